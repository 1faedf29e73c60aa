"""Optimizers that need each parameter whole, as transforms of flat buffers: their state
is on every rank, undivided.

Some classes keep state of other shapes than the parameter (row and column statistics,
scales of blocks), or look at a full parameter. An update gathers parameters and
gradients of a flat buffer, every rank runs the class on all of them, and keeps its
shard of the result. This is correct for a class that treats parameters one by one, and
it saves no memory of optimizer states: use it where no transform of `fzero.optim` does
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.common.random_states import seed
from fzero.optim.fragments import ByContents, ShardContents
from fzero.optim.transforms import Leaf, Transform, no_steps, step_spec
from sharding import TensorSpec
from sharding.layout import FlatLayout
from sharding.owners import Matrices
from sharding.views import dtype_name

Values = dict[str, Tensor]


class WholeState(NamedTuple, Generic[Leaf]):
    """The state of an optimizer by parameter and name; every rank has all of it.

    Attributes:
        step: counts updates (0-d float32); at 0 all others are zeros.
        tensors: the class's tensors, of any shape.
        numbers: its Python numbers, as 0-d int64 or float64.
    """

    step: Leaf
    tensors: dict[str, dict[str, Leaf]]
    numbers: dict[str, dict[str, Leaf]]


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
        return None

    def check(self, field: str) -> None:
        """Nothing: `check_whole` has tried the class."""

    def __call__(self, lr: Any, contents: ShardContents | None = None, kind: str = "") -> Transform:
        given = dict(self.arguments())
        if "lr" in given:
            given["lr"] = float(lr)
        contents = contents or ShardContents.whole(FlatLayout(("x",), ((4, 8),), 1))
        return unsharded_transform(self.cls, given, contents, self.blanks)


def unsharded_transform(
    cls: type[Optimizer],
    params: Mapping[str, Any],
    contents: ShardContents,
    blanks: dict[Any, tuple[Values, Values]],
) -> Transform:
    """A class of optimizers as a transform of a flat tensor, which steps it on whole
    parameters.

    *Collective:* an update gathers parameters and gradients, 2 · (W-1)/W · P elements.

    Args:
        blanks: a cache, see `WholeParams`; a state's shapes do not depend on the values
            of `params`.
    """
    layout = contents.layout

    def blank(dtype: torch.dtype) -> dict[str, tuple[Values, Values]]:
        found = {}
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if (shape, dtype) not in blanks:
                blanks[shape, dtype] = _blank_state(cls, params, tuple(shape), dtype)
            found[name] = blanks[shape, dtype]
        return found

    def init(param: Tensor) -> WholeState[Tensor]:
        contents.check(cls.__name__, param)

        def zeros(values: Values) -> Values:
            return {name: torch.zeros_like(x, device=param.device) for name, x in values.items()}

        found = blank(param.dtype)
        return WholeState(
            no_steps(param),
            {n: zeros(x) for n, (x, _) in found.items()},
            {n: zeros(x) for n, (_, x) in found.items()},
        )

    def update(
        grad: Tensor, param: Tensor, state: WholeState[Tensor]
    ) -> tuple[Tensor, Tensor, WholeState[Tensor]]:
        full_param, full_grad = contents.join(param), contents.join(grad)
        tensors, numbers, fulls = {}, {}, {}
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            start, stop = layout.bounds(name)
            full = fulls[name] = full_param[start:stop].view(shape)
            before = (state.tensors[name], state.numbers[name]) if state.step else None
            tensors[name], numbers[name] = _step(
                cls, params, full, full_grad[start:stop].view(shape), before
            )
        if full_param is not param:
            for part in contents.parts:
                part.of(param).copy_(
                    fulls[layout.names[part.index]].reshape(-1)[part.start : part.stop]
                )
        return grad, param, WholeState(state.step.add_(1), tensors, numbers)

    def specs(param: TensorSpec) -> WholeState[TensorSpec]:
        count = step_spec(param)

        def of(values: Values) -> dict[str, TensorSpec]:
            return {
                n: replace(count, shape=tuple(x.shape), dtype=dtype_name(x.dtype))
                for n, x in values.items()
            }

        found = blank(torch.float64 if param.dtype == "float64" else torch.float32)
        return WholeState(
            count,
            {n: of(x) for n, (x, _) in found.items()},
            {n: of(x) for n, (_, x) in found.items()},
        )

    return Transform(init, update, specs)


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
            numbers[name] = torch.tensor(
                value, dtype=torch.float64 if isinstance(value, float) else torch.int64
            )
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
