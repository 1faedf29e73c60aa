"""Does code for a CUDA device order its work, where there is no such device?

    with PretendedCuda() as card:
        ...tensors made on device="cuda", streams, events, copies...
    card.crossed  # bytes to the device, and to the host
    card.waits  # operators that the host had to wait for, and how often
    card.drains  # waits of the host after which the device had nothing left to do

All tensors are real ones on the CPU, so numbers are right whatever the order. A tensor
is *on the device* if its storage is labelled so: patched functions of PyTorch say so to
Python, and a `TorchDispatchMode` sees every operator, those of a backward too, and what
it reads and writes. The host and each stream have a vector clock: an operator on the
device happens after all that the host has done and after what is on its stream, and the
host goes on at once. This raises

1. RuntimeError: an operator that mixes memories, as in PyTorch (numbers without a
  dimension may come from the host);
2. AssertionError: a race, of two uses of the same bytes of which one writes and neither
  happens before the other;
3. AssertionError: memory given back while a stream uses it of which PyTorch's allocator
  does not know (`record_stream`).

Pessimistic: the bytes of a view with gaps go from its first to its last. Not seen:
threads other than those of ranks in lockstep, what `torch.vmap` and a capture make in
C++, collectives of NCCL, changes by numpy, gradients of a copy between the memories,
and `with torch.device("cuda")`. A card has a random state of its own, from which it
draws the host's numbers; its autocast is that of the host.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch._dynamo  # before anything is patched, for it makes tables of PyTorch's functions
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from fzero.comms.lockstep import Hub

Kind = Literal["device", "pinned", "host"]

COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
KNOW_SHAPE_LATE = {"nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operators that the host waits for, to know how long the result is."""
_FILLS = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_OTHERS = ("randperm", "arange", "linspace", "eye", "empty_strided", "scalar_tensor")
FACTORIES = [*_FILLS, *_OTHERS, *(f"{fill}_like" for fill in _FILLS)]
METHODS = [f"new_{fill}" for fill in (*_FILLS[:4], "empty_strided")]
"""What makes tensors: functions of PyTorch, and methods of a tensor. They read no
numbers of the tensor they are given.
"""


class Crossed(NamedTuple):
    """Bytes that were copied between the memories."""

    to_device: int
    to_host: int


class Timeline:
    """What happens in one order: the work of the host, or of a stream. `seen` counts
    what has happened before its next work.
    """

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, Counter[Timeline]()

    def advance(self) -> int:
        self.seen[self] += 1
        return self.seen[self]

    def __repr__(self) -> str:
        return self.name


class Waited:
    """What the host can wait for."""

    card: PretendedCuda
    seen: Counter[Timeline]

    def synchronize(self) -> None:
        self.card.sweep()
        self.card.host_waits(self.seen, type(self).__name__)

    def query(self) -> bool:
        self.synchronize()  # for the host knows that it is done
        return True


class Stream(Timeline, Waited):
    """`torch.cuda.Stream`."""

    def __init__(self, card: PretendedCuda, device: Any = None, priority: int = 0) -> None:
        super().__init__(f"stream {len(card.streams)}")
        self.card, self.device = card, torch.device("cuda", 0)
        card.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.card.sweep()
        self.seen |= other.seen

    def wait_event(self, event: Event) -> None:
        self.card.sweep()
        self.seen |= event.seen

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.card)
        event.record(self)
        return event


class Event(Waited):
    """`torch.cuda.Event`: one that nobody has recorded is waited for by nobody."""

    def __init__(self, card: PretendedCuda, **_: bool) -> None:
        self.card, self.seen = card, Counter[Timeline]()

    def record(self, stream: Stream | None = None) -> None:
        self.seen = (stream or self.card.current).seen.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.card.current).wait_event(self)


class Use(NamedTuple):
    """Bytes [start, stop) of a memory, read or written as the `count`-th work of a
    timeline.
    """

    start: int
    stop: int
    writes: bool
    timeline: Timeline
    count: int
    operator: str

    def __str__(self) -> str:
        return (
            f"{self.operator} on {self.timeline} {'writes' if self.writes else 'reads'} "
            f"bytes {self.start}:{self.stop}"
        )


@dataclass(slots=True)
class Memory:
    """What is known of one storage."""

    address: StorageWeakRef  # keeps others from it
    end: weakref.ref[torch.UntypedStorage]  # calls when it is freed
    kind: Kind
    nbytes: int
    owner: Timeline  # whose next work may get the bytes when they are given back
    uses: list[Use] = field(default_factory=list)  # those that a later one may race with
    last: dict[Timeline, Use] = field(default_factory=dict)
    reported: set[Timeline] = field(default_factory=set)  # by `record_stream`

    def use(self, new: Use) -> None:
        """Raises if this use races with one before."""
        rest = []
        for old in self.uses:
            overlaps = old.start < new.stop and new.start < old.stop
            if (
                overlaps
                and (old.writes or new.writes)
                and new.timeline.seen[old.timeline] < old.count
            ):
                raise AssertionError(
                    f"race: {new} of {self.kind} memory, and nothing orders it after {old}"
                )
            is_inside = new.start <= old.start and old.stop <= new.stop
            follows = new.timeline.seen[old.timeline] >= old.count
            if not (is_inside and follows and (new.writes or not old.writes)):
                rest.append(old)  # else what races with it races with the new one
        self.uses = [*rest, new]
        self.last[new.timeline] = new

    def give_back(self, host: Timeline) -> None:
        """Raises if a stream may still use the bytes when their owner gives them to
        somebody else. That is after all that the reported streams have been given so
        far."""
        orders = (self.owner, host, *self.reported)
        for timeline, use in self.last.items():
            if max(order.seen[timeline] for order in orders) < use.count:
                raise AssertionError(
                    f"given back too early: {self.nbytes} bytes of {self.owner}, when nothing "
                    f"orders its next work after {use}"
                )


class Generator(torch.Generator):
    """`torch.Generator`, of the host's numbers for either device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


class Autocast(torch.autocast):
    """`torch.autocast`, of the host's kernels for either device."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


class PretendedCuda(TorchDispatchMode):
    """A device in which one process may believe, while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, Memory] = {}
        self._freed: list[int] = []  # since the last look
        self.streams: list[Stream] = []
        self.host, self.default = Timeline("the host"), Stream(self)
        self.crossed = Crossed(0, 0)
        self.nbytes = self.max_nbytes = 0  # on the device
        self.waits, self.drains = Counter[str](), Counter[str]()
        self._of_thread = threading.local()
        self.generator = torch.Generator()
        self._patches = ExitStack()

    @property
    def current(self) -> Stream:
        """This thread's stream."""
        return getattr(self._of_thread, "stream", self.default)

    @property
    def _making(self) -> Kind | None:
        """Where new tensors stand; None: where those stand that they are made of."""
        return getattr(self._of_thread, "making", None)

    # --- time -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Looks what was freed since. Before the order changes, for this is when it was
        freed.
        """
        freed, self._freed = self._freed, []
        for memory in [self._memories.pop(key) for key in freed]:
            if memory.kind == "device":
                self.nbytes -= memory.nbytes
                memory.give_back(self.host)

    def launch(self, stream: Timeline) -> int:
        """The count of the next work of the host, or of a stream, to which the host
        gives it.
        """
        if stream is not self.host:
            stream.seen |= self.host.seen
        return stream.advance()

    def memory(self, x: Tensor, kind: Kind = "host") -> Memory:
        """What is known of a tensor's storage, which is of that kind if it is new."""
        storage = x.untyped_storage()
        if (key := storage._cdata) not in self._memories:
            end = weakref.ref(storage, lambda _: self._freed.append(key))
            memory = Memory(StorageWeakRef(storage), end, kind, storage.nbytes(), self.current)
            self._memories[key] = memory
            if kind == "device":
                self.nbytes += memory.nbytes
                self.max_nbytes = max(self.max_nbytes, self.nbytes)
        return self._memories[storage._cdata]

    def kind(self, x: Tensor) -> Kind:
        """Where a tensor is."""
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        memory = self._memories.get(x.untyped_storage()._cdata)
        return "host" if memory is None else memory.kind

    def _use(self, x: Tensor, timeline: Timeline, count: int, func: Any, *, writes: bool) -> None:
        if x.numel():
            start = x.storage_offset() * x.element_size()
            numel = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            self.memory(x).use(
                Use(start, start + numel * x.element_size(), writes, timeline, count, str(func))
            )

    # --- operators --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.sweep()
        kwargs, schema = dict(kwargs or {}), func._schema
        given = [
            (a, args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(schema.arguments)
        ]
        inputs = [(argument, x) for argument, value in given for x in _tensors(value)]
        if _is_cuda(kwargs.get("device")):  # of the program of a graph, which names it
            with self._made("device"):
                return self.__torch_dispatch__(
                    func, types, args, kwargs | {"device": torch.device("cpu")}
                )
        for _, x in inputs:
            self.memory(x)  # so that new memory of a result differs from a view
        if schema.name in COPIES:
            return self._copy(func, args, kwargs)
        on_device = any(self.kind(x) == "device" for _, x in inputs)
        if on_device:
            self._check_is_there(func, inputs)
        name = schema.name.removeprefix("aten::")
        read = [x for a, x in inputs if a.alias_info is None and name not in (*FACTORIES, *METHODS)]
        written = [x for a, x in inputs if _is_written(a)]
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        with (
            self._drawing() if draws and (on_device or self._making == "device") else nullcontext()
        ):
            outputs = func(*args, **kwargs)
        for x in _tensors(outputs):
            if x.untyped_storage()._cdata not in self._memories:
                made = self.memory(x, self._making or ("device" if on_device else "host"))
                on_device |= made.kind == "device"
                written.append(x)
        for x in read if on_device else ():
            if self.kind(x) != "device":  # a number, read when the host launches the operator
                self._use(x, self.host, self.launch(self.host), func, writes=False)
        timeline = self.current if on_device else self.host
        count = self.launch(timeline)
        for x, writes in [*((x, False) for x in read), *((x, True) for x in written)]:
            if (self.kind(x) == "device") == on_device:
                self._use(x, timeline, count, func, writes=writes)
        if on_device and (
            name in KNOW_SHAPE_LATE or any("Tensor" not in str(x.type) for x in schema.returns)
        ):
            self._wait(func)
            if name == "_local_scalar_dense":
                self._cross(to_host=inputs[0][1].element_size())
        return outputs

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Inside, random numbers are the card's."""
        host = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(host)

    def _check_is_there(self, func: Any, inputs: list[tuple[Any, Tensor]]) -> None:
        """Raises if an operator of the device is given what is not there, but for
        numbers.
        """
        for argument, x in inputs:
            is_number = x.dim() == 0 and not _is_written(argument)
            if "::_fused_" in func._schema.name:  # whose kernels read counters themselves
                is_number &= argument.name == "lr"
            if self.kind(x) != "device" and not is_number:
                raise RuntimeError(
                    f"expected all tensors on the same device: {func} runs on cuda:0, and "
                    f"{argument.name}, of shape {tuple(x.shape)}, is in host memory"
                )

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copies, of which each runs on the current stream if one side of it is on the
        device.
        """
        name = func._schema.name
        outputs = func(*args, **kwargs)
        if name == "aten::_to_copy":
            self.memory(
                outputs, self._making or ("device" if self.kind(args[0]) == "device" else "host")
            )
            pairs, non_blocking = [(outputs, args[0])], kwargs.get("non_blocking", False)
        else:
            pairs = list(zip(*args[:2])) if name == "aten::_foreach_copy_" else [args[:2]]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        for to, source in pairs:
            sides = {self.kind(to), self.kind(source)}
            timeline = self.current if "device" in sides else self.host
            count = self.launch(timeline)
            self._use(source, timeline, count, func, writes=False)
            self._use(to, timeline, count, func, writes=True)
            if "device" not in sides or sides == {"device"} or not to.numel():
                continue
            # Else PyTorch copies by way of host memory that is not pinned.
            is_direct = to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
            if not (non_blocking and is_direct and "pinned" in sides):
                self._wait(func)
            if self.kind(to) == "device":
                self._cross(to_device=to.numel() * to.element_size())
            else:
                self._cross(to_host=to.numel() * source.element_size())
        return outputs

    def _wait(self, func: Any) -> None:
        """The host waits for the end of an operator."""
        self.host_waits(self.current.seen, str(func))
        self.waits[str(func)] += 1

    def host_waits(self, seen: Counter[Timeline], name: str) -> None:
        """The host waits for what has been seen. If that is all that the compute stream
        was given, the device then idles.
        """
        is_all = (
            self.host.seen[self.default] < self.default.seen[self.default] <= seen[self.default]
        )
        self.host.seen |= seen
        self.drains[name] += is_all

    def _cross(self, to_device: int = 0, to_host: int = 0) -> None:
        self.crossed = Crossed(self.crossed.to_device + to_device, self.crossed.to_host + to_host)

    # --- what Python sees -------------------------------------------------------------------------

    @contextmanager
    def _made(self, kind: Kind | None) -> Iterator[None]:
        before, self._of_thread.making = self._making, kind
        try:
            yield
        finally:
            self._of_thread.making = before

    def _factory(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Of new tensors, on a device that may be this one."""

        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            if device is not None and torch.device(device).type not in ("cpu", "cuda"):
                return make(*args, device=device, **kwargs)
            on_host: Kind | None = "pinned" if pin_memory else None if device is None else "host"
            with self._made("device" if _is_cuda(device) else on_host):
                return make(*args, **kwargs | ({} if device is None else {"device": "cpu"}))

        return made

    def _from_data(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Of a tensor of numbers of the host, which cross, unless it is one."""

        def made(
            *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any
        ) -> Tensor:
            x = make(*args, **kwargs)
            x = x if device is None else x.to(device)
            return x.requires_grad_() if requires_grad else x

        return made

    def _device_of(self, x: Tensor) -> torch.device:
        is_here = not is_lazy(x) and self.kind(x) == "device"
        return torch.device("cuda", 0) if is_here else _REAL["device"].__get__(x)

    def _to(self, x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if "other" in kwargs:
            other = kwargs.pop("other")
            args = (other.device, other.dtype)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type not in ("cpu", "cuda"):
            return _REAL["to"](x, device, dtype, non_blocking, copy)
        options = {"non_blocking": non_blocking, "copy": copy, "memory_format": memory_format}
        options = {key: value for key, value in options.items() if value is not None}
        on_device = self.kind(x) == "device"
        if device is None or _is_cuda(device) == on_device:
            return _REAL["to"](x, dtype=dtype or x.dtype, **options)
        with self._made("device" if not on_device else "pinned" if non_blocking else "host"):
            return _REAL["to"](x, dtype=dtype or x.dtype, **options | {"copy": True})

    def _deepcopy(self, x: Tensor, memo: Any) -> Tensor:
        kind = None if is_lazy(x) else self.kind(x)
        copied: Tensor = _REAL["__deepcopy__"](x, memo)
        if kind == "device":
            self.memory(copied, kind)
        return copied

    def _pin(self, x: Tensor, device: Any = None) -> Tensor:
        if self.kind(x) == "device":
            raise RuntimeError("cannot pin a tensor of the device")
        with self._made("pinned"):
            return x if self.kind(x) == "pinned" else x.clone()

    def _numpy(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.kind(x) == "device":
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first"
            )
        return _REAL["numpy"](x, *args, **kwargs)

    def _record_stream(self, x: Tensor, stream: Stream) -> None:
        self.memory(x).reported.add(stream)

    @contextmanager
    def _on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self._of_thread.stream = stream or before
        try:
            yield
        finally:
            self._of_thread.stream = before

    def _synchronize(self, device: Any = None) -> None:
        self.sweep()
        for stream in self.streams:
            self.host_waits(stream.seen, "synchronize")

    def pinned_nbytes(self) -> int:
        """Of host memory that is pinned now."""
        self.sweep()
        return sum(memory.nbytes for memory in self._memories.values() if memory.kind == "pinned")

    def _in_threads(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`Hub.run` whose ranks, of which one runs at a time, are on the device as
        well.
        """

        def of_all(hub: Hub, function: Callable[[int], Any]) -> Any:
            def of_rank(rank: int) -> Any:
                _push_mode(self)
                try:
                    return function(rank)
                finally:
                    _pop_mode()

            return run(hub, of_rank)

        return of_all

    def _allocated(self, device: Any = None) -> int:
        self.sweep()
        return self.nbytes

    def _reset_peak(self, device: Any = None) -> None:
        self.max_nbytes = self._allocated()

    def _methods(self) -> dict[str, Any]:
        on_device = lambda x: self.kind(x) == "device"  # noqa: E731
        return {
            "device": property(self._device_of),
            "is_cuda": property(on_device),
            "is_cpu": property(lambda x: x.device.type == "cpu"),
            "get_device": lambda x: 0 if on_device(x) else -1,
            "to": lambda x, *args, **kwargs: self._to(x, *args, **kwargs),
            "cuda": lambda x, device=None, non_blocking=False: self._to(
                x, "cuda", non_blocking=non_blocking
            ),
            "cpu": lambda x: self._to(x, "cpu"),
            "__deepcopy__": lambda x, memo: self._deepcopy(x, memo),
            "is_pinned": lambda x, device=None: self.kind(x) == "pinned",
            "pin_memory": lambda x, device=None: self._pin(x),
            "numpy": lambda x, *args, **kwargs: self._numpy(x, *args, **kwargs),
            "tolist": lambda x: _REAL["tolist"](x.cpu()),
            "record_stream": lambda x, stream: self._record_stream(x, stream),
            "new_tensor": lambda x, data, device=None, **options: torch.tensor(
                data, **{"dtype": x.dtype, "device": device or x.device} | options
            ),
        } | {name: self._factory(getattr(torch.Tensor, name)) for name in METHODS}

    def _functions(self) -> dict[str, Any]:
        return {
            "Stream": type("Stream", (Stream,), {"__init__": _made_for(Stream, self)}),
            "Event": type("Event", (Event,), {"__init__": _made_for(Event, self)}),
            "stream": self._on,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "synchronize": self._synchronize,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "memory_allocated": self._allocated,
            "max_memory_allocated": lambda device=None: self.max_nbytes,
            "reset_peak_memory_stats": self._reset_peak,
            "get_rng_state": lambda device=None: self.generator.get_state(),
            "set_rng_state": lambda state, device=None: (
                self.generator.set_state(state.clone()) and None
            ),
            "init": lambda: None,
            "default_generators": (self.generator,),
            "manual_seed": lambda seed: self.generator.manual_seed(seed) and None,
            "manual_seed_all": lambda seed: self.generator.manual_seed(seed) and None,
        }

    def __enter__(self) -> PretendedCuda:
        enter = self._patches.enter_context
        for name, function in self._functions().items():
            enter(patch.object(torch.cuda, name, function))
        for name, method in self._methods().items():
            enter(patch.object(torch.Tensor, name, method))
        for name in FACTORIES:
            enter(patch.object(torch, name, self._factory(getattr(torch, name))))
        for name in ("tensor", "as_tensor"):
            enter(patch.object(torch, name, self._from_data(getattr(torch, name))))
        enter(patch.object(torch, "Generator", Generator))
        enter(patch.object(torch, "autocast", Autocast))
        enter(patch.object(Hub, "run", self._in_threads(Hub.run)))
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()
        if error is None:
            self.sweep()


_REAL = {
    name: getattr(torch.Tensor, name)
    for name in ("device", "to", "numpy", "tolist", "__deepcopy__")
}


def _made_for(cls: type, card: PretendedCuda) -> Callable[..., None]:
    """The constructor of streams or events of a card."""

    def made(of: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(of, card, *args, **kwargs)  # type: ignore[misc]

    return made


def is_lazy(x: Tensor) -> bool:
    """Whether it has no memory yet, because its module has not run."""
    return isinstance(x, UninitializedTensorMixin)


def _tensors(value: Any) -> list[Tensor]:
    """Those of an argument or a result; what has no memory (`meta`) is none."""
    if isinstance(value, Tensor):
        return [] if is_followed(value) or value.is_meta else [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, list | tuple) else []


def is_followed(x: Tensor) -> bool:
    """Whether it is not a tensor, but what a capture has in its place."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")
