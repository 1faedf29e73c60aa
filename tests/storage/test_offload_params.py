"""The law of placements for parameters and gradients: no bit changes, wherever their
shards live, and no rank holds them all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from test_offload import (
    ACCUMULATING,
    ADAMW,
    PRECISIONS,
    WIDTH,
    blocks,
    captured_bits,
    config,
    data,
    differing,
    nvme,
    on,
    step_of,
    train,
)
from torch import Tensor, nn
from training import Odd, make, tokens

import fzero
from fzero.resharding.parameters import weight_of, with_weight
from fzero.runtime.gathers import Gathers
from fzero.storage.file_store import FileStore
from fzero.storage.file_tensor import FileTensors, in_memory
from fzero.storage.state_files import StateFiles
from sharding import Placement

NUMEL = 6528
"""Elements of one of two flat buffers, with the padding for two ranks."""


def in_files(path: Path | str, **keys: Any) -> dict[str, Any]:
    """Parameters in files alone."""
    return {"offload_param": {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0, **keys}}


def ways(path: Path, world_size: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Keys of `zero_optimization`, and what is given directly."""
    files = Placement("nvme", path=str(path / "given"))
    return {
        "parameters": (in_files(path / "a", checksums=True), None),
        "everything": ({**nvme(path / "b"), **in_files(path / "b")}, None),
        "host": (
            {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            None,
        ),
        # The first of two blocks stays in host memory, one buffer is all that is on its way.
        "cached": (
            nvme(path / "c", pipeline_read=False)
            | in_files(path / "c", max_in_cpu=NUMEL // world_size, buffer_count=1),
            None,
        ),
        "gradients": ({}, {"grads/*": files}),
        "given": (
            {},
            lambda quantity, key, leaf: (
                files if "1" in key and quantity in ("params", "master") else None
            ),
        ),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_in_files_give_the_bits_of_the_device(
    world_size: int, precision: str, tmp_path: Path
) -> None:
    here = on(world_size, step_of(3, precision))
    expected, reported = train(here, here.init(), 0, 3)
    weights = here.gather(expected)
    for name, (zero, given) in ways(tmp_path, world_size).items():
        ranks = on(world_size, step_of(3, precision, placements=given, **zero))
        state, found = train(ranks, ranks.init(), 0, 3)
        assert found == reported, name
        assert differing(state, expected) == [], name
        others = ranks.gather(state)
        assert all(torch.equal(weights[key], others[key]) for key in weights), name
        batch = tuple(x.unflatten(0, (world_size, -1)) for x in data(9))
        assert torch.equal(here.evaluate(expected, batch), ranks.evaluate(state, batch)), name


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("Lamb", "float32"),
        ("Lamb", "float16"),
        ("Lamb", "bfloat16 alone"),
        ("Adafactor", "bfloat16"),
        ("Muon", "float32"),
        ("Muon", "bfloat16"),
        ("NAdam", "float32"),
        ("RMSprop", "bfloat16"),
    ],
)
def test_optimizers_that_look_at_whole_parameters_and_torchs_own_have_the_bits_of_the_device_too(
    optimizer: str, precision: str, tmp_path: Path
) -> None:
    where = {"float32": (3, 3), "bfloat16": (2, 1), "float16": (1, 3), "bfloat16 alone": (2, 0)}
    world_size, stage = where[precision]
    files = Placement("nvme", path=str(tmp_path))

    def run(given: Any = None, **zero: Any) -> tuple[Any, list[str]]:
        keys = config(
            stage, clip=0.1, optimizer={"type": optimizer, "params": {"lr": 1e-3}}, **zero
        )
        keys |= PRECISIONS[precision] | {"train_batch_size": 24}
        ranks = on(world_size, fzero.make_train_step(make(Mixed), keys, placements=given))
        return train(ranks, ranks.init(), 0, 2)

    expected, reported = run()
    everything = nvme(tmp_path) | (in_files(tmp_path) if stage == 3 else {})
    some = run(lambda quantity, key, leaf: files if "1" in key and quantity != "grads" else None)
    for state, found in (some, run(**everything)):
        assert found == reported
        assert differing(state, expected) == []


class Mixed(nn.Module):
    """Blocks with matrices and vectors, whose shards are cut inside of them, and a tiny
    one: most of its shards are padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, WIDTH)) for _ in range(2)
        )
        self.tiny = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        for tiny in self.tiny:
            x = tiny(x[..., None])[..., 0]
        return nn.functional.mse_loss(x, y)


def test_frozen_parameters_alone_may_live_in_files(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = blocks()
        return model.requires_grad_(False) and model.blocks[1].requires_grad_(True) and model  # type: ignore[operator]

    def run(given: Any) -> Any:
        ranks = on(
            2, fzero.make_train_step(make(frozen), config(3, optimizer=ADAMW), placements=given)
        )
        return train(ranks, ranks.init(), 0, 2)

    (expected, reported), (state, found) = (
        run(None),
        run({"params/*frozen": Placement("nvme", path=str(tmp_path))}),
    )
    assert found == reported and differing(state, expected) == []
    assert len(list(tmp_path.rglob("*.flat"))) == 2


def _odd_bits(path: str | None, micro_steps: int) -> list[bytes]:
    """On a real rank: a model with tied, frozen, empty, unused and 0-d parameters, some
    of which stay whole.
    """
    zero = {} if path is None else {**nvme(path), **in_files(path)}
    cfg = config(3, optimizer=ADAMW, clip=0.1, **zero) | PRECISIONS["bfloat16"]
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    cfg["gradient_accumulation_steps"], cfg["train_batch_size"] = micro_steps, 12
    step = fzero.make_train_step(make(Odd), cfg)
    state = step.init()
    for index in range(2):
        batch = tuple(x.chunk(step.world_size)[step.rank] for x in tokens(index))
        state, _ = step(state, batch)
    kept = in_memory(state)._replace(grads={})
    return [
        x.reshape(-1).view(torch.uint8).numpy().tobytes()
        for x in optree.tree_leaves(kept)
        if x.numel()
    ]


@pytest.mark.parametrize(("world_size", "micro_steps"), [(2, 1), (3, 2)])
def test_real_ranks_have_the_bits_of_the_device_for_odd_models_too(
    ranks: RankPool, world_size: int, micro_steps: int, tmp_path: Path
) -> None:
    expected = ranks(world_size, _odd_bits, None, micro_steps)
    assert ranks(world_size, _odd_bits, str(tmp_path), micro_steps) == expected
    assert list(tmp_path.iterdir()) == [], "files go with the state"


def test_a_weight_whose_parameters_are_in_files_is_written_with_its_master(tmp_path: Path) -> None:
    cfg = config(3, optimizer=ADAMW, **in_files(tmp_path)) | PRECISIONS["bfloat16"]
    step = fzero.make_train_step(make(blocks), cfg)
    state = step.init()
    before = {name: value.clone() for name, value in step.gather(state).items()}
    name, shape = (
        step.plan.flat_buffers[0].layout.names[0],
        step.plan.flat_buffers[0].layout.shapes[0],
    )
    state = with_weight(step, state, name, torch.full(shape, 3.0))
    after = step.gather(state)
    assert torch.equal(after[name], torch.full(shape, 3.0, dtype=after[name].dtype))
    assert all(torch.equal(after[other], value) for other, value in before.items() if other != name)
    assert (weight_of(step, state, name) == 3.0).all()


def test_the_specs_say_where_every_shard_lives(tmp_path: Path) -> None:
    ranks = on(
        2, step_of(3, "bfloat16", **nvme(tmp_path), **in_files(tmp_path, max_in_cpu=NUMEL // 2))
    )
    by_memory = ranks.plan.bytes_by_memory
    held = ranks.plan.bytes_per_rank
    assert (
        by_memory["host"]
        == {"parameters": held["parameters"] // 2}
        == {"parameters": 2 * NUMEL // 2}
    )
    assert (
        by_memory["nvme"]["parameters"] == NUMEL
        and by_memory["nvme"]["gradients"] == held["gradients"]
    )
    state = ranks.init()
    found = [isinstance(x, FileTensors) for x in optree.tree_leaves(state)]
    assert (
        found == [spec.placement.kind == "nvme" for spec in optree.tree_leaves(ranks.specs)]
        and sum(found) == 9
    )


@pytest.mark.parametrize(
    ("zero", "options", "message"),
    [
        (
            {"buffer_size": 100},
            {},
            r"offload_param.buffer_size: must hold the longest shard .* 6496 elements, got 100",
        ),
        ({}, {"donate": False}, r"donate: must be True where state is in files"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(
    zero: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    cfg = config(3, optimizer=ADAMW, **in_files(tmp_path, **zero))
    with pytest.raises(fzero.ConfigError, match=message):
        fzero.make_train_step(make(blocks), cfg, **options)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("world_size", "others_too", "keys"),
    [
        (1, False, {}),
        (2, True, PRECISIONS["bfloat16"] | ACCUMULATING),
        (3, False, PRECISIONS["float16"]),
    ],
)
def test_a_graph_loads_parameters_from_files_and_has_the_bits_of_the_eager_step(
    ranks: RankPool, world_size: int, others_too: bool, keys: dict[str, Any], tmp_path: Path
) -> None:
    path = str(tmp_path)
    zero = in_files(path, buffer_count=1) | (nvme(path) if others_too else {})
    expected = ranks(world_size, captured_bits, 3, None, keys)
    assert ranks(world_size, captured_bits, 3, zero, keys) == expected


def test_a_unit_of_two_buffers_needs_as_many_on_their_way(tmp_path: Path) -> None:
    cfg = config(3, optimizer=ADAMW, **in_files(tmp_path, buffer_count=1))
    with pytest.raises(
        fzero.ConfigError,
        match=(
            r"offload_param.buffer_count: must be .* shards in files of one unit, 2, got 1; "
            r"raise it"
        ),
    ):
        fzero.make_train_step(
            make(blocks), cfg, param_groups=[{"params": "scale", "weight_decay": 0.0}]
        )


# --- when shards come and go ----------------------------------------------------------------------


def _started(
    path: str, monkeypatch: pytest.MonkeyPatch, world_size: int, **zero: Any
) -> list[list[str]]:
    """By rank, what a step starts: its passes read (r) and write (w), something is read
    ahead for the update (a), or it asks a file for anything (f); of parameters (p) and
    gradients (g), with the block's number."""
    logs: list[list[str]] = [[] for _ in range(world_size)]

    def spy(owner: type, name: str, what: str) -> None:
        before = getattr(owner, name)

        def call(files: Any, tensor: str, *args: Any) -> Any:
            store = files if isinstance(files, FileStore) else files.mover(tensor).store
            kind = "g" if "grads" in tensor else "p"
            logs[int(store.folder.name[-1])].append(f"{what}{kind}{tensor.split('/')[0][-1]}")
            return before(files, tensor, *args)

        monkeypatch.setattr(owner, name, call)

    placements = {"grads/*": Placement("nvme", path=path), "params/*": Placement("nvme", path=path)}
    cfg = config(3, optimizer=ADAMW, **zero) | {"train_batch_size": 24}
    ranks = on(
        world_size, fzero.make_train_step(make(partial(blocks, 6)), cfg, placements=placements)
    )
    state, _ = train(ranks, ranks.init(), 0, 1)
    spy(StateFiles, "start_read", "r")
    spy(StateFiles, "start_write", "w")
    spy(StateFiles, "prefetch", "a")
    spy(FileStore, "read", "f")
    train(ranks, state, 1, 1)
    return logs


def test_shards_are_read_ahead_and_gradients_leave_while_the_backward_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    more = {
        "offload_optimizer": {"device": "cpu", "buffer_count": 9}
    }  # two tensors in files for each of three sub-groups, and three
    for world_size, zero in ((1, {}), (2, {}), (2, {"round_robin_gradients": True}), (2, more)):
        for log in _started(str(tmp_path), monkeypatch, world_size, **zero):
            passes = [x for x in log if x[0] in "rw"]
            reads, writes = ([x[-1] for x in passes if x[:2] == kind] for kind in ("rp", "wg"))
            assert "".join(reads) == "01234543210", "block 5 stays from the forward to the backward"
            assert "".join(writes) == "543210"
            # On one rank the gradient of block 5 leaves at once, when block 4 has been asked for.
            # On two it is sent while block 4 runs backward, block 3 is gathered and block 2 is
            # read.
            num_before = sum(x[:2] == "rp" for x in passes[: passes.index("wg5")])
            assert num_before == {1: len("0123454"), 2: len("012345432")}[world_size], passes
            # What the update asks for first is there when the backward ends: three sub-groups have
            # buffers, or more.
            backward = log[log.index("ap0") :]
            early = [f"ap{i}" for i in range(6 if "offload_optimizer" in zero else 3)]
            assert [x for x in log if x[0] == "a"] == early
            assert backward.index("wg5") > backward.index(early[-1]) and "rp5" not in backward
            assert sorted(x for x in log if x[:2] == "fg") == [f"fg{i}" for i in range(6)], (
                "the norm reads nothing"
            )
            assert len([x for x in log if x[:2] == "fp"]) == len(reads) + 6, (
                "what was read ahead is not read again"
            )
        monkeypatch.undo()


# --- memory ---------------------------------------------------------------------------------------

WHOLE = """
import gc, resource, sys, threading, torch
from pathlib import Path
from torch import nn
import fzero
from fzero.checkpoint.dcp_format import StateFiles  # and what it imports

folder, precision, where, share = sys.argv[1:]
torch.set_num_threads(1)
threading.stack_size(1 << 20)  # which counts, too
dtype = torch.bfloat16 if precision == "bf16" else torch.float32
batch = torch.ones(4, 512, dtype=dtype)

class Model(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(num_blocks))
    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()

def step_of(num_blocks, zero, seed=0):
    with torch.device("meta"):
        model = Model(num_blocks)
    cfg = {
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "aio": {"queue_depth": 2},
        "zero_optimization": {"stage": 3, "sub_group_size": 16384, "reduce_bucket_size": 1, **zero},
    }
    return fzero.make_train_step(model, cfg, seed=seed)

def in_files(name):
    at = {"device": "nvme", "nvme_path": f"{folder}/{name}"}
    return {"offload_optimizer": at, "offload_param": at | {"max_in_cpu": 0}}

def everything(num_blocks, zeros):
    first, second = (step_of(num_blocks, zero) for zero in zeros)
    state, losses = first.init(), []
    for _ in range(2):
        state, metrics = first(state, batch)
        losses.append(metrics.loss.item())
    fzero.save(state, f"{folder}/saved{num_blocks}", step=first)
    fzero.checkpoint.save_16bit_model(state, f"{folder}/model{num_blocks}", step=first, max_file_nbytes=1 << 21)
    state = fzero.reshard(state, first, second)
    state, metrics = second(state, batch)
    losses.append(metrics.loss.item())
    state = fzero.place(state, first)
    del state
    gc.collect()
    state = fzero.load(f"{folder}/saved{num_blocks}", step=second).state
    assert second.evaluate(state, batch).item() == losses[2], "as before the third step"
    del state
    gc.collect()
    state = fzero.load_weights(f"{folder}/saved{num_blocks}", step=second)
    assert second.evaluate(state, batch).item() == losses[2]
    return losses

zeros = [in_files("a"), in_files("b")] if where == "files" else [{}, {}]
everything(2, zeros)  # what is loaded and made once is there
gc.collect()
step = step_of(48, zeros[0])
params = step.plan.bytes_per_rank["parameters"]
taken = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
room = int(float(share) * params)
resource.setrlimit(resource.RLIMIT_DATA, (taken + room, taken + room))
losses = everything(48, zeros)
assert losses[2] < losses[1] < losses[0], losses
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "share"), [("fp32", 0.5), pytest.param("bf16", 0.9, marks=pytest.mark.nightly)]
)
def test_a_model_trains_whose_parameters_alone_do_not_fit_into_memory(
    precision: str, share: float, tmp_path: Path
) -> None:
    """Forward, backward, update, save, load, export, reshard and place, beside
    gradients, masters and state in files.
    """

    def run(where: str) -> subprocess.CompletedProcess[str]:
        # What is freed goes back to the system, and does not stay with the allocator.
        allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | allocator
        command = [sys.executable, "-c", WHOLE, str(tmp_path / where), precision, where, str(share)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    streamed = run("files")
    assert streamed.returncode == 0, streamed.stderr
    assert "can't allocate memory" in run("memory").stderr, "the limit holds"


def test_a_view_that_ends_while_its_unit_is_released_is_no_change_of_a_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has loaded a shard may hold it a moment longer; its memory must not
    be used again under the watch.
    """
    held: list[Tensor] = []
    release, watch = Gathers.release, Gathers._watch

    def releases(self: Gathers, unit: str) -> None:
        held.extend(flat[:0] for flat in self._gathered.get(unit, {}).values())
        release(self, unit)

    def watches(self: Gathers, flat: Tensor, key: str) -> None:
        watch(self, flat, key)
        held.clear()

    here = on(1, step_of(3, "bfloat16 alone"))
    expected, _ = train(here, here.init(), 0, 2)
    monkeypatch.setattr(Gathers, "release", releases)
    monkeypatch.setattr(Gathers, "_watch", watches)
    for name, (zero, given) in ways(tmp_path, 1).items():
        ranks = on(1, step_of(3, "bfloat16 alone", placements=given, **zero))
        assert differing(train(ranks, ranks.init(), 0, 2)[0], expected) == [], name
