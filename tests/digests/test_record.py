"""Recordings: they change nothing, do not depend on how a job is divided, and show the
step, unit and tensor at which two runs part, and by how much.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, strategies as st
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fzero
from fzero.__main__ import main
from fzero.digests import Recording, RecordingError, Sums, diff, record, record_module
from fzero.digests.recording import NAME
from fzero.digests.sums import BLOCK, ZERO, K, sums_of
from fzero.optim.transforms import same_bits
from fzero.pipeline import PipelineModule
from sharding import Mesh

Batch = tuple[Tensor, Tensor]
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}


def sums(x: Tensor, *cuts: int) -> Sums:
    """Those of a tensor, added up over its parts."""
    flat, found = x.reshape(-1), ZERO
    bounds = [0, *cuts, len(flat)]
    for start, stop in itertools.pairwise(bounds):
        found = found + Sums.of(sums_of(flat[start:stop], start))
    return found


# --- sums -----------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool)


@given(
    numel=st.integers(0, 200) | st.integers(BLOCK - 2, 2 * BLOCK + 2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_sums_of_parts_add_up_to_those_of_the_whole(
    numel: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    x = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=4)))
    whole, parts = sums(x), sums(x, *cuts)
    assert whole.bits == parts.bits
    assert parts.distance(whole) <= 1e-13 * (1 + whole.norm)  # float64, in another order
    assert whole.norm == pytest.approx(torch.view_as_real(x).double().norm().item()
                                       if x.is_complex() else x.double().norm().item(), rel=1e-12)  # fmt: skip
    assert Sums.of_text(whole.text()) == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_the_sums(dtype: torch.dtype) -> None:
    x = (torch.randn(40) * 3).to(dtype)
    before, seen = sums(x), set()
    for byte in range(x.nbytes):
        for bit in range(1 if dtype == torch.bool else 8):
            y = x.clone()
            y.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(sums(y).bits)
    assert before.bits not in seen
    assert len(seen) == x.nbytes * (1 if dtype == torch.bool else 8)


def test_sums_know_the_place_of_an_element_and_not_its_dtype() -> None:
    x = torch.tensor([1.5, -2.0, 0.0, 4.0])
    assert sums(x).bits == sums(x.bfloat16()).bits == sums(torch.cat([x, torch.zeros(9)])).bits
    assert sums(x).bits != sums(x.flip(0)).bits
    assert sums(torch.zeros(70)) == ZERO == sums(torch.zeros(0))


@pytest.mark.parametrize("relative", [1e-6, 1e-2])
@pytest.mark.parametrize("kind", ["everywhere", "one column", "one constant", "alike in blocks"])
def test_sketches_estimate_how_far_two_tensors_are_apart(kind: str, relative: float) -> None:
    """The mean of 40 squared ratios has a deviation of √(2/K/40) = 4 %, each ratio of
    13 %.
    """
    generator, ratios = torch.Generator().manual_seed(3), []
    for number in range(40):
        x = torch.randn(2 * BLOCK + 100 * number, generator=generator, dtype=torch.float64)
        change = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if kind == "one column":
            change[torch.arange(len(x)) % (31 * 2 + number) != 3] = 0
        elif kind == "one constant":
            change.fill_(1)
        elif kind == "alike in blocks":
            change[BLOCK : 2 * BLOCK] = change[:BLOCK]
        y = x + relative * change
        ratios.append(sums(x).distance(sums(y)) / (x - y).norm().item())
    assert all(0.5 < ratio < 1.6 for ratio in ratios)
    if kind != "one constant":  # whose sketch has the same signs each time
        assert sum(ratio**2 for ratio in ratios) / 40 == pytest.approx(1, abs=0.16)


def test_one_different_element_is_measured_exactly() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y.view(torch.int32)[777] ^= 1 << 3
    assert sums(x).distance(sums(y)) == pytest.approx((x - y).abs().max().item(), rel=1e-6)
    small = torch.randn(K)
    assert sums(small).distance(sums(-small)) == pytest.approx(2 * small.norm().item())


# --- runs -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """With a tied, a frozen, an empty and a 0-d parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 7), nn.BatchNorm1d(7)
        self.h = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.h[2].weight = self.h[0].weight
        self.h[1].bias.requires_grad_(False)
        self.empty, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.scale + self.empty.sum()
        for layer in self.h:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.last(x)
        return out


UNITS = ("first", "h.0", "h.1", "last")


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def batches(num: int, *, rank: int = 0, world_size: int = 1) -> list[Batch]:
    """Those of a rank: parts of global batches of 12 rows."""
    generator = torch.Generator().manual_seed(5)
    whole = [
        (torch.randn(12, 4, generator=generator), torch.randn(12, 3, generator=generator))
        for _ in range(num)
    ]
    return [(x.chunk(world_size)[rank], y.chunk(world_size)[rank]) for x, y in whole]


def model_of_seed(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if not batch_norm:  # its statistics are of a rank's own rows
        model.norm = nn.LayerNorm(7)  # type: ignore[assignment]
    return model


def made(stage: int, cfg: Mapping[str, Any] = {}, **keys: Any) -> fzero.TrainStep:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    full = {"optimizer": ADAM, "zero_optimization": zero, "gradient_clipping": 0.5} | cfg
    model = keys.pop("model", None) or model_of_seed()
    return fzero.make_train_step(model, full, **{"units": UNITS, "loss_fn": loss_of} | keys)


def trained(
    folder: Path | str,
    stage: int = 0,
    *,
    num: int = 4,
    every: int = 1,
    between: Callable[[int, Any], None] = lambda number, state: None,
    **keys: Any,
) -> dict[str, Tensor]:
    """Records some steps; the final weights."""
    step = made(stage, **keys)
    recorded, state = record(step, folder, every=every), step.init()
    rows = batches(num, rank=step.data_rank, world_size=step.data_world_size)
    for number, batch in enumerate(rows):
        between(number, state)
        state, _ = recorded(state, batch)
    return step.gather(state)


WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "in one graph": {"compile": "step", "compile_backend": "aot_eager"},
    "blocks": {"compile": "block", "compile_backend": "aot_eager"},
    "kept": {"donate": False},
    "fp16": {
        "cfg": {
            "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 40, "hysteresis": 1}
        }
    },
    "accumulated": {"cfg": {"gradient_accumulation_steps": 3}},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_recorded_step_has_the_bits_of_the_step_and_takes_the_same_states(
    stage: int, way: str, tmp_path: Path
) -> None:
    steps = [made(stage, **WAYS[way]) for _ in range(2)]
    calls = [record(steps[0], tmp_path, every=2), steps[1]]
    states = [step.init() for step in steps]
    for batch in batches(5):
        before = states[0]
        found = [call(state, batch) for call, state in zip(calls, states, strict=True)]
        states = [state for state, _ in found]
        pairs = zip(*map(optree.tree_leaves, found), strict=True)
        assert all(same_bits(x, y) for x, y in pairs)  # gradients of an overflow are NaN
        if way == "kept":
            calls[0](before, batch)
        else:
            with pytest.raises(ValueError, match="must not be used again"):
                calls[0](before, batch)
    steps_of = [step.step for step in Recording.load(tmp_path).steps]
    if way == "fp16":  # the first updates are skipped, and are not counted
        assert {*steps_of} <= {0, 2, 4} and steps_of[:2] == [0, 0]
    else:
        assert [*dict.fromkeys(steps_of)] == [0, 2, 4]


def test_two_equal_runs_have_no_difference(tmp_path: Path) -> None:
    for name in "ab":
        trained(tmp_path / name)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.first is None and found.beyond is None and not found.settings
    assert "All bits of 4 steps are equal." in str(found)
    assert {part.quantity for part in found.parts} >= {
        "given weight", "loss", "gradient", "grad_norm", "exp_avg", "exp_avg_sq", "count", "weight",
    }  # fmt: skip
    assert {*found.a.steps[0].given} == {"weight"}
    tensors = {part.tensor for part in found.parts if part.quantity == "weight"}
    assert tensors == {name for name, p in model_of_seed().named_parameters() if p.numel()}


def _trained(folder: str, *args: Any, **keys: Any) -> dict[str, Tensor]:
    if keys.pop("batch_norm", False):
        keys["model"] = model_of_seed(batch_norm=True)
    return trained(folder, *args, **keys)


def relative(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    square = sum((a[name].double() - b[name].double()).square().sum().item() for name in a)
    return math.sqrt(square) / math.sqrt(sum(x.double().square().sum().item() for x in a.values()))


def test_recordings_do_not_depend_on_how_a_job_divides_its_state(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Stages, meshes and placements make no difference in a bit, another number of ranks
    one of rounding, which is measured.
    """
    first = trained(tmp_path / "one rank")
    for world_size in (2, 3):
        runs: dict[str, tuple[int, dict[str, Any]]] = {
            f"stage {stage}": (stage, {}) for stage in range(4)
        }
        if world_size == 2:
            host = {"device": "cpu"}
            runs |= {
                "host": (3, {"cfg": {"zero_optimization": {
                    "stage": 3, "offload_optimizer": host, "offload_param": host}}}),
                "files": (3, {"cfg": {"zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")},
                    "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}}}}),
            }  # fmt: skip
        folder = tmp_path / str(world_size)
        for name, (stage, keys) in runs.items():
            last = ranks(world_size, _trained, str(folder / name), stage, **keys)[0]
            found = diff(folder / "stage 0", folder / name)
            assert found.first is None, (name, str(found))
            across = diff(tmp_path / "one rank", folder / name)
            assert across.first is not None and across.beyond is None, (name, str(across))
            assert "by rounding only" in across.conclusion
            (*_, estimate) = across.growth()["weight"].values()
            # of the tensors that differ most, each to 13 %
            assert estimate == pytest.approx(relative(first, last), rel=0.4)


def simulated(folder: Path, stage: int, world_size: int, **keys: Any) -> None:
    """Records three steps of simulated ranks."""
    mesh, zero = keys.pop("mesh", None), keys.pop("zero", {})
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | zero
    cfg = {"zero_optimization": zero} | keys.pop("cfg", {})
    axis = fzero.comms.AbstractAxis("data", world_size, mesh=mesh)
    step = fzero.simulate(made(stage, cfg, mesh=axis, **keys), world_size, mesh=mesh, by="lockstep")
    recorded, state = record(step, folder), step.init()
    for x, y in batches(3):
        rows = x.view(world_size, -1, 4), y.view(world_size, -1, 3)
        state, _ = recorded(state, rows)


MESHES: dict[str, dict[str, Any]] = {
    "hybrid": {"mesh": Mesh.of(node=2, data=2)},
    "hpZ": {"zero": {"zero_hpz_partition_size": 2}},
    "MiCS": {"zero": {"mics_shard_size": 2}},
}


@pytest.mark.parametrize("name", MESHES)
def test_replicas_and_secondary_shards_count_once(name: str, tmp_path: Path) -> None:
    trained(tmp_path / "one", num=3)
    for stage in (1, 3) if name == "hybrid" else (3,):
        simulated(tmp_path / str(stage), stage, 4, **MESHES[name])
        found = diff(tmp_path / "one", tmp_path / str(stage))
        assert found.first is not None and found.beyond is None, str(found)
        of = {part.quantity for part in found.parts}
        assert {"gradient", "exp_avg", "weight"} <= of


OPTIMIZERS = {
    "SGD": {"count"},
    "Lion": {"count", "exp_avg"},
    "Muon": {"count", "momentum", "exp_avg", "exp_avg_sq"},
    "Adafactor": {"count", "row_var", "col_var", "variance"},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_tensors_of_each_optimizer_are_recorded_whole(kind: str, tmp_path: Path) -> None:
    cfg = {"optimizer": {"type": kind, "params": {"lr": 1e-2}}}
    for stage in (0, 3):
        simulated(tmp_path / str(stage), stage, 2, cfg=cfg)
    found = diff(tmp_path / "0", tmp_path / "3")
    assert found.first is None, str(found)
    of = {part.quantity for part in found.parts}
    assert OPTIMIZERS[kind] <= of and not found.notes


SIXTEEN: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"bf16": {"enabled": True, "auto_cast": True}}, 5e-2),
    "float16": ({"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8}}, 1e-2),
}


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_runs_of_other_precisions_are_compared_by_value(dtype: str, tmp_path: Path) -> None:
    cfg, tolerance = SIXTEEN[dtype]
    simulated(tmp_path / "fp32", 3, 2)
    simulated(tmp_path / "16", 3, 2, cfg=cfg)
    found = diff(tmp_path / "fp32", tmp_path / "16")
    assert found.tolerance == tolerance and dtype in found.settings["precision"][1]
    first = [part for part in found.parts if part.step == 0]
    # the masters; a frozen parameter may have none
    given = [x for x in first if x.quantity == "given weight" and x.tensor != "h.1.bias"]
    assert given and all(x.is_same for x in given), [x.tensor for x in given if not x.is_same]
    grads = [x for x in first if x.quantity == "gradient"]  # without the loss scale
    assert grads and all(x.is_same or 1e-5 < x.relative < 10 * tolerance for x in grads)
    assert all(x.is_same for x in found.parts if x.quantity == "loss_scale")


def test_a_loss_that_is_a_sum_gives_the_gradients_of_the_mean(tmp_path: Path) -> None:
    def weighted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(y.numel()))

    for name, keys in (("mean", {}), ("sum", {"loss_fn": weighted})):
        simulated(tmp_path / name, 2, 3, **keys)
    found = diff(tmp_path / "mean", tmp_path / "sum")
    assert found.beyond is None, str(found)


def test_module_buffers_are_recorded(ranks: RankPool, tmp_path: Path) -> None:
    for stage in (0, 3):
        ranks(2, _trained, str(tmp_path / str(stage)), stage, batch_norm=True)
    found = diff(tmp_path / "0", tmp_path / "3")
    assert found.first is None
    of = {part.tensor for part in found.parts if part.quantity == "module buffer"}
    assert of == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_gradient_that_is_only_rounding_is_not_beyond_it(ranks: RankPool, tmp_path: Path) -> None:
    """A bias before BatchNorm has no influence, so its gradient is what rounding leaves."""
    cfg = {"gradient_accumulation_steps": 2}
    for stage in (0, 3):
        ranks(2, _trained, str(tmp_path / str(stage)), stage, batch_norm=True, cfg=cfg)
    found = diff(tmp_path / "0", tmp_path / "3")
    own = [x for x in found.parts if (x.quantity, x.tensor) == ("gradient", "first.bias")]
    assert max(x.relative for x in own) > 1e-2 and max(x.norm for x in own) < 1e-5
    assert found.beyond is None or found.beyond.quantity != "gradient"


# --- where runs part ------------------------------------------------------------------------------


def flip(x: Tensor, element: int, bit: int = 18) -> None:
    x.view(torch.int32)[element] ^= 1 << bit


def _flipped(folder: str, stage: int, kind: str) -> None:
    """A run of which one bit flips on the last rank, in step 2."""
    step = made(stage)
    unit = next(unit for unit in step.plan.units if unit.name == "h.1")
    (buffer,) = (b for b in unit.buffers if "h.1.weight" in b.layout.names)
    recorded, state = record(step, folder), step.init()
    rows = batches(4, rank=step.rank, world_size=step.world_size)
    is_last = step.rank == step.world_size - 1
    for number, batch in enumerate(rows):
        if number == 2 and is_last and kind != "gradient":
            of = {"weight": state.params, "exp_avg": state.optimizer}[kind][buffer.key]
            flat = of if kind == "weight" else of.exp_avg
            flip(flat, 5)
        with ExitStack() as stack:
            if number == 2 and is_last and kind == "gradient":
                kind_of_program = type(step.runtime.program)
                stack.enter_context(
                    patch.object(
                        kind_of_program, "__call__", flipping(kind_of_program.__call__, buffer.key)
                    )
                )
            state, _ = recorded(state, batch)


def flipping(program: Callable[..., Any], key: str) -> Callable[..., Any]:
    """A program that flips a bit of a reduced gradient."""

    def call(self: Any, run: Any, state: Any, micro_batches: Any) -> Any:
        collected = program(self, run, state, micro_batches)
        flip(collected.state.grads[key], 5)
        return collected

    return call


PLACES = {"weight": "given weight", "gradient": "gradient", "exp_avg": "exp_avg"}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (3, 2)])
def test_a_flipped_bit_is_found_in_its_step_unit_and_tensor(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, world_size: int
) -> None:
    ranks(world_size, _trained, str(tmp_path / "right"), stage)
    ranks(world_size, _flipped, str(tmp_path / "wrong"), stage, kind)
    found = diff(tmp_path / "right", tmp_path / "wrong")
    assert found.first == found.beyond and found.first is not None
    place = found.first.step, found.first.quantity, found.first.unit, found.first.tensor
    assert place == (2, PLACES[kind], "h.1", "h.1.weight")
    assert next(part.step for part in found.parts if not part.is_same) == 2


def test_a_wrong_optimizer_is_found_in_its_first_tensor_also_across_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    trained(tmp_path / "right")
    wrong = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "betas": [0.9, 0.99]}}
    ranks(2, _trained, str(tmp_path / "wrong"), 3, cfg={"optimizer": wrong})
    found = diff(tmp_path / "right", tmp_path / "wrong")
    assert found.first is not None and found.beyond is not None
    assert found.first.step == 0 and found.first.quantity in ("loss", "gradient")
    assert (found.beyond.step, found.beyond.quantity) == (0, "exp_avg_sq")
    # (1 - 0.999) and (1 - 0.99) of the same gradient
    assert found.beyond.relative == pytest.approx(0.9, rel=0.25)
    assert found.settings["stage"] == ("0", "3")
    growth = found.growth()["weight"]
    assert growth[3] > growth[0]


def plain_run(folder: Path, *, lr: float = 1e-2, clips: bool = True, num: int = 4) -> None:
    model = model_of_seed()
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=lr, weight_decay=0.01)
    recorded = record_module(model, optimizer, folder)
    for batch in batches(num):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(trains, 0.5 if clips else math.inf)
        recorded.note(loss=loss, grad_norm=norm)
        optimizer.step()
        optimizer.zero_grad()
    recorded.close()


def test_a_plain_loop_is_the_run_of_fzero_to_rounding(ranks: RankPool, tmp_path: Path) -> None:
    plain_run(tmp_path / "plain")
    trained(tmp_path / "one rank")
    ranks(3, _trained, str(tmp_path / "three"), 3)
    for name in ("one rank", "three"):
        found = diff(tmp_path / "plain", tmp_path / name)
        assert found.beyond is None, str(found)
        quantities = {part.quantity for part in found.parts}
        assert quantities >= {"loss", "gradient", "grad_norm", "lr", "exp_avg", "count", "weight"}
        # fzero knows the units
        assert {part.unit for part in found.parts if part.tensor == "h.1.weight"} == {"h.1"}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def _of_torch(folder: str, kind: str) -> None:
    model = small()
    if kind == "FSDP2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    record_module(model, optimizer, folder)
    for batch in batches(3, rank=dist.get_rank(), world_size=dist.get_world_size()):
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _small(folder: str) -> None:
    trained(folder, 3, num=3, model=small(), units=("0", "2"), cfg={"gradient_clipping": 0.0})


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_loop_of_ddp_or_fsdp2_is_recorded_in_full(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    ranks(2, _of_torch, str(tmp_path / "torch"), kind)
    ranks(2, _small, str(tmp_path / "fzero"))
    found = diff(tmp_path / "torch", tmp_path / "fzero")
    assert found.beyond is None, str(found)
    assert found.settings["ranks"] == ("2", "data 2")
    assert len([x for x in found.parts if x.quantity == "exp_avg" and x.norm]) == 3 * 4


@pytest.mark.parametrize(
    ("change", "quantity"), [({"lr": 2e-2}, "lr"), ({"clips": False}, "gradient")]
)
def test_a_port_that_forgets_something_parts_from_its_origin_there(
    tmp_path: Path, change: dict[str, Any], quantity: str
) -> None:
    plain_run(tmp_path / "plain", **change)
    trained(tmp_path / "fzero")
    found = diff(tmp_path / "plain", tmp_path / "fzero").beyond
    assert found is not None and (found.step, found.quantity) == (0, quantity)
    if quantity == "gradient":  # a backward begins with the last unit
        assert found.tensor == "last.bias"


def test_a_recorded_plain_loop_has_the_bits_of_the_loop(tmp_path: Path) -> None:
    results = []
    for is_recorded in (False, True):
        model = torch.compile(model_of_seed(), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_recorded:
            record_module(model, optimizer, tmp_path, every=2)
        for batch in batches(3):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        results.append([*model.parameters()])
    assert all(map(torch.equal, *results))
    found = Recording.load(tmp_path)
    assert [step.step for step in found.steps] == [0, 2] and "h.0.weight" in found.header.params
    assert "momentum" in found.steps[1].made


def test_simulated_ranks_are_recorded_as_real_ones(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _trained, str(tmp_path / "real"), 3)
    step = fzero.simulate(made(3), 2, by="lockstep")
    recorded, state = record(step, tmp_path / "simulated"), step.init()
    for x, y in batches(4):
        state, _ = recorded(state, (x.view(2, 6, 4), y.view(2, 6, 3)))
    assert diff(tmp_path / "real", tmp_path / "simulated").first is None
    with pytest.raises(ValueError, match="pass simulate"):
        record(fzero.simulate(made(3), 2, by="vmap"), tmp_path / "at once")


def _pipeline(folder: str, stages: int, order: str) -> None:
    torch.manual_seed(0)
    layers = PipelineModule(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), stages, loss_fn=F.mse_loss
    )
    cfg = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    step = fzero.make_train_step(
        layers, cfg, mesh=Mesh.of(pipe=stages, data=2 // stages), pipeline=order
    )
    recorded, state = record(step, folder), step.init()
    for number in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        state, _ = recorded(state, (x, -x))


def test_a_pipeline_is_recorded_as_a_whole(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("1f1b", "interleaved:2"):  # they hold other layers
        ranks(2, _pipeline, str(tmp_path / name), 2, name)
    found = diff(tmp_path / "1f1b", tmp_path / "interleaved:2")
    assert found.first is None
    assert len({part.tensor for part in found.parts if part.quantity == "gradient"}) == 8
    names = [f"{layer}.{name}" for layer in range(4) for name in ("weight", "bias")]
    assert [*found.a.header.params] == names


# --- files ----------------------------------------------------------------------------------------


def test_a_torn_line_is_left_out_and_a_resumed_run_replaces_what_it_repeats(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a" / NAME
    step = made(0)
    recorded, state = record(step, file.parent), step.init()
    rows = batches(6)
    for number, batch in enumerate(rows[:4]):
        if number == 2:
            fzero.save(state, tmp_path / "saved", step=step)
        state, _ = recorded(state, batch)
    del recorded
    with file.open("a") as out:
        out.write('{"step":4,"numbers":{"lo')  # a job that was killed
    assert [x.step for x in Recording.load(file).steps] == [0, 1, 2, 3]
    step = made(0)
    recorded, state = record(step, file.parent), fzero.load(tmp_path / "saved", step=step).state
    for batch in rows[2:]:
        state, _ = recorded(state, batch)
    assert [x.step for x in Recording.load(file).steps] == [0, 1, 2, 3, 4, 5]
    trained(tmp_path / "unbroken", num=6)
    assert diff(file.parent, tmp_path / "unbroken").first is None


def test_runs_recorded_at_other_intervals_are_compared_where_both_are(tmp_path: Path) -> None:
    trained(tmp_path / "a", num=5)
    trained(tmp_path / "b", num=5, every=2)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.first is None and found.steps == (0, 2, 4)


def test_an_error_of_a_step_is_recorded_with_its_gradients(tmp_path: Path) -> None:
    step = made(0)
    recorded, state = record(step, tmp_path), step.init()
    (x, y) = batches(1)[0]
    x[0, 0] = math.inf
    with pytest.raises(FloatingPointError):
        recorded(state, (x, y))
    (found,) = Recording.load(tmp_path).steps
    assert "not finite" in found.skipped
    assert math.isnan(found.made["gradient"]["first.weight"].norm)


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    trained(tmp_path / "a", num=2)
    with pytest.raises(RecordingError, match="must be a file that fzero"):
        diff(tmp_path / "a", tmp_path / "none")
    other = nn.Sequential(nn.Linear(4, 3))
    step = fzero.make_train_step(other, {}, loss_fn=loss_of)
    record(step, tmp_path / "other")(step.init(), batches(1)[0])
    with pytest.raises(RecordingError, match=r"'empty' is of shape \(0, 3\) in .* and missing in"):
        diff(tmp_path / "a", tmp_path / "other")
    with pytest.raises(RecordingError, match="missing in this run"):
        record(step, tmp_path / "a")
    step = made(0)
    first = record(step, tmp_path / "later")
    with pytest.raises(RecordingError, match="another one writes"):
        record(step, tmp_path / "later")
    del first
    with pytest.raises(RecordingError, match="must have a step in common"):
        diff(tmp_path / "a", tmp_path / "later")
    file = tmp_path / "a" / NAME
    file.write_text(file.read_text().replace('"step":1', '"step":"one"'))
    with pytest.raises(RecordingError, match=r"line 3 of .* must be one that fzero.record wrote"):
        diff(tmp_path / "a", tmp_path / "a")
    with pytest.raises(ValueError, match="every: must be a whole number"):
        record(step, tmp_path / "b", every=0)
    with pytest.raises(ValueError, match="step: must be a step"):
        record(nn.Linear(2, 2), tmp_path / "b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer: must be a torch"):
        record_module(other, step, tmp_path / "b")  # type: ignore[arg-type]


def _other_folders(folder: str) -> None:
    step = made(0)
    with pytest.raises(ValueError, match="dir must be the same on all ranks"):
        record(step, f"{folder}/{step.rank}")
    Path(f"{folder}/file").touch()
    with pytest.raises(RecordingError, match="file"):
        record(step, f"{folder}/file")


def test_all_ranks_raise_where_rank_0_cannot_write(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _other_folders, str(tmp_path))


def test_the_command_prints_a_table_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, cfg in (("a", {}), ("b", {}), ("c", {"gradient_clipping": 0.1})):
        trained(tmp_path / name, num=2, cfg=cfg)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["diff", a, b]) == 0
    assert main(["diff", a, c, "--tolerance", "9"]) == 0
    picture = tmp_path / "diff.png"
    assert main(["diff", a, c, "--json", "--picture", str(picture)]) == 1
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{") :])
    assert found["beyond_rounding"]["quantity"] == "exp_avg" and found["steps"] == [0, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["diff", a, str(tmp_path / "d")]) == 2
    assert "must be a file that fzero.record wrote" in capsys.readouterr().err
