"""The laws of saving and loading: what is loaded is what was saved, whoever loads it, and training goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from ranks import RankPool
from test_reshard import Normed, Setting, assert_same, paths, settings, states_of, step_of
from torch import Tensor, nn
from training import Odd, config, make, part, vectors

import fzero
from fzero.checkpoint_plan import parts_to_save

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where many checkpoints are written in a short time."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@cache
def simulated(setting: Setting) -> fzero.LockstepRanks:
    return fzero.simulate(step_of(setting), by="lockstep")


def without_grads(state: Any) -> Any:
    return state._replace(grads=optree.tree_map(torch.zeros_like, state.grads))


# --- what is loaded is what was saved ----------------------------------------------------------------------------


@given(paths(2))
def test_what_is_loaded_on_any_ranks_is_what_these_would_cut_of_the_whole_state(path: list[Setting]) -> None:
    old, new = map(step_of, path)
    with TemporaryDirectory(dir=MEMORY) as folder:
        fzero.save(fzero.stacked(states_of(old)), folder, step=simulated(path[0]))
        loaded = fzero.load(folder, step=simulated(path[1])).state
    assert_same(fzero.unstacked(loaded, new.world_size), states_of(new))


@given(settings("AdamW", precisions=("float32", "bfloat16")))
def test_all_ranks_together_write_each_element_once_and_about_as_much_each(setting: Setting) -> None:
    step, written = step_of(setting), dict[tuple[str, int], int]()
    numels = []
    for rank in range(setting.world_size):
        parts = list(parts_to_save(step.plan, rank, {}))
        numels.append(sum(own.stop - own.start for own in parts))
        for key, i in ((own.key, i) for own in parts for i in range(own.start, own.stop)):
            written[key, i] = written.get((key, i), 0) + 1
    assert set(written.values()) == {1}
    expected = [f"model.{name}" for name, _ in (*make(Normed).named_parameters(), *make(Normed).named_buffers())]
    assert {key for key, _ in written if key.startswith("model.")} == {n for n in expected if "empty" not in n}
    tensors = 4 * sum(len(unit.buffers) for unit in step.plan.units) + len(step.plan.buffers)
    assert max(numels) - min(numels) <= 32 * tensors * setting.world_size  # of alignment and padding


# --- training goes on --------------------------------------------------------------------------------------------


class Moody(nn.Module):
    """A model that draws random numbers and has statistics, so that all of the state counts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm, self.dropout, self.head = nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(torch.tanh(block(x)))
        return nn.functional.mse_loss(self.head(self.norm(x)), y)


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 7}}},
    "bf16": {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"buffer_dtype": "bf16"}},
    "fp16": {
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 17, "loss_scale_window": 3},
        "data_types": {"buffer_dtype": "fp16"},
    },
    "accumulation": {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3}}},
    "Adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}},
    "loco": {"zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}},
}


def config_of(kind: str, stage: int) -> dict[str, Any]:
    cfg = config(stage) | KINDS[kind]
    return cfg | {"zero_optimization": config(stage)["zero_optimization"] | KINDS[kind].get("zero_optimization", {})}


def batch(number: int, world_size: int) -> Any:
    return optree.tree_map(lambda x: x.unflatten(0, (world_size, 8)), vectors(number, 8 * world_size, 8))


def run(step: Any, state: Any, numbers: range, batch_of: Callable[[int], Any]) -> Any:
    for number in numbers:
        state, _ = step(state, batch_of(number))
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 3), (2, 2), (3, 1), (3, 3)])
def test_five_steps_and_five_more_after_a_load_are_ten_steps_bit_for_bit(
    kind: str, stage: int, world_size: int, folder: Path
) -> None:
    def ranks(seed: int) -> fzero.LockstepRanks:
        made = fzero.make_train_step(make(Moody, seed), config_of(kind, stage), seed=seed)
        return fzero.simulate(made, world_size, by="lockstep")

    def batches(number: int) -> Any:
        return batch(number, world_size)

    step = ranks(0)
    halfway = run(step, step.init(), range(5), batches)
    fzero.save(halfway, folder, step=step, client={"next": 5})
    ten = run(step, halfway, range(5, 10), batches)
    again = ranks(1)  # with other weights and another seed, as a new process might have
    loaded = fzero.load(folder, step=again)
    assert_same([run(again, loaded.state, range(loaded.client["next"], 10), batches)], [ten])


def train_save_load(cfg: dict[str, Any], folder: str, compile: Any) -> tuple[Any, Any]:
    options = {"compile": compile, "compile_backend": "aot_eager"} if compile else {}

    def batches(number: int) -> Any:
        return part(vectors(number, 8 * step.world_size, 8), step.rank, step.world_size)

    step = fzero.make_train_step(make(Moody), cfg, **options)
    halfway = run(step, step.init(), range(3), batches)
    fzero.save(halfway, folder, step=step)
    through = run(step, halfway, range(3, 5), batches)
    again = fzero.make_train_step(make(Moody, 1), cfg, **options)
    return through, run(again, fzero.load(folder, step=again).state, range(3, 5), batches)


@pytest.mark.parametrize(
    ("stage", "world_size", "compile"), [(0, 2, None), (1, 2, None), (2, 3, None), (3, 2, None), (3, 2, "step")]
)
def test_on_processes_training_goes_on_bit_for_bit(
    ranks: RankPool, stage: int, world_size: int, compile: Any, folder: Path
) -> None:
    for through, loaded in ranks(world_size, train_save_load, config_of("bf16", stage), str(folder), compile):
        assert_same([loaded], [through])


def save_states(setting: Setting, folder: str) -> None:
    step = fzero.make_train_step(step_of(setting).recipe.model, step_of(setting).recipe.cfg)
    fzero.save(states_of(step_of(setting))[step.rank], folder, step=step)


def load_states(setting: Setting, folder: str) -> Any:
    step = fzero.make_train_step(step_of(setting).recipe.model, step_of(setting).recipe.cfg)
    return fzero.load(folder, step=step).state


def test_processes_load_what_other_processes_saved_and_simulated_ranks_too(ranks: RankPool, folder: Path) -> None:
    path = [Setting(3, 3, precision="bfloat16"), Setting(1, 2, precision="bfloat16"), Setting(2, 4), Setting(0, 1)]
    ranks(path[0].world_size, save_states, path[0], str(folder))
    for setting in path[1:]:
        assert_same(ranks(setting.world_size, load_states, setting, str(folder)), states_of(step_of(setting)))
    loaded = fzero.load(folder, step=simulated(path[2])).state
    assert_same(fzero.unstacked(loaded, 4), states_of(step_of(path[2])))


# --- other jobs --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", range(4))
def test_a_plain_job_loads_the_parameters_under_their_own_names_tied_ones_too(stage: int, folder: Path) -> None:
    ranks = fzero.simulate(fzero.make_train_step(make(Odd), config(stage)), 3, by="lockstep")
    state = ranks.init()
    path = fzero.save(state, folder, step=ranks)
    model = make(Odd, seed=1)
    tensors = model.state_dict()
    dcp.load({"model": tensors}, checkpoint_id=path)
    assert_same([tensors], [type(tensors)(ranks.gather(state))])
    moments = {name: torch.full_like(x, 7.0) for name, x in model.named_parameters() if x.requires_grad}
    dcp.load({"optimizer": {"exp_avg": moments}}, checkpoint_id=path)
    assert not any(x.any() for x in moments.values())


class Odder(Odd):
    """Without a 0-d parameter, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def in_fsdp2(seed: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model, mesh = make(Odder, seed), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh)
    return dict(model.state_dict())


def load_in_fsdp2(folder: str) -> dict[str, Tensor]:
    tensors = in_fsdp2(seed=1)
    dcp.load({"model": tensors}, checkpoint_id=folder)
    return {name: x.full_tensor() for name, x in tensors.items()}


def save_in_fsdp2(folder: str, prefix: str) -> None:
    tensors = in_fsdp2(seed=2)
    dcp.save({prefix: tensors} if prefix else tensors, checkpoint_id=folder)


def test_fsdp2_loads_what_fzero_saved(ranks: RankPool, folder: Path) -> None:
    step = fzero.simulate(fzero.make_train_step(make(Odder), config(3)), 3, by="lockstep")
    state = step.init()
    path = fzero.save(state, folder, step=step)
    for found in ranks(2, load_in_fsdp2, str(path)):
        assert_same([found], [step.gather(state)])


@pytest.mark.parametrize("prefix", ["model", ""])
def test_fzero_loads_what_fsdp2_saved(ranks: RankPool, prefix: str, folder: Path) -> None:
    ranks(2, save_in_fsdp2, str(folder), prefix)
    step = fzero.simulate(fzero.make_train_step(make(Odder), config(3)), 3, by="lockstep")
    assert_same([step.gather(fzero.load_weights(folder, step=step))], [dict(make(Odder, seed=2).state_dict())])
