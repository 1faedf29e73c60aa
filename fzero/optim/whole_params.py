"""Optimizers that need each parameter whole, as transforms of flat buffers.

Some classes keep state of other shapes than the parameter (row and column statistics,
scales of blocks), or look at a full parameter. So each parameter has one owner among
the ranks, as whole matrices have (`fzero.optim.owner_calls`): an update sends it
parameter, gradient and state, it steps the class on them, and sends parameter and state
back. This is correct for a class that treats parameters one by one. The state is flat,
and divided like the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.common.random_states import seed
from fzero.optim.fragments import ByContents, ShardContents
from fzero.optim.owner_calls import Calls, OwnerCall
from fzero.optim.transforms import Leaf, Transform, no_steps, step_spec, update_by
from fzero.optim.whole_matrices import EntriesSpec, owned_buffers
from sharding import TensorSpec
from sharding.layout import FlatLayout
from sharding.owners import Matrices, Matrix, OwnedBuffer
from sharding.views import dtype_name, torch_dtype

Values = dict[str, Tensor]


class WholeState(NamedTuple, Generic[Leaf]):
    """The state of an optimizer of whole parameters.

    Attributes:
        step: counts updates (0-d float32); at 0 all others are zeros.
        tensors: the class's tensors by dtype and name; each is flat, the entries of all
            parameters one after another.
        numbers: its Python numbers likewise, one for each parameter, as int64 or
            float64.
    """

    step: Leaf
    tensors: dict[str, dict[str, Leaf]]
    numbers: dict[str, dict[str, Leaf]]


class _Entry(NamedTuple):
    """A tensor of the state: whether it holds numbers, its dtype, and its name."""

    is_number: bool
    dtype: str
    name: str


@dataclass(frozen=True, slots=True)
class WholeParams(ByContents):
    """A function of a learning rate and the contents of a flat tensor, which makes the
    transform of a class.

    Attributes:
        cls: the class of the optimizer.
        arguments: its present hyper-parameters.
        blanks: the states of parameters that have been tried, by shape and dtype.
    """

    cls: type[Optimizer]
    arguments: Callable[[], Mapping[str, Any]]
    blanks: dict[Any, tuple[Values, Values]] = field(default_factory=dict)

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        return ""

    def is_elementwise(self, kind: str) -> bool:
        return False

    def matrices(self, layout: FlatLayout, kind: str) -> Matrices | None:
        return Matrices(_params_of(layout), ("float32", "float32"), "float32")

    def check(self, field: str) -> None:
        """Nothing: `check_whole` has tried the class."""

    def __call__(self, lr: Any, contents: ShardContents | None = None, kind: str = "") -> Transform:
        given = dict(self.arguments())
        if "lr" in given:
            given["lr"] = float(lr)
        contents = contents or ShardContents.whole(FlatLayout(("x",), ((4, 8),), 1))
        return whole_transform(self.cls, given, contents, self.blanks)


def _params_of(layout: FlatLayout) -> tuple[Matrix, ...]:
    """The parameters of a layout, of any number of dims, as what an owner gets."""
    return tuple(
        Matrix(name, 0, math.prod(shape[:1]), math.prod(shape[1:]), math.prod(shape))
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if math.prod(shape)
    )


def whole_transform(
    cls: type[Optimizer],
    params: Mapping[str, Any],
    contents: ShardContents,
    blanks: dict[Any, tuple[Values, Values]],
) -> Transform:
    """A class of optimizers as a transform of a flat tensor, which steps it on whole
    parameters.

    *Collective:* an update sends parameters, gradients and states to their owners, and
    parameters and states back (`sharding.owners.OwnedBuffer.num_sent`).

    Args:
        blanks: a cache, see `WholeParams`; a state's shapes do not depend on the values
            of `params`.
    """
    whole = _Whole(cls, params, contents.layout, blanks)

    def init(param: Tensor) -> WholeState[Tensor]:
        contents.check(cls.__name__, param)
        tensors = {}
        for entry, layout in whole.layouts(param.dtype).items():
            numel = len(contents.ranks) * layout.partition.shard_numel
            tensors[entry] = param.new_zeros(numel, dtype=torch_dtype(entry.dtype))
        return _state(no_steps(param), tensors)

    def calls(grad: Tensor, param: Tensor, state: WholeState[Tensor]) -> Calls:
        entries = whole.entries(param.dtype)
        buffers = whole.buffers(entries, contents.owners, contents.places, contents.holds)
        step = state.step.add_(1)
        reply, *new = yield OwnerCall(
            partial(whole.run, tuple(entries)),
            (cls, repr(params), tuple(entries)),
            (param, *(_at(state, entry) for entry in entries), grad),
            (*buffers, buffers[0]),
            (whole.shapes, *entries.values(), whole.shapes),
            step,
            param.dtype,
            contents.rank,
            contents.exchange,
            num_not_returned=1,
        )
        for part in contents.parts:
            part.of(param).copy_(part.of(reply))
        return grad, param, _state(step, dict(zip(entries, new, strict=True)))

    def specs(param: TensorSpec) -> WholeState[TensorSpec]:
        dtype = torch.float64 if param.dtype == "float64" else torch.float32
        tensors: dict[_Entry, TensorSpec] = {
            entry: EntriesSpec.of(param, layout, entry.dtype)
            for entry, layout in whole.layouts(dtype).items()
        }
        return _state(step_spec(param), tensors)

    update = partial(update_by, calls)
    return Transform(init, update, specs, calls=(update, calls))


@dataclass(frozen=True, slots=True)
class _Whole:
    """The parameters of a layout, and what a class keeps of each."""

    cls: type[Optimizer]
    params: Mapping[str, Any]
    layout: FlatLayout
    blanks: dict[Any, tuple[Values, Values]]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.layout.shape(each.name)) for each in _params_of(self.layout))

    def entries(self, dtype: torch.dtype) -> dict[_Entry, tuple[tuple[int, ...], ...]]:
        """By tensor of the state, the shape of each parameter's entries; (0,) for one
        that has none.
        """
        shapes = self.shapes
        found: dict[_Entry, dict[int, tuple[int, ...]]] = {}
        for index, shape in enumerate(shapes):
            if (shape, dtype) not in self.blanks:
                self.blanks[shape, dtype] = _blank_state(self.cls, self.params, shape, dtype)
            for is_number, values in enumerate(self.blanks[shape, dtype]):
                for name, x in values.items():
                    entry = _Entry(bool(is_number), dtype_name(x.dtype), name)
                    found.setdefault(entry, {})[index] = tuple(x.shape)
        return {
            entry: tuple(of.get(index, (0,)) for index in range(len(shapes)))
            for entry, of in sorted(found.items())
        }

    def buffers(
        self,
        entries: Mapping[_Entry, tuple[tuple[int, ...], ...]],
        owners: tuple[int, ...] | None = None,
        places: tuple[tuple[int, int], ...] = ((0, 0),),
        holds: Literal["shard", "full"] = "full",
    ) -> tuple[OwnedBuffer, ...]:
        """Of the parameters, and of each tensor of the state."""
        matrices = _params_of(self.layout)
        return owned_buffers(self.layout, matrices, tuple(entries.values()), owners, places, holds)

    def layouts(self, dtype: torch.dtype) -> dict[_Entry, FlatLayout]:
        """Of each tensor of the state."""
        entries = self.entries(dtype)
        found = (buffer.layout for buffer in self.buffers(entries)[1:])
        return dict(zip(entries, found, strict=True))

    def run(
        self,
        entries: tuple[_Entry, ...],
        stack: Tensor,
        given: tuple[Tensor, ...],
        counts: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """The new parameters and states, from parameters, states and gradients."""
        *olds, grads = given
        results, news = [], [list[Tensor]() for _ in olds]
        for index, count in enumerate(counts.tolist()):
            full = stack[index].clone()
            before = {
                entry: old[index]
                for entry, old in zip(entries, olds, strict=True)
                if old[index].numel()
            }
            after = _stepped(
                self.cls, self.params, full, grads[index], before if count > 1 else None
            )
            results.append(full)
            for new, old, entry in zip(news, olds, entries, strict=True):
                new.append(after.get(entry, old[index]))
        return torch.stack(results), [torch.stack(new) for new in news]


def _state(step: Leaf, tensors: Mapping[_Entry, Leaf]) -> WholeState[Leaf]:
    found: tuple[dict[str, dict[str, Leaf]], dict[str, dict[str, Leaf]]] = {}, {}
    for entry, x in tensors.items():
        found[entry.is_number].setdefault(entry.dtype, {})[entry.name] = x
    return WholeState(step, *found)


def _at(state: WholeState[Tensor], entry: _Entry) -> Tensor:
    return (state.numbers if entry.is_number else state.tensors)[entry.dtype][entry.name]


def _stepped(
    cls: type[Optimizer],
    params: Mapping[str, Any],
    param: Tensor,
    grad: Tensor,
    before: Mapping[_Entry, Tensor] | None,
) -> dict[_Entry, Tensor]:
    """Steps one parameter, written in place; its state after, of which numbers have the
    shape (1,).
    """
    values: tuple[Values, Values] = {}, {}
    for entry, x in (before or {}).items():
        values[entry.is_number][entry.name] = x
    tensors, numbers = _step(cls, params, param, grad, None if before is None else values)
    return {_Entry(False, dtype_name(x.dtype), name): x for name, x in tensors.items()} | {
        _Entry(True, dtype_name(x.dtype), name): x for name, x in numbers.items()
    }


def _blank_state(
    cls: type[Optimizer], params: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Values, Values]:
    """The state after one step of a parameter of that shape, as tensors without memory."""
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    tensors, numbers = _step(cls, params, param, grad, None)
    return (
        {name: x.new_empty(x.shape, device="meta") for name, x in tensors.items()},
        {name: x.new_empty(x.shape, device="meta") for name, x in numbers.items()},
    )


def _step(
    cls: type[Optimizer],
    params: Mapping[str, Any],
    param: Tensor,
    grad: Tensor,
    before: tuple[Values, Values] | None,
) -> tuple[Values, Values]:
    """Steps a new optimizer with the state `before` on one parameter, written in place;
    its tensors and numbers after.
    """
    owned = nn.Parameter(param)  # the same memory
    owned.grad = grad
    make: Any = cls  # the arguments differ between classes
    optimizer: Optimizer = make([owned], **params)
    if before is not None:
        optimizer.state[owned] = {**before[0], **{name: x.item() for name, x in before[1].items()}}
    optimizer.step()
    return _split(cls, optimizer.state[owned])


def _split(cls: type[Optimizer], state: Mapping[str, Any]) -> tuple[Values, Values]:
    tensors, numbers = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
        elif isinstance(value, bool | int | float):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            numbers[name] = torch.tensor([value], dtype=dtype)
        else:
            raise ValueError(
                f"{cls.__name__}: its state may hold tensors and numbers, and {name!r} is a "
                f"{type(value).__name__}; choose another class"
            )
    return tensors, numbers


_TRIAL_SHAPES = ((6, 8), (5,), (3, 2, 4))


def check_whole(cls: type[Optimizer], params: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the class treats parameters one by one and keeps
    everything in its `state`.

    Four steps of one optimizer with several parameters are compared with four new
    optimizers, each of which gets the state that the one before it left.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in _TRIAL_SHAPES]
    grads = [[torch.randn(shape, generator=generator) for shape in _TRIAL_SHAPES] for _ in range(4)]
    make: Any = cls
    with torch.random.fork_rng(devices=[]):
        owned = [nn.Parameter(x.clone()) for x in starts]
        together: Optimizer = make(owned, **params)
        for of_step in grads:
            for x, grad in zip(owned, of_step, strict=True):
                x.grad = grad.clone()
            together.step()
        for index, start in enumerate(starts):
            param, state = start.clone(), None
            for of_step in grads:
                state = _step(cls, params, param, of_step[index].clone(), state)
            if not torch.equal(param, owned[index].detach()):
                raise ValueError(
                    f"{cls.__name__}: must treat parameters one by one, and keep everything in its "
                    f"`state`, and does not; choose another class"
                )


def check_shapes_do_not_matter(cls: type[Optimizer], params: Mapping[str, Any]) -> None:
    """Raises a ValueError if a class updates a matrix in another way than the same
    elements as a flat tensor, as in a flat buffer."""
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(6, 8, generator=generator), torch.randn(4, 6, 8, generator=generator)
    with torch.random.fork_rng(devices=[]):
        ends = []
        for shape in ((6, 8), (48,)):
            seed(0, torch.device("cpu"))
            param, state = start.clone().view(shape), None
            for grad in grads:
                state = _step(cls, params, param, grad.clone().view(shape), state)
            ends.append(param.flatten())
    if not torch.allclose(ends[0], ends[1], rtol=1e-6, atol=1e-7):
        raise ValueError(
            f"{cls.__name__}: must update a matrix as it updates the same elements in one dim, and "
            f"does not"
        )
