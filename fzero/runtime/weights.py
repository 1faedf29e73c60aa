"""The weights of a state: a first state from weights, the full state dict, and the same
state with other weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from fzero.common.arguments import check_callable, check_kind, check_no_inference
from fzero.comms import collectives
from fzero.comms.hangs.failures import store_barrier
from fzero.comms.records import Label
from fzero.runtime.init_state import InitFn
from fzero.runtime.outcome import explained
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState
from fzero.verbs import gather_flat
from sharding import Sharded
from sharding.views import torch_dtype


def first_state(
    run: StepRuntime, params: Mapping[str, Tensor] | None, init_fn: InitFn | None
) -> TrainState[Tensor]:
    """See `TrainStep.init`. *Collective.*"""
    check_no_inference("init")
    check_callable("init_fn", init_fn, "a function of a module that fills it", optional=True)
    if params is not None:
        check_kind("params", params, Mapping, "a state dict", "pass model.state_dict()")
        fix = "pass model.state_dict(), or torch.from_numpy(array)"
        for name, value in params.items():
            check_kind(f"params[{name!r}]", value, Tensor, "a tensor", fix)
        params = {run.stored_names.get(key, key): tensor for key, tensor in params.items()}
    store_barrier("TrainStep.init", run.mesh.world)
    run.learned.model_check.record(given=params is not None)
    with explained(run.plan):
        state = run.builder.make(run.mesh, params, init_fn)
    return run.job.first_state(run.plan, state)


def state_dict(
    run: StepRuntime, state: TrainState[Tensor], *, to: Literal["all", "rank0"]
) -> dict[str, Tensor]:
    """See `TrainStep.gather`. *Collective.*"""
    if to not in ("all", "rank0"):
        raise ValueError(f"to: must be 'all' or 'rank0', got {to!r}; pass one of these")
    run.check_state(state)
    store_barrier("TrainStep.gather", run.mesh.world)
    # the rank 0 of those that hold this part of the model
    keep = to == "all" or run.ranks.rank == 0
    full: dict[str, Tensor] = {}
    for views in run.full_weights(state):
        if keep:
            full |= {name: _portable(view) for name, view in views.items()}
    run.agree_on_files(state)
    full |= {name: _portable(tensor) for name, tensor in state.buffers.items()} if keep else {}
    full = {key: full[name] for key, name in run.stored_names.items()} if keep else {}
    return run.job.all_tensors(full, to=to) if keep else {}


def differing(
    run: StepRuntime, state: TrainState[Tensor], tensors: Mapping[str, Tensor]
) -> set[str]:
    """The names of those of the model's tensors that differ from the values of a state,
    as far as this rank holds these.
    """
    found = {
        name
        for name in tensors
        if name in state.buffers and not torch.equal(tensors[name], state.buffers[name])
    }
    for buffer in run.plan.flat_buffers:
        flat, start = state.params[buffer.key], 0
        if buffer.flow.gathers_over and isinstance(buffer.params.spec, Sharded):
            shard = run.plan.mesh.shard_of(run.rank, buffer.params.spec)
            start = buffer.params.partition(run.plan.mesh).bounds(shard)[0]
        for name in tensors.keys() & set(buffer.layout.names):
            if not isinstance(flat, Tensor):  # in a file
                found.add(name)
                continue
            first, stop = (
                min(max(place - start, 0), flat.numel()) for place in buffer.layout.bounds(name)
            )
            own = (
                tensors[name]
                .detach()
                .reshape(-1)[first + start - buffer.layout.bounds(name)[0] :][: stop - first]
            )
            if not torch.equal(own.to(flat.device, flat.dtype), flat[first:stop]):
                found.add(name)
    return found


def on_any_rank(run: StepRuntime, names: Collection[str]) -> set[str]:
    """The names that any rank gives. *Collective:* every rank of the job; sends the
    names.
    """
    return {
        *chain.from_iterable(
            collectives.exchange(sorted(names), run.mesh.world, label=Label("compare"))
        )
    }


def with_weights(
    run: StepRuntime, state: TrainState[Tensor], weights: Mapping[str, Tensor]
) -> TrainState[Tensor]:
    """See `TrainStep.with_weights`. *Collective* where a rank holds a shard of the
    weights and full parameters.
    """
    run.check_state(state)
    own = run.weights(state)
    for key, weight in weights.items():
        if key not in own or not isinstance(weight, Tensor) or weight.shape != own[key].shape:
            got = f"{tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
            wanted = (
                f"a tensor of shape {tuple(own[key].shape)}"
                if key in own
                else f"one of {', '.join(own)}"
            )
            raise ValueError(
                f"with_weights: {key!r} must be {wanted} in this step, got {got}; give the flat "
                f"buffers of step.weights(state) (step.init(params) takes a state dict)"
            )
    master, params, has_met = dict(state.master), dict(state.params), False
    for buffer in run.plan.flat_buffers:
        if buffer.key not in weights:
            continue
        key, weight, home = buffer.key, weights[buffer.key].detach(), params[buffer.key]
        if not (isinstance(home, Tensor) and isinstance(own[key], Tensor)):
            raise ValueError(
                f"with_weights: {key!r} must be in memory to have other weights, and is in a file; "
                f"bring the state into memory with fzero.place and a step without offload, and "
                f"evaluate with that"
            )
        if key in master:
            master[key] = weight.to(own[key].device, own[key].dtype)
        narrow = weight.to(run.device, torch_dtype(buffer.dtypes.param))
        if narrow.numel() != home.numel():
            if not has_met:
                store_barrier("TrainStep.with_weights", run.mesh.world)
                has_met = True
            narrow = run.builder.cut(gather_flat(narrow, buffer, run.mesh), buffer.params)
        params[key] = narrow.to(home.device)
    return state._replace(master=master, params=params)


def with_made_buffers(run: StepRuntime, state: TrainState[Tensor]) -> TrainState[Tensor]:
    """The state with the buffers that transforms make from weights, where they are not
    made yet. *Collective* if one is not.
    """
    if any(not state.buffers[name].any() for name in run.changes.made_buffers):
        for views in run.full_weights(state):
            for name, made in run.changes.first_buffers(views).items():
                if not state.buffers[name].any():
                    state.buffers[name].copy_(made)
    return state


def _portable(tensor: Tensor) -> Tensor:
    dtype = (
        torch.float32
        if tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor.dtype
    )
    copy = tensor.detach().to("cpu", dtype)
    return copy.clone() if copy.data_ptr() == tensor.data_ptr() or copy._base is not None else copy
