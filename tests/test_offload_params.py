"""The law of placements for parameters and gradients: no bit changes, wherever their shards live, and no rank holds them all."""

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
from test_offload import ADAMW, PRECISIONS, blocks, config, data, differing, nvme, on, step_of, train
from training import Odd, make, tokens

import fzero
from fzero.file_store import FileStore
from fzero.file_tensors import FileTensors, in_memory
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
        "host": ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, None),
        # The first of two blocks stays in host memory, one buffer is all that is on its way.
        "cached": (
            nvme(path / "c", pipeline_read=False) | in_files(path / "c", max_in_cpu=NUMEL // world_size, buffer_count=1),
            None,
        ),
        "gradients": ({}, {"grads/*": files}),
        "given": ({}, lambda quantity, key, leaf: files if "1" in key and quantity in ("params", "master") else None),
    }  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_in_files_give_the_bits_of_the_device(world_size: int, precision: str, tmp_path: Path) -> None:
    here = on(world_size, step_of(3, precision))
    expected, told = train(here, here.init(), 0, 3)
    weights = here.gather(expected)
    for name, (zero, given) in ways(tmp_path, world_size).items():
        ranks = on(world_size, step_of(3, precision, placements=given, **zero))
        state, found = train(ranks, ranks.init(), 0, 3)
        assert found == told, name
        assert differing(state, expected) == [], name
        others = ranks.gather(state)
        assert all(torch.equal(weights[key], others[key]) for key in weights), name
        batch = tuple(x.unflatten(0, (world_size, -1)) for x in data(9))
        assert torch.equal(here.evaluate(expected, batch), ranks.evaluate(state, batch)), name


def _odd_bits(path: str | None, micro_steps: int) -> list[bytes]:
    """On a real rank: a model with tied, frozen, empty, unused and 0-d parameters, some of which stay whole."""
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
    return [x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in optree.tree_leaves(kept) if x.numel()]


@pytest.mark.parametrize(("world_size", "micro_steps"), [(2, 1), (3, 2)])
def test_real_ranks_have_the_bits_of_the_device_for_odd_models_too(
    ranks: RankPool, world_size: int, micro_steps: int, tmp_path: Path
) -> None:
    expected = ranks(world_size, _odd_bits, None, micro_steps)
    assert ranks(world_size, _odd_bits, str(tmp_path), micro_steps) == expected
    assert list(tmp_path.iterdir()) == [], "files go with the state"


def test_the_specs_say_where_every_shard_lives(tmp_path: Path) -> None:
    ranks = on(2, step_of(3, "bfloat16", **nvme(tmp_path), **in_files(tmp_path, max_in_cpu=NUMEL // 2)))
    by_memory = ranks.plan.bytes_by_memory
    held = ranks.plan.bytes_per_rank
    assert by_memory["host"] == {"parameters": held["parameters"] // 2} == {"parameters": 2 * NUMEL // 2}
    assert by_memory["nvme"]["parameters"] == NUMEL and by_memory["nvme"]["gradients"] == held["gradients"]
    state = ranks.init()
    found = [isinstance(x, FileTensors) for x in optree.tree_leaves(state)]
    assert found == [spec.placement.kind == "nvme" for spec in optree.tree_leaves(ranks.specs)] and sum(found) == 9


@pytest.mark.parametrize(
    ("zero", "options", "message"),
    [
        ({"buffer_size": 100}, {}, r"offload_param.buffer_size: must hold the longest shard .* 6496 elements, got 100"),
        ({}, {"compile": "step"}, r"compile: must be None or 'block' .* 'nvme'"),
        ({}, {"donate": False}, r"donate: must be True where state is in files"),
        ({}, {"type": "Lamb"}, r"optimizer.type: must be elementwise .* got 'Lamb' with params/.* on 'nvme'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_fix(
    zero: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    how = dict(options)
    cfg = config(3, optimizer=ADAMW | ({"type": how.pop("type"), "params": {}} if "type" in how else {}))
    cfg["zero_optimization"] |= in_files(tmp_path, **zero)
    with pytest.raises(fzero.ConfigError, match=message):
        fzero.make_train_step(make(blocks), cfg, **how)


def test_a_unit_of_two_buffers_needs_as_many_on_their_way(tmp_path: Path) -> None:
    cfg = config(3, optimizer=ADAMW, **in_files(tmp_path, buffer_count=1))
    with pytest.raises(
        fzero.ConfigError, match=r"offload_param.buffer_count: must hold .* 2 in files, got 1; raise it"
    ):
        fzero.make_train_step(make(blocks), cfg, param_groups=[{"params": "scale", "weight_decay": 0.0}])


# --- when shards come and go -------------------------------------------------------------------------------------


def _started(path: str, monkeypatch: pytest.MonkeyPatch, world_size: int, **zero: Any) -> list[list[str]]:
    """By rank, what a step starts to read (r) and write (w): of parameters (p) and gradients (g), with the block's number."""
    logs: list[list[str]] = [[] for _ in range(world_size)]

    def spy(name: str) -> None:
        before = getattr(FileStore, name)

        def call(store: FileStore, tensor: str, *args: Any) -> Any:
            if "exp_avg" not in tensor:
                kind = "g" if "grads" in tensor else "p"
                logs[int(store.folder.name[-1])].append(f"{name[0]}{kind}{tensor.split('/')[0][-1]}")
            return before(store, tensor, *args)

        monkeypatch.setattr(FileStore, name, call)

    placements = {"grads/*": Placement("nvme", path=path), "params/*": Placement("nvme", path=path)}
    cfg = config(3, optimizer=ADAMW, **zero) | {"train_batch_size": 24}
    ranks = on(world_size, fzero.make_train_step(make(partial(blocks, 6)), cfg, placements=placements))
    state, _ = train(ranks, ranks.init(), 0, 1)
    spy("read")
    spy("write")
    train(ranks, state, 1, 1)
    return logs


def test_shards_are_read_ahead_and_gradients_leave_while_the_backward_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for world_size, order in ((1, {}), (2, {}), (2, {"round_robin_gradients": True})):
        for log in _started(str(tmp_path), monkeypatch, world_size, **order):
            passes = log[: log.index("rg0")]  # what follows is the norm and the update
            reads, writes = ([x[-1] for x in passes if x[:2] == kind] for kind in ("rp", "wg"))
            assert "".join(reads) == "01234543210", "block 5 stays from the forward to the backward"
            assert "".join(writes) == "543210"
            # On one rank the gradient of block 5 leaves at once, when block 4 has been asked for. On two it is sent while block
            # 4 runs backward, block 3 is gathered and block 2 is read.
            num_before = sum(x[:2] == "rp" for x in passes[: passes.index("wg5")])
            assert num_before == {1: len("0123454"), 2: len("012345432")}[world_size], passes
        monkeypatch.undo()


# --- memory ------------------------------------------------------------------------------------------------------

WHOLE = """
import gc, resource, sys, threading, torch
from pathlib import Path
from torch import nn
import fzero
from fzero.checkpoint_format import Files  # and what it imports

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
    first.save_16bit_model(state, f"{folder}/model{num_blocks}", max_file_nbytes=1 << 21)
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


@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.5), pytest.param("bf16", 0.9, marks=pytest.mark.nightly)])
def test_a_model_trains_whose_parameters_alone_do_not_fit_into_memory(
    precision: str, share: float, tmp_path: Path
) -> None:
    """Forward, backward, update, save, load, export, reshard and place, beside gradients, masters and state in files."""

    def run(where: str) -> subprocess.CompletedProcess[str]:
        # What is freed goes back to the system, and does not stay with the allocator.
        allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | allocator
        command = [sys.executable, "-c", WHOLE, str(tmp_path / where), precision, where, str(share)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    streamed = run("files")
    assert streamed.returncode == 0, streamed.stderr
    assert "can't allocate memory" in run("memory").stderr, "the limit holds"
