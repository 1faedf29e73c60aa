"""The laws of saving and loading: what is loaded is what was saved, whoever loads it,
and training goes on from it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import given
from profiles import examples
from ranks import RankPool
from safetensors.torch import save_file
from test_reshard import Normed, Setting, assert_same, paths, settings, states_of, step_of
from torch import Tensor, nn
from training import Odd, config, make, part, vectors

import fzero
from fzero.__main__ import main
from fzero.checkpoint import folders as files
from fzero.checkpoint.layout import parts_to_save

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where many checkpoints are written in a short time."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@cache
def simulated(setting: Setting) -> fzero.simulation.LockstepRanks:
    return fzero.simulate(step_of(setting), by="lockstep")


def without_grads(state: Any) -> Any:
    return state._replace(grads=optree.tree_map(torch.zeros_like, state.grads))


# --- what is loaded is what was saved -------------------------------------------------------------


@examples(10)
@given(paths(2))
def test_what_is_loaded_on_any_ranks_is_what_these_would_cut_of_the_whole_state(
    path: list[Setting],
) -> None:
    old, new = map(step_of, path)
    with TemporaryDirectory(dir=MEMORY) as folder:
        fzero.save(fzero.simulation.stacked(states_of(old)), folder, step=simulated(path[0]))
        loaded = fzero.load(folder, step=simulated(path[1])).state
    assert_same(fzero.simulation.unstacked(loaded, new.world_size), states_of(new))


@given(settings("AdamW", precisions=("float32", "bfloat16")))
def test_all_ranks_together_write_each_element_once_and_about_as_much_each(
    setting: Setting,
) -> None:
    step, written = step_of(setting), dict[tuple[str, int], int]()
    numels = []
    for rank in range(setting.world_size):
        parts = list(parts_to_save(step.plan, rank, {}))
        numels.append(sum(own.stop - own.start for own in parts))
        for key, i in ((own.key, i) for own in parts for i in range(own.start, own.stop)):
            written[key, i] = written.get((key, i), 0) + 1
    assert set(written.values()) == {1}
    expected = [
        f"model.{name}"
        for name, _ in (*make(Normed).named_parameters(), *make(Normed).named_buffers())
    ]
    assert {key for key, _ in written if key.startswith("model.")} == {
        n for n in expected if "empty" not in n
    }
    tensors = 4 * sum(len(unit.buffers) for unit in step.plan.units) + len(step.plan.buffers)
    # of alignment and padding
    assert max(numels) - min(numels) <= 32 * tensors * setting.world_size


# --- training goes on -----------------------------------------------------------------------------


class Moody(nn.Module):
    """A model that draws random numbers and has statistics, so that all of the state
    counts.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm, self.dropout, self.head = (
            nn.BatchNorm1d(width),
            nn.Dropout(0.3),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(torch.tanh(block(x)))
        return nn.functional.mse_loss(self.head(self.norm(x)), y)


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 7}}
    },
    "bf16": {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"buffer_dtype": "bf16"}},
    "fp16": {
        "fp16": {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": 17,
            "loss_scale_window": 3,
        },
        "data_types": {"buffer_dtype": "fp16"},
    },
    "accumulation": {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3}}},
    "Adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}},
    "loco": {
        "zero_optimization": {
            "zero_quantized_gradients": True,
            "zeropp_loco_param": {"err_beta": 0.8},
        }
    },
}


def config_of(kind: str, stage: int) -> dict[str, Any]:
    cfg = config(stage) | KINDS[kind]
    return cfg | {
        "zero_optimization": config(stage)["zero_optimization"]
        | KINDS[kind].get("zero_optimization", {})
    }


def batch(number: int, world_size: int) -> Any:
    return optree.tree_map(
        lambda x: x.unflatten(0, (world_size, 8)), vectors(number, 8 * world_size, 8)
    )


def run(step: Any, state: Any, numbers: range, batch_of: Callable[[int], Any]) -> Any:
    for number in numbers:
        state, _ = step(state, batch_of(number))
    return state


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 3), (2, 2), (3, 1), (3, 3)])
def test_five_steps_and_five_more_after_a_load_are_ten_steps_bit_for_bit(
    kind: str, stage: int, world_size: int, folder: Path
) -> None:
    def ranks(seed: int) -> fzero.simulation.LockstepRanks:
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
    ("stage", "world_size", "compile"),
    [
        (0, 2, None),
        (1, 2, None),
        (2, 3, None),
        (3, 2, None),
        pytest.param(3, 2, "step", marks=pytest.mark.long),
    ],
)
def test_on_processes_training_goes_on_bit_for_bit(
    ranks: RankPool, stage: int, world_size: int, compile: Any, folder: Path
) -> None:
    for through, loaded in ranks(
        world_size, train_save_load, config_of("bf16", stage), str(folder), compile
    ):
        assert_same([loaded], [through])


def save_states(setting: Setting, folder: str) -> None:
    step = fzero.make_train_step(step_of(setting).spec.model, step_of(setting).spec.cfg)
    fzero.save(states_of(step_of(setting))[step.rank], folder, step=step)


def load_states(setting: Setting, folder: str) -> Any:
    step = fzero.make_train_step(step_of(setting).spec.model, step_of(setting).spec.cfg)
    return fzero.load(folder, step=step).state


def test_processes_load_what_other_processes_saved_and_simulated_ranks_too(
    ranks: RankPool, folder: Path
) -> None:
    path = [
        Setting(3, 3, precision="bfloat16"),
        Setting(1, 2, precision="bfloat16"),
        Setting(2, 4),
        Setting(0, 1),
    ]
    ranks(path[0].world_size, save_states, path[0], str(folder))
    for setting in path[1:]:
        assert_same(
            ranks(setting.world_size, load_states, setting, str(folder)),
            states_of(step_of(setting)),
        )
    loaded = fzero.load(folder, step=simulated(path[2])).state
    assert_same(fzero.simulation.unstacked(loaded, 4), states_of(step_of(path[2])))


# --- other jobs -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", range(4))
def test_a_plain_job_loads_the_parameters_under_their_own_names_tied_ones_too(
    stage: int, folder: Path
) -> None:
    ranks = fzero.simulate(fzero.make_train_step(make(Odd), config(stage)), 3, by="lockstep")
    state = ranks.init()
    path = fzero.save(state, folder, step=ranks)
    model = make(Odd, seed=1)
    tensors = model.state_dict()
    dcp.load({"model": tensors}, checkpoint_id=path)
    assert_same([tensors], [type(tensors)(ranks.gather(state))])
    moments = {
        name: torch.full_like(x, 7.0) for name, x in model.named_parameters() if x.requires_grad
    }
    dcp.load({"optimizer": {"exp_avg": moments}}, checkpoint_id=path)
    assert not any(x.any() for x in moments.values())


class Odder(Odd):
    """Without a 0-d parameter, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def in_fsdp2(seed: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model, mesh = (
        make(Odder, seed),
        dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)),
    )
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
    assert_same(
        [step.gather(fzero.load_weights(folder, step=step))],
        [dict(make(Odder, seed=2).state_dict())],
    )


# --- nothing is lost ------------------------------------------------------------------------------


def small(stage: int = 2, world_size: int = 2) -> tuple[fzero.simulation.LockstepRanks, Any]:
    step = fzero.simulate(
        fzero.make_train_step(make(Moody), config(stage)), world_size, by="lockstep"
    )
    return step, step.init()


def numbered(state: Any, number: int) -> Any:
    """The state after so many updates, in which every number tells it."""
    return optree.tree_map(lambda x: torch.full_like(x, number % 100), state)._replace(
        rng=state.rng
    )


@pytest.mark.parametrize(
    "name",
    ["fzero.json", "contents.json", ".metadata", "client.pt", "__0_0.distcp", "__1_0.distcp"],
)
def test_a_flipped_bit_is_found_anywhere_and_reported_with_file_and_tensor(
    name: str, folder: Path
) -> None:
    step, state = small()
    path = fzero.save(state, folder, step=step, client={"x": torch.arange(9)})
    content = (path / name).read_bytes()
    for place in torch.linspace(0, len(content) - 1, 12).int().tolist():
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        (path / name).write_bytes(damaged)
        with pytest.raises(fzero.CheckpointError, match=re.escape(name)) as raised:
            fzero.load(folder, step=step)
        if name.endswith("distcp"):
            slices = json.loads((path / files.CONTENTS).read_text())["slices"]
            (key,) = (s[0] for s in slices if s[5] == name and s[6] <= place < s[6] + s[7])
            assert repr(key) in str(raised.value)
    (path / name).write_bytes(content)
    fzero.load(folder, step=step)


def test_only_the_checkpoints_saved_last_are_kept_also_after_going_back(folder: Path) -> None:
    step, state = small()
    for number in (1, 2, 3, 2):
        state = state._replace(step=torch.full_like(state.step, number))
        fzero.save(state, folder, step=step, keep=2)
    assert {path.name for path in folder.iterdir() if path.name != files.JOB} == {
        "latest",
        "step-3",
        "step-2-2",
    }  # the other was there meanwhile
    assert fzero.load(folder, step=step).path.name == "step-2-2"
    fzero.save(state, folder, step=step, keep=2)
    assert {path.name for path in folder.iterdir() if path.name != files.JOB} == {
        "latest",
        "step-2",
        "step-2-2",
    }
    assert fzero.load(folder / "step-2-2", step=step).path.name == "step-2-2"


def test_fzero_that_is_not_installed_saves_and_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs from its source folder, as `make gpu` does with the Python of another
    machine.
    """
    step, state = small()

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("fzero.common.version.version", version)
    assert files.read_manifest(fzero.save(state, folder, step=step))["fzero"] == "not installed"
    assert_same(fzero.load(folder, step=step).state, state)


def limited(nbytes: int) -> Any:
    """With RLIMIT_FSIZE."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def context() -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return context()


def test_too_little_space_is_reported_before_anything_is_written(folder: Path) -> None:
    step, state = small()
    fzero.save(state, folder, step=step)
    with (
        limited(10_000),
        pytest.raises(fzero.CheckpointError, match=r"RLIMIT_FSIZE is 10,000; nothing was written"),
    ):
        fzero.save(numbered(state, 7), folder, step=step)
    with (
        patch.object(files.os, "statvfs", lambda path: SimpleNamespace(f_bavail=9, f_frsize=1000)),
        pytest.raises(
            fzero.CheckpointError, match=r"bytes free, and has 9,000; nothing was written"
        ),
    ):
        fzero.save(numbered(state, 7), folder, step=step)
    assert {path.name for path in folder.iterdir() if path.name != files.JOB} == {
        "latest",
        "step-0",
    }
    assert_same([fzero.load(folder, step=step).state], [without_grads(state)])


def test_a_disk_that_is_full_meanwhile_is_reported_on_all_ranks_and_nothing_is_left(
    folder: Path,
) -> None:
    step, state = small()
    fzero.save(state, folder, step=step)
    nothing = patch.object(files, "check_space", lambda *_: None)
    with (
        nothing,
        limited(10_000),
        pytest.raises(fzero.CheckpointError, match=r"make space on the disk.*on rank 0"),
    ):
        fzero.save(numbered(state, 7), folder, step=step)
    assert {path.name for path in folder.iterdir() if path.name != files.JOB} == {
        "latest",
        "step-0",
    }
    assert_same([fzero.load(folder, step=step).state], [without_grads(state)])


class Full:
    """A disk on which the n-th new file or folder cannot be made, nor any after it, as
    where no inodes are left.
    """

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        made, mkdir, opened = os.open, Path.mkdir, Path.open

        def take() -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def of_os(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT:
                take()
            return made(path, flags, *args, **kwargs)

        def of_path(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa"):
                take()
            return opened(path, mode, *args, **kwargs)

        def folder(path: Path, *args: Any, **kwargs: Any) -> None:
            if not path.exists():
                take()
            mkdir(path, *args, **kwargs)

        patch.setattr(os, "open", of_os)
        patch.setattr(Path, "open", of_path)
        patch.setattr(Path, "mkdir", folder)


def test_wherever_inodes_run_out_no_part_of_a_checkpoint_is_left(folder: Path) -> None:
    step, state = small()
    fzero.save(state, folder, step=step)
    for number in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            full = Full(patch, number)
            try:
                fzero.save(numbered(state, 7), folder, step=step)
            except fzero.CheckpointError as error:
                assert "No space left" in str(error)
            if full.left >= 0:
                break
        left = {path for path in folder.iterdir() if path.name not in (files.JOB, "latest")}
        assert left == {*files.whole_ones(folder)}, (number, left)
        assert_same([fzero.load(folder / "step-0", step=step).state], [without_grads(state)])
    assert number > 8


def test_a_checkpoint_may_be_published_as_soon_as_the_last_part_is_seen(tmp_path: Path) -> None:
    folder, rename = tmp_path / "being written", Path.rename
    folder.mkdir()

    def seen_at_once(self: Path, target: Path) -> Path:
        rename(self, target)
        return rename(folder, tmp_path / "whole")

    with patch.object(Path, "rename", seen_at_once):
        files.write_whole(folder / "part-1.json", b"part")
    assert (tmp_path / "whole" / "part-1.json").read_bytes() == b"part"


@pytest.mark.parametrize("wrong", ["names", "shapes", "optimizer", "dtype"])
def test_another_model_or_optimizer_is_reported_by_name(wrong: str, folder: Path) -> None:
    def ranks(model: nn.Module, cfg: Any) -> fzero.simulation.LockstepRanks:
        return fzero.simulate(fzero.make_train_step(model, cfg), 2, by="lockstep")

    step = ranks(make(Moody), config(2))
    fzero.save(step.init(), folder, step=step)
    model, cfg = make(Moody), config(1)
    if wrong == "names":
        model.extra = make(lambda: nn.Linear(2, 2))
        message = r"parameter 'extra.weight' must be in the checkpoint"
    elif wrong == "shapes":
        model, message = (
            make(lambda: Moody(9)),
            r"'model.blocks.0.weight' must have shape \(9, 9\) .* has \(8, 8\)",
        )
    elif wrong == "optimizer":
        cfg, message = (
            config(1, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
            r"'blocks.0.weight' must keep the same",
        )
    else:
        cfg = config(1) | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
        message = r"must not become narrower, and is float32 in the checkpoint but bfloat16"
    with pytest.raises(ValueError, match=message):
        fzero.load(folder, step=ranks(model, cfg))


def test_what_is_no_whole_checkpoint_is_reported(folder: Path) -> None:
    step, state = small()
    with pytest.raises(
        fzero.checkpoint.NoCheckpointError, match=r"must be a folder, and there is none"
    ):
        fzero.load(folder, step=step)
    folder.mkdir()
    with pytest.raises(
        fzero.checkpoint.NoCheckpointError, match=r"must hold 'latest' or fzero.json"
    ):
        fzero.load(folder, step=step)
    path = fzero.save(state, folder, step=step)
    half = files.begin(folder, 3)
    with pytest.raises(fzero.CheckpointError, match=r"was not written to its end"):
        fzero.load(half, step=step)
    with pytest.raises(
        fzero.CheckpointError, match=r"no other save to .* may be under way, and process \d+ on"
    ):
        fzero.save(state, folder, step=step)
    files.write_manifest(path, files.read_manifest(path) | {"format": 2})
    with pytest.raises(
        fzero.CheckpointError,
        match=r"must be at most 1, got 2: a newer fzero wrote it .*update fzero",
    ):
        fzero.load(folder, step=step)
    with pytest.warns(
        UserWarning, match=r"client\['a'\]: a object is left out; store numbers, strings"
    ):
        fzero.save(state, folder / "other", step=step, client={"a": object(), "b": Path("x")})
    assert fzero.load(folder / "other", step=step).client == {"b": Path("x")}


# --- while the next steps run ---------------------------------------------------------------------


def save_while_training(folder: str) -> tuple[Any, Any, Any, float, str]:
    step = fzero.make_train_step(make(Moody), config(2))

    def batches(number: int) -> Any:
        return part(vectors(number, 8 * step.world_size, 8), step.rank, step.world_size)

    state = run(step, step.init(), range(2), batches)
    expected = optree.tree_map(torch.clone, state)
    first = fzero.start_save(state, folder, step=step, client="first")
    state = run(step, state, range(2, 6), batches)  # writes into the very tensors
    second = fzero.start_save(state, folder, step=step, after=first)
    reported = ""
    if step.rank == 0:
        try:
            files.begin(Path(folder), 9)
        except fzero.CheckpointError as error:
            reported = str(error)
    second.wait()
    loaded = fzero.load(Path(folder) / "step-2", step=step)
    return expected, loaded.state, state, loaded.client, reported


def test_steps_go_on_while_a_checkpoint_is_written_which_holds_what_was_given(
    ranks: RankPool, folder: Path
) -> None:
    for expected, loaded, state, client, _ in ranks(2, save_while_training, str(folder)):
        assert_same([loaded], [without_grads(expected)])
        assert not torch.equal(state.params["blocks.0/float32"], loaded.params["blocks.0/float32"])
        assert client == "first"
    assert (folder / "latest").read_text() == "step-6\n"


def test_what_is_written_meanwhile_asks_nothing_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose parameters are a running step's: asking for them gathers."""
    step = fzero.make_train_step(make(Moody), config(3))
    asked = set()
    for name in ("named_parameters", "named_buffers", "named_modules", "state_dict"):
        ask = getattr(nn.Module, name)

        def noted(*args: Any, ask: Any = ask, **kwargs: Any) -> Any:
            asked.add(threading.current_thread().name)
            return ask(*args, **kwargs)

        monkeypatch.setattr(nn.Module, name, noted)
    list(step.spec.model.named_parameters())
    fzero.start_save(step.init(), folder, step=step).wait()
    assert asked == {threading.current_thread().name}


def fail_while_training(folder: str) -> list[str]:
    step = fzero.make_train_step(make(Moody), config(2))
    broken = patch.object(files, "write_manifest", side_effect=OSError("no"))
    with broken:
        saving = fzero.start_save(step.init(), folder, step=step)
        found = []
        for _ in range(2):
            try:
                saving.wait()
            except fzero.CheckpointError as error:
                found.append(str(error))
    return found


def test_what_goes_wrong_meanwhile_is_reported_by_wait_on_all_ranks(
    ranks: RankPool, folder: Path
) -> None:
    for reported in ranks(2, fail_while_training, str(folder)):
        assert len(reported) == 2 and all(
            "got no; make space" in line and "(on rank 0)" in line for line in reported
        )
    assert [path.name for path in folder.iterdir()] == [files.JOB]


# --- weights from elsewhere, and for others -------------------------------------------------------


def llama() -> nn.Module:
    cfg = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(cfg)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", ["step", "checkpoint"])
def test_from_pretrained_loads_what_is_exported_and_fzero_loads_it_again(
    stage: int, way: str, tmp_path: Path
) -> None:
    cfg = config(stage) | {"bf16": {"enabled": True}}
    step = fzero.simulate(fzero.make_train_step(make(llama), cfg), 2, by="lockstep")
    state = step.init()
    out, expected = tmp_path / "out", step.gather(state)
    if way == "step":
        fzero.checkpoint.save_16bit_model(state, out, step=step, max_file_nbytes=4000)
    else:
        fzero.save(state, tmp_path / "saved", step=step)
        assert main(["export", str(tmp_path / "saved"), str(out), "--max-file-nbytes", "4000"]) == 0
    make(llama).config.save_pretrained(out)
    names = {path.name for path in out.iterdir()}
    assert "model.safetensors.index.json" in names and "model-00001-of-00003.safetensors" in names
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert_same([dict(found.state_dict())], [{name: x.bfloat16() for name, x in expected.items()}])
    again = fzero.simulate(fzero.make_train_step(make(llama, 1), config(2)), 3, by="lockstep")
    rounded = {name: x.bfloat16().float() for name, x in expected.items()}
    assert_same([again.gather(fzero.load_weights(out, step=again))], [rounded])


@pytest.mark.long
@given(settings("AdamW", precisions=("float32", "bfloat16")))
def test_weights_that_are_loaded_are_the_state_that_init_makes_of_them(setting: Setting) -> None:
    step, weights = simulated(setting), make(Normed, seed=3).state_dict()
    with TemporaryDirectory(dir=MEMORY) as folder:
        torch.save(weights, Path(folder) / "weights.pt")
        loaded = fzero.load_weights(Path(folder) / "weights.pt", step=step)
    assert_same([loaded], [step.init(weights)])


def test_weights_of_another_model_are_reported_by_name(tmp_path: Path) -> None:
    step, _ = small()
    weights = make(Moody).state_dict()
    for change, message in (
        ({"extra": torch.ones(1)}, "'extra' must be of this model"),
        ({"head.weight": torch.ones(2, 8)}, r"'head.weight' must have shape \(8, 8\)"),
    ):
        torch.save(weights | change, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=message):
            fzero.load_weights(tmp_path / "weights.pt", step=step)
    save_file({"norm.weight": torch.ones(8)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"parameter 'blocks.0.weight' must be among the weights"):
        fzero.load_weights(tmp_path / "weights.safetensors", step=step)
    (tmp_path / "weights.safetensors").write_bytes(b"nothing at all")
    with pytest.raises(fzero.CheckpointError, match="must be a safetensors file"):
        fzero.load_weights(tmp_path / "weights.safetensors", step=step)


def test_a_state_is_saved_whose_schedule_has_come_to_its_end(folder: Path) -> None:
    def rate(num_updates: int) -> float:
        if num_updates >= 2:
            raise ValueError("the schedule has two rates")
        return 0.1

    step = fzero.make_train_step(make(Moody), config(1), lr_schedule=rate)
    state = run(step, step.init(), range(2), lambda number: vectors(number, 8, 8))
    fzero.save(state, folder, step=step)
    assert_same([without_grads(fzero.load(folder, step=step).state)], [without_grads(state)])
