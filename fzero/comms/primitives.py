"""The collectives as primitives: `all_gather`, `reduce_scatter` (a sum), `all_to_all`;
`all_reduce` consists of the first two.

A primitive is one linear map over the ranks of an axis, with all of its rules:

- *evaluate*: on a `ProcessAxis` or `LockstepAxis` through `fzero.comms.collectives`. If
  a tracer is active (make_fx, fake tensors, AOTAutograd, Inductor), it is a node of
  torch's functional collectives (`fzero.comms.traced`).
- *transpose*: all_gather and reduce_scatter are each other's transpose, all_to_all is
  its own. So gradients sum over ranks. A primitive can be differentiated any number of
  times, also in forward mode.
- *batch*: a batch dimension moves to the front, and the primitive is applied again.
  Over the ranks of a `StackedAxis` the primitive is an operation on the dimension of
  ranks.
- *abstract*: the shape and dtype of the result, and what is sent. Plans and dry runs
  read the same rule (`messages`).
- *coded*: a comm hook without a state sends the numbers in fewer bytes. The derivative
  is that of the exact primitive (straight through the codec), and is sent exactly. A
  hook with a state is not used here: it is called directly, and returns the new state.

Captures: Dynamo would trace the `forward` of a `torch.autograd.Function` and ignore the
`backward`, without an error. So under Dynamo the collective is called by `_captured`, a
function that Dynamo takes as one node.

Shape letters: P = W·S, S elements of a shard, W ranks; every tensor may have leading
dimensions. Three dimensions stand for stacked ranks: A for axes before that of the
collective, R for this axis, B for axes after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.comms import collectives
from fzero.comms.axes import AbstractAxis, LockstepAxis, ProcessAxis, RankAxis
from fzero.comms.comm_hooks import CommHook
from fzero.comms.pending import Pending
from fzero.comms.records import CommRecord, Label, messages
from fzero.comms.traced import TracedAxis, in_order


class OverRanks(ABC):
    """An axis whose ranks are stacked, inside of `torch.vmap` over them.

    Attributes:
        stride: the difference of two neighbours' ranks.
        rank: the index of this rank, 0-d int64. It is batched at the level of the
            ranks, and at no other one.
    """

    __slots__ = ()
    name: str
    size: int
    stride: int

    @property
    @abstractmethod
    def rank(self) -> Tensor: ...

    def all_gather(self, shard_S: Tensor) -> Tensor:
        return all_gather(shard_S, self)

    def reduce_scatter(self, full_P: Tensor) -> Tensor:
        return reduce_scatter(full_P, self)

    def all_reduce(self, full_P: Tensor) -> Tensor:
        return all_reduce(full_P, self)

    def all_to_all(self, rows_WN: Tensor) -> Tensor:
        return all_to_all(rows_WN.flatten(-2), self).view(rows_WN.shape)

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Refused: the tensors of stacked ranks have equal shapes."""
        raise ValueError(
            f"exchange: ranks must not be a dimension of tensors, whose sizes differ between "
            f"ranks, got {self}; use ranks in processes or in lockstep"
        )

    def stack(self, x: Tensor) -> Tensor:
        """The small tensors of all ranks along a new first dimension."""
        return all_gather(x.reshape(-1), self).view(self.size, *x.shape)


Axis = ProcessAxis | LockstepAxis | AbstractAxis | TracedAxis | OverRanks
"""An axis that a primitive runs on."""


class Abstract(NamedTuple):
    """The shape and dtype of a primitive's result, and the traffic of this rank, as an
    axis reports it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: CommRecord


@dataclass(frozen=True, slots=True)
class Primitive:
    """A collective over the last dimension of a tensor, with all of its rules; call it
    with a tensor and an axis.

    Args:
        name: the name of the collective.
        transpose: the name of its transpose.
        divides: whether this rank's tensor holds a part for each rank. If not, each
            rank gets the whole tensor.
        joins: whether the result holds the parts of all ranks, in rank order. If not,
            it is their sum, made in rank order.
        start: starts it on a flat tensor, whose parts are in rank order: (tensor,
            axis=, label=) → `Pending`.
        label: the label of calls without one.
    """

    name: str
    transpose: str
    divides: bool
    joins: bool
    start: Callable[..., Pending]
    label: Label

    def __call__(
        self, x: Tensor, axis: Axis, *, hook: CommHook | None = None, label: Label | None = None
    ) -> Tensor:
        """The collective.

        *Collective:* every rank of `axis` calls it; each sends `(W-1) · S` elements.
        Its transpose is a collective, too: either all ranks differentiate the result,
        or no rank does.

        Args:
            x: (…, P) if the primitive divides, else (…, S).
            axis: the ranks. Call it inside of `Stacked.map` if this is a
                `StackedAxis`.
            hook: encodes what is sent, row by row; it must have no state. None sends
                the numbers unchanged.
            label: the label of its records.

        Returns:
            (…, P) if the primitive joins, else (…, S). On one rank it is `x` itself.

        Raises:
            ValueError: `x` has no dimension, or the ranks cannot divide the last one;
                or the axis cannot run here; or the hook has a state, or does not
                support this collective.
        """
        self._check(x, axis.size)
        if hook is not None:
            self._check_hook(hook)
        if axis.size == 1:
            return x
        label = label or self.label
        number = axis.rank if isinstance(axis.rank, Tensor) else None
        if torch.compiler.is_dynamo_compiling():
            return _captured(x, number, self.name, _let_in(hook), *_in_graph(axis, x))
        where = axis if number is None else StackedRanks(axis.size, axis.stride)  # type: ignore[union-attr]
        result: Tensor = _Collective.apply(x, number, self.name, where, hook, label)  # type: ignore[no-untyped-call]
        return result

    def abstract(self, x: Tensor, axis: Axis, *, label: Label | None = None) -> Abstract:
        """The shape, the dtype and the traffic of a call; it sends nothing.

        >>> x = torch.empty(3, 8, device="meta")
        >>> found = reduce_scatter.abstract(x, AbstractAxis("data", 4))
        >>> found.shape, found.sent.num_elements, found.sent.nbytes
        ((3, 2), 18, 72)
        """
        self._check(x, axis.size)
        full_numel = x.shape[-1] if self.divides else x.shape[-1] * axis.size
        message = next(messages(full_numel, (axis.size,)))
        shape = (*x.shape[:-1], message.numel * axis.size if self.joins else message.numel)
        sent = message.num_others * message.numel * x.shape[:-1].numel()
        record = CommRecord(
            self.name, axis.name, label or self.label, sent, sent * x.element_size()
        )
        return Abstract(shape, x.dtype, record)

    def evaluate(
        self,
        x: Tensor,
        axis: RankAxis | AbstractAxis | TracedAxis,
        hook: CommHook | None,
        label: Label,
    ) -> Tensor:
        """The result on an axis to which this rank belongs."""
        if hook is not None:
            return self._coded(
                x,
                axis if isinstance(axis, RankAxis) and not _is_traced(x) else _traced(axis, x),
                hook,
            )
        rows = _parts(x, axis.size).movedim(-2, 0) if self.divides and x.dim() > 1 else x
        flat = rows.contiguous().view(-1)
        if isinstance(axis, RankAxis) and not _is_traced(x):
            result = self.start(flat, axis=axis, label=label).wait()
        else:
            with collectives.labelled(label):
                result = getattr(_traced(axis, x), self.name)(flat)
        if x.dim() == 1:
            return result
        if not self.joins:
            return result.view(rows.shape[1:])
        shape = rows.shape[1:] if self.divides else rows.shape
        return result.view(axis.size, *shape).movedim(0, -2).flatten(-2)

    def over_ranks(
        self, x_W: Tensor, ranks: StackedRanks, hook: CommHook | None
    ) -> tuple[Tensor, int | None]:
        """The results of all ranks, stacked along dimension 0 like `x_W`, and that
        dimension; None if all are equal.
        """
        if hook is not None:
            numbers = torch.arange(x_W.shape[0], device=x_W.device)

            def of_rank(x: Tensor, number: Tensor) -> Tensor:
                return self._coded(x, replace(ranks, number=number), hook)

            return torch.vmap(of_rank, randomness="different")(x_W, numbers), 0
        majors = x_W.shape[0] // (ranks.size * ranks.stride)
        x_ARB = x_W.reshape(majors, ranks.size, ranks.stride, *x_W.shape[1:])
        if not self.divides:  # all parts go to every rank
            joined_AB = x_ARB.movedim(1, -2).flatten(-2)
            if joined_AB.shape[:2] == (1, 1):
                return joined_AB[0, 0].clone(), None
            return joined_AB.unsqueeze(1).expand(majors, ranks.size, *joined_AB.shape[1:]).flatten(
                0, 2
            ), 0
        if not self.joins:
            sum_AB = in_order(x_ARB.unbind(1))
            return _parts(sum_AB, ranks.size).movedim(-2, 1).flatten(0, 2), 0
        return _parts(x_ARB, ranks.size).transpose(1, -2).flatten(-2).flatten(0, 2), 0

    def _coded(self, x: Tensor, axis: RankAxis | TracedAxis | OverRanks, hook: CommHook) -> Tensor:
        """The result of a comm hook, row by row."""
        if x.dim() > 1:
            return torch.stack([self._coded(row, axis, hook) for row in x.unbind(0)])
        result, _ = (hook.gather if self.joins else hook.reduce_scatter)(x, axis, None)
        return result

    def _check_hook(self, hook: CommHook) -> None:
        if self.divides and self.joins:
            raise ValueError(
                f"{self.name}: a comm hook has no {self.name}, got {hook.name}; encode the parts "
                f"themselves"
            )
        if hook.init(torch.empty(2, device="meta")) is not None:
            raise ValueError(
                f"{self.name}: hook must be without a state, got {hook.name}; call the hook "
                f"itself, which returns the new one"
            )

    def _check(self, x: Tensor, size: int) -> None:
        if not x.dim():
            raise ValueError(
                f"{self.name}: the tensor must have a dimension, got a 0-d one; pass x[None]"
            )
        if self.divides and x.shape[-1] % size:
            raise ValueError(
                f"{self.name}: {size} ranks cannot divide the last dimension of {tuple(x.shape)} "
                f"equally; pad it"
            )


def _parts(x: Tensor, size: int) -> Tensor:
    """The part for each rank: (…, P) → (…, W, S)."""
    return x.view(*x.shape[:-1], size, x.shape[-1] // size)


def _start_all_to_all(parts_P: Tensor, axis: RankAxis, label: Label) -> Pending:
    return collectives.start_all_to_all(parts_P.view(axis.size, -1), axis, label=label).then(
        lambda rows: rows.view(-1)
    )


_start_all_gather = partial(collectives.start_all_gather, full_P=None)
all_gather = Primitive(
    "all_gather",
    "reduce_scatter",
    divides=False,
    joins=True,
    start=_start_all_gather,
    label=collectives.GATHER,
)
"""The shards of all ranks in rank order, (…, S) → (…, P)."""
reduce_scatter = Primitive(
    "reduce_scatter",
    "all_gather",
    divides=True,
    joins=False,
    start=collectives.start_reduce_scatter,
    label=collectives.REDUCE,
)
"""This rank's shard of the sum over ranks, (…, P) → (…, S). The sum is made in rank
order.
"""
all_to_all = Primitive(
    "all_to_all",
    "all_to_all",
    divides=True,
    joins=True,
    start=_start_all_to_all,
    label=collectives.OTHER,
)
"""Rank r gets part r of every rank, in rank order: (…, P) → (…, P)."""
PRIMITIVES = {primitive.name: primitive for primitive in (all_gather, reduce_scatter, all_to_all)}


def all_reduce(x: Tensor, axis: Axis, *, label: Label | None = None) -> Tensor:
    """The sum over ranks, in rank order, of tensors of any shape: a reduce-scatter and
    an all-gather.

    *Collective:* every rank of `axis`; each sends `2(W-1)/W` of the elements of `x`,
    whose last dimension is padded. On one rank it is `x` itself.
    """
    label = label or collectives.REDUCE
    rows = x if x.dim() else x[None]
    numel = rows.shape[-1]
    padding = -numel % axis.size
    # `pad` by nothing copies
    shard = reduce_scatter(pad(rows, (0, padding)) if padding else rows, axis, label=label)
    return all_gather(shard, axis, label=label)[..., :numel].reshape(x.shape)


@dataclass(frozen=True, slots=True)
class StackedRanks(OverRanks):
    """Groups of `size` stacked ranks that are `stride` apart; `number` is that of this
    rank.
    """

    size: int
    stride: int
    number: Tensor | None = None
    name: str = "stacked"

    @property
    def rank(self) -> Tensor:
        assert self.number is not None
        return self.number


class _Collective(torch.autograd.Function):
    """A primitive, known by its name.

    `number` is the number of each stacked rank, None for one rank. `torch.vmap` batches
    it at the level of the ranks only, which distinguishes this level from those of
    other calls of `torch.vmap`.
    """

    @staticmethod
    def forward(
        x: Tensor, number: Tensor | None, name: str, where: Any, hook: CommHook | None, label: Label
    ) -> Tensor:
        if number is not None:
            raise ValueError(
                f"{name}: stacked ranks must be a dimension of torch.vmap; call it inside of "
                f"Stacked.map"
            )
        return PRIMITIVES[name].evaluate(x, where, hook, label)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, number, ctx.name, ctx.where, _, ctx.label = inputs
        numbers = () if number is None else (number,)
        ctx.save_for_backward(*numbers)
        ctx.save_for_forward(*numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (
            _again(ctx, grad, PRIMITIVES[PRIMITIVES[ctx.name].transpose]),
            None,
            None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _again(ctx, tangent, PRIMITIVES[ctx.name])

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        number: Tensor | None,
        name: str,
        where: Any,
        *how: Any,
    ) -> tuple[Tensor, int | None]:
        x_dim, number_dim = in_dims[:2]
        if number_dim is None:
            assert x_dim is not None
            return _Collective.apply(x.movedim(x_dim, 0), number, name, where, *how), 0  # type: ignore[no-untyped-call]
        x_W = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        return PRIMITIVES[name].over_ranks(x_W, where, hook=how[0])


def _again(ctx: Any, x: Tensor, primitive: Primitive) -> Tensor:
    """Applies another primitive over the same ranks."""
    number = ctx.saved_tensors[0] if ctx.saved_tensors else None
    label, own = ctx.label, PRIMITIVES[ctx.name].label
    label = primitive.label if label == own else _transposed(label)
    result: Tensor = _Collective.apply(x, number, primitive.name, ctx.where, None, label)  # type: ignore[no-untyped-call]
    return result


def _transposed(label: Label) -> Label:
    """The label of the collective in the backward."""
    return replace(label, phase="backward") if label.phase == "forward" else label


# --- captures -------------------------------------------------------------------------------------


_HOOKS: list[CommHook | None] = [None]
"""The comm hooks that graphs name by their index."""


def _captured(x: Tensor, number: Tensor | None, name: str, hook: int, *values: Any) -> Tensor:
    """A primitive as one node of Dynamo's graph, which can hold numbers and strings,
    but no axis and no comm hook.
    """
    where, label = (
        TracedAxis(*values) if number is None else StackedRanks(*values),
        PRIMITIVES[name].label,
    )
    result: Tensor = _Collective.apply(x, number, name, where, _HOOKS[hook], label)  # type: ignore[no-untyped-call]
    return result


def _let_in(hook: CommHook | None) -> int:
    """Lets Dynamo take `_captured` as one node, without an import of Dynamo, which is
    slow; returns the index of the hook.
    """
    torch.compiler.allow_in_graph(_captured)  # type: ignore[no-untyped-call]
    if hook not in _HOOKS:
        _HOOKS.append(hook)
    return _HOOKS.index(hook)


_let_in._dynamo_marked_constant = True  # type: ignore[attr-defined] # Dynamo runs it when it traces a call of it


def _in_graph(axis: Axis, x: Tensor) -> tuple[Any, ...]:
    """The values that describe an axis in a graph."""
    if isinstance(axis, LockstepAxis | AbstractAxis):
        raise ValueError(
            f"{type(axis).__name__}: a captured function cannot run on it; use real ranks, or "
            f"Stacked.map"
        )
    if isinstance(axis, ProcessAxis):
        axis = TracedAxis.of(axis, x.device)
    if isinstance(axis, TracedAxis):
        return axis.size, axis.rank, axis.group_name, axis.is_nccl, axis.name
    return axis.size, axis.stride


def _traced(axis: RankAxis | AbstractAxis | TracedAxis, x: Tensor) -> TracedAxis:
    """The axis whose operators make a collective visible to a tracer."""
    if isinstance(axis, TracedAxis):
        return axis
    if isinstance(axis, LockstepAxis):
        raise ValueError(
            "LockstepAxis: a collective of ranks in lockstep cannot be traced; trace on real "
            "ranks, or in Stacked.map"
        )
    has_numbers = (
        not x.is_meta and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    )
    if isinstance(axis, AbstractAxis) and has_numbers:
        raise ValueError(
            f"AbstractAxis: its {axis.size} ranks have no numbers, got a tensor on {x.device}; "
            f"pass a fake or meta tensor"
        )
    return TracedAxis.of(axis, x.device)


def _is_traced(x: Tensor) -> bool:
    """Whether a dispatch mode, a tensor subclass or a tracer may look at the operators
    that run on `x`.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]
        or x.is_meta
        or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )
