"""The step composed by hand from the verbs of flat buffers, with `finish`, is the step
of `make_train_step`, bit for bit.

Nothing of the runner is used: no units in flight, no hooks of autograd, no schedule.
What both share are the verbs, the rules of the end of a step and the transforms.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training import ADAMW, Plain, config, make, part, vectors

import fzero
from fzero.comms import collectives
from fzero.runtime.finish import finish, loss_row, norm_parts
from fzero.state import TrainState
from fzero.step import TrainStep
from fzero.storage.shard_transfer import own_shard, updated_part
from fzero.verbs import start_gather, start_join, start_reduce_scatter_grads
from sharding import Mesh
from sharding.views import torch_dtype, unflatten


def composed(
    step: TrainStep, model: nn.Module, state: TrainState[Tensor], batch: Any
) -> tuple[TrainState[Tensor], float, float]:
    """The next state, the loss and the gradient norm, of a model without ties and
    module buffers, with one micro-batch.
    """
    run, plan, mesh = step.runtime, step.plan, step.runtime.mesh
    hooks, rules = plan.comm_hooks, run.rules

    full = {
        b.key: start_gather(state.params[b.key], b, mesh, hooks).wait() for b in plan.flat_buffers
    }
    leaves: dict[str, Tensor] = {}
    for buffer in plan.flat_buffers:
        leaves |= unflatten(full[buffer.key].detach(), buffer.layout)
    trained = {
        name: leaves[name].requires_grad_()
        for b in plan.flat_buffers
        if b.trainable
        for name in b.layout.names
    }
    loss = torch.func.functional_call(model, leaves, run.batches.cast(batch))
    grads = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))

    sums = {}
    for buffer in (b for b in plan.flat_buffers if b.trainable):
        flat_P = torch.zeros(buffer.padded_numel, dtype=torch_dtype(buffer.flow.send_dtype))
        for name in buffer.layout.names:
            start, stop = buffer.layout.bounds(name)
            flat_P[start:stop] = grads[name].reshape(-1) * (1 / rules.loss.predivide)
        reduced, _ = start_reduce_scatter_grads(flat_P, buffer, mesh, hooks).wait()
        sums[buffer.key] = reduced.to(torch_dtype(buffer.flow.keep_dtype))

    stats_AW4 = collectives.stack(loss_row(loss, None, 1.0, 1.0), mesh.world)[None]
    cut = [b for b in plan.flat_buffers if b.trainable and b.shard_numel]
    parts_F = norm_parts(
        rules.loss,
        [rules.loss.of_shard(own_shard(sums[b.key], b, mesh.shard)) for b in cut],
        stack=mesh.stack,
        device=step.device,
    )
    outcome, _, factor = finish(rules, stats_AW4, parts_F, state.loss_scale, is_sum=False)

    params, master, optimizer = dict(state.params), dict(state.master), dict(state.optimizer)
    hyper = run.updater.hyper(int(state.step))
    for buffer in (b for b in plan.flat_buffers if b.trainable):
        key, param = buffer.key, params[buffer.key]
        own = updated_part(param, buffer, mesh.shard)
        out = own if buffer.has_master else None
        transform = run.updater.transform_of(buffer, hyper, factor=factor, out=out)
        _, _, optimizer[key] = transform.update(sums[key], master.get(key, own), optimizer[key])
        if own is not param and buffer.flow.joins_over:
            start_join(own, buffer, mesh, out=param).wait()
    return (
        state._replace(params=params, master=master, optimizer=optimizer, step=state.step + 1),
        float(outcome.loss),
        float(outcome.norm),
    )


def _apart(cfg: dict[str, Any], num_steps: int, mesh: Mesh | None = None) -> list[str]:
    """The tensors in which a composed training differs from the step's; loss and norm
    are among them.
    """
    step = fzero.make_train_step(make(Plain), cfg, mesh=mesh)
    state, model = step.init(), make(Plain)
    mine = optree.tree_map(torch.clone, state)
    differ = []
    for index in range(num_steps):
        batch = part(vectors(index), step.rank, step.world_size)
        batch = batch if isinstance(batch, tuple) else (batch,)
        state, metrics = step(state, batch)
        mine, loss, norm = composed(step, model, mine, batch)
        if (loss, norm) != (float(metrics.loss), float(metrics.grad_norm)):
            differ.append(
                f"step {index}: {loss, norm} and {float(metrics.loss), float(metrics.grad_norm)}"
            )
    for name in ("params", "master", "optimizer", "step"):
        theirs, own = (optree.tree_leaves(getattr(x, name)) for x in (state, mine))
        differ += [name for x, y in zip(theirs, own, strict=True) if not torch.equal(x, y)]
    return differ


BF16 = {"bf16": {"enabled": True, "auto_cast": True}}


def _in_all_stages() -> list[list[str]]:
    cases = [config(stage, optimizer=ADAMW, clip=0.05) for stage in range(4)]
    return [_apart(cfg, 3) for cfg in cases] + [_apart(cfg | BF16, 3) for cfg in cases]


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_composed_from_the_verbs_is_the_step(ranks: RankPool, world_size: int) -> None:
    assert ranks(world_size, _in_all_stages) == [[[]] * 8] * world_size


def _on_two_axes() -> list[list[str]]:
    return [
        _apart(config(stage, optimizer=ADAMW, clip=0.05), 2, Mesh.of(node=2, data=2))
        for stage in range(4)
    ]


def test_so_it_is_on_a_mesh_of_two_axes(ranks: RankPool) -> None:
    assert ranks(4, _on_two_axes) == [[[]] * 4] * 4
