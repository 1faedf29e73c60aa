"""`hvp` and `gnvp`: the Hessian's and the Gauss–Newton matrix' product with a vector,
by the forwards and backwards of a step.

    H v = d/dε ∇L(p + ε v),        G v = Jᵀ ∇²ℓ(z) J v    with L(p) = ℓ(z(p)).

A step's forward runs with dual parameters (`fzero.curvature.duals`): the tangent of
every gradient is the product, and it is collected and reduced as a gradient is, in
every stage. For the Gauss–Newton product the forward alone carries tangents; a plain
backward follows.

Beyond a gradient's collectives each flat buffer of the vector is gathered once, before
the forward. The vector stays in memory in full until the end (P elements in the
model's dtype): PyTorch saves a tensor's tangent with it, and has no hook for that.

Shape letters: P padded elements of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero.common.arguments import check_callable, refuse_without_grad
from fzero.comms import collectives
from fzero.curvature.duals import DualView, dual, parts_of, tangents_allowed
from fzero.curvature.vectors import HasRuntime, Vector, VectorSpace
from fzero.model.binding import random_state
from fzero.runtime import phases
from fzero.runtime.batches import loss_of_batch
from fzero.runtime.eager import ForwardBackward
from fzero.runtime.finish import check_rows, mean_of
from fzero.runtime.param_views import ParamViews
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.weights import differing, on_any_rank
from fzero.state import TrainState
from fzero.storage.shard_transfer import read_later, updated_part
from sharding.views import torch_dtype

State = TrainState[Tensor]


def hvp(run: StepRuntime, state: State, batch: Any, vector: Vector) -> dict[str, Tensor]:
    """See `TrainStep.hvp`."""
    return _product(run, state, batch, vector, call="step.hvp", gives="tangent")


def gradient(step: HasRuntime, state: State, batch: Any) -> dict[str, Tensor]:
    """The gradient of the loss as a vector of `space(step)`; the state is unchanged.

    *Collective:* every rank; sends what a gradient does.
    """
    return _product(
        step.runtime, state, batch, None, call="fzero.curvature.gradient", gives="value"
    )


def gnvp(
    run: StepRuntime,
    state: State,
    batch: Any,
    vector: Vector,
    *,
    outputs: Callable[[Any, Any], Tensor],
    loss: Callable[[Tensor, Any], Any],
) -> dict[str, Tensor]:
    """See `TrainStep.gnvp`."""
    check_callable("outputs", outputs, "a function of the model and the batch")
    check_callable("loss", loss, "a function of the outputs and the batch")

    def projected(model: Any, micro_batch: Any) -> Any:
        """zᵀ u with u = ∇²ℓ J v held fixed, whose gradient is Jᵀ u."""
        z = outputs(model, micro_batch)
        if not isinstance(z, Tensor):
            raise ValueError(
                f"gnvp: outputs must return a tensor, got {type(z).__name__}; concatenate them"
            )
        z, z_tangent = parts_of(z)
        tangent = torch.zeros_like(z) if z_tangent is None else z_tangent.detach()
        with torch.enable_grad():
            leaf = dual(z.detach().requires_grad_(), tangent)
            value = loss(leaf, micro_batch)
            total, weight = value if isinstance(value, tuple) else (value, None)
            (grad,) = torch.autograd.grad(total, leaf)
        _, u = parts_of(grad)
        u = torch.zeros_like(z) if u is None else u.detach()
        product = (z * u).sum()
        return product if weight is None else (product, weight)

    return _product(
        replace(run, spec=replace(run.spec, loss_fn=projected)),
        state,
        batch,
        vector,
        call="step.gnvp",
        gives="value",
    )


def _product(
    run: StepRuntime,
    state: State,
    batch: Any,
    vector: Vector | None,
    *,
    call: str,
    gives: str,
) -> dict[str, Tensor]:
    """The gradient of the loss with dual parameters: its tangent, or its value. Without
    a vector the parameters have no tangents. *Collective:* every rank.
    """
    space = VectorSpace(run)
    check_product(run, call)
    run.check_state(state)
    if state.hook_states:
        raise ValueError(
            f"{call}: must not have a reduce_hook with a state, whose errors are of gradients, got "
            f"one for {next(iter(state.hook_states))!r}; make a step without it"
        )
    if vector is not None:
        space.check(vector, call)
    micro_batches = list(run.batches.split(batch))
    collectives.next_step(run.mesh.world)
    run.learned.model_check.check_at_step(partial(differing, run, state), partial(on_any_rank, run))
    grads = {
        b.key: torch.empty(
            b.flow.grad_numel, dtype=torch_dtype(b.flow.keep_dtype), device=run.device
        )
        for b in space.buffers
    }
    tangents = {} if vector is None else space.full_in_compute_dtype(vector)
    dtypes = {key: x.dtype for key, x in (grads if vector is None else vector).items()}
    with ExitStack() as stack, random_state(state.rng, run.device):
        if vector is not None:
            stack.enter_context(tangents_allowed(call))
        window = _window(run, state._replace(grads=grads), tangents, gives)
        del tangents
        for index, micro_batch in enumerate(micro_batches):
            forward = partial(loss_of_batch, run, micro_batch)
            loss, weight = phases.forward(run, window, forward, kind=call)
            is_last = index == len(micro_batches) - 1
            if gives == "value" and is_last:
                stack.close()  # drops all tangents
            window = phases.backward(
                run,
                window,
                loss,
                weight=weight,
                num_parts=len(micro_batches) if weight is None else 1,
                is_last=is_last,
            )
            del loss
        window.forward_backward.close()
        rows_M2 = torch.stack(window.loss_stats).flatten(0, 1)[:, :2]
        check_rows(rows_M2, is_sum=window.is_sum)
        _, total = mean_of(rows_M2, is_sum=window.is_sum)
        multiple = run.rules.loss.multiple(total, state.loss_scale.scale)
        return {
            b.key: updated_part(grads[b.key], b, run.mesh.shard).to(dtypes[b.key]) / multiple
            for b in space.buffers
        }


def _window(
    run: StepRuntime, state: State, tangents: dict[str, Tensor], gives: str
) -> phases.AccumulationWindow:
    """An accumulation window whose parameters have tangents."""
    transfer, num_updates = run.offload.transfer(run.scratch), read_later(state.step)
    views = {
        name: (DualView(tangent, run.inner_plan.param_units[name][0].gathered_numel > 0, gives),)
        for name, tangent in tangents.items()
    }
    work = ForwardBackward(
        run.inner_plan,
        run.mesh,
        run.inner_params(state.params, transfer),
        state.grads,
        run.learned,
        transfer,
        seen=ParamViews(views, num_updates, state.buffers),
    )
    run.learned.leaked = work.gathers.leaked
    buffers = {name: tensor.clone() for name, tensor in state.buffers.items()}
    before = {name: (tensor, tensor._version) for name, tensor in buffers.items()}
    return phases.AccumulationWindow(state, work, buffers, before, num_updates)


def check_product(run: StepRuntime, call: str) -> None:
    """Raises unless a step can make the product."""
    spec = run.spec
    refused = {
        f"compile={spec.compile!r}, whose code has no forward mode": spec.compile is not None,
        "a pipeline, whose stages have a backward of their own": not run.job.is_whole,
        "a mesh axis 'seq', whose exchanges have no forward mode": run.plan.seq_size > 1,
        "transforms with views of parameters": bool(run.changes.views),
        "a state in files": run.offload.has_files,
    }
    if found := next((what for what, is_there in refused.items() if is_there), None):
        raise ValueError(
            f"{call}: must be of an eager step of the whole model in memory, got {found}; make a "
            f"step without it for the same state (fzero.reshard moves a state between steps)"
        )
    if not torch.is_grad_enabled():
        refuse_without_grad(call)
