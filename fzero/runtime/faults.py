"""The parameters that make a step fail: the first one whose gradient is not finite, and those without a gradient."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import astuple

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.records import Label
from fzero.runtime.finish import Outcome
from fzero.runtime.step_runtime import StepRuntime
from fzero.state import TrainState
from fzero.storage.shard_transfer import own_shard


def first_overflow(run: StepRuntime, state: TrainState[Tensor]) -> str | None:
    """The first parameter whose gradient is not finite; see `TrainStep.first_overflow`. *Collective.*"""
    order = {name: index for index, (name, _) in enumerate(run.recipe.model.named_parameters())}
    first, mesh = len(order), run.mesh
    trained = [buffer for buffer in run.plan.flat_buffers if buffer.trainable]
    shards = ((b.key, own_shard(state.grads[b.key], b, mesh.shard)) for b in trained)
    for buffer, grad_S in zip(trained, run.offload.transfer(run.scratch).each(shards), strict=True):
        for name, start, stop, offset in map(astuple, buffer.layout.fragments(mesh.shard)):
            if order[name] < first and not grad_S[offset : offset + stop - start].isfinite().all():
                first = order[name]
    found = int(mesh.stack(torch.tensor(first, device=run.device), label=Label("overflow")).min())
    name = dict(zip(order.values(), order, strict=True)).get(found)
    return name if run.stages is None else run.stages.first_name(name)


def check_used(run: StepRuntime, used: Collection[str]) -> None:
    """Raises on every rank where a trained parameter got no gradient on some rank. *Collective:* a number per parameter.

    Args:
        used: the parameters that got a gradient on this rank, or need none.
    """
    trained = {name for buffer in run.plan.flat_buffers if buffer.trainable for name in buffer.layout.names}
    names = [name for name, _ in run.recipe.model.named_parameters() if name in trained]
    is_unused = torch.tensor([float(name not in used) for name in names], device=run.device)
    unused_WN = collectives.stack(is_unused, run.mesh.world, label=Label("other", "of unused parameters", "update"))
    lines = [
        f"{name!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for name, of_name in zip(names, unused_WN.T.tolist(), strict=True)
        if (ranks := [rank for rank, number in enumerate(of_name) if number])
    ]
    if lines:
        raise ValueError(
            f"zero_optimization.ignore_unused_parameters: is false, and the loss does not depend on {'; '.join(lines)}; compute "
            f"the loss from all of them, freeze them with requires_grad_(False), or leave the key out: then their gradient is 0"
        )


def what_is_not_finite(run: StepRuntime, outcome: Outcome, state: TrainState[Tensor]) -> str:
    """The message about a loss or gradient that is not finite. *Collective.*"""
    losses_AW = outcome.loss_stats[..., 0]
    by_rank = losses_AW.mean(dim=0).tolist()
    ranks = [rank for rank, value in enumerate(by_rank) if not math.isfinite(value)]
    mean = losses_AW.mean().item()
    what = f"loss is not finite on ranks {ranks}" if ranks else f"loss is {mean:.6g}, its gradient is not finite"
    name = first_overflow(run, state)
    return (
        f"step {int(state.step)}: {what} (losses {by_rank}, gradient norm {outcome.norm.item():.6g}"
        + (f", first parameter {name!r}" if name else "")
        + "); the state was not updated: lower the learning rate, set gradient_clipping, or look at this batch"
    )
