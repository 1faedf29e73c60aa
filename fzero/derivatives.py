"""`functional`: the model of a step as a function of its sharded parameters.

A leaf of the parameters is this rank's shard of a flat buffer (S elements), in every
stage. A unit is gathered when the model uses it, by the primitive `all_gather`, whose
transpose is the reduce-scatter and whose tangent and batch are all-gathers. So a
derivative by the parameters, of any order and by any transform, has the form of the
parameters, and sends what the verbs send.

Shape letters: S elements of a shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from fzero.common.arguments import check_callable
from fzero.model.binding import is_bound
from fzero.plans.plan import UnitPlan
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.shard_transfer import own_shard, read_later
from fzero.verbs import gather_shards
from sharding.views import unflatten

T = TypeVar("T")
Params = dict[str, Tensor]


def functional(
    step: TrainStep, state: TrainState[Tensor], function: Callable[..., T] | None = None
) -> tuple[Callable[..., T], Params]:
    """`(apply, params)`: the model as a pure function, and the point at which the state
    is. `apply(params, *args)` computes `model(*args)` with these parameters.

        apply, params = fzero.functional(step, state)

        def loss(params, x, y):
            return F.mse_loss(apply(params, x), y) / step.world_size

        grads = torch.func.grad(loss)(params, x, y)
        adapted = {key: p - 0.1 * grads[key] for key, p in params.items()}
        outer = torch.func.grad(loss)(adapted, *others)

    A derivative by `params` is of the sum of all ranks' values: divide by their number
    for a mean. Arithmetic on `params`, and on vectors like them, is on shards; a dot
    product of two is the sum over ranks of the dot products of their shards.

    *Collective:* each call of `apply`, and each backward through one; every rank, in
    the same order. A unit is gathered each time the model comes to it ((W-1)/W of its
    elements), and its gradient is reduce-scattered once for each such time. What autograd
    saves for a backward keeps gathered units in memory.

    Args:
        state: is not changed, and may be donated afterwards.
        function: `function(model, *args)`, called instead of the model, with the model
            bound to the parameters.

    Returns:
        `apply`, and by key of a trained flat buffer this rank's shard (S), in the dtype
        with which the model computes. Module buffers are those of `state`; what a
        forward writes into them is dropped.

    Raises:
        ValueError: a transform gives modules other values than the parameters, or (in
            `apply`) `torch.utils.checkpoint` runs a part of the model: the backward
            would run that part with the module's own parameters.
    """
    run = step.runtime
    if function is not None:
        check_callable("functional", function, "function(model, *args)")
    run.check_state(state)
    if run.changes.views:
        raise ValueError(
            "functional: must be of a step whose modules compute with its parameters, and a "
            "transform gives them other values; leave the transform out"
        )
    transfer, shards = run.offload.transfer(run.scratch), Params()
    for buffer in run.plan.flat_buffers:
        home = transfer.load(buffer.key, state.params[buffer.key])
        shards[buffer.key] = own_shard(home, buffer, run.mesh.shard).detach().clone()
    transfer.abandon()
    params = {b.key: shards.pop(b.key) for b in run.plan.flat_buffers if b.trainable}
    buffers, num_updates = dict(state.buffers), read_later(state.step)

    def apply(params: Params, *args: Any, **kwargs: Any) -> T:
        model = run.spec.model
        if is_bound(model):
            raise RuntimeError(
                "functional: apply must not be called inside a forward of its own model, and was; "
                "call the model there"
            )
        gathered = _Gathered(run, shards | params)
        call = run.call(num_updates, is_counted=False)
        now = {name: tensor.clone() for name, tensor in buffers.items()}
        with run.binding.to(gathered.fetch, now), run.changes.bound(model, lambda: call):
            called: Any = model if function is None else function
            result: T = called(*(() if function is None else (model,)), *args, **kwargs)
        return result

    return apply, params


@dataclass(slots=True)
class _Gathered:
    """The parameters of one call, of which those of the present unit are there."""

    run: StepRuntime
    shards: Params
    _unit: UnitPlan | None = None
    _present: dict[str, Tensor] = field(default_factory=dict)

    def fetch(self, name: str) -> Tensor:
        unit = self.run.plan.param_units[name][0]
        if unit is not self._unit:
            _check_runs_once()
            self._unit, self._present = unit, dict(self._views(unit))
        return self._present[name]

    def _views(self, unit: UnitPlan) -> Iterator[tuple[str, Tensor]]:
        for buffer in unit.buffers:
            full = gather_shards(self.shards[buffer.key], self.run.mesh)
            for name, view in unflatten(full, buffer.layout).items():
                view.fzero_name = name  # type: ignore[attr-defined]
                yield name, view


def _check_runs_once() -> None:
    """Raises ValueError in a part of a model that a backward runs again."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_again = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    frame: Any = sys._getframe()
    while frame is not None and not is_again:
        is_again = frame.f_code is CheckpointFunction.forward.__code__
        frame = frame.f_back
    if is_again:
        raise ValueError(
            "functional: the model must not use torch.utils.checkpoint in apply, because the "
            "backward would run that part again with the module's own parameters, and did; switch "
            "it off (gradient_checkpointing_disable, activation_checkpointing), or use step.forward"
        )
