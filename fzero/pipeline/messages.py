"""Messages between pipeline stages: any tree of tensors, whose shapes may change from
one micro-batch to the next.

A message is one block of bytes: its sizes, the form of the tree, and the tensors one
after the other. Both sides know how long the last message of a kind (`Route`) was, and
the next one is sent with that length, so that its receive can start before it is sent.
If it does not fit, the sizes in this block give the length of a second block, which
holds the whole message.

Sends are asynchronous. Receives are started in the order in which the other side sends,
one ahead for each peer. A block that was sent is freed when a message comes that the
peer has sent after it had received that block: both sides know the order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fzero.common.plain_values import pack, unpack
from fzero.comms import collectives
from fzero.comms.axes import RankAxis, observed
from fzero.comms.pending import Pending
from fzero.comms.records import CommRecord, Label
from sharding.views import dtype_name, torch_dtype

FIRST = 4096
"""The bytes of the first message of a route."""
_ALIGNED = 64
_NUM_SIZES, _SIZES = 8, Struct("=3q")
"""The 64-bit numbers at the start of a block: bytes of the message, bytes of its form,
number of the micro-batch; then zeros.
"""


class Route(NamedTuple):
    """The messages of one kind, which are of about one size.

    Attributes:
        content: `"output"` of a chunk, sent to the next chunk; or `"gradient"` of a
            chunk's output, sent back to it.
        chunk: the number of the chunk whose output it is.
    """

    content: Literal["output", "gradient"]
    chunk: int


class Message(NamedTuple):
    """One message: its route, its micro-batch, and the other stage."""

    route: Route
    micro_batch: int
    peer: int

    def label(self, verb: str) -> Label:
        route = self.route
        what = (
            f"{route.content} of chunk {route.chunk}, micro-batch {self.micro_batch}, {verb} "
            f"stage {self.peer}"
        )
        return Label("stages", what, "forward" if route.content == "output" else "backward")


class TensorForm(NamedTuple):
    """A tensor of a message, without its values."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * torch_dtype(self.dtype).itemsize


class Received(NamedTuple):
    """A message that has arrived: its tensors, in memory of their own, and the tree
    that they are in.
    """

    tensors: list[Tensor]
    requires_grad: list[bool]
    tree: Any

    @classmethod
    def copied(cls, tree: Any) -> Received:
        """A tree for another chunk of the same stage, which may change its tensors in
        place.
        """
        tensors: list[Tensor] = []
        form = _form_of(tree, tensors, 0)
        return cls([x.detach().clone() for x in tensors], [x.requires_grad for x in tensors], form)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with these tensors."""
        return _filled(self.tree, tensors)


@dataclass(frozen=True, slots=True)
class Links:
    """The ranks of all stages, for messages to a later stage (`up`) and to an earlier
    one (`down`).

    Each direction has a process group of its own. On NCCL, which runs what two ranks do
    with each other in the order in which it was started, a rank only sends to another
    in such a group or only receives, in the order that `check_order` proves for both
    sides. On gloo, whose own thread tries again and again to read while another thread
    sends on the same connection, that thread does not take the processor from the one
    that sends.
    """

    up: RankAxis
    down: RankAxis

    def to(self, stage: int) -> RankAxis:
        """The axis of messages to a stage."""
        return self.up if stage > self.up.rank else self.down

    def of(self, stage: int) -> RankAxis:
        """The axis of messages from a stage."""
        return self.up if stage < self.up.rank else self.down

    def observed(self, observe: Callable[[CommRecord], None]) -> Links:
        """The same, whose messages are also reported to `observe`."""
        return Links(observed(self.up, observe), observed(self.down, observe))


class Expected(NamedTuple):
    """A message that a rank will receive, and how many messages of this rank its peer
    has received when it sends it.
    """

    message: Message
    num_received: int


@dataclass(slots=True)
class Mailbox:
    """The messages of one rank with the stages before and after it.

    Attributes:
        links: the ranks with the same place in the other axes of the mesh, one for each
            stage.
        device: the device of the tensors.
    """

    links: Links
    device: torch.device
    _sent_nbytes: dict[Route, int] = field(default_factory=dict)
    _received_nbytes: dict[Route, int] = field(default_factory=dict)
    _sending: defaultdict[int, deque[list[Pending]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """By peer, the messages that it may not have received yet."""
    _num_received: Counter[int] = field(default_factory=Counter)
    """By peer, the messages that it has received for sure."""
    _expected: defaultdict[int, deque[Expected]] = field(default_factory=lambda: defaultdict(deque))
    _coming: dict[int, tuple[Expected, Pending]] = field(default_factory=dict)
    _forms: dict[bytes, Any] = field(default_factory=dict)
    _heads: dict[Route, tuple[Any, int, int, Tensor]] = field(default_factory=dict)
    """By route, the form of the last message that was sent, and what `_head` made of
    it.
    """

    def expect(self, messages: Sequence[Expected]) -> None:
        """Names the messages that this rank will receive, each peer's in the order in
        which that stage sends them.
        """
        self._num_received.clear()
        for expected in messages:
            self._expected[expected.message.peer].append(expected)
        for peer in list(self._expected):
            self._start_next(peer)

    def send(self, message: Message, tree: Any) -> None:
        """Starts to send a tree of tensors. They may be changed afterwards.

        Raises:
            ValueError: the tree holds something that cannot be sent.
        """
        tensors: list[Tensor] = []
        form = _form_of(tree, tensors, message.route.chunk), [_tensor_form(x) for x in tensors]
        start, nbytes, head = self._head(message, form)
        usual = self._sent_nbytes.get(message.route, FIRST)
        fits = nbytes <= usual and (usual == FIRST or usual <= 2 * nbytes)
        block = torch.empty(usual if fits else nbytes, dtype=torch.uint8, device=self.device)
        block[: head.numel()].copy_(head)
        for x, target in zip(tensors, _tensors_in(block, start, form[1]), strict=True):
            target.copy_(x.detach())
        label, axis = message.label("to"), self.links.to(message.peer)
        started = list[Pending]()
        if not fits:
            first = torch.zeros(usual, dtype=torch.uint8, device=self.device)
            first[: 8 * _NUM_SIZES].copy_(head[: 8 * _NUM_SIZES])
            started.append(collectives.start_send(first, message.peer, axis, label=label))
            self._sent_nbytes[message.route] = max(nbytes, FIRST)
        started.append(collectives.start_send(block, message.peer, axis, label=label))
        self._sending[message.peer].append(started)

    def receive(self, message: Message) -> Received:
        """Waits for the next message of a peer."""
        found, pending = self._coming.pop(message.peer)
        assert found.message == message, f"expects {found}, asked for {message}"
        block = pending.wait()
        self._free(message.peer, found.num_received)
        head = _bytes_of(block[:FIRST])
        nbytes, numel, micro_batch = _SIZES.unpack_from(head)
        usual = block.numel()
        if nbytes > usual or not (usual == FIRST or usual <= 2 * nbytes):
            block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            label = message.label("from")
            block = collectives.start_receive(
                block, message.peer, self.links.of(message.peer), label=label
            ).wait()
            head = _bytes_of(block[:FIRST])
            self._received_nbytes[message.route] = max(nbytes, FIRST)
        assert micro_batch == message.micro_batch, (
            f"stage {message.peer} sent micro-batch {micro_batch}: {message}"
        )
        self._start_next(message.peer)
        stop = 8 * _NUM_SIZES + numel
        content = (head if stop <= FIRST else _bytes_of(block[:stop]))[8 * _NUM_SIZES : stop]
        if content not in self._forms:
            tree, found_forms = unpack(content)
            self._forms[content] = tree, [TensorForm(*one) for one in found_forms]
        tree, forms = self._forms[content]
        tensors = list(_tensors_in(block, _aligned(stop), forms))
        return Received(tensors, [one.requires_grad for one in forms], tree)

    def end(self) -> None:
        """Waits until everything has been sent."""
        for messages in self._sending.values():
            while messages:
                _end(messages.popleft())

    def abandon(self) -> list[Pending]:
        """Forgets everything after an error; returns what was under way."""
        left = [
            pending
            for messages in self._sending.values()
            for started in messages
            for pending in started
        ]
        left += [pending for _, pending in self._coming.values()]
        self._sending.clear()
        self._coming.clear()
        self._expected.clear()
        return left

    def _head(
        self, message: Message, form: tuple[Any, list[TensorForm]]
    ) -> tuple[int, int, Tensor]:
        """Where the tensors of a message begin, its bytes, and the start of its block:
        sizes and form (uint8, on the CPU).
        """
        known = self._heads.get(message.route)
        if known is None or known[0] != form:
            packed = pack((form[0], [tuple(one) for one in form[1]]))
            start = _aligned(8 * _NUM_SIZES + len(packed))
            nbytes = start + sum(_aligned(one.nbytes) for one in form[1])
            sizes = _SIZES.pack(nbytes, len(packed), message.micro_batch).ljust(
                8 * _NUM_SIZES, b"\0"
            )
            known = (
                form,
                start,
                nbytes,
                torch.frombuffer(bytearray(sizes + packed), dtype=torch.uint8),
            )
            self._heads[message.route] = known
        _, start, nbytes, head = known
        head[: 8 * _NUM_SIZES].view(torch.int64)[2] = message.micro_batch
        return start, nbytes, head

    def _free(self, peer: int, num_received: int) -> None:
        """Frees the blocks of the first so many messages to a peer."""
        while self._num_received[peer] < num_received:
            _end(self._sending[peer].popleft())
            self._num_received[peer] += 1

    def _start_next(self, peer: int) -> None:
        if self._expected[peer]:
            expected = self._expected[peer].popleft()
            numel = self._received_nbytes.get(expected.message.route, FIRST)
            block = torch.empty(numel, dtype=torch.uint8, device=self.device)
            label = expected.message.label("from")
            self._coming[peer] = (
                expected,
                collectives.start_receive(block, peer, self.links.of(peer), label=label),
            )


def _bytes_of(x: Tensor) -> bytes:
    found: bytes = x.cpu().numpy().tobytes()
    return found


def _end(started: Sequence[Pending]) -> None:
    for pending in started:
        pending.end()


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order in which they are sent."""
    tensors: list[Tensor] = []
    _form_of(tree, tensors, 0)
    return tensors


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _tensors_in(block: Tensor, start: int, forms: Sequence[TensorForm]) -> list[Tensor]:
    """Tensors whose memory is a part of the block. (They are no views, so that a layer
    may change them in place.)
    """
    found = []
    for one in forms:
        dtype = torch_dtype(one.dtype)
        x = torch.empty(0, dtype=dtype, device=block.device)
        found.append(
            x.set_(block.untyped_storage(), start // dtype.itemsize, one.shape, one.stride)
        )
        start += _aligned(one.nbytes)
    return found


def _tensor_form(x: Tensor) -> TensorForm:
    # without gaps
    stride = x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()
    return TensorForm(dtype_name(x.dtype), tuple(x.shape), tuple(stride), x.requires_grad)


def _form_of(tree: Any, tensors: list[Tensor], chunk: int) -> Any:
    """The form of a tree as plain values; its tensors are appended to `tensors`."""
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided:
            raise ValueError(
                f"pipeline: a layer must give dense tensors to the next stage, got layout "
                f"{tree.layout} from chunk {chunk}; call to_dense() in that layer"
            )
        tensors.append(tree)
        return "tensor"
    if tree is None or type(tree) in (bool, int, float, str):
        return ("value", tree)
    if type(tree) in (tuple, list):
        return (type(tree).__name__, [_form_of(x, tensors, chunk) for x in tree])
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        return ("dict", {key: _form_of(x, tensors, chunk) for key, x in tree.items()})
    raise ValueError(
        f"pipeline: a layer must give tensors to the next stage, or tuples, lists and dicts of "
        f"tensors and numbers, got a {type(tree).__name__} in the output of chunk {chunk}; return "
        f"such values from its last layer"
    )


def _filled(form: Any, tensors: Sequence[Tensor]) -> Any:
    rest = iter(tensors)

    def filled(form: Any) -> Any:
        if form == "tensor":
            return next(rest)
        kind, value = form
        if kind == "value":
            return value
        if kind == "dict":
            return {key: filled(one) for key, one in value.items()}
        return tuple(map(filled, value)) if kind == "tuple" else list(map(filled, value))

    return filled(form)
