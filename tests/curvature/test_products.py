"""`step.hvp`, `step.gnvp` and their vectors, beside torch.func on one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

import fzero
from fzero.transforms import weight_norm
from sharding import Mesh

UNITS = ["first", "tied", "again", "unused", "frozen", "last"]
ROUNDING = 1e-6
"""Of sums over ranks and micro-batches, whose order differs from the plain loop's; the
products are smaller than 1."""


class Oddities(nn.Module):
    """A model with tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.again = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.unused, self.frozen, self.last = nn.Linear(3, 3), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.tied, self.frozen, self.again):
            x = torch.tanh(layer(x))
        return self.last(x)


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


def outputs_of(model: Any, batch: Batch) -> Tensor:
    out: Tensor = model(batch.x)
    return out


def mean_of(z: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(z, batch.y)


def sum_of(z: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(z, batch.y, reduction="sum"), len(batch.y)


def mean_loss(model: Any, batch: Batch) -> Tensor:
    return mean_of(outputs_of(model, batch), batch)


def sum_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    return sum_of(outputs_of(model, batch), batch)


def model_of() -> Oddities:
    torch.manual_seed(0)
    return Oddities()


def batch_of(rows: slice = slice(None)) -> Batch:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=draw), torch.randint(3, (24,), generator=draw)
    return Batch(x[rows], y[rows])


def tangents_of(model: nn.Module) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(param.shape, generator=draw)
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def step_of(
    stage: int, loss_fn: Callable[..., Any] = mean_loss, *, micro_steps: int = 1, **how: Any
) -> fzero.TrainStep:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_accumulation_steps": micro_steps,
        "zero_optimization": zero,
    }
    return fzero.make_train_step(model_of(), cfg, loss_fn=loss_fn, units=UNITS, **how)


def plain() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The products H v and G v of the whole batch, by torch.func."""
    model, batch = model_of(), batch_of()
    v = tangents_of(model)
    params = {name: model.get_parameter(name).detach() for name in v}

    def outputs(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (batch.x,))

    hv = jvp(grad(lambda params: mean_of(outputs(params), batch)), (params,), (v,))[1]
    z, jv = jvp(outputs, (params,), (v,))
    u = jvp(grad(lambda z: mean_of(z, batch)), (z,), (jv,))[1]
    return hv, vjp(outputs, params)[1](u)[0]


def products(
    stage: int, micro_steps: int, sums: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Both products on this rank, in full, and whether the state is as before."""
    step = step_of(stage, sum_loss if sums else mean_loss, micro_steps=micro_steps)
    state, space = step.init(), fzero.curvature.space(step)
    before = step.gather(state)
    size = 24 // step.world_size
    own = batch_of(slice(step.rank * size, (step.rank + 1) * size))
    v = space.shard(tangents_of(model_of()))
    first = step.hvp(state, own, v)
    hv = step.hvp(state, own, v)
    assert all(torch.equal(first[key], hv[key]) for key in hv)
    gv = step.gnvp(state, own, v, outputs=outputs_of, loss=sum_of if sums else mean_of)
    after = step.gather(state)
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    return space.gather(hv), space.gather(gv), is_same


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("micro_steps", "sums"), [(1, False), (2, True)])
@pytest.mark.covering(2)
def test_products_are_those_of_the_plain_loop(
    ranks: RankPool, stage: int, world_size: int, micro_steps: int, sums: bool
) -> None:
    hv, gv = plain()
    for found_hv, found_gv, is_same in ranks(world_size, products, stage, micro_steps, sums):
        assert found_hv.keys() == hv.keys() and is_same
        for name in hv:
            if world_size == micro_steps == 1:
                assert torch.equal(found_hv[name], hv[name]), name
                assert torch.equal(found_gv[name], gv[name]), name
            assert (found_hv[name] - hv[name]).abs().max() < ROUNDING, name
            assert (found_gv[name] - gv[name]).abs().max() < ROUNDING, name
        assert hv["tied.weight"].abs().max() > 0.01 and not hv["unused.weight"].any()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("by", ["lockstep", "vmap"])
def test_simulated_ranks_have_the_bits_of_processes(ranks: RankPool, stage: int, by: Any) -> None:
    step = step_of(stage)
    simulated = fzero.simulate(step, 2, by=by)
    state, batch = simulated.init(), Batch(*(x.unflatten(0, (2, 12)) for x in batch_of()))
    spaces = [fzero.curvature.space(one) for one in simulated.steps]
    v = fzero.simulation.stacked([space.shard(tangents_of(model_of())) for space in spaces])
    hv = simulated.hvp(state, batch, v)
    gv = simulated.gnvp(state, batch, v, outputs=outputs_of, loss=mean_of)
    of_ranks = [fzero.simulation.unstacked(found, 2) for found in (hv, gv)]
    full = simulated.on_each(lambda rank: [spaces[rank].gather(own[rank]) for own in of_ranks])
    for rank, real in enumerate(ranks(2, products, stage, 1, False)):
        for found, expected in zip(full[rank], real[:2], strict=True):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_mesh_of_nodes_has_the_same_products() -> None:
    hv, _ = plain()
    mesh = Mesh.of(node=2, data=2)
    simulated = fzero.simulate(step_of(3), mesh=mesh, world_size=4, by="lockstep")
    states = simulated.states_of(simulated.init())

    def on(rank: int) -> tuple[dict[str, Tensor], Tensor]:
        step = simulated.steps[rank]
        space = fzero.curvature.space(step)
        v = space.shard(tangents_of(model_of()))
        own = batch_of(slice(6 * rank, 6 * rank + 6))
        return space.gather(step.hvp(states[rank], own, v)), space.dot(v, v)

    v = tangents_of(model_of())
    square = sum(x.double().square().sum() for x in v.values())
    for found, dot in simulated.on_each(on):
        assert all((found[name] - hv[name]).abs().max() < ROUNDING for name in hv)
        assert abs(dot - square) < 1e-9  # in fp64; the order of the sum differs


def gathers_of(stage: int) -> tuple[Counter[str], Counter[str], int]:
    """The collectives of a step and of a product, by purpose, once their orders are
    learned; and the number of trained flat buffers.
    """
    sent: list[str] = []
    step = step_of(stage).observed(lambda record: sent.append(record.label.purpose))
    state, space = step.init(), fzero.curvature.space(step)
    own, v = batch_of(), space.normal(0)
    state, _ = step(state, own)
    step.hvp(state, own, v)
    sent.clear()
    step.hvp(state, own, v)
    of_product = Counter(sent)
    sent.clear()
    step(state, own)
    return Counter(sent), of_product, len(space.buffers)


def test_a_product_gathers_each_unit_once_more_than_a_step(ranks: RankPool) -> None:
    for stage, per_buffer in ((0, 0), (1, 1), (2, 1), (3, 1)):
        for of_step, of_product, num in ranks(2, gathers_of, stage):
            # the update's own gathers, of stages 1 and 2, have another purpose
            assert of_product["gather"] == of_step["gather"] + per_buffer * num, stage
            assert of_product["reduce"] == of_step["reduce"], stage


def training(stage: int, looks: bool) -> dict[str, Tensor]:
    step = step_of(stage)
    state, space = step.init(), fzero.curvature.space(step)
    for _ in range(3):
        if looks:
            step.hvp(state, batch_of(), space.normal(0))
        state, _ = step(state, batch_of())
    return step.gather(state)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_as_if_no_product_had_been_made(ranks: RankPool, stage: int) -> None:
    for looked, alone in zip(
        ranks(2, training, stage, True), ranks(2, training, stage, False), strict=True
    ):
        assert all(torch.equal(looked[name], alone[name]) for name in alone)


def dots(stage: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    space = fzero.curvature.space(step_of(stage))
    v, own = space.normal(3), tangents_of(model_of())
    return float(space.dot(v, space.shard(own))), space.gather(v), space.gather(space.shard(own))


def test_dot_products_and_random_vectors_are_the_same_in_every_stage(ranks: RankPool) -> None:
    found = [result for stage in range(4) for result in ranks(2, dots, stage)]
    own = tangents_of(model_of())
    _, v, _ = found[0]
    expected = sum((v[name].double() * own[name]).sum() for name in own)
    assert {dot for dot, _, _ in found} == {found[0][0]}
    assert abs(found[0][0] - expected) < 1e-9  # in fp64; the order of the sum differs
    for _, normal, again in found:
        assert all(torch.equal(normal[name], v[name]) for name in v)
        assert all(torch.equal(again[name], own[name]) for name in own)
    assert len({float(x.flatten()[0]) for x in v.values()}) == len(v)


def test_layers_that_run_again_keep_the_bits() -> None:
    found = []
    for checkpoint in (None, 1):
        step = step_of(3, checkpoint=checkpoint)
        state, space = step.init(), fzero.curvature.space(step)
        found.append(step.hvp(state, batch_of(), space.normal(0)))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


@pytest.mark.parametrize("what", ["a captured step", "a view", "no grad", "inside jvp", "a vector"])
def test_products_that_cannot_be_made_are_refused_by_name(what: str) -> None:
    how: dict[str, dict[str, Any]] = {
        "a captured step": {"compile": "step", "compile_backend": "aot_eager"},
        "a view": {"transforms": [weight_norm("first")]},
    }
    step = step_of(2, **how.get(what, {}))
    state, space = step.init(), fzero.curvature.space(step)
    v = space.normal(0)
    if what == "a captured step":
        with pytest.raises(ValueError, match=r"step.hvp: must be of an eager step .* 'step'"):
            step.hvp(state, batch_of(), v)
    elif what == "a view":
        with pytest.raises(ValueError, match=r"step.hvp: must be of .* views of parameters"):
            step.hvp(state, batch_of(), v)
    elif what == "no grad":
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"gradients enabled"):
            step.hvp(state, batch_of(), v)
    elif what == "inside jvp":
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=r"step.hvp: must not be called inside"),
        ):
            step.hvp(state, batch_of(), v)
    else:
        key = next(iter(v))
        with pytest.raises(ValueError, match=rf"step.hvp: vector\['{key}'\] must be a tensor"):
            step.hvp(state, batch_of(), v | {key: v[key][1:]})
        with pytest.raises(ValueError, match=r"trained flat buffers only, got 'more'"):
            step.hvp(state, batch_of(), v | {"more": v[key]})
        with pytest.raises(ValueError, match=r"'frozen.weight' must be of a trained parameter"):
            space.shard({"frozen.weight": torch.zeros(8, 8)})
        with pytest.raises(ValueError, match=r"'first.weight' must have the shape"):
            space.shard({"first.weight": torch.zeros(4, 8)})


def test_an_operator_without_forward_mode_raises_pytorchs_own_error() -> None:
    step = step_of(3, lambda model, batch: mean_of(Doubled.apply(model(batch.x)), batch))
    state, space = step.init(), fzero.curvature.space(step)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp"):
        step.hvp(state, batch_of(), space.normal(0))
    other = step_of(3)  # the level of forward mode is closed again
    found = other.hvp(other.init(), batch_of(), fzero.curvature.space(other).normal(0))
    assert any(x.any() for x in found.values())
