"""A compiled step is worth nothing unless it is the eager one: numbers, bits, graphs,
donation, errors.

With SGD and a learning rate that is a power of two every product of an update is exact,
so that eager and captured arithmetic give the same bits: nearly all tests ask for
these. `aot_eager` runs a captured graph without code generation.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate, groupby, product
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.utils.checkpoint
from graphs import captures
from ranks import RankPool
from test_models import MODELS, text
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import Graph
from training import ADAMW, Block, Odd, Plain, config, make, part, tokens, train, vectors

import fzero
from fzero.graph.analysis import analyse
from fzero.graph.backends import InductorPass, digest_of_marks
from fzero.graph.capture_errors import in_collectives
from fzero.graph.host_inputs import FROM_HOST, TO_HOST
from fzero.graph.liveness import liveness
from fzero.graph.nodes import WAIT, flops_of, is_collective, numel_of
from fzero.graph.remat import is_again, is_backward
from fzero.graph.schedule import PassOptions
from fzero.optim import torch_optimizer
from fzero.transforms.checkpointing import Moves
from sharding import Sharded

SGD = {"type": "SGD", "params": {"lr": 0.125, "momentum": 0.9, "weight_decay": 0.01}}
aten = torch.ops.aten
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
    """A poisoned backward, dropout, batch statistics, and buffers that are changed in
    place and put anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = (
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.5),
        )
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        self.count.add_(1)
        return nn.functional.mse_loss(Wrong.apply(self.dropout(self.norm(self.linear(x)))), y)


def _differences(
    model: Any, data: Any, cfg: Any, num_steps: int = 3, **options: Any
) -> tuple[float, float]:
    """How far eager and compiled steps are apart: the largest difference of losses and
    norms, and of weights.
    """
    compiling = {key: options.pop(key) for key in AOT if key in options} or AOT
    curve, weights = train(model, data, cfg, num_steps=num_steps, **options)
    compiled, found = train(model, data, cfg, num_steps=num_steps, **options, **compiling)
    assert weights.keys() == found.keys()
    apart = [
        (weights[name].double() - found[name].double()).abs().max().item()
        for name in weights
        if weights[name].numel()
    ]
    return (torch.tensor(curve) - torch.tensor(compiled)).abs().max().item(), max(apart)


# --- one graph, the same numbers ------------------------------------------------------------------


def _of_one_stage(
    stage: int, all_keys: tuple[dict[str, Any], ...]
) -> list[tuple[tuple[float, float], int]]:
    cases = []
    for keys in all_keys:
        with captures() as graphs:
            difference = _differences(
                Short, vectors, config(stage, optimizer=SGD, clip=0.05) | keys
            )
        cases.append((difference, len(graphs)))
    return cases


KEYS = ({}, BF16 | TWICE, BF16, TWICE | {"gradient_clipping": 0.0})


@pytest.mark.covering(0)
@pytest.mark.parametrize(("stage", "all_keys"), [(3, KEYS[:2]), *product((2, 1, 0, 3), (KEYS,))])
def test_a_step_is_one_graph_and_gives_the_eager_step_s_bits(
    ranks: RankPool, stage: int, all_keys: tuple[dict[str, Any], ...]
) -> None:
    for cases in ranks(2, _of_one_stage, stage, all_keys):
        for keys, (difference, num_graphs) in zip(all_keys, cases, strict=True):
            assert difference == (0.0, 0.0)
            assert num_graphs == 1 + (TWICE.items() <= keys.items())  # a micro-step and the update


def _bits(stages: tuple[int, ...], cfg: dict[str, Any]) -> list[tuple[float, float]]:
    return [_differences(Short, vectors, config(stage, optimizer=SGD) | cfg) for stage in stages]


@pytest.mark.long
def test_three_ranks_give_the_eager_step_s_bits(ranks: RankPool) -> None:
    assert all(found == [(0.0, 0.0)] * 2 for found in ranks(3, _bits, (0, 3), {}))


@pytest.mark.covering(0)
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
    return _differences(partial(Odd, num_blocks=2), tokens, config(3), 5)


def test_tied_and_frozen_parameters_and_adamw_agree_to_rounding(ranks: RankPool) -> None:
    # The fused kernel and the formula round in other places: a few last bits, 2^-24 each, of an
    # update of lr = 1e-2 and of weights of about 1, in each of five steps; where a gradient is near
    # zero Adam makes a fraction of lr of its last bits.
    for curve, weights in ranks(2, _of_adamw):
        assert weights <= 1e-5
        assert curve <= 2e-5  # of a loss and a norm of about 20


@pytest.mark.covering(0)
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad", "Lion"])
def test_every_elementwise_optimizer_agrees_to_rounding(optimizer: str) -> None:
    cfg = config(0, optimizer={"type": optimizer, "params": {"lr": 2**-7, "weight_decay": 0.1}})
    curve, weights = _differences(Short, vectors, cfg, 4)
    assert weights <= 1e-6 and curve <= 1e-6


def _of_peculiar() -> tuple[float, float]:
    return _differences(Peculiar, vectors, config(3, optimizer=SGD))


@pytest.mark.covering(0)
@pytest.mark.parametrize("world_size", [2, 1])
def test_a_poisoned_backward_dropout_and_module_buffers_are_the_eager_step_s(
    ranks: RankPool, world_size: int
) -> None:
    assert ranks(world_size, _of_peculiar) == [(0.0, 0.0)] * world_size


def test_the_poison_is_in_the_gradient() -> None:
    # The backward of `Wrong` gives thrice the derivative; an honest one would give another norm.
    (honest, _), (poisoned, _) = (
        train(model, vectors, config(0, clip=0.0, optimizer=SGD), num_steps=1, **AOT)
        for model in (Peculiar, Honest)
    )
    assert honest[0][1] == pytest.approx(3 * poisoned[0][1], rel=1e-6)


class Honest(Peculiar):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.dropout(self.norm(self.linear(x))), y)


def test_losses_with_weights_agree() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(*batch) * 5, torch.tensor(5)

    cfg = config(2, optimizer=SGD) | {"gradient_accumulation_steps": 2, "train_batch_size": 12}
    results = [
        train(Short, vectors, cfg, num_steps=2, loss_fn=loss_fn, **options) for options in ({}, AOT)
    ]
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
    cfg = config(2, optimizer=SGD) | {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.125}}
    }
    results = [
        train(Short, vectors, cfg, num_steps=4, transform=_plain_sgd, **options)
        for options in ({}, AOT)
    ]
    # The learning rate is rounded to fp32 before it multiplies, and not after.
    assert results[0][0] == [pytest.approx(pair, rel=1e-6) for pair in results[1][0]]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-7)
    assert not torch.equal(
        results[1][1]["blocks.0.weight"], make(Short).state_dict()["blocks.0.weight"]
    )


@pytest.mark.long
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


# --- overflow -------------------------------------------------------------------------------------


def _with_overflow(options: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor], str | None]:
    fp16 = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
    }
    step = fzero.make_train_step(make(Short), config(2, optimizer=SGD) | fp16, **options)
    state, reported, overflowed = step.init(), [], None
    for index in range(6):
        x, y = (v.half() for v in part(vectors(index), step.rank, step.world_size))
        state, metrics = step(state, (x * 3e4 if index == 2 and step.rank == 1 else x, y))
        reported.append(
            [str(x.item()) for x in metrics] + [int(state.step), state.loss_scale.scale.item()]
        )
        overflowed = step.first_overflow(state) if metrics.overflow else overflowed
    if step.program is not None:
        assert len(step.program.compiled.graphs) == 1
    return reported, step.gather(state), overflowed


def test_an_overflow_skips_the_update_and_moves_the_loss_scale_as_in_the_eager_step(
    ranks: RankPool,
) -> None:
    for eager, compiled in zip(ranks(2, _with_overflow, {}), ranks(2, _with_overflow, AOT)):
        assert [reported[3] for reported in eager[0]].count("True") == 1, "a step must overflow"
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


@pytest.mark.long
def test_a_loss_that_is_not_finite_is_reported_as_in_the_eager_step_and_updates_nothing(
    ranks: RankPool,
) -> None:
    assert ranks(2, _with_nan, {}) == ranks(2, _with_nan, AOT)


# --- donation -------------------------------------------------------------------------------------


def _tensors(state: Any) -> list[Tensor]:
    return [
        x
        for part_ in (state.params, state.master, state.grads, state.optimizer)
        for x in optree.tree_leaves(part_)
    ]


def _addresses_and_graph(stage: int) -> tuple[bool, int, int, int]:
    keys = BF16 | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    step = fzero.make_train_step(make(Plain), config(stage, optimizer=ADAMW) | keys, **AOT)
    state = step.init()
    before = [x.data_ptr() for x in _tensors(state)]
    state, _ = step(state, part(vectors(0), step.rank, step.world_size))
    assert step.program is not None
    (graph,) = step.program.compiled.graphs
    written = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    num_written = len([node for node in written if node.op == "placeholder"])
    largest = max(b.nbytes for b in _tensors(state))
    return (
        [x.data_ptr() for x in _tensors(state)] == before,
        num_written,
        _new_state_alive(graph),
        largest,
    )


def _new_state_alive(graph: torch.fx.Graph) -> int:
    """The most bytes of new state that are alive at once beside the old state: between
    their making and their `copy_`.
    """
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


@pytest.mark.covering(0)
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_the_state_is_written_in_place_and_no_second_copy_is_alive(
    ranks: RankPool, stage: int
) -> None:
    for same, num_written, alive, largest in ranks(2, _addresses_and_graph, stage):
        assert same
        # Each of five blocks: parameters, master, gradients, step, two moments.
        assert num_written == 5 * 6
        # The bf16 gradients of five blocks wait for the norm. Of parameters, master and moments one
        # block's are made at a time: three in fp32, and bf16 parameters, no larger; all five
        # blocks' would be 15 and more.
        assert alive <= 5 * largest / 2 + 4 * largest


# --- what the configuration says of the schedule --------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = (
            nn.Linear(16, 48),
            nn.Linear(48, 16),
            nn.Parameter(torch.ones(16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x * self.scale)))


class Uneven(Plain):
    """Small units between two large ones, so that there is something to join."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.blocks.append(Wide())
        self.blocks.insert(0, Wide())


GROUPS: list[dict[str, Any]] = [{"params": r"(scale|bias)$", "weight_decay": 0.0}]


def _plan_and_graph(stage: int, num_steps: int = 1, **zero: int) -> tuple[fzero.Plan, Graph]:
    """Of a step of `Uneven`, every unit of which has two flat buffers; its numbers must
    be the eager step's.
    """
    weights = []
    for options in ({}, AOT):
        cfg = config(stage, optimizer=SGD, clip=0.05, **zero)
        step = fzero.make_train_step(make(Uneven), cfg, param_groups=GROUPS, **options)
        state = step.init()
        for index in range(num_steps):
            state, _ = step(state, part(vectors(index), step.rank, step.world_size))
        weights.append(step.gather(state))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert step.program is not None
    (graph,) = step.program.compiled.graphs
    return step.plan, graph


def _of_buckets(stage: int) -> tuple[list[int], int, list[int], list[int]]:
    plan, graph = _plan_and_graph(stage, 3, allgather_bucket_size=800, reduce_bucket_size=800)
    starts = [node for node in graph.nodes if is_collective(node)]
    numels = [max(numel_of(node), sum(map(numel_of, node.all_input_nodes))) for node in starts]
    flat = [buffer.padded_numel for buffer in plan.flat_buffers]
    units = sorted(unit.gathered_numel for unit in plan.units)
    return (
        [numel for numel in numels if numel > 32],
        liveness(graph).peak_gathered_numel,
        flat,
        units,
    )


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_joined_collectives_stay_within_their_buckets_and_give_the_eager_step_s_bits(
    ranks: RankPool, stage: int, world_size: int
) -> None:
    for starts, gathered, flat, units in ranks(world_size, _of_buckets, stage):
        assert all(numel <= 800 or numel in flat for numel in starts)
        # Gradients are reduced in stage 0, by three ranks as a sum of shards that are then joined;
        # in stages 1 and 2 updated shards are gathered; in stage 3 every unit but the last is
        # gathered twice.
        num_alone = {0: world_size - 1, 1: 2, 2: 2, 3: 3}[stage] * len(flat) - 2 * (stage == 3)
        assert len(starts) < num_alone
        assert gathered <= sum(units[-2:])


def _of_sizes(*sizes: dict[str, int]) -> list[tuple[str, int]]:
    return [
        (_letters(graph), liveness(graph).peak_gathered_numel)
        for _, graph in (_plan_and_graph(3, **zero) for zero in sizes)
    ]


def _letters(graph: Graph) -> str:
    """The starts of gathers by the number of their unit, and what stands between them:
    w for waits, . for products.
    """
    units = {
        gather.issue[-1]: gather.unit.removeprefix("blocks.") for gather in analyse(graph).gathers
    }
    waits = {
        node for gather in analyse(graph).gathers for node in gather.settle if node.target is WAIT
    }
    letters = {**units, **dict.fromkeys(waits, "w")}
    return "".join(
        letters.get(node, ".") for node in graph.nodes if node in letters or flops_of(node)
    )


WIDE, NARROW = 1536 + 128, 256 + 64
"""Elements of a unit of `Uneven` on two ranks, its two flat buffers with their padding.
"""


@pytest.mark.long
def test_the_sizes_of_the_configuration_set_the_schedule(ranks: RankPool) -> None:
    sizes: list[dict[str, int]] = [
        {},
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 10**9},
        {"stage3_prefetch_bucket_size": 10**9, "stage3_max_live_parameters": 2400},
        {"stage3_prefetch_bucket_size": 2 * NARROW},
        {"stage3_max_reuse_distance": 10**9},
    ]
    there_and_back = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    for found in ranks(2, _of_sizes, *sizes):
        letters, peaks = zip(*found)
        orders = [[int(unit) for unit, _ in groupby(filter(str.isdigit, row))] for row in letters]
        for row, order in zip(letters, orders):  # the flat buffers of a unit start together
            pairs = "".join(f"{unit}{unit}" for unit in order)
            # The backward of the first unit does not need the scales: no gradient goes further.
            assert "".join(filter(str.isdigit, row)) == (pairs[:-1] if order[-1] == 0 else pairs)
            assert all(f"{unit}{unit}" in row for unit in order)
        assert orders[:5] == [there_and_back] * 5
        assert peaks[0] == WIDE + NARROW, "the next unit, as a whole"
        assert re.fullmatch(r"((\d)\2?w[w.]*)+", letters[1]) and peaks[1] == WIDE, "just in time"
        assert peaks[2] == 2 * WIDE + 3 * NARROW, "every unit, and none twice"
        assert WIDE + NARROW < peaks[3] <= 2400
        assert peaks[4] == WIDE + 2 * NARROW
        assert orders[5] == [0, 1, 2, 3, 4]


def _of_small() -> tuple[list[int], list[int], list[int]]:
    plan, graph = _plan_and_graph(3, stage3_param_persistence_threshold=100)
    analysis = analyse(graph)
    gathered = [gather.numel for gather in analysis.gathers]
    updates = [
        r.numel
        for r in analysis.reductions
        if any(_is_state(user) for wait in r.waits for user in wait.users)
    ]
    kept = [b.padded_numel for b in plan.flat_buffers if not isinstance(b.row.params, Sharded)]
    return gathered, updates, kept


def _is_state(node: Any) -> bool:
    return node.target is torch.ops.aten.copy.default and node.args[0].op == "placeholder"


@pytest.mark.long
def test_small_parameters_are_gathered_once_in_a_step_when_they_are_updated(
    ranks: RankPool,
) -> None:
    for gathered, updates, kept in ranks(2, _of_small):
        assert sorted(gathered) == sorted([1536] * 3 + [256] * 6), (
            "the last unit once, the others twice"
        )
        assert updates == kept == [128, 64, 64, 64, 128]


# --- what is captured anew ------------------------------------------------------------------------


def test_nothing_that_changes_from_step_to_step_is_captured_anew_and_a_smaller_batch_once() -> None:
    schedule = {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
    }
    cfg = config(3) | {"scheduler": schedule}
    step = fzero.make_train_step(make(Short), cfg, **AOT)
    state, rates = step.init(), set()
    for index in range(5):
        state, metrics = step(state, vectors(index))
        rates.add(metrics.lr.item())
    assert len(rates) > 2
    assert step.program is not None and len(step.program.compiled.graphs) == 1
    for index in range(2):
        state, _ = step(state, vectors(index, size=5))
        state, _ = step(state, vectors(index))
    assert len(step.program.compiled.graphs) == 2
    curve, _ = train(Short, vectors, cfg, num_steps=5)
    assert metrics.loss.item() == pytest.approx(curve[-1][0], rel=1e-6)


# --- what cannot be captured ----------------------------------------------------------------------


class Branching(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the line
            x = x + 1
        return super().forward(x, y)


def test_what_cannot_be_captured_is_reported_by_file_and_line_and_offers_blocks() -> None:
    step = fzero.make_train_step(Branching(), config(0), **AOT)
    with pytest.raises(fzero.CompileError) as raised:
        step(step.init(), vectors(0))
    message = str(raised.value)
    assert (
        __file__ in message and "if x.sum().item() > 0" in message and "compile='block'" in message
    )
    assert len(message) < 1000


def test_a_loss_that_is_no_scalar_is_reported_as_in_the_eager_step() -> None:
    step = fzero.make_train_step(Plain(), config(0), loss_fn=lambda model, batch: batch[0], **AOT)
    with pytest.raises(ValueError, match="must be a scalar tensor"):
        step(step.init(), vectors(0))


def _with_optimizers(stage: int) -> list[tuple[float, float]]:
    return [
        _differences(
            Short,
            vectors,
            config(stage, optimizer={"type": name, "params": {"lr": 0.1}}),
            num_steps=num_steps,
        )
        for name, num_steps in (("Lamb", 3), ("Adafactor", 3), ("Muon", 1))
    ]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), *product((1, 2, 3), range(4))])
def test_optimizers_that_send_agree_to_rounding(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    """Of Muon one step: its orthogonalisation in bfloat16 amplifies a rounding of the
    rate in the next ones.
    """
    for lamb, adafactor, muon in ranks(world_size, _with_optimizers, stage):
        assert max(*lamb, *adafactor, *muon) <= 2**-23  # the last bit of a weight of about 1


def _with_classes_of_torch(stage: int) -> list[tuple[float, float]]:
    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 2**-4, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    adamax = {"type": "Adamax", "params": {"lr": 2**-6}}
    rmsprop = {"type": "RMSprop", "params": {"lr": 2**-6, "momentum": 0.5}}
    return [
        _differences(Short, vectors, config(stage, optimizer=adamax)),
        _differences(
            Short, vectors, config(stage, optimizer=rmsprop) | BF16 | {"scheduler": warmup}
        ),
        _differences(
            Short,
            vectors,
            config(stage, optimizer=SGD),
            transform=lambda lr: torch_optimizer("NAdam", lr=lr),
        ),
    ]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (1, 0), (2, 1)])
def test_a_graph_runs_classes_of_torch_optim_with_the_eager_step_s_bits(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    """Rates are powers of two, or sums of two: a graph reads them in fp32."""
    for differences in ranks(world_size, _with_classes_of_torch, stage):
        assert differences == [(0.0, 0.0)] * 3


def test_a_step_with_other_hyper_parameters_is_captured_with_them() -> None:
    def weights(options: dict[str, Any]) -> dict[str, Tensor]:
        step = fzero.make_train_step(make(Short), config(0, optimizer=SGD), **options)
        other = {"type": "SGD", "params": {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}}
        optimizer = fzero.Config.load(config(0, optimizer=other)).optimizer
        state = step.init()
        for index, now in enumerate((step, step.following([0.25], [optimizer]), step)):
            state, _ = now(state, vectors(index))
        return step.gather(state)

    eager, compiled = weights({}), weights(AOT)
    assert all(torch.equal(weight, compiled[name]) for name, weight in eager.items())


def _evaluations(stage: int) -> tuple[list[float], list[float], int]:
    losses = []
    for options in ({}, AOT):
        step = fzero.make_train_step(make(Peculiar), config(stage), **options)
        state, own = step.init(), part(vectors(0), step.rank, step.world_size)
        before = [x.clone() for x in optree.tree_leaves(state)]
        losses.append([step.evaluate(state, own).item() for _ in range(2)])
        assert (
            all(map(torch.equal, before, optree.tree_leaves(state)))
            and step.runtime.spec.model.training
        )
    assert step.program is not None
    return losses[0], losses[1], len(step.program.compiled.graphs)


def test_an_evaluation_is_one_graph_and_changes_nothing(ranks: RankPool) -> None:
    for stage in (0, 3):
        for eager, compiled, num_graphs in ranks(2, _evaluations, stage):
            assert eager == compiled and eager[0] == eager[1] and num_graphs == 1


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="compile: must be None or 'step' or 'block', got 'all'"):
        fzero.make_train_step(Plain(), config(0), compile="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no repeated blocks"):
        fzero.make_train_step(nn.Linear(2, 2), config(0), compile="block")


# --- checkpointing --------------------------------------------------------------------------------


class Noisy(Block):
    """A block with dropout, inside and at its end, and with batch statistics."""

    def __init__(self) -> None:
        super().__init__(16)
        self.batch_norm, self.dropout = nn.BatchNorm1d(48), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.batch_norm(self.up(self.norm(x)))))
        return x + self.dropout(self.down(hidden))


class Stack(nn.Module):
    def __init__(
        self, block: Any = Noisy, num_blocks: int = 3, order: tuple[int, ...] = (0, 1, 2)
    ) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(block() for _ in range(num_blocks)), order

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return nn.functional.mse_loss(x, y)


class Fused(Noisy):
    """With the kernel of dropout that gives its mask, as on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = Masked()


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.3, True)[0]


def _fused() -> nn.Module:
    return Stack(Fused)


def _repeating() -> nn.Module:
    return Stack(order=(0, 1, 0, 2))


def _quiet() -> nn.Module:
    return Stack(lambda: Block(16), 6, tuple(range(6)))


def _checkpointed(model: Any, data: Any, cfg: dict[str, Any], checkpoint: Any = 1) -> bool:
    """Whether a checkpointed step's losses, norms, weights and module buffers are those
    of one that is not, to the bit.
    """
    curve, weights = train(model, data, cfg, num_steps=2, **AOT)
    found_curve, found = train(model, data, cfg, num_steps=2, checkpoint=checkpoint, **AOT)
    return curve == found_curve and all(
        torch.equal(found[name], weight) for name, weight in weights.items()
    )


def _checkpointed_in_stages(
    model: Any, stages: tuple[int, ...], keys: dict[str, Any]
) -> list[bool]:
    return [_checkpointed(model, vectors, config(stage) | keys) for stage in stages]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "world_size", "stages", "keys"),
    [
        (_repeating, 1, (0, 3), {}),
        (_repeating, 2, (0, 1, 2, 3), {}),
        (_repeating, 3, (3,), {}),
        (_repeating, 2, (3,), BF16 | {"data_types": {"buffer_dtype": "bf16"}}),
        (_repeating, 2, (1, 3), TWICE),
        (_quiet, 2, (3,), BF16 | TWICE),
    ],
)
def test_checkpointing_changes_no_bit_of_a_compiled_step(
    ranks: RankPool, model: Any, world_size: int, stages: tuple[int, ...], keys: dict[str, Any]
) -> None:
    assert (
        ranks(world_size, _checkpointed_in_stages, model, stages, keys)
        == [[True] * len(stages)] * world_size
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpointing_changes_no_bit_of_a_compiled_transformer(ranks: RankPool, name: str) -> None:
    assert ranks(2, _checkpointed, MODELS[name], text, config(3)) == [True, True]


@pytest.mark.long
def test_autocast_and_gradients_inside_the_forward_are_the_same_when_checkpointed() -> None:
    assert _checkpointed(_quiet, vectors, config(0) | {"torch_autocast": {"enabled": True}}, 2)
    assert _checkpointed(Penalised, vectors, config(0))


class Penalised(Stack):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        hidden = self.blocks[2](self.blocks[1](self.blocks[0](x)))
        (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
        return nn.functional.mse_loss(hidden, y) + 1e-3 * slope.square().sum()


def test_an_error_of_a_collective_is_reported_as_one_and_any_other_as_it_is() -> None:
    with (
        pytest.raises(fzero.CollectiveError, match="all_reduce in the compiled step of A"),
        in_collectives("A"),
    ):
        torch.ops._c10d_functional.all_reduce.default(torch.ones(1), "sum", "no such group")
    with pytest.raises(RuntimeError, match="must match the size") as raised, in_collectives("A"):
        aten.add.Tensor(torch.ones(2), torch.ones(3))
    assert raised.type is RuntimeError


def _graph(model: Any, checkpoint: Any, keys: dict[str, Any] | None = None) -> torch.fx.Graph:
    step = fzero.make_train_step(
        make(model), config(0) | (keys or {}), checkpoint=checkpoint, **AOT
    )
    step(step.init(), vectors(0))
    assert step.program is not None
    return step.program.compiled.graphs[0]


def _kept(graph: torch.fx.Graph) -> int:
    """Bytes of the forward that are alive where the backward starts, without what the
    step itself makes there.
    """
    first = next(i for i, node in enumerate(graph.nodes) if is_backward(node))
    loss_stats, seed = 4 * 8, 4
    return liveness(graph).live[first] - loss_stats - seed


@pytest.mark.long
def test_a_checkpointed_block_keeps_its_input_and_nothing_else() -> None:
    x, hidden, loss = 4 * 12 * 16, 4 * 12 * 48, 4
    # the norm's mean and deviation, what it makes, and gelu's input and result
    inside = 2 * 4 * 12 + x + 2 * hidden
    choices = [(None, 0), (1, 6), (2, 3), (lambda name, _: name in ("blocks.1", "blocks.2"), 2)]
    for checkpoint, number in choices:
        # Each block's result is the next one's input; the first input is the batch.
        assert _kept(_graph(_quiet, checkpoint)) == 6 * x + (6 - number) * inside + loss
    by_config = _graph(
        _quiet, None, {"activation_checkpointing": {"every": 2, "cpu_checkpointing": True}}
    )
    assert _kept(by_config) == 6 * x + 3 * inside + loss


def test_random_operators_and_writes_are_not_repeated_and_of_dropout_the_mask_is_kept() -> None:
    for targets, model in (
        ((aten.bernoulli.p, aten.copy_.default), Stack),
        ((aten.native_dropout.default,), _fused),
    ):
        plain, again = (_graph(model, checkpoint) for checkpoint in (None, 1))
        for target in targets:
            counts = [
                sum(node.target is target for node in graph.nodes) for graph in (plain, again)
            ]
            assert counts[0] == counts[1] > 0
    x, hidden = 12 * 16, 12 * 48
    # the new running mean and variance, which are written into the module buffers at the end
    statistics = 2 * 4 * 48
    # The second dropout's result is added and needed no more; its mask is.
    assert _kept(again) == 3 * (4 * x + statistics + x + hidden) + 4


class Again(nn.Module):
    """Reads parameters in the backward: code that PyTorch's checkpointing runs again, a
    hook, and an autograd.Function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
        )
        self.dropout = nn.Dropout(0.0)
        self.first.register_full_backward_hook(lambda *_: None)
        self.second.register_full_backward_hook(
            lambda module, grads, _: (grads[0] * self.first.weight.mean(),)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.inside, self.first(x), use_reentrant=False)
        return nn.functional.mse_loss(self.second(x), y)

    def inside(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(self.second(x))))


def test_a_backward_that_reads_parameters_reads_those_of_the_state(ranks: RankPool) -> None:
    assert _differences(Again, vectors, config(0, optimizer=SGD)) == (0.0, 0.0)
    assert ranks(2, _of_again) == [(0.0, 0.0)] * 2


def _of_again() -> tuple[float, float]:
    return _differences(Again, vectors, config(3, optimizer=SGD))


class Repeats(Again):
    def __init__(self) -> None:
        super().__init__()
        self.dropout.p = 0.5


class Seeds(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            x = x + torch.randn_like(x)
        return super().forward(x, y)


@pytest.mark.parametrize("model", [Repeats, Seeds])
def test_random_numbers_after_a_set_random_state_are_refused(model: Any) -> None:
    step = fzero.make_train_step(make(model), config(0), **AOT)
    with pytest.raises(fzero.CompileError, match="after it has set the random state"):
        step(step.init(), vectors(0))


class PartlyCast(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.blocks[0](x)
        return super().forward(x, y)


def test_an_autocast_around_the_step_casts_what_it_casts_in_the_eager_step() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert _differences(PartlyCast, vectors, config(0, optimizer=SGD)) == (0.0, 0.0)


def test_a_module_that_the_graph_does_not_show_is_named() -> None:
    step = fzero.make_train_step(Stack(order=(0, 1)), config(0), checkpoint=1, **AOT)
    with pytest.raises(
        ValueError, match=r"checkpoint: module 'blocks.2' must run as a module .* compile='block'"
    ):
        step(step.init(), vectors(0))


# --- inputs of checkpointed modules in host memory ------------------------------------------------

ON_HOST = {"activation_checkpointing": {"every": 1, "cpu_checkpointing": True}}


@pytest.fixture
def host_is_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs move as from a GPU, by copies."""
    monkeypatch.setattr(
        "fzero.transforms.checkpointing.host_moves", lambda device: Moves(torch.clone, torch.clone)
    )


@pytest.mark.usefixtures("host_is_other_memory")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("model", "data"), [(_quiet, vectors), (Odd, tokens)])
def test_inputs_in_host_memory_change_no_bit_of_a_captured_step(
    model: Any, data: Any, stage: int
) -> None:
    expected = train(model, data, config(stage), num_steps=2, checkpoint=1, **AOT)
    curve, weights = train(model, data, config(stage) | ON_HOST, num_steps=2, **AOT)
    assert curve == expected[0] and all(
        torch.equal(weights[name], value) for name, value in expected[1].items()
    )


@pytest.mark.long
@pytest.mark.usefixtures("host_is_other_memory")
def test_inductor_trains_with_inputs_in_host_memory() -> None:
    inductor = AOT | {"compile_backend": "inductor"}
    expected, _ = train(_quiet, vectors, config(3), num_steps=2, checkpoint=1, **inductor)
    curve, _ = train(_quiet, vectors, config(3) | ON_HOST, num_steps=2, **inductor)
    for found, wanted in zip(curve, expected, strict=True):
        # another fusion of the generated code rounds sums in another order
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.usefixtures("host_is_other_memory")
def test_the_backward_reads_inputs_from_host_memory_alone() -> None:
    def scheduled(keys: dict[str, Any]) -> Graph:
        step = fzero.make_train_step(_quiet(), config(3) | keys, **AOT)
        (captured,) = step.trace(vectors(0))
        return captured.scheduled().graph

    here = scheduled({"activation_checkpointing": {"every": 1}})
    away = scheduled(ON_HOST)
    moved = away.find_nodes(op="call_function", target=TO_HOST)
    # The first block's input is the batch, which needs no gradient and stays.
    assert len(moved) == 5
    brought = away.find_nodes(op="call_function", target=FROM_HOST)
    assert len(brought) == 5 and all(is_again(node) for node in brought)
    places = {node: place for place, node in enumerate(away.nodes)}
    first = min(places[node] for node in away.nodes if is_backward(node))
    for node in moved:
        (x,) = node.all_input_nodes
        assert all(places[user] < first for user in x.users) and places[node] < first
    before_the_backward = []
    for graph in (here, away):
        first = next(i for i, node in enumerate(graph.nodes) if is_backward(node))
        before_the_backward.append(liveness(graph).live[first])
    # the last of the five may still be in use there
    assert before_the_backward[0] - before_the_backward[1] >= 4 * moved[0].meta["val"].nbytes


def test_inductors_cache_tells_apart_what_the_passes_read() -> None:
    """It compares operators itself; not by which module each was called, nor the labels
    of collectives.
    """
    step = fzero.make_train_step(Short(), config(3), **AOT)
    found = [
        InductorPass(PassOptions()),
        InductorPass(PassOptions(max_live=1)),
        InductorPass(PassOptions(), ["blocks.0"]),
    ]
    found.append(InductorPass(PassOptions(), checkpoint=["blocks.0"]))
    (captured,) = step.trace(vectors(0))
    found += [
        InductorPass(PassOptions(), marks=digest_of_marks(graph))
        for graph in (captured.graph, Graph())
    ]
    assert len({one.uuid() for one in found}) == len(found)


def test_inductors_cache_tells_apart_numbers_of_threads() -> None:
    """Kernels are written for one number: a rank that was given fewer threads would
    start too many.
    """
    before, found = torch.get_num_threads(), set()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.add(InductorPass(PassOptions()).uuid())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 2


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", [None, 1])
def test_another_run_finds_the_compiled_graph(
    checkpoint: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The graph, the collectives and all numbers are those of the run that compiled it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for hits in (0, 1):
        counters.clear()
        torch.manual_seed(0)
        step = fzero.make_train_step(Short(), config(3), compile="step", checkpoint=checkpoint)
        state, _ = step(step.init(), vectors(0))
        assert step.program is not None and counters["inductor"]["fxgraph_cache_hit"] == hits
        (graph,) = step.program.compiled.graphs
        found.append((str(graph), optree.tree_leaves(state.params)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


class Widening(nn.Module):
    """What it makes is larger than what it reads, in the first operator, which is
    pointwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.down = nn.Parameter(torch.randn(8, 16)), nn.Linear(8 * 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.down(torch.tanh(x[:, None] * self.weight).flatten(1)))


def _peak_of_generated_code(checkpoint: int | None) -> int:
    """The most bytes that a step allocates at once."""
    model = make(lambda: Stack(Widening, 8, tuple(range(8))))
    step = fzero.make_train_step(model, config(0), checkpoint=checkpoint, compile="step")
    batch = vectors(0, size=2048)
    state, _ = step(step.init(), batch)
    with torch.profiler.profile(profile_memory=True) as profile:
        step(state, batch)
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]  # type: ignore[union-attr]
    return max(
        accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    )


@pytest.mark.long
def test_generated_code_does_not_make_again_in_the_forward_what_the_backward_needs() -> None:
    # A block's eight-fold input, as large as eight results; one block's is alive at a time beside
    # its gradient.
    result = 4 * 2048 * 16
    plain, again = _peak_of_generated_code(None), _peak_of_generated_code(1)
    assert plain > 8 * 8 * result
    assert again < 8 * result + 4 * 8 * result


# --- what is sent ---------------------------------------------------------------------------------


def _sent(stage: int, checkpoint: int | None) -> dict[str, int]:
    log: list[fzero.comms.CommRecord] = []
    axis = fzero.join()
    axis = fzero.comms.ProcessAxis(axis.name, axis.size, axis.rank, axis.group, log.append)
    step = fzero.make_train_step(
        make(Plain), config(stage), mesh=axis, checkpoint=checkpoint, **AOT
    )
    state = step.init()
    state, _ = step(state, part(vectors(0), step.rank, step.world_size))
    log.clear()
    step(state, part(vectors(0), step.rank, step.world_size))
    reported = sum(x.num_elements for x in log if x.num_elements > 100)  # not the loss and the norm
    planned = step.plan.sent_per_step
    timeline = step.explain()
    assert f"stage {stage}" in str(timeline) and timeline.draw().axes
    gathered = max(liveness(step.program.compiled.graphs[0]).gathered_numel)  # type: ignore[union-attr]
    return {"reported": reported, "planned": sum(planned.values()), "gathered": gathered}


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("stage", "checkpoint"), [(3, 1), (3, 2), (3, None), (2, 1), (2, None), (1, None), (0, None)]
)
def test_a_graph_sends_what_the_plan_says_and_gathers_two_units_at_most(
    ranks: RankPool, stage: int, checkpoint: int | None
) -> None:
    largest = max(
        unit.gathered_numel for unit in fzero.plan(make(Plain), config(stage), world_size=2).units
    )
    for found in ranks(2, _sent, stage, checkpoint):
        assert found["reported"] == found["planned"] > 0
        assert found["gathered"] == 2 * largest, "the next unit is gathered early, and no more"


# --- dry runs -------------------------------------------------------------------------------------


def _explained_and_run(stage: int, keys: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The collectives of the graphs as explained, by rank 0 alone, and as run."""
    step = fzero.make_train_step(make(Short), config(stage) | keys, **AOT)
    batch = part(vectors(0), step.rank, step.world_size)
    explained = []
    if step.rank == 0:
        explained = [_collectives(captured.scheduled().graph) for captured in step.trace(batch)]
    step(step.init(), batch)
    assert step.program is not None
    return explained, [_collectives(graph) for graph in step.program.compiled.graphs]


def _collectives(graph: torch.fx.Graph) -> list[tuple[str, torch.Size]]:
    """And their waits, and the matrix products between them."""
    return [
        (str(node.target), node.meta["val"].shape)
        for node in graph.nodes
        if is_collective(node) or node.target is WAIT or flops_of(node)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "keys"), [(2, TWICE), (0, {}), (1, BF16), (3, {})])
def test_what_one_rank_explains_before_the_first_step_is_what_runs(
    ranks: RankPool, stage: int, keys: dict[str, Any]
) -> None:
    explained, run = ranks(2, _explained_and_run, stage, keys)[0]
    if keys is TWICE:
        assert explained.pop(0) == explained[0], "two micro-steps are one graph"
    assert explained == run and any("c10d" in target for target, _ in run[0])
    eager = fzero.make_train_step(
        make(Short), config(stage) | keys, mesh=fzero.comms.AbstractAxis("data", 2, backend="gloo")
    )
    assert [_collectives(c.scheduled().graph) for c in eager.trace(part(vectors(0), 0, 2))][
        -1
    ] == run[-1]


class Counting(Peculiar):
    """Changes itself as it runs, and has a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.last = 0, torch.zeros(())
        self.norm.eval()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        loss = super().forward(x, y)
        self.last = loss.detach()
        return loss


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, AOT, {"units": ["linear"], "compile": "block", "compile_backend": "aot_eager"}]
)
def test_explaining_changes_nothing(options: dict[str, Any]) -> None:
    def run(explain: bool) -> tuple[Any, ...]:
        model = make(Counting)
        step = fzero.make_train_step(model, config(3, optimizer=SGD), **options)
        state, reported = step.init(), []
        for index in range(3):
            if explain:
                before = torch.get_rng_state(), model.num_calls, model.last, step.schedule
                assert step.explain(vectors(index)).num_collectives == 0  # of one rank
                after = torch.get_rng_state(), model.num_calls, model.last, step.schedule
                assert (
                    torch.equal(before[0], after[0])
                    and before[2] is after[2]
                    and before[1::2] == after[1::2]
                )
            state, metrics = step(state, vectors(index))
            reported.append((metrics.loss.item(), metrics.grad_norm.item(), model.num_calls))
        assert model.linear.training and not model.norm.training
        return (
            reported,
            step.gather(state),
            None if step.program is None else len(step.program.compiled.graphs),
        )

    (reported, weights, num_captured), (expected, expected_weights, expected_captured) = (
        run(True),
        run(False),
    )
    assert reported == expected and num_captured == expected_captured
    assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


@pytest.mark.long
def test_a_step_may_be_explained_for_many_batches_on_any_device() -> None:
    step = fzero.make_train_step(make(Short), config(1), mesh=fzero.comms.AbstractAxis("data", 8))
    real, meta = (
        step.explain(tuple(x.to(device) for x in vectors(0))) for device in ("cpu", "meta")
    )
    assert real == meta
    found = [sum(step.explain(vectors(0, size)).liveness.live) for size in range(2, 11)]
    assert found == sorted(set(found)), "a larger batch keeps more alive"


@pytest.mark.long
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_a_step_in_a_dry_run_holds_and_sends_what_the_plan_says(stage: int) -> None:
    num_ranks, text_ = 64, text(0)
    with torch.device("meta"):
        model = MODELS["llama"]()
    step = fzero.make_train_step(
        model, config(stage), mesh=fzero.comms.AbstractAxis("data", num_ranks)
    )
    (captured,) = step.trace(text_)
    graph, units = captured.graph, captured.units
    held = sum(
        node.meta["val"].nbytes
        for node in graph.nodes
        if node.op == "placeholder" and node.name in units
    )
    assert held == sum(step.plan.bytes_per_rank.values())
    timeline = captured.scheduled().timeline()
    planned = sum(step.plan.sent_per_step.values())
    if stage == 3:  # the backward does not need an embedding's weights
        planned -= step.plan.units[0].gathered_numel // num_ranks * (num_ranks - 1)
    # Losses, weights, numbers of passes, checksums and the parts of the norm, in float64; and the
    # tables of angles, which are module buffers.
    numbers = 5 * 8 + sum(spec.local_nbytes(num_ranks) for spec in step.specs.buffers.values())
    assert timeline.sent == 4 * planned + numbers * (num_ranks - 1)
    assert "gather model.layers.1" in str(timeline) or stage < 3


@pytest.mark.long
def test_a_step_with_weighted_losses_is_explained_with_its_micro_steps() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(*batch) * 5, torch.tensor(5)

    cfg = config(2, optimizer=SGD) | {
        "gradient_accumulation_steps": 3,
        "train_micro_batch_size_per_gpu": 4,
    }
    step = fzero.make_train_step(
        make(Plain), cfg, loss_fn=loss_fn, mesh=fzero.comms.AbstractAxis("data", 4)
    )
    timeline = step.explain(vectors(0))
    assert timeline.sent == 4 * sum(step.plan.sent_per_step.values()) + (3 * 4 + 1) * 8 * 3


def test_what_cannot_be_explained_or_run_is_reported() -> None:
    step = fzero.make_train_step(make(Plain), config(0), **AOT)
    with pytest.raises(ValueError, match=r"explain: needs a batch .* call the step once"):
        step.explain()
    with pytest.raises(fzero.CompileError, match=r"if x.sum\(\).item\(\) > 0"):
        fzero.make_train_step(Branching(), config(0)).explain(vectors(0))
    paper = fzero.make_train_step(
        make(Plain), config(3) | TWICE, mesh=fzero.comms.AbstractAxis("data", 4)
    )
    with pytest.raises(ValueError, match="batch: must hold 6 samples"):
        paper.explain(vectors(0))
    with pytest.raises(ValueError, match=r"mesh: .* AbstractAxis\(name='data', size=4"):
        paper.init()
    with pytest.raises(ValueError, match="AbstractAxis: rank must be in"):
        fzero.comms.AbstractAxis("data", 4, rank=4)
    with pytest.raises(ValueError, match="AbstractAxis: backend must be"):
        fzero.comms.AbstractAxis("data", 4, backend="mpi")  # type: ignore[arg-type]


# --- blocks ---------------------------------------------------------------------------------------


def _by_block(stage: int, checkpoint: int | None) -> tuple[tuple[float, float], int]:
    counters.clear()
    options: dict[str, Any] = {
        "compile": "block",
        "compile_backend": "aot_eager",
        "checkpoint": checkpoint,
    }
    return _differences(Plain, vectors, config(stage), **options), counters["stats"][
        "unique_graphs"
    ]


@pytest.mark.covering(0)
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


# --- code generation ------------------------------------------------------------------------------


def _with_inductor(model: Any, sizes: dict[str, int]) -> tuple[tuple[float, float], int]:
    with captures() as graphs:
        return _differences(model, vectors, config(3, **sizes), compile="step"), len(graphs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "sizes"),
    [(Short, {}), (Uneven, {"allgather_bucket_size": 800, "reduce_bucket_size": 800})],
    ids=["alone", "joined"],
)
def test_generated_code_agrees_to_rounding(
    ranks: RankPool, model: Any, sizes: dict[str, int]
) -> None:
    for (curve, weights), num_graphs in ranks(2, _with_inductor, model, sizes):
        assert num_graphs == 1
        # Other roundings of a gradient, which Adam divides by its own size: last bits of it, 2^-23,
        # of lr = 1e-2, unless the gradient is near zero.
        assert weights <= 1e-5 and curve <= 1e-5
