"""A compiled step is worth nothing unless it is the eager one: numbers, bits, graphs, donation, errors.

With SGD and a learning rate that is a power of two every product of an update is exact, so that eager and captured
arithmetic give the same bits: nearly all tests ask for these. `aot_eager` runs a captured graph without code generation.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch._dynamo.utils import counters
from training import ADAMW, Odd, Plain, config, make, part, tokens, train, vectors

import fzero
from fzero.graph_analysis import liveness

SGD = {"type": "SGD", "params": {"lr": 0.125, "momentum": 0.9, "weight_decay": 0.01}}
AOT: dict[str, Any] = {"compile": "step", "compile_backend": "aot_eager"}
BF16 = {"bf16": {"enabled": True, "auto_cast": True}}
TWICE = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 3}


class Short(Plain):
    def __init__(self) -> None:
        super().__init__(num_blocks=2)


class Wrong(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


class Peculiar(nn.Module):
    """A poisoned backward, dropout, batch statistics, and buffers that are changed in place and put anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        self.count.add_(1)
        return nn.functional.mse_loss(Wrong.apply(self.dropout(self.norm(self.linear(x)))), y)


def _differences(model: Any, data: Any, cfg: Any, num_steps: int = 3, **options: Any) -> tuple[float, float]:
    """How far eager and compiled steps are apart: the largest difference of losses and norms, and of weights."""
    compiling = {key: options.pop(key) for key in AOT if key in options} or AOT
    curve, weights = train(model, data, cfg, num_steps=num_steps, **options)
    compiled, found = train(model, data, cfg, num_steps=num_steps, **options, **compiling)
    assert weights.keys() == found.keys()
    apart = [
        (weights[name].double() - found[name].double()).abs().max().item() for name in weights if weights[name].numel()
    ]
    return (torch.tensor(curve) - torch.tensor(compiled)).abs().max().item(), max(apart)


# --- one graph, the same numbers ---------------------------------------------------------------------------------


def _of_one_stage(stage: int) -> list[tuple[tuple[float, float], int, int]]:
    cases = []
    for keys in ({}, BF16, TWICE | {"gradient_clipping": 0.0}, BF16 | TWICE):
        counters.clear()
        difference = _differences(Short, vectors, config(stage, optimizer=SGD, clip=0.05) | keys)
        cases.append((difference, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return cases


@pytest.mark.parametrize("stage", range(4))
def test_a_step_is_one_graph_and_gives_the_eager_step_s_bits(ranks: RankPool, stage: int) -> None:
    for fp32, bf16, fp32_twice, bf16_twice in ranks(2, _of_one_stage, stage):
        assert fp32 == bf16 == ((0.0, 0.0), 1, 0)
        assert fp32_twice == bf16_twice == ((0.0, 0.0), 2, 0)  # a micro-step and the update


def _bits(stages: tuple[int, ...], cfg: dict[str, Any]) -> list[tuple[float, float]]:
    return [_differences(Short, vectors, config(stage, optimizer=SGD) | cfg) for stage in stages]


def test_three_ranks_give_the_eager_step_s_bits(ranks: RankPool) -> None:
    assert all(found == [(0.0, 0.0)] * 2 for found in ranks(3, _bits, (0, 3), {}))


@pytest.mark.parametrize(
    "keys",
    [
        {
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "auto_cast": True,
                "stochastic_rounding": True,
            }
        },
        {"torch_autocast": {"enabled": True}, "gradient_norm_type": "inf"},
        {"gradient_predivide_factor": 2.0, "communication_data_type": "bf16"},
    ],
    ids=lambda keys: min(keys),
)
def test_dtypes_and_divisions_are_the_eager_step_s(ranks: RankPool, keys: dict[str, Any]) -> None:
    assert all(found == [(0.0, 0.0)] for found in ranks(2, _bits, (1,), keys))


def _of_adamw() -> tuple[float, float]:
    return _differences(Odd, tokens, config(3), 5)


def test_tied_and_frozen_parameters_and_adamw_agree_to_rounding(ranks: RankPool) -> None:
    # The fused kernel and the formula round in other places: a few last bits, 2^-24 each, of an update of lr = 1e-2 and of
    # weights of about 1, in each of five steps; where a gradient is near zero Adam makes a fraction of lr of its last bits.
    for curve, weights in ranks(2, _of_adamw):
        assert weights <= 1e-5
        assert curve <= 2e-5  # of a loss and a norm of about 20


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad", "Lion"])
def test_every_elementwise_optimizer_agrees_to_rounding(optimizer: str) -> None:
    cfg = config(0, optimizer={"type": optimizer, "params": {"lr": 2**-7, "weight_decay": 0.1}})
    curve, weights = _differences(Short, vectors, cfg, 4)
    assert weights <= 1e-6 and curve <= 1e-6


def _of_peculiar() -> tuple[float, float]:
    return _differences(Peculiar, vectors, config(3, optimizer=SGD))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_poisoned_backward_dropout_and_module_buffers_are_the_eager_step_s(ranks: RankPool, world_size: int) -> None:
    assert ranks(world_size, _of_peculiar) == [(0.0, 0.0)] * world_size


def test_the_poison_is_in_the_gradient() -> None:
    # The backward of `Wrong` gives thrice the derivative; an honest one would give another norm.
    (honest, _), (poisoned, _) = (
        train(model, vectors, config(0, clip=0.0, optimizer=SGD), num_steps=1, **AOT) for model in (Peculiar, Honest)
    )
    assert honest[0][1] == pytest.approx(3 * poisoned[0][1], rel=1e-6)


class Honest(Peculiar):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.dropout(self.norm(self.linear(x))), y)


def test_losses_with_weights_agree() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(*batch) * 5, torch.tensor(5)

    cfg = config(2, optimizer=SGD) | {"gradient_accumulation_steps": 2, "train_batch_size": 12}
    results = [train(Short, vectors, cfg, num_steps=2, loss_fn=loss_fn, **options) for options in ({}, AOT)]
    assert results[0][0] == results[1][0]
    assert all(torch.equal(weight, results[1][1][name]) for name, weight in results[0][1].items())


def _plain_sgd(lr: Any) -> fzero.Transform:
    """Gives new tensors and writes into none that it is given."""
    return fzero.Transform(
        lambda param: (torch.zeros_like(param),),
        lambda grad, param, state: (grad, param - lr * grad, (state[0] + grad,)),
        lambda spec: (spec,),
    )


def test_a_transform_of_the_user_that_makes_new_tensors_agrees() -> None:
    cfg = config(2, optimizer=SGD) | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.125}}}
    results = [train(Short, vectors, cfg, num_steps=4, transform=_plain_sgd, **options) for options in ({}, AOT)]
    # The learning rate is rounded to fp32 before it multiplies, and not after.
    assert results[0][0] == [pytest.approx(pair, rel=1e-6) for pair in results[1][0]]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-7)
    assert not torch.equal(results[1][1]["blocks.0.weight"], make(Short).state_dict()["blocks.0.weight"])


def test_weights_of_the_model_may_be_dropped_and_a_state_be_copied() -> None:
    model = make(Odd)
    step = fzero.make_train_step(model, config(3, optimizer=SGD), donate=False, **AOT)
    state = step.init()
    model.to("meta")
    first, _ = step(state, tokens(0))
    again, metrics = step(state, tokens(0))
    assert int(state.step) == 0 and int(again.step) == 1
    assert all(torch.equal(x, y) for x, y in zip(_tensors(first), _tensors(again), strict=True))
    assert step.evaluate(again, tokens(0)) < metrics.loss


# --- overflow ----------------------------------------------------------------------------------------------------


def _with_overflow(options: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor], str | None]:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}}
    step = fzero.make_train_step(make(Short), config(2, optimizer=SGD) | fp16, **options)
    state, told, overflowed = step.init(), [], None
    for index in range(6):
        x, y = (v.half() for v in part(vectors(index), step.rank, step.world_size))
        state, metrics = step(state, (x * 3e4 if index == 2 and step.rank == 1 else x, y))
        told.append([str(x.item()) for x in metrics] + [int(state.step), state.loss_scale.scale.item()])
        overflowed = step.first_overflow(state) if metrics.overflow else overflowed
    if step._compiled is not None:
        assert step._compiled.backend.num_captured == 1
    return told, step.gather(state), overflowed


def test_an_overflow_skips_the_update_and_moves_the_loss_scale_as_in_the_eager_step(ranks: RankPool) -> None:
    for eager, compiled in zip(ranks(2, _with_overflow, {}), ranks(2, _with_overflow, AOT)):
        assert [told[3] for told in eager[0]].count("True") == 1, "a step must overflow"
        assert compiled[0] == eager[0] and compiled[2] == eager[2]
        assert all(torch.equal(compiled[1][name], weight) for name, weight in eager[1].items())


def _with_nan(options: dict[str, Any]) -> tuple[str, int, list[float]]:
    step = fzero.make_train_step(make(Short), config(1, optimizer=SGD), **options)
    state = step.init()
    state, _ = step(state, part(vectors(0), step.rank, step.world_size))
    x, y = part(vectors(1), step.rank, step.world_size)
    before = step.gather(state)
    with pytest.raises(FloatingPointError) as raised:
        step(state, (x, y * float("nan") if step.rank == 1 else y))
    assert all(torch.equal(step.gather(state)[name], weight) for name, weight in before.items())
    state, metrics = step(state, (x, y))
    return str(raised.value), int(state.step), [metrics.loss.item(), metrics.grad_norm.item()]


def test_a_loss_that_is_not_finite_is_told_as_in_the_eager_step_and_updates_nothing(ranks: RankPool) -> None:
    assert ranks(2, _with_nan, {}) == ranks(2, _with_nan, AOT)


# --- donation ----------------------------------------------------------------------------------------------------


def _tensors(state: Any) -> list[Tensor]:
    return [
        x for part_ in (state.params, state.master, state.grads, state.optimizer) for x in optree.tree_leaves(part_)
    ]


def _addresses_and_graph(stage: int) -> tuple[bool, int, int, int]:
    keys = BF16 | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    step = fzero.make_train_step(make(Plain), config(stage, optimizer=ADAMW) | keys, **AOT)
    state = step.init()
    before = [x.data_ptr() for x in _tensors(state)]
    state, _ = step(state, part(vectors(0), step.rank, step.world_size))
    assert step._compiled is not None
    (graph,) = step._compiled.backend.graphs
    written = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    num_written = len([node for node in written if node.op == "placeholder"])
    largest = max(b.nbytes for b in _tensors(state))
    return [x.data_ptr() for x in _tensors(state)] == before, num_written, _new_state_alive(graph), largest


def _new_state_alive(graph: torch.fx.Graph) -> int:
    """The most bytes of new state that are alive at once beside the old state: between their making and their `copy_`."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    events = []
    for node in graph.nodes:
        if node.target is torch.ops.aten.copy_.default:
            value = node.args[1]
            nbytes = value.meta["val"].numel() * value.meta["val"].element_size()
            events += [(place[value], nbytes), (place[node], -nbytes)]
    alive = most = 0
    for _, change in sorted(events):
        alive += change
        most = max(most, alive)
    return most


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_state_is_written_in_place_and_no_second_copy_is_alive(ranks: RankPool, stage: int) -> None:
    for same, num_written, alive, largest in ranks(2, _addresses_and_graph, stage):
        assert same
        # Each of five blocks: parameters, master, gradients, step, two moments.
        assert num_written == 5 * 6
        # The bf16 gradients of five blocks wait for the norm. Of parameters, master and moments one block's are made at a
        # time: three in fp32, and bf16 parameters, no larger; all five blocks' would be 15 and more.
        assert alive <= 5 * largest / 2 + 4 * largest


# --- what is captured anew ---------------------------------------------------------------------------------------


def test_nothing_that_changes_from_step_to_step_is_captured_anew_and_a_smaller_batch_once() -> None:
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}}
    cfg = config(3) | {"scheduler": schedule}
    step = fzero.make_train_step(make(Short), cfg, **AOT)
    state, rates = step.init(), set()
    for index in range(5):
        state, metrics = step(state, vectors(index))
        rates.add(metrics.lr.item())
    assert len(rates) > 2
    assert step._compiled is not None and step._compiled.backend.num_captured == 1
    for index in range(2):
        state, _ = step(state, vectors(index, size=5))
        state, _ = step(state, vectors(index))
    assert step._compiled.backend.num_captured == 2
    curve, _ = train(Short, vectors, cfg, num_steps=5)
    assert metrics.loss.item() == pytest.approx(curve[-1][0], rel=1e-6)


# --- what cannot be captured -------------------------------------------------------------------------------------


class Branching(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the line
            x = x + 1
        return super().forward(x, y)


def test_what_cannot_be_captured_is_told_by_file_and_line_and_offers_blocks() -> None:
    step = fzero.make_train_step(Branching(), config(0), **AOT)
    with pytest.raises(fzero.CompileError) as raised:
        step(step.init(), vectors(0))
    message = str(raised.value)
    assert __file__ in message and "if x.sum().item() > 0" in message and "compile='block'" in message
    assert len(message) < 1000


def test_a_loss_that_is_no_scalar_is_told_as_in_the_eager_step() -> None:
    step = fzero.make_train_step(Plain(), config(0), loss_fn=lambda model, batch: batch[0], **AOT)
    with pytest.raises(fzero.CompileError, match="must be a scalar tensor"):
        step(step.init(), vectors(0))


@pytest.mark.parametrize("name", ["Lamb", "Muon", "Adafactor", "Adamax"])
def test_an_optimizer_that_a_graph_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(fzero.ConfigError, match="compile='block'"):
        fzero.make_train_step(Plain(), config(0, optimizer={"type": name}), **AOT)


def test_checkpointing_and_unknown_choices_are_refused() -> None:
    with pytest.raises(fzero.ConfigError, match="compile='block'"):
        fzero.make_train_step(Plain(), config(0), checkpoint=1, **AOT)
    with pytest.raises(ValueError, match="compile: must be None or 'step' or 'block', got 'all'"):
        fzero.make_train_step(Plain(), config(0), compile="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no repeated blocks"):
        fzero.make_train_step(nn.Linear(2, 2), config(0), compile="block")


# --- what is sent ------------------------------------------------------------------------------------------------


def _sent(stage: int) -> dict[str, int]:
    log: list[fzero.Sent] = []
    axis = fzero.join()
    axis = fzero.Real(axis.name, axis.size, axis.rank, axis.group, log.append)
    step = fzero.make_train_step(make(Plain), config(stage), mesh=axis, **AOT)
    state = step.init()
    state, _ = step(state, part(vectors(0), step.rank, step.world_size))
    log.clear()
    step(state, part(vectors(0), step.rank, step.world_size))
    told = sum(x.num_elements for x in log if x.num_elements > 100)  # not the loss and the norm
    planned = step.plan.sent_per_step
    timeline = step.explain()
    assert f"stage {stage}" in str(timeline) and timeline.draw().axes
    gathered = max(liveness(step._compiled.backend.graphs[0]).gathered_numel)  # type: ignore[union-attr]
    return {"told": told, "planned": sum(planned.values()), "gathered": gathered}


@pytest.mark.parametrize("stage", range(4))
def test_a_graph_sends_what_the_plan_says_and_gathers_two_units_at_most(ranks: RankPool, stage: int) -> None:
    largest = max(unit.gathered_numel for unit in fzero.plan(make(Plain), config(stage), world_size=2).units)
    for found in ranks(2, _sent, stage):
        assert found["told"] == found["planned"] > 0
        assert found["gathered"] == 2 * largest, "the next unit is gathered early, and no more"


def test_a_schedule_is_explained_once_it_is_known() -> None:
    step = fzero.make_train_step(make(Plain), config(0), **AOT)
    with pytest.raises(ValueError, match=r"explain: needs a graph .* call the step once"):
        step.explain()
    with pytest.raises(ValueError, match=r"explain: needs a graph .* compile='step'"):
        fzero.make_train_step(make(Plain), config(0)).explain()


# --- blocks ------------------------------------------------------------------------------------------------------


def _by_block(stage: int, checkpoint: int | None) -> tuple[tuple[float, float], int]:
    counters.clear()
    options: dict[str, Any] = {"compile": "block", "compile_backend": "aot_eager", "checkpoint": checkpoint}
    return _differences(Plain, vectors, config(stage), **options), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("stage", "checkpoint"), [(2, None), (3, None), (3, 1)])
def test_equal_blocks_share_one_compilation_and_give_the_eager_step_s_bits(
    ranks: RankPool, stage: int, checkpoint: int | None
) -> None:
    for difference, num_graphs in ranks(2, _by_block, stage, checkpoint):
        assert difference == (0.0, 0.0)
        assert num_graphs == 2  # of five blocks: the input of the first needs no gradient


def _peculiar_by_block() -> tuple[float, float]:
    options = {"compile": "block", "compile_backend": "aot_eager", "units": ["inner"]}
    return _differences(Wrapped, vectors, config(3, optimizer=SGD), **options)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Peculiar(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y) * self.scale


def test_a_compiled_block_keeps_poison_dropout_and_module_buffers() -> None:
    curve, weights = _peculiar_by_block()
    assert weights == 0.0
    assert curve <= 5e-7  # the loss, a number near 2, in its last bits


# --- code generation ---------------------------------------------------------------------------------------------


def _with_inductor() -> tuple[tuple[float, float], int]:
    counters.clear()
    return _differences(Short, vectors, config(3), compile="step"), counters["stats"]["unique_graphs"]


def test_generated_code_agrees_to_rounding(ranks: RankPool) -> None:
    for (curve, weights), num_graphs in ranks(2, _with_inductor):
        assert num_graphs == 1
        # Other roundings of a gradient, which Adam divides by its own size: last bits of it, 2^-23, of lr = 1e-2, unless the
        # gradient is near zero.
        assert weights <= 1e-5 and curve <= 1e-5
