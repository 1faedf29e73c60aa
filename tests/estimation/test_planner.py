"""The laws of the planner: what it reports is what formulas, layouts and running steps
have.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import weakref
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed_estimates
import optree
import pytest
import torch
from alive import most_alive
from hypothesis import given, strategies as st
from schedules import recorded
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from training import config, make, vectors

import fzero
from fzero.common.flops import counter
from fzero.config.config import ConfigError
from fzero.deepspeed import estimators as estimates
from fzero.deepspeed.runtime.zero import stage3, stage_1_and_2
from fzero.estimation.activation_trace import OperatorCost, trace_activations
from fzero.estimation.compare import Choices
from fzero.estimation.dry_pass import DryPass
from fzero.estimation.dry_run import dry_run
from fzero.estimation.fit_search import Limits
from fzero.estimation.ledger import PYTHON
from fzero.estimation.models import (
    VOCABULARY,
    ModelError,
    PlainGPT,
    TransformerBlock,
    filled,
    named,
    sample_of,
    shape_of,
)
from fzero.estimation.unit_events import order_of, parts_of
from fzero.estimation.zero_formulas import zero_nbytes
from fzero.graph.timeline import Lanes
from fzero.plans.machine_model import MachineModel
from fzero.plans.schedule_check import check_schedules
from fzero.profiling.profiler import NUM_OPERATORS, operator_seconds, small_block
from fzero.runtime.sequencer import Sequencer
from fzero.simulation import LockstepRanks, stacked
from fzero.storage import file_agreement
from fzero.storage.buffer_sizes import pinned_nbytes, stream_buffers
from fzero.storage.shard_transfer import BufferPool
from fzero.transforms.checkpointing import Moves

FP16 = {"fp16": {"enabled": True}}

# --- formulas -------------------------------------------------------------------------------------

# of the ZeRO paper: GB of P_os, P_os+g and P_os+g+p by ranks, for 7.5B, 128B and 1T parameters
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


def last_digit(number: float) -> float:
    """What one more in the last digit that is printed means: the paper rounds some
    entries and cuts others.
    """
    return 10.0 ** -len(str(number).partition(".")[2])


@pytest.mark.parametrize("num_ranks", TABLE_1)
def test_the_formula_gives_table_1_of_the_zero_paper(num_ranks: int) -> None:
    for psi, row in zip((7.5e9, 128e9, 1e12), TABLE_1[num_ranks], strict=True):
        for stage, printed in enumerate(row, 1):
            assert zero_nbytes(psi, num_ranks, stage) / 1e9 == pytest.approx(
                printed, abs=last_digit(printed)
            ), (
                psi,
                stage,
            )


def test_a_model_of_7_5_billion_parameters_on_64_ranks_is_figure_1_of_the_zero_paper() -> None:
    comparison = fzero.estimation.compare_plans(named("7.5B").model, FP16, world_size=64)
    held = [
        sum(comparison[f"stage {stage}"].plan.bytes_per_rank.values()) / 1e9 for stage in range(4)
    ]
    # The model has 0.04 % more parameters than the paper's, and vectors that stage 3 keeps whole.
    assert held == pytest.approx([120, 31.406, 16.641, 1.875], rel=0.003)


class Even(nn.Module):
    """Blocks whose parameters need no padding on up to 1024 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_ranks", [1, 4, 64, 1024])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_from_the_layouts_are_the_formulas_where_nothing_is_padded(
    stage: int, num_ranks: int
) -> None:
    with torch.device("meta"):
        model = Even()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    plan = fzero.plan(
        model, {"fp16": {"enabled": True}, "zero_optimization": zero}, world_size=num_ranks
    )
    counters = 4 * len(plan.flat_buffers)  # Adam's steps
    assert sum(plan.bytes_per_rank.values()) - counters == zero_nbytes(3 * 256**2, num_ranks, stage)
    assert (
        fzero.estimation.compare.column(
            model, "", {**FP16, "zero_optimization": zero}, num_ranks
        ).padding_nbytes
        == 0
    )


DEEPSPEED = {  # as its documentation (docs/code-docs/source/memory.rst) prints them
    "2, old": """
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu
  127.45GB |  15.93GB | offload_optimizer=none""",
    "3": """
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0""",
}


def test_the_estimators_print_the_tables_of_deepspeeds_documentation() -> None:
    lines: list[str] = []
    estimates.estimate_zero2_model_states_mem_needs_all_cold(
        2851e6, 8, 1, formula="old", show=lines.append
    )
    assert lines == DEEPSPEED["2, old"].strip("\n").splitlines()
    lines.clear()
    estimates.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, 8, 1, show=lines.append)
    assert lines == DEEPSPEED["3"].strip("\n").splitlines()


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (2, 8), (16, 4)])
def test_the_estimators_formulas_are_those_of_0_19(nodes: int, gpus: int) -> None:
    psi, layer, num = 1_000_000, 30_000, nodes * gpus
    two, three = (
        estimates.estimate_zero2_model_states_mem_needs,
        estimates.estimate_zero3_model_states_mem_needs,
    )
    assert two(psi, gpus, nodes) == (psi * max(4 * num, 16) * 1.5, 2 * psi)
    assert two(psi, gpus, nodes, False) == (4 * psi * gpus * 1.5, 2 * psi + 18 * psi // num)
    assert two(psi, gpus, nodes, False, formula="old") == (
        4 * psi * gpus * 1.5,
        4 * psi + 16 * psi // num,
    )
    assert three(psi, layer, gpus, nodes) == (18 * psi / nodes * 1.5, 4 * layer, 4 * layer)
    assert (
        three(psi, layer, gpus, nodes, zero_init=False)[0] == psi * max(4 * gpus, 18 / nodes) * 1.5
    )
    opt_only = three(psi, layer, gpus, nodes, True, False)
    assert opt_only == (16 * psi / nodes * 1.5, 4 * layer + 2 * psi // num, 4 * layer)
    none = three(psi, layer, gpus, nodes, False, False)
    assert none == (4 * layer * gpus * 1.5, 4 * layer + 18 * psi // num, 4 * layer)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_estimators_are_deepspeeds_own_to_the_byte_and_print_the_same() -> None:
    program = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "deepspeed_estimates.py"),
    ]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stderr.splitlines()[-1])
    assert deepspeed_estimates.estimates(stage_1_and_2, stage3) == theirs


def test_the_estimators_count_tied_parameters_once_and_a_layer_without_its_children() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(10, 10, bias=False),
            nn.Sequential(nn.Linear(10, 30), nn.Linear(10, 10, bias=False)),
        )
    model[1][1].weight = model[0].weight
    assert estimates.model_to_params(model) == (100 + 330, 330)
    lines: list[str] = []
    estimates.estimate_zero3_model_states_mem_needs_all_live(model, show=lines.append)
    assert len(lines) == 10


# --- working buffers ------------------------------------------------------------------------------


class Counted:
    """Counts the bytes of full flat buffers that are alive on each rank, by what they
    were taken for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.most: defaultdict[str, int] = defaultdict(int)
        purposes: dict[tuple[int, int], str] = {}
        take, give = BufferPool.take, BufferPool.give

        def counted_take(scratch: BufferPool, *args: Any) -> Tensor:
            flat = take(scratch, *args)
            purpose = sys._getframe(1).f_globals["__name__"].removeprefix("fzero.runtime.")
            purposes[id(scratch), flat.data_ptr()] = purpose
            self.alive[id(scratch), purpose] += flat.nbytes
            self.most[purpose] = max(self.most[purpose], self.alive[id(scratch), purpose])
            return flat

        def counted_give(scratch: BufferPool, flat: Tensor) -> None:
            if purpose := purposes.pop((id(scratch), flat.data_ptr()), ""):
                self.alive[id(scratch), purpose] -= flat.nbytes
            give(scratch, flat)

        monkeypatch.setattr(BufferPool, "take", counted_take)
        monkeypatch.setattr(BufferPool, "give", counted_give)


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Uneven(nn.Module):
    """Blocks of different sizes, so that it shows which of them are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow(width) for width in (8, 40, 24, 70, 8, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


BUCKETS = {
    "as configured": {},
    "small buckets": {"reduce_bucket_size": 3000},
    "nothing early": {"stage3_prefetch_bucket_size": 0},
    "room for one": {"stage3_max_live_parameters": 2500},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("keys", BUCKETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "wide gradients"])
@pytest.mark.parametrize("stage", range(4))
def test_planned_buffers_are_those_that_a_running_step_takes(
    monkeypatch: pytest.MonkeyPatch, stage: int, precision: str, keys: str
) -> None:
    cfg = config(stage, **BUCKETS[keys])
    if precision != "fp32":
        cfg |= {"bf16": {"enabled": True, "auto_cast": True}}
    if precision == "wide gradients":
        cfg |= {"data_types": {"grad_accum_dtype": "fp32"}}
    counted = Counted(monkeypatch)
    step = fzero.make_train_step(make(Uneven), cfg, mesh=fzero.comms.AbstractAxis("data", 3))
    ranks = LockstepRanks(step.spec, 3)
    state = ranks.init()
    for _ in range(2):  # the order of gathers is known from the second on
        state, _ = ranks(state, stacked([vectors(rank, 4) for rank in range(3)]))
    batch = vectors(0, 4)
    for trace in (None, trace_activations(make(Uneven), cfg, batch)):
        planned = dry_run(ranks.plan, trace)
        assert counted.most["gathers"] == planned.most("gathers")
        assert counted.most["reductions"] == planned.most("reductions")
        assert bool(planned.most("gathers")) == (stage == 3)
        assert bool(planned.most("reductions")) == (stage > 1 or precision == "wide gradients")


def test_planned_pools_of_host_memory_are_those_that_a_step_with_files_makes(
    tmp_path: Path,
) -> None:
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    for how in ({}, {"bf16": {"enabled": True}}, {"optimizer": {"type": "Lamb"}}):
        for zero in (
            {"offload_optimizer": block},
            {"offload_optimizer": block, "offload_param": block | {"max_in_cpu": 0}},
        ):
            step = fzero.make_train_step(make(Uneven), config(3, **zero) | how)
            files = file_agreement.files_of(step.init())
            pools = sum(mover.pool.num * mover.pool.nbytes for mover in files._movers.values())
            planned = stream_buffers(step.plan).host_pool - step.runtime.offload._staged_nbytes
            if how.get("optimizer"):
                # two flat buffers as wholes, and two tensors that leave; the pool only moves a
                # state
                nbytes = 4 * max(buffer.shard_numel for buffer in step.plan.flat_buffers)
                num_tensors = 2 * (4 if "offload_param" in zero else 3) + 2
                assert (
                    stream_buffers(step.plan).host_pool
                    == step.runtime.offload._staged_nbytes
                    == num_tensors * nbytes
                )
                continue
            assert pools >= planned > 0.5 * pools, (
                "buffers of the pool are rounded up to whole blocks of the files"
            )
            files.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_tensors_are_planned_as_large_as_pytorch_makes_them(
    pinned: bool, optimizer: str
) -> None:
    """Each a power of two bytes; not where the model is on the CPU, and nothing is
    pinned.
    """
    block = {"device": "cpu", "pin_memory": pinned}
    cfg = config(3, offload_optimizer=block, offload_param=block) | {"bf16": {"enabled": True}}
    plan = fzero.plan(make(Uneven), cfg | {"optimizer": {"type": optimizer}}, world_size=2)
    # Parameters and gradients; with LAMB, which the device runs, master and two moments, too.
    sizes = (2, 2, 4, 4, 4)[: 2 if optimizer == "AdamW" else 5]
    tensors = [size * buffer.shard_numel for buffer in plan.flat_buffers for size in sizes]
    assert dry_run(plan).host_gaps == pinned * sum(
        pinned_nbytes(nbytes) - nbytes for nbytes in tensors
    )
    assert dry_run(plan, device="cpu").host_gaps == 0


# --- a dry run ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Whose head is its embedding, so that a unit is entered twice; and a block that
    nobody uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Narrow(width) for width in (8, 40, 24, 70))
        self.unused = Narrow(30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            (x @ self.embedding.weight.T).flatten(0, 1), ids.flatten()
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("every", [None, 1, 2])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", [Uneven, Tied])
def test_the_order_in_a_dry_run_is_the_order_that_a_running_step_learns(
    kind: type[nn.Module], stage: int, every: int | None
) -> None:
    cfg = config(stage) | {"activation_checkpointing": {"every": every} if every else {}}
    model, batch = (
        make(kind),
        vectors(0, 4) if kind is Uneven else torch.zeros(2, 8, dtype=torch.int64),
    )
    step = fzero.make_train_step(model, cfg)
    step(step.init(), batch)
    trace = trace_activations(model, cfg, batch)
    assert order_of(step.plan, parts_of(step.plan, trace, MachineModel())) == step.schedule


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", [Uneven, Tied])
def test_a_dry_run_executes_the_events_of_a_running_step(
    kind: type[nn.Module],
    stage: int,
    num_micro_steps: int,
    num_ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One by one: gathers, waits, releases, prefetches, flat gradients, reductions and
    their ends.
    """
    cfg = config(stage) | {
        "gradient_accumulation_steps": num_micro_steps,
        "train_micro_batch_size_per_gpu": 2,
    }
    micro_batch = vectors(0, 2) if kind is Uneven else torch.zeros(2, 8, dtype=torch.int64)
    whole = optree.tree_map(lambda x: torch.cat([x] * num_micro_steps), micro_batch)
    batch = stacked([whole] * num_ranks)
    counted = Counted(monkeypatch)
    step = fzero.make_train_step(make(kind), cfg, mesh=fzero.comms.AbstractAxis("data", num_ranks))
    ranks = LockstepRanks(step.spec, num_ranks)
    state, _ = ranks(ranks.init(), batch)
    with recorded(Sequencer) as of_ranks, recorded(DryPass) as planned:
        ranks(state, batch)
        dry_run(ranks.plan, trace_activations(make(kind), cfg, micro_batch))
    executed = list(of_ranks.values())
    assert executed == [*planned.values()] * num_ranks
    peak = check_schedules(executed, ranks.plan.unit_rules)
    assert num_ranks == 1 or counted.most["gathers"] == 4 * peak
    assert bool(peak) == (stage == 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "cfg", [{}, {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}, FP16]
)
@pytest.mark.parametrize("stage", range(4))
def test_what_is_sent_in_a_dry_run_is_what_the_plan_says(stage: int, cfg: dict[str, Any]) -> None:
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50}}
    plan = fzero.plan(make(Uneven), cfg | zero, world_size=4)
    sent = sum(sum(of_axis.values()) for of_axis in plan.sent_nbytes_by_axis.values())
    assert dry_run(plan).timeline.sent == sent


def test_the_peak_is_that_of_the_sum_and_not_the_sum_of_peaks() -> None:
    batch, cfg = vectors(0, 4000), config(3)
    found = dry_run(
        fzero.plan(make(Uneven), cfg, world_size=2), trace_activations(make(Uneven), cfg, batch)
    )
    parts = ("gathers", "reductions", "arrivals", "activations")
    assert (
        found.nbytes
        == sum(found.at_peak.values())
        < sum(found.state.values()) + sum(map(found.most, parts))
    )
    assert found.peak.label in found.description and "activations" in found.description
    labels = [row.label for row in found.rows]
    assert labels[0] == "forward" and labels[-1] == "update"
    assert (
        labels.index("forward of blocks.0")
        < labels.index("backward of blocks.5")
        < labels.index("backward of blocks.0")
    )
    assert {name: n for name, n in found.rows[-1].held.items() if name != "streams"} == {}, (
        "nothing is left"
    )
    (axes,) = found.draw("a step").axes
    assert found.peak.label in axes.texts[0].get_text() and axes.get_title(loc="left") == "a step"
    assert (
        axes.get_xticklabels()[0].get_text() == "forward"
        and axes.get_ylabel()[2:] == " on the device"
    )


def test_an_accumulated_step_takes_its_micro_steps_and_keeps_no_more() -> None:
    def one(num: int, stage: int = 2) -> Any:
        cfg = config(stage) | {
            "gradient_accumulation_steps": num,
            "train_micro_batch_size_per_gpu": 4,
        }
        batch = vectors(0, 4)
        return dry_run(
            fzero.plan(make(Uneven), cfg, world_size=2), trace_activations(make(Uneven), cfg, batch)
        )

    two, three, four = one(2), one(3), one(4)
    assert four.seconds > three.seconds > two.seconds
    assert four.seconds - three.seconds == pytest.approx(three.seconds - two.seconds)
    assert two.nbytes == four.nbytes


def test_lanes_do_one_thing_at_a_time_and_overlap_unless_nothing_does() -> None:
    ends = {}
    for overlap in (True, False):
        lanes = Lanes(overlap=overlap)
        gathers = [
            lanes.start("collective", "gather", 2.0),
            lanes.start("collective", "gather", 2.0),
        ]
        copied = lanes.start("host", "copy", 1.0, after=gathers[0])
        lanes.compute("", 3.0)
        lanes.wait("", max(*gathers, copied))
        lanes.settle()
        ends[overlap] = lanes.now
    assert ends == {True: 4.0, False: 8.0}


def test_seconds_follow_the_rates() -> None:
    batch, cfg = vectors(0, 64), config(3)
    plan, trace = (
        fzero.plan(make(Uneven), cfg, world_size=4),
        trace_activations(make(Uneven), cfg, batch),
    )

    def seconds(**rates: float) -> float:
        return dry_run(plan, trace, machine=MachineModel(**rates)).seconds

    slow: dict[str, Any] = {"latency": 0.0, "flops": 1e30, "memory": 1e30, "network": 1e30}
    sent, moves = dry_run(plan, trace).timeline.sent, trace.events
    assert seconds(**slow | {"network": 1e6}) == pytest.approx(sent / 1e6)
    assert seconds(**slow | {"flops": 1e6}) == pytest.approx(trace.flops / 1e6)
    assert (
        seconds(**slow | {"memory": 1e6})
        > sum(work.nbytes for moment in moves for work in moment.work) / 1e6
    )
    both = seconds(**slow | {"network": 1e6, "flops": 2 * trace.flops / sent * 1e6})
    assert sent / 1e6 < both < 1.5 * sent / 1e6, (
        "half of it is computed, some of that beside what is sent"
    )


def test_two_ranks_sum_in_one_collective_which_adds_meanwhile() -> None:
    rates: dict[str, Any] = {"flops": 1e30, "memory": 1e30, "network": 1e30, "latency": 1.0}
    for world_size, num in ((2, 1), (4, 2)):  # more ranks reduce, and then gather
        plan = fzero.plan(make(Uneven), config(0), world_size=world_size)
        num_buffers = sum(buffer.trainable for buffer in plan.flat_buffers)
        # a norm
        assert dry_run(plan, machine=MachineModel(**rates)).seconds == pytest.approx(
            num * num_buffers + 1
        )
        slow = MachineModel(**rates | {"memory": 1.0})
        on_cpu, on_gpu = (
            dry_run(plan, machine=slow, device=device).seconds for device in ("cpu", "cuda")
        )
        assert (on_cpu > on_gpu) == (world_size > 2), (
            "on a CPU the sums of more ranks take memory's time"
        )


def test_a_step_takes_the_time_of_its_own_python_where_operators_take_some() -> None:
    plan = fzero.plan(make(Uneven), config(3), world_size=2)
    machine = MachineModel(flops=1e30, memory=1e30, network=1e30, latency=0, operator=1.0)
    timeline = dry_run(plan, machine=machine).timeline
    # the norm's is none of a buffer
    num_sent = sum(span.lane == "collective" for span in timeline.spans) - 1
    num_events = sum(kind != "boundary" for kind, *_ in parts_of(plan, None, machine))
    num_updates = sum(buffer.trainable for buffer in plan.flat_buffers)
    expected = (
        PYTHON["event"] * num_events
        + PYTHON["collective"] * num_sent
        + PYTHON["update"] * num_updates
    )
    assert timeline.seconds == pytest.approx(expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_only_gradients_and_new_parameters_cross_where_the_processor_updates(
    stage: int, num_micro_steps: int
) -> None:
    cfg = config(stage, offload_optimizer={"device": "cpu"}) | {
        "bf16": {"enabled": True, "auto_cast": True}
    }
    cfg |= {"train_batch_size": 8, "gradient_accumulation_steps": num_micro_steps}
    plan = fzero.plan(make(Uneven), cfg, world_size=2)
    held = plan.bytes_by_memory["host"]
    new, grads = held["master"] // 2, held["gradients"]
    for device, factor in (("cuda", 1), ("cpu", 0)):  # where host memory is the device's
        timeline = dry_run(plan, machine=MachineModel(host=1e6), device=device).timeline  # type: ignore[arg-type]
        moved = {
            lane: sum(s.end - s.begin for s in timeline.spans if s.lane == lane) * 1e6
            for lane in ("host", "back")
        }
        sums = (num_micro_steps - 1) * grads  # to which the device adds
        assert moved["host"] == pytest.approx(factor * (new + sums))
        assert moved["back"] == pytest.approx(factor * num_micro_steps * grads)


# --- activations ----------------------------------------------------------------------------------


class Wide(Uneven):
    """Whose gradients are larger than its activations."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList(Narrow(20_000) for _ in range(3))


def test_the_gradients_of_a_unit_are_alive_together() -> None:
    model, batch = make(Wide), vectors(0, 1)
    found = most_alive(model, {"gradient_clipping": 0.0}, batch)
    assert found == pytest.approx(trace_activations(model, {}, batch).nbytes, rel=0.01)
    assert found > 4 * 2 * 16 * 20_000, "of both layers of a block"


@pytest.mark.covering(0)
@pytest.mark.parametrize("shape", [(2, 128), (1, 4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_traced_activations_are_what_a_running_step_makes(
    checkpoint: bool, precision: str, shape: tuple[int, int]
) -> None:
    """Counted by the same rule while an eager step runs on real tensors; of few tokens
    it is gradients that count.
    """
    with torch.device("meta"):
        model = filled(PlainGPT(3, 128), "cpu")
    tokens = torch.zeros(shape, dtype=torch.int64)
    cfg: dict[str, Any] = {
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    cfg |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
    cfg |= {"activation_checkpointing": {"every": 1}} if checkpoint else {}
    batch = {"input_ids": tokens, "labels": tokens}
    traced = trace_activations(model, cfg, batch)
    assert most_alive(model, cfg, batch) == pytest.approx(traced.nbytes, rel=0.01), (
        "and the step's own numbers"
    )
    assert traced.nbytes == trace_activations(model.to("meta"), cfg, batch).nbytes, (
        "values do not matter"
    )


class Host:
    """Host memory beside a device, on the CPU: what is put there counts there alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.left = self.returned = 0
        monkeypatch.setattr(
            "fzero.transforms.checkpointing.host_moves", lambda device: Moves(self.away, self.back)
        )

    def away(self, x: Tensor) -> Tensor:
        with _disable_current_modes():
            copy = x.clone()
        self.now, self.left = self.now + pinned_nbytes(copy.nbytes), self.left + copy.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(copy.untyped_storage(), self.drop, pinned_nbytes(copy.nbytes))
        return copy

    def back(self, x: Tensor) -> Tensor:
        self.returned += x.nbytes
        return x.clone()

    def drop(self, nbytes: int) -> None:
        self.now -= nbytes


class Masked(nn.Module):
    """Blocks that are given a mask by name, and whose first input needs no gradient."""

    class Block(Narrow):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * mask

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked.Block(24) for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = (y > 0).float()
        for block in self.blocks:
            x = block(x, mask=mask)
        # `mse_loss` keeps memory for all elements of its mean on the CPU
        return (x - y).square().mean()


ON_HOST = {"activation_checkpointing": {"every": 1, "cpu_checkpointing": True}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["gpt", "bf16 gpt", "masked"])
def test_inputs_that_wait_in_host_memory_are_planned_as_a_running_step_moves_them(
    kind: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg: dict[str, Any] = {
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    cfg |= {"activation_checkpointing": {"every": every, "cpu_checkpointing": True}}
    if kind == "masked":
        model, batch, num_moved = (
            make(Masked),
            vectors(0, 500),
            len(range(every, 5, every)) if every > 1 else 4,
        )
    else:
        with torch.device("meta"):
            model = filled(PlainGPT(3, 128), "cpu")
        tokens = torch.zeros((2, 48), dtype=torch.int64)
        batch, num_moved = {"input_ids": tokens, "labels": tokens}, len(range(0, 3, every))
        cfg |= {"bf16": {"enabled": True}} if kind == "bf16 gpt" else {}
    host = Host(monkeypatch)
    found, traced = most_alive(model, cfg, batch), trace_activations(model, cfg, batch)
    assert found == pytest.approx(traced.nbytes, rel=0.01)
    assert host.now == 0 and host.most == traced.host_nbytes > 0
    steps = 2  # of the running one
    assert sum(event.leaves for event in traced.events) == host.left / steps
    assert (
        sum(event.returns for event in traced.events) == host.returned / steps == host.left / steps
    )
    of_one = host.left // steps // num_moved
    assert traced.host_nbytes == num_moved * pinned_nbytes(of_one)
    here = trace_activations(model, cfg, batch, on_host=False)
    assert here.host_nbytes == 0 and here.flops == traced.flops and here.nbytes > traced.nbytes
    assert traced.without_moves() == here, "one trace serves both"


def test_inputs_in_host_memory_count_there_and_their_copies_take_time() -> None:
    def planned(block: dict[str, Any], device: Any = "cuda", **keys: Any) -> Any:
        cfg = config(1) | {"activation_checkpointing": block} | keys
        model, machine = make(Masked), MachineModel(host=1e6)
        return fzero.estimation.compare_plans(
            model, cfg, batch=vectors(0, 500), machine=machine, device=device
        )["stage 1"]

    block = ON_HOST["activation_checkpointing"]
    here, there = planned({"every": 1}), planned(block)
    of_one = 500 * 16 * 4
    assert (
        there.memory["host"] == {"activations": 4 * pinned_nbytes(of_one)}
        and "host" not in here.memory
    )
    assert there.seconds - here.seconds == pytest.approx(2 * 4 * of_one / 1e6), (
        "nothing is computed meanwhile"
    )
    # At the most that of the block that runs again is here, and one that will be freed.
    assert here.nbytes("device") - there.nbytes("device") >= 2 * of_one
    lanes = {
        lane: sum(s.end - s.begin for s in there.step.timeline.spans if s.lane == lane)
        for lane in ("back", "host")
    }
    assert lanes["back"] == pytest.approx(lanes["host"]) == pytest.approx(4 * of_one / 1e6)
    twice = planned(block, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=500)
    assert twice.nbytes("host") == there.nbytes("host"), "one micro-step after the other"
    on_cpu = [planned(block, "cpu") for block in ({"every": 1}, block)]
    assert on_cpu[0].memory == on_cpu[1].memory and on_cpu[0].seconds == on_cpu[1].seconds
    assert planned({"cpu_checkpointing": True}).memory == planned({}).memory, (
        "nothing is checkpointed"
    )


def test_what_fits_may_keep_inputs_in_host_memory_where_a_device_has_memory_of_its_own() -> None:
    def found(device_nbytes: float = 1e9, device: Any = "cuda", **keys: Any) -> Any:
        cfg = config(1) | keys
        return fzero.estimation.fit(
            make(Masked),
            cfg,
            world_size=2,
            device_nbytes=device_nbytes,
            batch=vectors(0, 500),
            device=device,
        )

    name = "checkpointed inputs in host memory"
    ladder = {rung.name: rung for rung in found().ladder}
    before, rung = ladder["stage 2"], ladder[name]
    assert rung.nbytes("device") < before.nbytes("device") and rung.seconds > before.seconds
    assert rung.nbytes("host") == 4 * pinned_nbytes(500 * 16 * 4)
    assert rung.keys["activation_checkpointing"] == ON_HOST["activation_checkpointing"]
    least = min(rung.nbytes("device") for rung in ladder.values())
    needed = found(least)
    assert (
        needed.best.choices.inputs == "host"
        and "checkpointed inputs in host memory" in str(needed).split("Fastest")[1]
    )
    assert found().best.choices.inputs == "device", "where there is room it is slower"
    for other in (found(device="cpu"), found(activation_checkpointing={"cpu_checkpointing": True})):
        assert name not in [rung.name for rung in other.ladder]
    given = found(activation_checkpointing={"cpu_checkpointing": True})
    assert [rung.nbytes("host") > 0 for rung in given.ladder][:2] == [False, True], (
        "as soon as one is checkpointed"
    )
    configured = found(**ON_HOST)
    assert configured.ladder[0].nbytes("host") == rung.nbytes("host")
    of_cpu, plain = (
        found(device="cpu", activation_checkpointing=block)
        for block in (ON_HOST["activation_checkpointing"], {"every": 1})
    )
    assert [rung.memory for rung in of_cpu.ladder] == [rung.memory for rung in plain.ladder]


class Caching(nn.Module):
    """Makes tables when it runs first, and notes that it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.num_runs = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_runs += 1
        if self.table is None:
            self.table = self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)
            self.register_buffer("late", self.table + 1, persistent=False)
        self.seen = self.seen + 1
        return nn.functional.mse_loss(self.layer(x + self.table), y)


def test_a_model_that_is_planned_is_left_as_it_was() -> None:
    model, batch = make(Caching), vectors(0, 4)
    seen, before = model.seen, {name: dict(vars(module)) for name, module in model.named_modules()}
    fzero.estimation.compare_plans(model, batch=batch)
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert (
        model.table is None
        and not model.tables
        and list(model._buffers) == ["seen"]
        and model.seen is seen
    )
    assert torch.isfinite(model(*batch)), "on real tensors"


def test_checkpointing_saves_activations_and_costs_a_forward() -> None:
    tokens = torch.empty((1, 512), dtype=torch.int64, device="meta")
    batch, model = {"input_ids": tokens, "labels": tokens}, named("50M").model
    plain, again = (
        trace_activations(model, {}, batch, checkpoint=checkpoint) for checkpoint in (False, True)
    )
    assert again.nbytes < plain.nbytes
    of_blocks = 2 * 512 * sum(p.numel() for p in model.blocks.parameters())  # type: ignore[union-attr]
    # Attention besides; and of each block not the last product, a third of them, whose result the
    # backward does not need.
    assert 0.67 * of_blocks < again.flops - plain.flops < of_blocks


def test_operations_of_attention_on_the_cpu_are_counted() -> None:
    def flops(fused: bool) -> int:
        q = torch.randn(1, 2, 64, 128, requires_grad=True)
        with (
            counter() as counted,
            torch.nn.attention.sdpa_kernel(
                torch.nn.attention.SDPBackend.FLASH_ATTENTION
                if fused
                else torch.nn.attention.SDPBackend.MATH
            ),
        ):
            nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        return counted.get_total_flops()

    forward = 4 * 2 * 64 * 64 * 128
    assert (flops(False), flops(True)) == (3 * forward, 3.5 * forward), (
        "the fused kernel computes its scores again"
    )


# --- models by name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["100K", "1M", "8.3M", "8.39M", "10M", "125M", "1.3B", "7B", "70e9", "175B", "1T"]
)
def test_a_count_gives_a_gpt_of_that_size_to_two_percent(word: str) -> None:
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    wanted = float(word[:-1]) * scale[word[-1]] if word[-1] in scale else float(word)
    found = named(word)
    model: Any = found.model
    assert found.num_params == pytest.approx(wanted, rel=0.02)
    assert all(param.is_meta for param in model.parameters())
    assert re.search(
        rf"{len(model.blocks)} blocks?, .* vocabulary {model.embedding.num_embeddings}: ",
        found.description,
    )
    assert wanted < 8.4e6 or model.embedding.num_embeddings == VOCABULARY


@given(st.floats(5, 14).map(lambda power: 10.0**power))
def test_every_count_is_met_to_two_percent(count: float) -> None:
    depth, width, vocabulary = shape_of(count)
    with torch.device("meta"):
        of_block = sum(param.numel() for param in TransformerBlock(width).parameters())
    assert depth * of_block + (2 * vocabulary + 2) * width == pytest.approx(count, rel=0.02)
    assert depth >= 1 and 256 <= vocabulary <= VOCABULARY and width % 64 == 0


def test_the_smallest_gpt_runs() -> None:
    model = filled(named("100K").model, "cpu")
    ids = torch.arange(12).view(2, 6)
    assert model(ids, ids).isfinite()


def make_even() -> nn.Module:
    return Even()


def fails() -> nn.Module:
    raise KeyError("no such thing")


def test_models_are_found_by_file_class_and_path(tmp_path: Path) -> None:
    tiny = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **tiny})
    )
    of_file, of_folder = named(str(tmp_path / "config.json")), named(str(tmp_path))
    assert (
        of_file.num_params == of_folder.num_params < 100_000
        and "LlamaForCausalLM" in of_file.description
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **tiny}))
    assert named(str(tmp_path)).num_params == of_file.num_params, "by its type"
    assert named("test_planner:make_even").num_params == 3 * 256**2
    assert all(
        x.is_meta for found in (of_file, named("GPT2Config")) for x in found.model.parameters()
    )


WRONG = {
    "nonsense": r"^model: 'nonsense' must be a count of parameters \(7B\), an import path",
    "meta-llama/Llama-2-7b": r"nothing is downloaded",
    "no.such.module:fn": (
        r"^model: 'no.such.module:fn' .* got ModuleNotFoundError: No module named 'no'; "
        r"correct it"
    ),
    "test_planner:fails": r"got KeyError: 'no such thing'",
    "test_planner:WRONG": r"must be a torch.nn.Module, got dict",
    "LlamaTokenizer": r"must be a model or a configuration of transformers",
    "1": r"must be between 100K and 100T, got 1",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_word_that_is_no_model_is_reported(word: str) -> None:
    with pytest.raises(ModelError, match=WRONG[word]):
        named(word)


def test_attention_takes_the_time_of_its_own_rate() -> None:
    model = named("300K").model
    trace = trace_activations(model, {}, sample_of(model, 1, 16))
    works = [work for event in trace.events for work in event.work]
    flops = sum(work.flops for work in works if work.kind == "attention")
    assert 0 < flops < trace.flops
    # the rest takes nanoseconds
    assert sum(trace.seconds(MachineModel(attention_fp32=1.0))) == pytest.approx(flops)
    assert trace.seconds(MachineModel(attention=1.0)) == trace.seconds(MachineModel()), (
        "of 16 bits, and there are none"
    )


def test_where_nothing_overlaps_an_operator_takes_its_products_its_bytes_and_its_dispatch() -> None:
    cost = OperatorCost(flops=6, nbytes=8, is_wide=False)
    rates = {"flops": 2.0, "memory": 4.0, "operator": 5.0}
    assert cost.seconds(MachineModel(**rates)) == 5 + max(3, 2)
    assert cost.seconds(MachineModel(**rates, overlap=False)) == 5 + 3 + 2


def test_operators_are_timed_on_as_many_as_a_trace_counts() -> None:
    def loss_fn(block: nn.Module, x: Tensor) -> Tensor:
        return (x + block(x)).sum()

    trace = trace_activations(small_block(), {}, torch.ones(1, 2, 8), loss_fn=loss_fn, device="cpu")
    assert sum(len(event.work) for event in trace.events) == NUM_OPERATORS
    assert 0 < operator_seconds() < 0.01


# --- what fits ------------------------------------------------------------------------------------

GIGA = 1e9
SIZES = (0.3, 1, 4, 8, 12, 20, 30, 60, 200)


@pytest.fixture(scope="module")
def billion() -> nn.Module:
    return named("1.3B").model


@pytest.mark.long
def test_more_memory_is_never_slower_and_what_fits_holds(
    billion: nn.Module, tmp_path: Path
) -> None:
    found = [
        fzero.estimation.fit(billion, FP16, world_size=8, device_nbytes=size * GIGA)
        for size in SIZES
    ]
    fitting = [
        (size, one.best) for size, one in zip(SIZES, found, strict=True) if one.best is not None
    ]
    assert len(fitting) > 5 and found[0].best is None
    seconds = [best.seconds for _, best in fitting]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    for size, best in fitting:
        planned = fzero.plan(billion, best.keys, world_size=8)
        assert best.nbytes("device") == dry_run(planned).nbytes <= size * GIGA
        assert best.nbytes("device") > sum(planned.bytes_by_memory["device"].values())
    found[-1].save(tmp_path / "fits.json")
    assert (
        fzero.Config.load(tmp_path / "fits.json").zero_optimization.stage
        == fitting[-1][1].choices.stage
    )
    with pytest.raises(
        fzero.ConfigError,
        match=r"^fit: nothing fits into 0.3 GB; .* needs the least device memory, ",
    ):
        found[0].save(tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_what_fits_has_the_planned_micro_batch_and_says_for_which_machine_its_seconds_are(
    tmp_path: Path,
) -> None:
    model, reported = named("300K").model, list[tuple[int, int]]()
    keys = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    }
    batch, how = sample_of(model, 3, 16), {"world_size": 2, "device_nbytes": GIGA}
    found = fzero.estimation.fit(
        model, keys, batch=batch, progress=lambda *numbers: reported.append(numbers), **how
    )
    found.save(tmp_path / "fits.json")
    sizes = fzero.Config.load(tmp_path / "fits.json").batch_sizes(2)
    assert (sizes.micro, sizes.num_micro_steps) == (3, 2)
    assert (
        reported == [(done, reported[0][1]) for done in range(len(reported))]
        and reported[-1][0] == reported[-1][1]
    )
    assert f"(assumed, pass --rates of `fzero env --json`): {MachineModel()}." in str(found)
    without = fzero.estimation.fit(model, keys, machine=MachineModel(flops=1e12), **how)
    assert (
        "(as given): 1 Tflop/s, memory" in str(without) and without.config["train_batch_size"] == 64
    )


@pytest.mark.long
def test_the_ladder_goes_one_change_at_a_time_from_the_given_configuration(
    billion: nn.Module,
) -> None:
    tokens = torch.empty((1, 256), dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    found = fzero.estimation.fit(
        billion, FP16, world_size=4, device_nbytes=6 * GIGA, nvme_path="/local", batch=batch
    )
    names = [rung.name for rung in found.ladder]
    assert names[:5] == [
        "as it is", "activation checkpointing", "stage 2", "checkpointed inputs in host memory",
        "optimizer state in host memory"
    ]  # fmt: skip
    assert names[-1] == "smaller bucket, nothing early" and "optimizer state in files" in names
    device = [rung.nbytes("device") for rung in found.ladder]
    assert device == sorted(device, reverse=True) and device[0] > 10 * device[-1]
    for before, after in pairwise(found.ladder):
        fields = ("stage", "optimizer", "params", "checkpoints", "small", "inputs")
        assert (
            sum(getattr(before.choices, name) != getattr(after.choices, name) for name in fields)
            == 1
        )
    assert found.ladder[0].keys == FP16, "as it is"
    later = fzero.estimation.fit(
        billion, FP16 | {"zero_optimization": {"stage": 3}}, world_size=4, device_nbytes=60 * GIGA
    )
    assert later.best is not None and later.best.choices.stage == 3, "no stage below the given one"
    for rung in found.ladder:
        assert rung.nbytes("device") == rung.nbytes("device") > rung.activations > 0
        assert Limits(rung.nbytes("device")).hold(rung) and not Limits(
            rung.nbytes("device") - 1
        ).hold(rung)
        host = rung.nbytes("host")
        assert Limits(math.inf, host).hold(rung) and not (
            host and Limits(math.inf, host - 1).hold(rung)
        )


def test_on_a_cpu_the_buffers_of_files_need_the_memory_of_the_device() -> None:
    keys = {"zero_optimization": Choices(3, "nvme", "nvme").placed()}
    how: dict[str, Any] = {"world_size": 2, "device": "cpu"}
    found = fzero.estimation.compare_plans(Even(), keys, **how)
    candidate = found["stage 3, all on nvme"]
    pool = candidate.step.host_pool
    assert pool > 0 and candidate.memory["device"]["sub-groups"] == pool
    assert candidate.nbytes("device") == candidate.step.nbytes + pool and not candidate.nbytes(
        "host"
    )
    for spare, fits in ((pool, True), (pool - 1, False)):
        assert Limits(candidate.step.nbytes + spare).hold(candidate) is fits
    with pytest.raises(ConfigError, match='host_nbytes must be left out with device="cpu"'):
        fzero.estimation.fit(Even(), keys, device_nbytes=1e9, host_nbytes=1e9, **how)


def test_tiles_are_proposed_for_a_length_that_needs_them() -> None:
    model, length = named("300K").model, 2048
    batch = sample_of(model, 1, length)
    how: dict[str, Any] = {"batch": batch, "device": "cpu"}
    roomy = fzero.estimation.fit(model, {}, device_nbytes=GIGA, **how)
    assert roomy.transforms == () and "Tiles" not in str(roomy), "tiles cost a second forward"
    ladder = {rung.name: rung for rung in roomy.ladder}
    tiled = ladder["the head and perceptrons in tiles"]
    assert tiled.nbytes("device") < ladder["activation checkpointing"].nbytes("device") / 2
    found = fzero.estimation.fit(model, {}, device_nbytes=tiled.nbytes("device"), **how)
    assert [str(one) for one in found.transforms] == [
        "fzero.tiled_head('head')", "fzero.tiled_mlp('blocks.*.mlp', 2)"
    ]  # fmt: skip
    shown = "Tiles: pass transforms=[fzero.tiled_head('head'), fzero.tiled_mlp('blocks.*.mlp', 2)]"
    assert shown in " ".join(str(found).split())
    assert found.as_dict()["best"]["transforms"] == [str(one) for one in found.transforms]
    columns = fzero.estimation.compare_plans(
        model, found.config, batch=batch, device="cpu", transforms=found.transforms
    )
    assert columns[columns.given].nbytes("device") == found.best.nbytes("device")
    assert found.best.nbytes("device") <= tiled.nbytes("device")


def test_a_plan_of_a_long_sequence_has_no_mask_of_all_pairs_of_tokens() -> None:
    import transformers  # slow to import, and only this test needs it

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=1, num_key_value_heads=2, use_cache=False, **sizes
    )
    model = transformers.LlamaForCausalLM(llama)
    peaks = [
        trace_activations(model, {}, sample_of(model, 1, length), device="cpu").nbytes
        for length in (2048, 4096)
    ]
    assert peaks[1] < 2.01 * peaks[0], "linear in the tokens, as is a step's own peak"


class OtherLoss(nn.Module):
    """Its loss is no cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens)).logsumexp(-1).mean()


def test_tiles_that_a_model_does_not_allow_are_named_among_what_is_not_possible() -> None:
    tokens = torch.empty((1, 2048), dtype=torch.int64, device="meta")
    found = fzero.estimation.fit(make(OtherLoss), {}, device_nbytes=GIGA, batch=tokens)
    assert found.best is not None and not any(rung.choices.tiles for rung in found.ladder)
    assert [note for note in found.notes if note.startswith("Not possible: tiled_head:")]


OLDER = [
    ({"stage": 2, "cpu_offload": True}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    (
        {
            "stage": 3,
            "cpu_offload": False,
            "cpu_offload_params": True,
            "cpu_offload_use_pin_memory": True,
        },
        {"stage": 3, "offload_param": {"device": "cpu"}},
    ),
    ({"stage": 3, "prefetch_bucket_size": 999}, {"stage": 3, "stage3_prefetch_bucket_size": 999}),
]


@pytest.mark.parametrize(("older", "today"), OLDER, ids=["optimizer", "parameters", "spelling"])
def test_older_names_of_keys_are_planned_as_todays(
    older: dict[str, Any], today: dict[str, Any]
) -> None:
    def found(zero: dict[str, Any]) -> Any:
        cfg = FP16 | {"zero_optimization": zero}
        compared = fzero.estimation.compare_plans(make(Uneven), cfg, world_size=2)
        fitting = fzero.estimation.fit(make(Uneven), cfg, world_size=2, device_nbytes=1e9)
        columns = {column.name: column.memory for column in compared.columns}
        rungs = [(rung.name, rung.nbytes("device")) for rung in fitting.ladder]
        return compared.given, columns, compared.refused, rungs, fitting.notes

    assert found(older) == found(today)
    assert fzero.estimation.compare_plans(make(Uneven), {"zero_optimization": older}).refused == {}
    beside = {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(
        fzero.ConfigError, match=r"zero_optimization.cpu_offload: stands beside 'offload_optimizer'"
    ):
        fzero.estimation.compare_plans(make(Uneven), beside)


def test_checkpointing_that_is_configured_is_planned_as_it_is() -> None:
    model, batch = make(Uneven), vectors(0, 4000)
    cfg = config(1) | {"activation_checkpointing": {"every": 4}}
    found = fzero.estimation.fit(model, cfg, world_size=2, device_nbytes=1e9, batch=batch)
    assert {rung.keys["activation_checkpointing"]["every"] for rung in found.ladder} == {4}
    given, all_of_them = (
        fzero.estimation.compare_plans(
            model,
            config(1) | {"activation_checkpointing": {"every": every}},
            world_size=2,
            batch=batch,
        )
        for every in (4, 1)
    )
    assert (
        found.ladder[0].nbytes("device")
        == given["stage 1"].nbytes("device")
        != all_of_them["stage 1"].nbytes("device")
    )


def test_a_model_without_repeated_blocks_is_fitted_without_checkpointing() -> None:
    found = fzero.estimation.fit(
        make(Caching), config(1), world_size=2, device_nbytes=1e9, batch=vectors(0, 4)
    )
    assert found.best is not None and not any(rung.choices.checkpoints for rung in found.ladder)
    assert "Activation checkpointing was not tried: Caching has no repeated blocks." in found.notes
    with_blocks = fzero.estimation.fit(
        make(Uneven), config(1), world_size=2, device_nbytes=1e9, batch=vectors(0, 4)
    )
    assert any(rung.choices.checkpoints for rung in with_blocks.ladder) and "repeated" not in str(
        with_blocks
    )


def test_a_unit_larger_than_the_limit_of_live_parameters_is_planned_without_prefetching() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000, bias=False) for _ in range(2)))
    planned = fzero.estimation.compare_plans(model, FP16, world_size=4)["stage 3"].plan
    assert planned.unit_rules.most_gathered() == 40_000**2 > planned.max_live


def test_seventy_billion_parameters_on_1024_ranks_are_compared() -> None:
    compared = fzero.estimation.compare_plans(named("70B").model, world_size=1024)
    assert sum(compared["stage 3"].plan.bytes_per_rank.values()) < 1.2e9


def test_a_model_whose_loss_is_computed_outside_is_planned_and_fitted() -> None:
    model, batch = nn.Linear(64, 8), torch.empty(32, 64, device="meta")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    compared = fzero.estimation.compare_plans(model, world_size=2, batch=batch, loss_fn=loss_fn)
    assert compared["stage 2"].step.at_peak["activations"] >= 32 * 8 * 4
    found = fzero.estimation.fit(
        model, world_size=2, device_nbytes=1e9, batch=batch, loss_fn=loss_fn
    )
    assert found.best is not None
