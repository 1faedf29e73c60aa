"""Classes of torch.optim as transforms of flat shards.

A flat tensor is the only parameter of a new optimizer, and the optimizer's `state` of
it is the state of the transform. Optimizers make that state in their first step; `init`
makes zeros of the same names and shapes, found by two trial steps. Trial runs check a
class: the update of each element must not depend on others, and the class must keep
nothing outside of `state`.

A graph holds the update as one operator, `fzero::torch_optimizer`, that runs the class
when the graph runs, because classes read Python numbers from their state, and a trace
has no values.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any, Generic, NamedTuple

import optree
import torch
from torch import Tensor
from torch.optim import Optimizer

from fzero.optim.elementwise import SHORT_TRIAL, TRIALS, check_trials, trial_tensors
from fzero.optim.torch_classes import find
from fzero.optim.transforms import Leaf, Transform, is_traced, no_steps, step_spec
from sharding import TensorSpec
from sharding.views import dtype_name, torch_dtype

OWN = {"Adafactor": "fzero.optim.adafactor", "Muon": "fzero.optim.muon"}
"""Classes whose update depends on full parameters, and the transforms that replace them
here.
"""
TRIAL_RATE = 0.5
"""In a trial, the value of each hyperparameter that is a tensor."""


class TorchState(NamedTuple, Generic[Leaf]):
    """The state of an optimizer of torch.optim.

    Attributes:
        step: counts updates (0-d float32); at 0 all others are zeros.
        tensors: the optimizer's tensors by name, of the parameter's shape or 0-d.
        numbers: its Python numbers by name, as 0-d int64 or float64.
    """

    step: Leaf
    tensors: dict[str, Leaf]
    numbers: dict[str, Leaf]


def torch_optimizer(name_or_class: str | type[Optimizer], **params: Any) -> Transform:
    """A class of `torch.optim`, or one of your own, as a transform of flat tensors.
    Trial runs check the class.

    Args:
        name_or_class: a class, or its name in upper or lower case.
        params: the hyperparameters of the class.

    Raises:
        ValueError: there is no such class, or it does not accept these hyperparameters,
            needs a closure or sparse gradients, is not elementwise, or keeps something
            outside of its `state`.

    >>> halving = torch_optimizer("SGD", lr=0.5)
    >>> param = torch.tensor([4.0])
    >>> halving.update(param.clone(), param, halving.init(param))[1]
    tensor([2.])
    """
    cls = find(name_or_class) if isinstance(name_or_class, str) else name_or_class
    if not inspect.isclass(cls) or not issubclass(cls, Optimizer):
        raise ValueError(
            f"torch_optimizer: needs a class of optimizers or its name, got {cls!r}; pass such a "
            f"class"
        )
    own = OWN.get(cls.__name__) if cls.__module__.startswith("torch.optim") else None
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{cls.__name__}: needs a closure that runs the model several times within a step, and "
            f"a transform of gradients has none; choose another class"
        )
    tried = _with_rates(params, TRIAL_RATE)
    checked = torch_transform(cls, tried)
    try:
        _check_keeps_to_its_state(cls, tried, checked)
        # The classes of PyTorch treat all steps alike, so that a short trial is enough.
        trials = (SHORT_TRIAL,) if cls.__module__.startswith("torch.optim") else TRIALS
        check_trials(checked, trials, name=cls.__name__)
    except ValueError as error:
        raise ValueError(f"{error}; use {own} in its place" if own else str(error)) from None
    return torch_transform(cls, params)


def torch_transform(cls: type[Optimizer], params: dict[str, Any]) -> Transform:
    """The transform of `torch_optimizer`, without its checks. Numbers in `params` may
    be 0-d tensors.
    """
    rates = [x for x in optree.tree_leaves(params) if isinstance(x, Tensor)]

    @cache
    def trial_state(dtype: torch.dtype) -> TorchState[Tensor]:
        return _trial(cls, _with_rates(params, TRIAL_RATE), dtype)[1][-1]

    def init(param: Tensor) -> TorchState[Tensor]:
        trial = trial_state(param.dtype)
        tensors = {
            name: torch.zeros_like(param, dtype=x.dtype)
            if x.ndim
            else x.new_zeros((), device=param.device)
            for name, x in trial.tensors.items()
        }
        numbers = {name: x.new_zeros((), device=param.device) for name, x in trial.numbers.items()}
        return TorchState(no_steps(param), tensors, numbers)

    def update(
        grad: Tensor, param: Tensor, state: TorchState[Tensor]
    ) -> tuple[Tensor, Tensor, TorchState[Tensor]]:
        if not is_traced():
            return grad, *_step(cls, params, grad, param, state)
        leaves, treespec = optree.tree_flatten(state)
        how = cls, _with_rates(params, _A_RATE), treespec
        if how not in _IN_GRAPHS:
            _IN_GRAPHS.append(how)
        param, *leaves = step_in_graph(grad, param, leaves, rates, _IN_GRAPHS.index(how))
        return grad, param, treespec.unflatten(leaves)

    def specs(param: TensorSpec) -> TorchState[TensorSpec]:
        trial = trial_state(torch_dtype(param.dtype))
        count = step_spec(param)

        def spec(x: Tensor) -> TensorSpec:
            return replace(param if x.ndim else count, dtype=dtype_name(x.dtype))

        return TorchState(
            count,
            {name: spec(x) for name, x in trial.tensors.items()},
            {name: spec(x) for name, x in trial.numbers.items()},
        )

    return Transform(init, update, specs)


def _with_rates(params: dict[str, Any], rate: Any) -> dict[str, Any]:
    """The hyperparameters, with `rate` for each that is a tensor."""
    replaced: dict[str, Any] = optree.tree_map(
        lambda x: rate if isinstance(x, Tensor) else x, params
    )
    return replaced


def _step(
    cls: type[Optimizer],
    params: dict[str, Any],
    grad: Tensor,
    param: Tensor,
    state: TorchState[Tensor],
) -> tuple[Tensor, TorchState[Tensor]]:
    """The parameter, written in place, and the state after a step of the class."""
    owned = torch.nn.Parameter(param)  # the same memory
    owned.grad = grad
    optimizer = _make(
        cls, optree.tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, params), owned
    )
    # in the first step the class makes its state; on CUDA this test waits for the device
    if state.step:
        optimizer.state[owned] = {
            **state.tensors,
            **{name: x.item() for name, x in state.numbers.items()},
        }
    optimizer.step()
    return param, _state_of(optimizer, owned, state.step.add_(1))


_A_RATE = object()
_IN_GRAPHS: list[tuple[type[Optimizer], dict[str, Any], optree.PyTreeSpec]] = []
"""For each update in a graph: the class, its hyperparameters (`_A_RATE` stands for a
tensor), and the tree of its state.
"""


@torch.library.custom_op("fzero::torch_optimizer", mutates_args=())
def step_in_graph(
    grad: Tensor, param: Tensor, state: list[Tensor], rates: list[Tensor], index: int
) -> list[Tensor]:
    """The parameter and the leaves of the state after a step of `_IN_GRAPHS[index]`;
    the arguments do not change.

    Args:
        rates: the hyperparameters that are tensors, in order.
    """
    cls, params, treespec = _IN_GRAPHS[index]
    now = iter(rates)
    params = optree.tree_map(lambda x: next(now) if x is _A_RATE else x, params)
    with torch.no_grad():
        old = treespec.unflatten([x.clone() for x in state])
        new, updated = _step(cls, params, grad.clone(), param.clone(), old)
    return [new, *(leaf.clone() for leaf in optree.tree_leaves(updated))]


@step_in_graph.register_fake
def _(
    grad: Tensor, param: Tensor, state: list[Tensor], rates: list[Tensor], index: int
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (param, *state)]


@step_in_graph.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
    """One step for each index of the dimension of ranks."""

    def at(index: int) -> list[Tensor]:
        chosen = optree.tree_map(
            lambda x, dim: x if dim is None else x.select(dim, index),
            args,
            in_dims,
            none_is_leaf=True,
        )
        updated: list[Tensor] = step_in_graph(*chosen)
        return updated

    stacked = [
        torch.stack(of_ranks) for of_ranks in zip(*map(at, range(info.batch_size)), strict=True)
    ]
    return stacked, [0] * len(stacked)


def _make(cls: type[Optimizer], params: dict[str, Any], param: Tensor) -> Optimizer:
    make: Any = cls  # the arguments differ between classes
    optimizer: Optimizer = make([param], **params)
    return optimizer


def _state_of(optimizer: Optimizer, param: Tensor, step: Tensor) -> TorchState[Tensor]:
    tensors, numbers = {}, {}
    for name, value in optimizer.state[param].items():
        if isinstance(value, bool | int | float):
            numbers[name] = torch.tensor(
                value, dtype=torch.float64 if isinstance(value, float) else torch.int64
            )
        elif isinstance(value, Tensor) and value.shape in ((), param.shape):
            tensors[name] = value.detach()
        else:
            found = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(
                f"{type(optimizer).__name__}: its state may hold numbers, 0-d tensors and tensors "
                f"of the parameter's shape {tuple(param.shape)}, but {name!r} is {found}; choose "
                f"another class"
            )
    device = param.device
    return TorchState(
        step,
        {n: x.to(device) for n, x in tensors.items()},
        {n: x.to(device) for n, x in numbers.items()},
    )


def _trial(
    cls: type[Optimizer], params: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, list[TorchState[Tensor]]]:
    """The parameter after steps of one optimizer, and its state after each.

    Raises:
        ValueError: the class does not accept these hyperparameters, or a dense gradient
            in one dim.
    """
    param, grads = trial_tensors(dtype)
    owned, states = torch.nn.Parameter(param), []
    try:
        optimizer = _make(cls, params, owned)
    except Exception as error:
        # a class may raise any error for hyperparameters that it does not expect
        raise ValueError(
            f"{cls.__name__}: does not take a flat tensor and {params}: {error}; change the "
            f"parameters"
        ) from None
    with torch.random.fork_rng(devices=[]):
        for grad in grads:
            owned.grad = grad.clone()
            try:
                optimizer.step()
            except (RuntimeError, TypeError, AssertionError, ValueError) as error:
                raise ValueError(
                    f"{cls.__name__}: must step with the dense gradient of a flat tensor, and "
                    f"raised: {error}; choose another class"
                ) from None
            states.append(
                optree.tree_map(torch.clone, _state_of(optimizer, owned, torch.zeros(())))
            )
    return owned.detach(), states


def _check_keeps_to_its_state(
    cls: type[Optimizer], params: dict[str, Any], transform: Transform
) -> None:
    """Raises unless a new optimizer with the old one's state makes the same steps as
    the old one.
    """
    expected, states = _trial(cls, params, torch.float32)
    kinds = [
        {name: (x.shape, x.dtype) for part in state[1:] for name, x in part.items()}
        for state in states
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"{cls.__name__}: its state must have the same names and shapes after every step, but "
            f"changes from {sorted(kinds[0])} to {sorted(kinds[-1])}; choose another class"
        )
    param, grads = trial_tensors(torch.float32)
    with torch.random.fork_rng(devices=[]):
        state = transform.init(param)
        for grad in grads:
            _, param, state = transform.update(grad.clone(), param, state)
    if not torch.equal(param, expected):
        raise ValueError(
            f"{cls.__name__}: must keep everything in its `state`, but a new optimizer with the "
            f"state of an old one makes other steps (it keeps something in its attributes or "
            f"parameter groups, or draws random numbers); choose another class"
        )
