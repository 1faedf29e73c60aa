"""The law of an update under the next forward: its state is a value like any other.
Whoever reads it waits, whatever the way of reading; bits and errors are those of an
update that ends with its step.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from test_offload import ACCUMULATING, ADAMW, PRECISIONS, blocks, config, data, nvme
from torch import Tensor
from training import make, part

import fzero
from fzero.optim.transforms import same_bits
from fzero.storage import direct_io, stream
from fzero.storage.async_update import AsyncUpdates
from fzero.storage.file_tensor import handles_of, in_memory
from fzero.storage.promised import promises_of
from sharding import Mesh

UNITS = ("blocks.0/float32", "blocks.1/float32")


def on_host(**keys: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", "async_update": True, **keys}}


def in_file(path: Path | str, *, params: bool = False, **keys: Any) -> dict[str, Any]:
    zero = nvme(path, async_update=True, **keys)
    if params:
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0}
    return zero


def step_of(
    stage: int, precision: str = "float32", *, zero: dict[str, Any] | None = None, **options: Any
) -> fzero.TrainStep:
    cfg = config(stage, optimizer=ADAMW, clip=0.1, **(zero or {})) | PRECISIONS[precision]
    return fzero.make_train_step(make(blocks), cfg | ACCUMULATING, **options)


def trained(step: fzero.TrainStep, num_steps: int, first: int = 0, state: Any = None) -> Any:
    state = step.init() if state is None else state
    for index in range(first, first + num_steps):
        state = after(step, state, index)
    for x in optree.tree_leaves(state):
        _ = isinstance(x, Tensor) and x.sum()  # no update is under way
    return state


def after(step: fzero.TrainStep, state: Any, index: int) -> Any:
    """The state after a step, whose update may run."""
    return step(state, part(data(index), step.rank, step.world_size))[0]


@contextmanager
def gate() -> Iterator[threading.Event]:
    """Inside, updates in threads of their own begin when the event is set."""
    opened, go_on = threading.Event(), stream.update_streamed

    def held(*args: Any, **how: Any) -> None:
        if threading.current_thread().name == "fzero-update":
            assert opened.wait(10), "nobody opened the gate"
            if hasattr(opened, "error"):
                raise opened.error
        go_on(*args, **how)

    stream.update_streamed = held  # type: ignore[assignment]
    try:
        yield opened
    finally:
        opened.set()
        stream.update_streamed = go_on


class Counted:
    """Notes how many buffers each step updates at once, and how many later."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        divided = AsyncUpdates.divided

        def counted(updates: AsyncUpdates, *args: Any) -> Any:
            now, later = divided(updates, *args)
            self.seen.append((len(now), len(later)))
            return now, later

        patch.setattr(AsyncUpdates, "divided", counted)


@cache
def _expected(stage: int, num_steps: int) -> Any:
    """The state after some steps whose updates end with them."""
    return trained(step_of(stage), num_steps)


@cache
def _on_host(stage: int) -> fzero.TrainStep:
    return step_of(stage, zero=on_host())


# --- ways to read ---------------------------------------------------------------------------------


def _raw(x: Tensor) -> Tensor:
    """Through its address."""
    numel = x.numel()
    return torch.tensor(list((ctypes.c_float * numel).from_address(x.data_ptr())))


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    found: Tensor = torch.load(file)["x"]
    return found


def _of_storage(x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(bytes(x.untyped_storage())), dtype=torch.float32)


def _in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.clone()


def _as_out(x: Tensor) -> Tensor:
    torch.neg(torch.ones(x.numel()), out=x)
    return x + 0


def _assigned(x: Tensor) -> Tensor:
    x[:3] = 5
    return x.clone()


def _set(x: Tensor) -> Tensor:
    return torch.empty(0).set_(x).clone()


READS: dict[str, Callable[[Tensor], Any]] = {
    "a function of torch": lambda x: torch.add(x, 1),
    "a method": lambda x: x.sum(),
    "an operator": lambda x: 1 - x,
    "a comparison": lambda x: x > 0,
    "an index": lambda x: x[7:20],
    "a mask": lambda x: x[x > 0],
    "an iteration": lambda x: torch.stack([y for y, _ in zip(x, range(9))]),
    "item": lambda x: x[5].item(),
    "tolist": lambda x: x.tolist(),
    "repr": repr,
    "a format": lambda x: f"{x[3]:.3f} {x}",
    "numpy()": lambda x: torch.from_numpy(x.numpy().copy()),
    "np.asarray": lambda x: torch.from_numpy(np.asarray(x).copy()),
    "DLPack": lambda x: torch.from_numpy(np.from_dlpack(x).copy()),
    "torch.from_dlpack": lambda x: torch.from_dlpack(x).clone(),
    "its address": _raw,
    "its storage": _of_storage,
    "detach": lambda x: x.detach().clone(),
    "data": lambda x: x.data.clone(),
    "clone": lambda x: x.clone(),
    "to another dtype": lambda x: x.double(),
    "a view": lambda x: x.view(-1, 2).clone(),
    "as_strided": lambda x: x.as_strided((10,), (2,)).clone(),
    "a list of tensors": lambda x: torch.cat([x, x]),
    "foreach": lambda x: torch._foreach_add([x, x], 1)[1],
    "an operation by its name": lambda x: torch.ops.aten.mul.Tensor(x, 3.0),
    "as a plain tensor": lambda x: x.as_subclass(Tensor).clone(),
    "a plain tensor made of it": lambda x: Tensor._make_subclass(Tensor, x).clone(),
    "torch.tensor": lambda x: x.new_tensor(x.tolist()),
    "copied from": lambda x: torch.empty(x.numel()).copy_(x),
    "set": _set,
    "torch.equal": lambda x: torch.equal(x, torch.zeros_like(x)),
    "allclose": lambda x: torch.allclose(torch.zeros(x.numel()), x),
    "copy": lambda x: copy.copy(x).clone(),
    "deepcopy": lambda x: copy.deepcopy({"x": [x]})["x"][0],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": _saved,
    "written in place": _in_place,
    "written as out=": _as_out,
    "written by index": _assigned,
    "vmap": lambda x: torch.func.vmap(lambda y: y * 2)(x),
    "grad": lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
    "functional_call": lambda x: torch.nn.functional.linear(torch.ones(2, x.numel()), x[None]),
    "autograd": lambda x: _gradient(x),
    "without torch functions": lambda x: _untouched(x),
}


def _gradient(x: Tensor) -> Tensor:
    y = torch.ones(x.numel(), requires_grad=True)
    (y * x).sum().backward()
    assert y.grad is not None
    return y.grad


def _untouched(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x + 1


FORM: dict[str, Callable[[Tensor], object]] = {
    "shape": lambda x: (x.shape, x.size(), x.size(0), x.dim(), x.ndim, len(x), x.numel()),
    "dtype": lambda x: (x.dtype, x.is_floating_point(), x.element_size(), x.itemsize, x.nbytes),
    "place": lambda x: (x.device, x.is_cpu, x.is_cuda, x.layout),
    "strides": lambda x: (x.stride(), x.storage_offset(), x.is_contiguous()),
    "changes": lambda x: x._version >= 0,
    "kind": lambda x: (
        isinstance(x, Tensor),
        torch.is_tensor(x),
        isinstance(x, torch.nn.Parameter),
    ),
}


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return type(found) is Tensor and same_bits(found, expected)
    return bool(found == expected)


@pytest.mark.parametrize("way", READS)
def test_a_tensor_that_is_still_written_is_read_when_it_is_whole_whatever_the_way(way: str) -> None:
    expected, step = READS[way](_expected(3, 2).params[UNITS[1]].clone()), _on_host(3)
    state = trained(step, 1)
    with gate() as opened:
        state = after(step, state, 1)
        leaf = state.params[UNITS[1]]
        threading.Timer(0.05, opened.set).start()
        found = READS[way](leaf)
        assert opened.is_set(), "it was read before it was written"
    assert _same(found, expected)


@pytest.mark.parametrize("what", FORM)
def test_the_form_of_a_tensor_is_known_before_it_is_written(what: str) -> None:
    expected, step = FORM[what](_expected(3, 2).params[UNITS[1]]), _on_host(3)
    with gate() as opened:
        state = after(step, step.init(), 0)
        assert FORM[what](state.params[UNITS[1]]) == expected
        assert str(fzero.state.table_of(state)) and not opened.is_set()


def _over_processes(way: str) -> list[float]:
    """On a real rank: a collective of torch.distributed on a promise."""
    step = step_of(3, zero=on_host())
    state = trained(step, 1)
    with gate() as opened:
        state = after(step, state, 1)
        leaf = state.params[UNITS[1]]
        threading.Timer(0.05, opened.set).start()
        out = torch.zeros(2, leaf.numel())
        if way == "all_reduce":
            dist.all_reduce(leaf)
            out = leaf.clone()
        elif way == "broadcast":
            dist.broadcast(leaf, 0)
            out = leaf.clone()
        elif way == "all_gather":
            dist.all_gather(list(out), leaf)
        elif way == "all_gather_into_tensor":
            dist.all_gather_into_tensor(out.view(-1), leaf)
        elif way == "send":
            other = dist.isend(leaf, 1 - step.rank)
            dist.recv(out[0], 1 - step.rank)
            other.wait()
        elif way == "functional":
            out = torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(leaf, "sum", dist.group.WORLD.group_name)
            )
        assert opened.is_set(), "it was sent before it was written"
    return out.flatten().tolist()


def _over_processes_plainly(way: str) -> list[float]:
    leaf = trained(step := step_of(3), 2).params[UNITS[1]]
    both = [torch.zeros_like(leaf) for _ in range(2)]
    dist.all_gather(both, leaf)
    found = {
        "all_reduce": both[0] + both[1],
        "functional": both[0] + both[1],
        "broadcast": both[0],
        "send": torch.stack([both[1 - step.rank], torch.zeros_like(leaf)]),
    }.get(way, torch.stack(both))
    return found.flatten().tolist()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(
    "way",
    ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "send", "functional"],
)
def test_a_tensor_that_is_still_written_is_sent_when_it_is_whole(ranks: RankPool, way: str) -> None:
    assert ranks(2, _over_processes, way) == ranks(2, _over_processes_plainly, way)


# --- uses of a state ------------------------------------------------------------------------------


def _losses(metrics: Any) -> str:
    return repr(tuple(x.item() for x in metrics))


def _steps_with_windows(step: fzero.TrainStep, state: Any, _: Path) -> Any:
    for index in (2, 3):
        window = step.begin(state)
        for rows in zip(*(x.chunk(2) for x in data(index)), strict=True):
            loss = step.forward(window, lambda rows=rows: step.spec.model(*rows))
            window = step.backward(window, loss, num_parts=2)
        state, metrics = step.update(window)
    return state, _losses(metrics)


def _loaded(step: fzero.TrainStep, state: Any, path: Path) -> Any:
    fzero.save(state, path / "saved", step=step)
    return fzero.load(path / "saved", step=step).state


def _resharded(step: fzero.TrainStep, state: Any, _: Path) -> Any:
    return fzero.reshard(state, step, step_of(1))


def _averaged(step: fzero.TrainStep, state: Any, _: Path) -> Any:
    other = trained(step_of(3), 1)
    if any(not isinstance(x, Tensor) for x in optree.tree_leaves(state)):
        state = in_memory(state)
    return optree.tree_map(
        lambda x, y: x + y, other.master | other.params, state.master | state.params
    )


def _kept(step: fzero.TrainStep, state: Any, _: Path) -> Any:
    """By a step that does not donate: the given state stays as it is."""
    twin = fzero.make_train_step(make(blocks), step.spec.cfg, donate=False)
    return state, twin(state, data(2))[0]


USES: dict[str, Callable[[fzero.TrainStep, Any, Path], Any]] = {
    "further steps": lambda step, state, _: trained(step, 3, 2, state),
    "windows": _steps_with_windows,
    "gather": lambda step, state, _: step.gather(state),
    "evaluate": lambda step, state, _: step.evaluate(state, data(7)),
    "inspect": lambda step, state, _: step.inspect(state, lambda: step.spec.model(*data(7))),
    "save and load": _loaded,
    "reshard": _resharded,
    "place": lambda step, state, _: fzero.place(state, step_of(3)),
    "other weights": lambda step, state, _: step.gather(
        step.with_weights(state, optree.tree_map(lambda x: x * 2, step.weights(state)))
    ),
    "an average with another state": _averaged,
    "first_overflow": lambda step, state, _: step.first_overflow(state),
    "a step that keeps the state": _kept,
    "deepcopy": lambda step, state, _: copy.deepcopy(state),
    "pickle": lambda step, state, _: pickle.loads(pickle.dumps(state)),
    "a fork": lambda step, state, _: _in_a_fork(state),
    "compile": lambda step, state, _: trained(
        step_of(3, zero=on_host(), compile="step", compile_backend="aot_eager"), 1, 2, state
    ),
}
OF_FILES = sorted(
    USES.keys()
    - {"deepcopy", "pickle", "a fork", "a step that keeps the state", "other weights"}
    - {"compile"}
)


def _in_a_fork(state: Any) -> float:
    receives, sends = os.pipe()
    child = os.fork()
    if child == 0:
        total = sum(x.double().sum().item() for x in optree.tree_leaves(state.params))
        os.write(sends, repr(total).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return float(os.read(receives, 100).decode())


def _is_written(state: Any) -> bool:
    """Whether the update of each trained buffer runs."""
    in_memory = all(x.is_running for x in promises_of(state))
    files = {handle.files for handle in handles_of(state)}
    return in_memory and bool(promises_of(state) or files) and all(x.update for x in files)


def _whole(found: Any) -> Any:
    """Without gradients, which are left over, and with tensors in memory."""
    if isinstance(found, fzero.TrainState):
        found = found._replace(grads={})
    elif type(found) is tuple:
        return [_whole(x) for x in found]
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, in_memory(found))


def _check_use(use: str, zero: dict[str, Any], tmp_path: Path) -> None:
    plain = step_of(3)
    expected = _whole(USES[use](plain, trained(plain, 2), tmp_path / "plain"))
    step = step_of(3, zero=zero)
    state = trained(step, 1)
    with gate() as opened:
        state = after(step, state, 1)
        assert _is_written(state)
        threading.Timer(0.1, opened.set).start()
        found = USES[use](step, state, tmp_path / "later")
        assert opened.is_set() or use == "first_overflow", "it was read before it was written"
        found = _whole(found)
    assert optree.tree_structure(found) == optree.tree_structure(expected)
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    assert all(_same(x, y) for x, y in pairs)


@pytest.mark.parametrize("use", USES)
def test_a_state_in_memory_that_is_still_written_is_a_value_in_every_use(
    use: str, tmp_path: Path
) -> None:
    _check_use(use, on_host(), tmp_path)


@pytest.mark.parametrize("use", OF_FILES)
@pytest.mark.parametrize("params", [False, True], ids=["state", "parameters"])
def test_a_state_in_files_that_are_still_written_is_a_value_in_every_use(
    use: str, params: bool, tmp_path: Path
) -> None:
    _check_use(use, in_file(tmp_path / "files", params=params), tmp_path)


# --- bits -----------------------------------------------------------------------------------------


def _bits(state: Any) -> list[bytes]:
    kept = in_memory(state)._replace(grads={})
    return [
        x.clone().reshape(-1).view(torch.uint8).numpy().tobytes() for x in optree.tree_leaves(kept)
    ]


def _zero(where: str, path: Path | str) -> dict[str, Any]:
    return {
        "host": {**on_host(), "sub_group_size": 2048},
        "files": in_file(path),
        "parameters, too": in_file(path, params=True),
    }[where]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bits_are_those_of_an_update_that_ends_with_its_step(
    stage: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-steps; float16 skips one update. Where parameters live on the device,
    in all stages."""
    seen = Counted(monkeypatch).seen
    plain = step_of(stage, precision)
    expected, reported = _run(plain, 4)
    for where in ("host", "files", *(["parameters, too"] if stage == 3 else [])):
        seen.clear()
        found, metrics = _run(step_of(stage, precision, zero=_zero(where, tmp_path)), 4)
        assert metrics == reported and found == expected, where
        skipped = precision == "float16" and where != "host"
        assert seen == [(0, 2)] * (3 if skipped else 4), "all later"


def _run(step: fzero.TrainStep, num_steps: int) -> tuple[list[bytes], list[str]]:
    state, reported = step.init(), []
    for index in range(num_steps):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        reported.append(_losses(metrics))
    return _bits(state), reported


def _on_ranks(
    stage: int, precision: str, zero: dict[str, Any]
) -> tuple[Any, list[tuple[int, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        seen = Counted(patch).seen
        step = step_of(stage, precision, zero=zero)
        return _run(step, 3), seen


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "where", "keys"),
    [
        (2, 3, "float16", "host", {}),
        (3, 3, "bfloat16", "parameters, too", {}),
        (2, 3, "float32", "host", {"zero_quantized_gradients": True}),
        (2, 1, "bfloat16", "host", {}),
        (2, 0, "float32", "files", {}),
    ],
)
def test_real_ranks_have_the_bits_too_and_update_later_only_what_nobody_gathers_then(
    ranks: RankPool,
    world_size: int,
    stage: int,
    precision: str,
    where: str,
    keys: dict[str, Any],
    tmp_path: Path,
) -> None:
    expected = ranks(world_size, _on_ranks, stage, precision, keys)
    zero = _zero(where, str(tmp_path)) | keys
    for (found, seen), (plain, _) in zip(
        ranks(world_size, _on_ranks, stage, precision, zero), expected, strict=True
    ):
        assert found == plain
        assert {later for _, later in seen} <= ({2} if stage == 3 else {0})


# --- memory that others hold ----------------------------------------------------------------------


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda x: x[3:5],
    "an array": lambda x: x.numpy(),
    "its storage": lambda x: x.untyped_storage(),
    "detached": lambda x: x.detach(),
}


@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("quantity", ["params", "exp_avg", "grads"])
def test_memory_that_others_hold_is_written_before_the_step_returns(
    how: str, quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = _on_host(3), Counted(monkeypatch).seen
    state = trained(step, 1)
    key = UNITS[1]
    x = state.optimizer[key].exp_avg if quantity == "exp_avg" else getattr(state, quantity)[key]
    held = HOLDS[how](x)
    del x
    trained(step, 1, 1, state)
    assert seen == [(0, 2), (1, 1)] and held is not None


def test_the_tensors_of_a_state_that_a_step_took_are_empty() -> None:
    step = _on_host(3)
    first = step.init()
    own = first.params[UNITS[0]]
    second, _ = step(first, data(0))
    assert own.shape == (0,) and second.params[UNITS[0]].shape == step.specs.params[UNITS[0]].shape
    leaf = second.params[UNITS[0]]
    del own, first  # which would hold the memory
    step(second, data(1))
    assert leaf.sum().item() == 0 and leaf.clone().shape == (0,)
    with pytest.raises(ValueError, match="must not be used again once a step took it"):
        step(second, data(1))


# --- faults ---------------------------------------------------------------------------------------


def _told(work: Callable[[], object]) -> str:
    try:
        work()
    except (fzero.StoreError, ValueError) as error:
        return str(error)
    return "nothing"


def _after_a_fault(
    zero: dict[str, Any], path: str, failing: int, use: str, saved: str
) -> list[str]:
    """On a real rank: what a use of a state says whose update fails on one rank while
    it runs, the same again, and a step from the last checkpoint.
    """
    step = step_of(3, zero=zero)
    mine = [part(data(index), step.rank, step.world_size) for index in range(4)]
    state, _ = step(step.init(), mine[0])
    fzero.save(state, saved, step=step)
    with gate() as opened:
        state, _ = step(state, mine[1])
        if step.rank == failing:
            _break(opened, path, failing)
        opened.set()
        uses: dict[str, Callable[[], object]] = {
            "step": lambda: step(state, mine[2]),
            "evaluate": lambda: step.evaluate(state, mine[2]),
            "gather": lambda: step.gather(state),
            "save": lambda: fzero.save(state, f"{saved}-again", step=step),
            "reshard": lambda: fzero.reshard(state, step, step_of(1)),
        }
        found = [_told(uses[use]), _told(uses[use])]
        del uses
    again = step_of(3)
    state, _ = again(fzero.load(saved, step=again).state, mine[1])
    return [*found, repr(_bits(state))]


def _break(opened: threading.Event, path: str, rank: int) -> None:
    """Cuts files off; where there are none, the update has no memory."""
    files = list(Path(path).glob(f"fzero-rank{rank}/*exp_avg.flat"))
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    if not files:
        opened.error = MemoryError("no memory left")  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", ["step", "evaluate", "gather", "save", "reshard"])
@pytest.mark.parametrize("where", ["host", "files", "parameters, too"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_that_fails_is_reported_in_the_next_use_on_all_ranks_and_the_checkpoint_is_whole(
    ranks: RankPool, world_size: int, where: str, use: str, tmp_path: Path
) -> None:
    failing, files = world_size - 1, str(tmp_path / "files")
    args = (_zero(where, files), files, failing, use, str(tmp_path / "saved"))
    found = ranks(world_size, _after_a_fault, *args)
    names = ["the update of 'blocks.0/float32' after 1 updates failed"]
    names += ["no memory left"] if where == "host" else ["exp_avg.flat", "made with"]
    for rank, (first, second, bits) in enumerate(found):
        assert all(name in first for name in names), first
        assert rank == failing or re.search(rf"(rank|process) {failing}\b", first), first
        assert "cannot be used any more" in second or names[0] in second
        assert bits == repr(_bits(trained(step_of(3), 2))) or world_size > 1


def test_a_failed_update_is_reported_wherever_a_tensor_of_it_is_read() -> None:
    step = _on_host(3)
    with gate() as opened:
        state, _ = step(step.init(), data(0))
        _break(opened, "/nowhere", 0)
        opened.set()
        state.grads[UNITS[0]].zero_()  # left over from the update, and may be written
        for read in (
            lambda: state.params[UNITS[0]] + 1,
            lambda: np.asarray(state.optimizer[UNITS[0]].exp_avg),
            lambda: pickle.dumps(state),
            lambda: optree.tree_map(torch.clone, state.params),
        ):
            assert "after 0 updates failed: no memory left" in _told(read)


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
import test_async_update as t
step = t.step_of(3, zero=t.in_file(sys.argv[1]))
with t.gate() as opened:
    state, _ = step(step.init(), t.data(0))
    assert t._is_written(state)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_process_that_is_killed_during_an_update_leaves_what_any_killed_one_leaves(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), *sys.path]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    names = sorted(file.name for file in tmp_path.rglob("*") if file.is_file())
    assert len(names) == 7 and "owner.json" in names, "two blocks: a gradient and two moments"
    with pytest.raises(fzero.StoreError, match=r"of a run that has ended"):
        step_of(3, zero=in_file(tmp_path)).init()
    trained(step_of(3, zero=in_file(tmp_path, leftover="clean")), 1)


ENDS = """
import sys, threading
sys.path[:0] = sys.argv[2:]
import test_async_update as t
step = t.step_of(3, zero=t.in_file(sys.argv[1]))
state, _ = step(step.init(), t.data(0))
"""


@pytest.mark.long
def test_a_process_may_end_while_an_update_runs_and_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path), *sys.path]
    ended = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.rglob("*.flat"))


def test_files_go_with_a_state_that_is_dropped_while_it_is_written(tmp_path: Path) -> None:
    step = step_of(3, zero=in_file(tmp_path))
    with gate() as opened:
        state = after(step, step.init(), 0)
        (running,) = {handle.files.update for handle in handles_of(state)}
        assert running is not None
        del state
        gc.collect()
        assert list(tmp_path.rglob("*.flat")), "the update still writes them"
        opened.set()
        assert running.rest() is None
    del running
    gc.collect()
    assert not list(tmp_path.rglob("*.flat"))


def test_a_disk_that_stalls_delays_and_changes_nothing(tmp_path: Path) -> None:
    expected, reported = _run(step_of(3), 3)
    write, num = direct_io.os.pwritev, 0

    def stalls(fd: int, buffers: Any, at: int) -> int:
        nonlocal num
        num += 1
        if num % 16 == 0:
            time.sleep(0.2)
        return write(fd, buffers, at)

    with mock.patch.object(direct_io.os, "pwritev", stalls):
        found, metrics = _run(step_of(3, zero=in_file(tmp_path, params=True)), 3)
    assert (found, metrics) == (expected, reported) and num > 32


# --- where it is refused --------------------------------------------------------------------------


def test_a_model_on_another_device_refuses_the_key() -> None:
    plan = _on_host(3).plan
    with pytest.raises(fzero.ConfigError, match=r"async_update: must be false where the model is"):
        AsyncUpdates(plan, {}, set(), torch.device("cuda"))


def test_a_pipeline_refuses_the_key() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(fzero.ConfigError, match=r"async_update: must be false with a pipeline"):
        fzero.make_train_step(
            model,
            config(1, optimizer=ADAMW, **on_host()),
            loss_fn=torch.nn.functional.mse_loss,
            mesh=fzero.comms.AbstractAxis.of(Mesh.of(pipe=2, data=1)),
            pipeline="1f1b",
        )
