"""The laws of the planner: what it tells is what formulas, layouts and running steps have."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed_estimates
import optree
import pytest
import torch
from torch import Tensor, nn
from training import config, make, vectors

import fzero
from fzero import estimates, offload, staging
from fzero.deepspeed.runtime.zero import stage3, stage_1_and_2
from fzero.estimates import zero_nbytes
from fzero.fit import Limits
from fzero.flop_counts import counter
from fzero.named_models import ModelError, PlainGPT, filled, named
from fzero.simulate import LockstepRanks, stacked
from fzero.traced_activations import Alive, trace_activations
from fzero.working_buffers import working_buffers

FP16 = {"fp16": {"enabled": True}}

# --- formulas ----------------------------------------------------------------------------------------------------

TABLE_1 = {  # of the ZeRO paper: GB of P_os, P_os+g and P_os+g+p by ranks, for 7.5B, 128B and 1T parameters
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


def last_digit(number: float) -> float:
    """What one more in the last digit that is printed means: the paper rounds some entries and cuts others."""
    return 10.0 ** -len(str(number).partition(".")[2])


@pytest.mark.parametrize("num_ranks", TABLE_1)
def test_the_formula_gives_table_1_of_the_zero_paper(num_ranks: int) -> None:
    for psi, row in zip((7.5e9, 128e9, 1e12), TABLE_1[num_ranks], strict=True):
        for stage, printed in enumerate(row, 1):
            assert zero_nbytes(psi, num_ranks, stage) / 1e9 == pytest.approx(printed, abs=last_digit(printed)), (
                psi,
                stage,
            )


def test_a_model_of_7_5_billion_parameters_on_64_ranks_is_figure_1_of_the_zero_paper() -> None:
    comparison = fzero.compare_plans(named("7.5B").model, FP16, world_size=64)
    held = [sum(comparison[f"stage {stage}"].plan.bytes_per_rank.values()) / 1e9 for stage in range(4)]
    # The model has 0.04 % more parameters than the paper's, and vectors that stage 3 keeps whole.
    assert held == pytest.approx([120, 31.406, 16.641, 1.875], rel=0.003)


class Even(nn.Module):
    """Blocks whose parameters need no padding on up to 1024 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))


@pytest.mark.parametrize("num_ranks", [1, 4, 64, 1024])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_from_the_layouts_are_the_formulas_where_nothing_is_padded(stage: int, num_ranks: int) -> None:
    with torch.device("meta"):
        model = Even()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    plan = fzero.plan(model, {"fp16": {"enabled": True}, "zero_optimization": zero}, world_size=num_ranks)
    counters = 4 * len(plan.flat_buffers)  # Adam's steps
    assert sum(plan.bytes_per_rank.values()) - counters == zero_nbytes(3 * 256**2, num_ranks, stage)
    assert fzero.planner.column(model, "", {**FP16, "zero_optimization": zero}, num_ranks).padding_nbytes == 0


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
    estimates.estimate_zero2_model_states_mem_needs_all_cold(2851e6, 8, 1, formula="old", show=lines.append)
    assert lines == DEEPSPEED["2, old"].strip("\n").splitlines()
    lines.clear()
    estimates.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, 8, 1, show=lines.append)
    assert lines == DEEPSPEED["3"].strip("\n").splitlines()


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (2, 8), (16, 4)])
def test_the_estimators_formulas_are_those_of_0_19(nodes: int, gpus: int) -> None:
    psi, layer, num = 1_000_000, 30_000, nodes * gpus
    two, three = estimates.estimate_zero2_model_states_mem_needs, estimates.estimate_zero3_model_states_mem_needs
    assert two(psi, gpus, nodes) == (psi * max(4 * num, 16) * 1.5, 2 * psi)
    assert two(psi, gpus, nodes, False) == (4 * psi * gpus * 1.5, 2 * psi + 18 * psi // num)
    assert two(psi, gpus, nodes, False, formula="old") == (4 * psi * gpus * 1.5, 4 * psi + 16 * psi // num)
    assert three(psi, layer, gpus, nodes) == (18 * psi / nodes * 1.5, 4 * layer, 4 * layer)
    assert three(psi, layer, gpus, nodes, zero_init=False)[0] == psi * max(4 * gpus, 18 / nodes) * 1.5
    opt_only = three(psi, layer, gpus, nodes, True, False)
    assert opt_only == (16 * psi / nodes * 1.5, 4 * layer + 2 * psi // num, 4 * layer)
    none = three(psi, layer, gpus, nodes, False, False)
    assert none == (4 * layer * gpus * 1.5, 4 * layer + 18 * psi // num, 4 * layer)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_estimators_are_deepspeeds_own_to_the_byte_and_print_the_same() -> None:
    program = [sys.executable, str(Path(__file__).with_name("deepspeed_estimates.py"))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stderr.splitlines()[-1])
    assert deepspeed_estimates.estimates(stage_1_and_2, stage3) == theirs


def test_the_estimators_count_tied_parameters_once_and_a_layer_without_its_children() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(10, 10, bias=False), nn.Sequential(nn.Linear(10, 30), nn.Linear(10, 10, bias=False))
        )
    model[1][1].weight = model[0].weight
    assert estimates.model_to_params(model) == (100 + 330, 330)
    lines: list[str] = []
    estimates.estimate_zero3_model_states_mem_needs_all_live(model, show=lines.append)
    assert len(lines) == 10


# --- working buffers ---------------------------------------------------------------------------------------------


class Counted:
    """Counts the bytes of full flat buffers that are alive on each rank, by what they were taken for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.most: defaultdict[str, int] = defaultdict(int)
        purposes: dict[tuple[int, int], str] = {}
        take, give = staging.Scratch.take, staging.Scratch.give

        def counted_take(scratch: staging.Scratch, *args: Any) -> Tensor:
            flat = take(scratch, *args)
            caller = sys._getframe(1).f_code.co_name
            purpose = {"_gather": "gathers", "_flat_grad": "reductions"}.get(caller, caller)
            purposes[id(scratch), flat.data_ptr()] = purpose
            self.alive[id(scratch), purpose] += flat.nbytes
            self.most[purpose] = max(self.most[purpose], self.alive[id(scratch), purpose])
            return flat

        def counted_give(scratch: staging.Scratch, flat: Tensor) -> None:
            if purpose := purposes.pop((id(scratch), flat.data_ptr()), ""):
                self.alive[id(scratch), purpose] -= flat.nbytes
            give(scratch, flat)

        monkeypatch.setattr(staging.Scratch, "take", counted_take)
        monkeypatch.setattr(staging.Scratch, "give", counted_give)


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
    step = fzero.make_train_step(make(Uneven), cfg, mesh=fzero.Fake("data", 3))
    ranks = LockstepRanks(step.recipe, 3)
    state = ranks.init()
    for _ in range(2):  # the order of gathers is known from the second on
        state, _ = ranks(state, stacked([vectors(rank, 4) for rank in range(3)]))
    planned = working_buffers(ranks.plan)
    assert counted.most["gathers"] == planned.gathers
    assert counted.most["reductions"] == planned.reductions
    assert bool(planned.gathers) == (stage == 3)
    assert bool(planned.reductions) == (stage > 1 or precision == "wide gradients")


def test_planned_pools_of_host_memory_are_those_that_a_step_with_files_makes(tmp_path: Path) -> None:
    block = {"device": "nvme", "nvme_path": str(tmp_path)}
    for precision in ({}, {"bf16": {"enabled": True}}):
        for zero in (
            {"offload_optimizer": block},
            {"offload_optimizer": block, "offload_param": block | {"max_in_cpu": 0}},
        ):
            step = fzero.make_train_step(make(Uneven), config(3, **zero) | precision)
            files = offload.files_of(step.init())
            pools = sum(mover.pool.num * mover.pool.nbytes for mover in files._movers.values())
            planned = working_buffers(step.plan).host_pool - step._offload._staged_nbytes
            assert pools >= planned > 0.5 * pools, "buffers of the pool are rounded up to whole blocks of the files"
            files.close()


# --- activations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 128), (1, 4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_traced_activations_are_what_a_running_step_makes(
    checkpoint: bool, precision: str, shape: tuple[int, int]
) -> None:
    """Counted by the same rule while an eager step runs on real tensors; of few tokens it is gradients that count."""
    with torch.device("meta"):
        model = filled(PlainGPT(3, 128), "cpu")
    tokens = torch.zeros(shape, dtype=torch.int64)
    cfg: dict[str, Any] = {"gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    cfg |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
    cfg |= {"activation_checkpointing": {"every": 1}} if checkpoint else {}
    batch = {"input_ids": tokens, "labels": tokens}
    traced = trace_activations(model, cfg, batch)
    step = fzero.make_train_step(model, cfg)
    state, _ = step(step.init(), batch)  # which takes what later steps keep
    alive = Alive()
    alive.ignore(iter([*optree.tree_leaves(state), tokens]))
    with alive:
        step(state, batch)
    assert alive.most == pytest.approx(traced.nbytes, rel=0.01), "and the step's own numbers"
    assert traced.nbytes == trace_activations(model.to("meta"), cfg, batch).nbytes, "values do not matter"


def test_checkpointing_saves_activations_and_costs_a_forward() -> None:
    tokens = torch.empty((1, 512), dtype=torch.int64, device="meta")
    batch, model = {"input_ids": tokens, "labels": tokens}, named("50M").model
    plain, again = (trace_activations(model, {}, batch, checkpoint=checkpoint) for checkpoint in (False, True))
    assert again.nbytes < plain.nbytes
    of_blocks = 2 * 512 * sum(p.numel() for p in model.blocks.parameters())  # type: ignore[union-attr]
    # Attention besides; and of each block not the last product, a third of them, whose result the backward does not need.
    assert 0.67 * of_blocks < again.flops - plain.flops < of_blocks


def test_operations_of_attention_on_the_cpu_are_counted() -> None:
    def flops(fused: bool) -> int:
        q = torch.randn(1, 2, 64, 128, requires_grad=True)
        with (
            counter() as counted,
            torch.nn.attention.sdpa_kernel(
                torch.nn.attention.SDPBackend.FLASH_ATTENTION if fused else torch.nn.attention.SDPBackend.MATH
            ),
        ):
            nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        return counted.get_total_flops()

    forward = 4 * 2 * 64 * 64 * 128
    assert (flops(False), flops(True)) == (3 * forward, 3.5 * forward), "the fused kernel computes its scores again"


# --- models by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["1M", "10M", "125M", "1.3B", "7B", "70e9", "175B", "1T"])
def test_a_count_gives_a_gpt_of_nearly_that_size(word: str) -> None:
    wanted = float(word[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[word[-1]] if word[-1] in "MBT" else float(word)
    found = named(word)
    # Tokens of a vocabulary of 32,000 have vectors of 128 at least, of which there are two.
    assert found.num_params == pytest.approx(max(wanted, 2 * 32_000 * 128), rel=0.03)
    assert all(param.is_meta for param in found.model.parameters())
    assert f"{sum(1 for _ in found.model.blocks)} blocks" in found.told  # type: ignore[arg-type, misc]


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
    assert of_file.num_params == of_folder.num_params < 100_000 and "LlamaForCausalLM" in of_file.told
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **tiny}))
    assert named(str(tmp_path)).num_params == of_file.num_params, "by its type"
    assert named("test_planner:make_even").num_params == 3 * 256**2
    assert all(x.is_meta for found in (of_file, named("GPT2Config")) for x in found.model.parameters())


WRONG = {
    "nonsense": r"^model: 'nonsense' must be a count of parameters \(7B\), an import path",
    "meta-llama/Llama-2-7b": r"nothing is downloaded",
    "no.such.module:fn": r"^model: 'no.such.module:fn' .* gave ModuleNotFoundError: No module named 'no'; mend it",
    "test_planner:fails": r"gave KeyError: 'no such thing'",
    "test_planner:WRONG": r"must give a torch.nn.Module, got dict",
    "LlamaTokenizer": r"must be a model or a configuration of transformers",
    "1": r"must be between 100K and 100T, got 1",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_word_that_is_no_model_is_told(word: str) -> None:
    with pytest.raises(ModelError, match=WRONG[word]):
        named(word)


# --- what fits ---------------------------------------------------------------------------------------------------

GIGA = 1e9
SIZES = (0.3, 1, 4, 8, 12, 20, 30, 60, 200)


@pytest.fixture(scope="module")
def billion() -> nn.Module:
    return named("1.3B").model


def test_more_memory_is_never_slower_and_what_fits_holds(billion: nn.Module, tmp_path: Path) -> None:
    found = [fzero.fit(billion, FP16, world_size=8, device_nbytes=size * GIGA) for size in SIZES]
    fitting = [(size, one.best) for size, one in zip(SIZES, found, strict=True) if one.best is not None]
    assert len(fitting) > 5 and found[0].best is None
    seconds = [best.seconds for _, best in fitting]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    for size, best in fitting:
        planned = fzero.plan(billion, best.column.keys, world_size=8)
        device = planned.bytes_by_memory["device"]
        assert best.device_nbytes == sum(device.values()) + working_buffers(planned).on_device <= size * GIGA
    found[-1].save(tmp_path / "fits.json")
    assert fzero.Config.load(tmp_path / "fits.json").zero_optimization.stage == fitting[-1][1].choice.stage
    with pytest.raises(fzero.ConfigError, match=r"^fit: nothing fits into 0.3 GB; .* needs the least of the device, "):
        found[0].save(tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_the_ladder_goes_one_change_at_a_time_from_the_given_configuration(billion: nn.Module) -> None:
    tokens = torch.empty((1, 256), dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    found = fzero.fit(billion, FP16, world_size=4, device_nbytes=6 * GIGA, nvme_path="/local", batch=batch)
    names = [rung.name for rung in found.ladder]
    assert names[:5] == [
        "as it is", "activation checkpointing", "stage 2", "optimizer state in host memory", "stage 3"
    ]  # fmt: skip
    assert names[-1] == "smaller bucket, nothing early" and "optimizer state in files" in names
    device = [rung.device_nbytes for rung in found.ladder]
    assert device == sorted(device, reverse=True) and device[0] > 10 * device[-1]
    for before, after in pairwise(found.ladder):
        fields = ("stage", "optimizer", "params", "checkpoints", "small")
        assert sum(getattr(before.choice, name) != getattr(after.choice, name) for name in fields) == 1
    assert found.ladder[0].column.keys == FP16, "as it is"
    later = fzero.fit(billion, FP16 | {"zero_optimization": {"stage": 3}}, world_size=4, device_nbytes=60 * GIGA)
    assert later.best is not None and later.best.choice.stage == 3, "no stage below the given one"
    for rung in found.ladder:
        assert rung.device_nbytes == rung.column.nbytes("device") + rung.activations > rung.activations > 0
        assert Limits(rung.device_nbytes).hold(rung) and not Limits(rung.device_nbytes - 1).hold(rung)
        host = rung.column.nbytes("host")
        assert Limits(math.inf, host).hold(rung) and not (host and Limits(math.inf, host - 1).hold(rung))


def test_a_unit_larger_than_the_default_limit_raises_it_and_says_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000, bias=False) for _ in range(2)))
    compared = fzero.compare_plans(model, FP16, world_size=4)
    assert compared["stage 3"].keys["zero_optimization"]["stage3_max_live_parameters"] == 2 * 40_000**2
    assert "holds the two largest units" in compared["stage 3"].note
    refused = fzero.compare_plans(model, FP16 | {"zero_optimization": {"stage3_max_live_parameters": 5}}).refused
    assert "stage3_max_live_parameters: must hold the largest unit" in refused["stage 3"], "what was given stays"


def test_seventy_billion_parameters_on_1024_ranks_are_compared_within_three_seconds() -> None:
    model = named("70B").model
    started = time.process_time()
    compared = fzero.compare_plans(model, world_size=1024)
    str(compared)
    assert time.process_time() - started < 3
    assert sum(compared["stage 3"].plan.bytes_per_rank.values()) < 1.2e9
