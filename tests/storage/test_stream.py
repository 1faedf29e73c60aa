"""The law of streams: an update by sub-groups, wherever the state lives, is the update
of the whole; or it raises for good.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from profiles import examples
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fzero.optim import Transform, adagrad, adam, adamw, chain, lion, scale, sgd, skip_if
from fzero.optim.rounding import stochastic
from fzero.optim.transforms import leaf_names, long_leaves, mixed_precision, same_bits
from fzero.storage.file_store import FileStore
from fzero.storage.file_tensor import FileSpec, StoreError
from fzero.storage.movers import DeviceMover, FileMover, TensorRange
from fzero.storage.stream import (
    Mover,
    Streamed,
    SubGroup,
    cut,
    init_streamed,
    stream_update,
    update_streamed,
)

TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "adam": lambda: adam(0.1, weight_decay=0.01),
    "adamw": lambda: adamw(0.1),
    "sgd": lambda: sgd(0.1, momentum=0.9, dampening=0.1),
    "adagrad": lambda: adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "lion": lambda: lion(0.1, weight_decay=0.01),
    "chain": lambda: chain(scale(0.5), adamw(0.1)),
}
PLACE = 77
"""Where the first element stands among all parameters: random roundings depend on it.
"""


def by_precision(
    precision: str, transform: Transform, update: int, out: Tensor
) -> Callable[[int, int], Transform]:
    """The transform of elements [start, stop), in one of the ways in which a step
    updates.
    """
    if precision == "float32":
        return lambda start, stop: transform
    if precision == "bfloat16 beside a master":
        factor = torch.tensor(0.25)
        return lambda start, stop: mixed_precision(
            transform, state_dtype="float32", factor=factor, out=out[start:stop]
        )
    return lambda start, stop: mixed_precision(
        transform,
        state_dtype="bfloat16",
        rounding=stochastic(update, PLACE + start),
        out=out[start:stop],
    )


@contextmanager
def mover_of(
    kind: str, tensors: dict[str, Tensor], num_alive: int, sub_group_numel: int
) -> Iterator[Mover]:
    """A mover with room for these, which hold zeros."""
    if kind == "host":
        yield DeviceMover(tensors, "cpu")
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        files = {
            name: FileSpec(len(x), str(x.dtype).removeprefix("torch."))
            for name, x in tensors.items()
        }
        with FileStore(
            folder, files, checksums=kind == "checked files", block_nbytes=1 << 16
        ) as store:
            num_leaves = len(tensors)
            yield FileMover(
                store, num_buffers=num_alive * num_leaves, buffer_nbytes=4 * sub_group_numel
            )


def contents(mover: Mover, buffer: Streamed, sub_group_numel: int) -> list[Tensor]:
    """What lives there, joined."""
    parts = []
    for group in cut(buffer.names, buffer.numel, sub_group_numel):
        parts.append([x.clone() for x in mover.fetch(group)()])
        mover.write_back(group)()
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def names_of(transform: Transform, name: str, state: Any) -> tuple[str, ...]:
    """Names for a parameter and for the tensors of its state that are as long as it is."""
    longs = zip(leaf_names(state), long_leaves(transform), strict=True)
    return name, *(f"{name}/{leaf}" for leaf, is_long in longs if is_long)


@examples(100)
@given(
    name=st.sampled_from(sorted(TRANSFORMS)),
    precision=st.sampled_from(["float32", "bfloat16 beside a master", "bfloat16 alone"]),
    kind=st.sampled_from(["host", "files", "checked files"]),
    numels=st.lists(st.integers(0, 40_000), min_size=1, max_size=3),
    units=st.integers(1, 4),
    ahead=st.fixed_dictionaries(
        {"read_ahead": st.integers(0, 2), "write_behind": st.integers(0, 2)}
    ),
    skips=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_a_streamed_update_is_that_of_the_whole_bit_for_bit(
    name: str,
    precision: str,
    kind: str,
    numels: list[int],
    units: int,
    ahead: dict[str, int],
    skips: list[bool],
) -> None:
    sub_group_numel = units * {"host": 32 * 37, "files": 4096, "checked files": 1 << 15}[kind]
    transform, is_narrow = TRANSFORMS[name](), precision == "bfloat16 alone"
    grad_dtype = torch.float32 if precision == "float32" else torch.bfloat16
    dtype = torch.bfloat16 if is_narrow else torch.float32
    generator = torch.Generator().manual_seed(sum(numels))
    params = [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    outs = [param.to(torch.bfloat16, copy=True) for param in params]
    grads = [[torch.randn(n, generator=generator).to(grad_dtype) for n in numels] for _ in skips]

    def at(update: int, index: int, out: Tensor) -> Callable[[int, int], Transform]:
        inner = skip_if(torch.tensor(skips[update]), transform)
        return by_precision(precision, inner, update, out)

    wholes, streamed_outs = [], [out.clone() for out in outs]
    for index, param in enumerate(params):
        whole, state = param.clone(), at(0, index, outs[index])(0, len(param)).init(param)
        for update, grad in enumerate(grads):
            _, whole, state = at(update, index, outs[index])(0, len(param)).update(
                grad[index].clone(), whole, state
            )
        wholes.append((whole, state))

    def buffers(update: int, states: Sequence[Any]) -> list[Streamed]:
        return [
            Streamed(
                names_of(transform, f"h.{index}", states[index]),
                numels[index],
                at(update, index, streamed_outs[index]),
                lambda start, stop, index=index: grads[update][index][start:stop].clone(),  # type: ignore[misc]
                states[index],
            )
            for index in range(len(numels))
        ]

    empty = torch.empty(0, dtype=dtype)
    states = [at(0, index, streamed_outs[index])(0, 0).init(empty) for index in range(len(numels))]
    tensors = {
        leaf: torch.zeros(buffer.numel, dtype=dtype)
        for buffer in buffers(0, states)
        for leaf in buffer.names
    }
    num_alive = 1 + sum(ahead.values())
    with mover_of(kind, tensors, num_alive, sub_group_numel) as mover:
        named = {f"h.{index}": param for index, param in enumerate(params)}
        init_streamed(
            buffers(0, states),
            lambda leaf, start, stop: named[leaf][start:stop],
            mover,
            sub_group_numel=sub_group_numel,
            **ahead,
        )
        for update in range(len(grads)):
            update_streamed(
                buffers(update, states), mover, sub_group_numel=sub_group_numel, **ahead
            )
        for buffer, (whole, state) in zip(buffers(0, states), wholes, strict=True):
            leaves, is_long = optree.tree_leaves(state), long_leaves(transform)
            longs = [x for x, long in zip(leaves, is_long, strict=True) if long]
            found = contents(mover, buffer, sub_group_numel)
            for leaf, x, expected in zip(buffer.names, found, [whole, *longs], strict=True):
                assert same_bits(x, expected), leaf
            for x, expected, long in zip(
                optree.tree_leaves(buffer.state), leaves, is_long, strict=True
            ):
                assert long or same_bits(x, expected), "counters advance once"
    for found, expected in zip(streamed_outs, outs, strict=True):
        assert same_bits(found, expected), "what the model computes with"


def test_what_is_known_of_a_transform_keeps_no_tensor_alive() -> None:
    skip, out = torch.zeros((), dtype=torch.bool), torch.zeros(5)
    memory = StorageWeakRef(out.untyped_storage())
    transform = mixed_precision(skip_if(skip, adamw(0.1)), state_dtype="float32", out=out)
    assert long_leaves(transform) == [False, True, True]
    del transform, out
    assert memory.expired()


class Recorder:
    """A mover that only tells what it is asked, and may fail at one of its calls."""

    def __init__(self, fails_at: tuple[str, int] | None = None) -> None:
        self.events: list[str] = []
        self.fails_at = fails_at
        self.num_alive = self.most_alive = 0
        self.cause: BaseException | None = None

    def _tell(self, what: str, group: SubGroup | None = None) -> None:
        number = -1 if group is None else group.start // 32
        self.events.append(f"{what} {number}" if group else what)
        if self.fails_at == (what, number):
            raise OSError(f"{what} {number}")

    def check(self, sub_groups: Sequence[SubGroup], num_alive: int) -> None:
        if self.cause is not None:
            raise RuntimeError("broken") from self.cause

    def fetch(self, group: SubGroup) -> Callable[[], list[Tensor]]:
        self._tell("fetch", group)
        self.num_alive += 1
        self.most_alive = max(self.most_alive, self.num_alive)

        def wait() -> list[Tensor]:
            self._tell("is here", group)
            return []

        return wait

    def write_back(self, group: SubGroup) -> Callable[[], object]:
        self._tell("write_back", group)

        def wait() -> None:
            self._tell("is away", group)
            self.num_alive -= 1

        return wait

    def fence(self) -> None:
        self._tell("fence")

    def fail(self, cause: BaseException) -> None:
        self.cause = cause


def run(mover: Recorder, num: int, **ahead: int) -> list[str]:
    stream_update(
        lambda group, _: mover._tell("update", group), mover, cut(("x",), 32 * num, 32), **ahead
    )
    return mover.events


@given(num=st.integers(1, 6), read_ahead=st.integers(0, 3), write_behind=st.integers(0, 3))
def test_neighbours_move_while_a_sub_group_is_updated(
    num: int, read_ahead: int, write_behind: int
) -> None:
    mover = Recorder()
    events = run(mover, num, read_ahead=read_ahead, write_behind=write_behind)
    for index in range(num):
        now = events.index(f"update {index}")
        ahead, behind = min(index + read_ahead, num - 1), index - 1 - write_behind
        assert events.index(f"fetch {ahead}") < now and f"fetch {ahead + 1}" not in events[:now]
        assert f"is away {index - write_behind}" not in events[:now]
        assert behind < 0 or events.index(f"is away {behind}") < now
    assert events[-1] == "fence" and mover.num_alive == 0
    assert mover.most_alive <= 1 + read_ahead + write_behind


def test_without_neighbours_it_is_one_after_the_other() -> None:
    steps = ("fetch", "is here", "update", "write_back", "is away")
    expected = [f"{step} {index}" for index in range(2) for step in steps]
    assert run(Recorder(), 2, read_ahead=0, write_behind=0) == [*expected, "fence"]


@given(
    what=st.sampled_from(["fetch", "is here", "update", "write_back", "is away", "fence"]),
    where=st.integers(0, 3),
    read_ahead=st.integers(0, 2),
    write_behind=st.integers(0, 2),
)
def test_whatever_fails_is_raised_and_the_state_is_not_used_again(
    what: str, where: int, read_ahead: int, write_behind: int
) -> None:
    mover = Recorder((what, -1 if what == "fence" else where))
    with pytest.raises(OSError, match=what) as caught:
        run(mover, 4, read_ahead=read_ahead, write_behind=write_behind)
    assert mover.cause is caught.value
    with pytest.raises(RuntimeError, match="broken"):
        run(mover, 4)


def test_the_state_is_not_used_after_an_update_that_raises(tmp_path: Path) -> None:
    def interrupted(group: SubGroup, tensors: list[Tensor]) -> None:
        tensors[0].fill_(1)
        if group.start:
            raise KeyboardInterrupt("the user's")

    groups = cut(("x",), 5000, 1024)
    with FileStore(tmp_path, {"x": FileSpec(5000, "float32")}) as store:
        movers = (
            FileMover(store, num_buffers=3, buffer_nbytes=4096),
            DeviceMover({"x": torch.zeros(5000)}, "cpu"),
        )
        for mover, kind in zip(movers, (StoreError, RuntimeError), strict=True):
            with pytest.raises(KeyboardInterrupt):
                stream_update(interrupted, mover, groups)
            for again in (
                lambda mover=mover: stream_update(interrupted, mover, groups),
                mover.fence,
            ):
                with pytest.raises(kind, match="since: the user's"):
                    again()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_write_that_fails_in_mid_stream_ends_the_update_and_all_later_ones(
    ahead: int, tmp_path: Path
) -> None:
    numel = 64 * 1024
    with FileStore(tmp_path, {"x": FileSpec(numel, "float32")}) as store:
        mover = FileMover(store, num_buffers=1 + 2 * ahead, buffer_nbytes=4096)
        groups, before = cut(("x",), numel, 1024), resource.getrlimit(resource.RLIMIT_FSIZE)
        for again in range(2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (numel, before[1]) if not again else before)
            try:
                with pytest.raises(StoreError, match="File too large"):
                    stream_update(
                        lambda _, x: x[0].add_(1),
                        mover,
                        groups,
                        read_ahead=ahead,
                        write_behind=ahead,
                    )  # type: ignore[func-returns-value]
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("numel", [4096, 2048, 1024])
def test_what_was_read_ahead_is_what_the_file_holds_when_it_is_fetched(
    numel: int, tmp_path: Path
) -> None:
    with FileStore(
        tmp_path, {"x": FileSpec(4096, "float32"), "y": FileSpec(4096, "float32")}
    ) as store:
        mover, seen = FileMover(store, num_buffers=3, buffer_nbytes=16384), []
        mover.prefetch(TensorRange("x", 0, 4096))  # which is then written, also a part at a time
        stream_update(
            lambda g, x: x[0].fill_(g.start + numel), mover, cut(("x",), 4096, numel), read_ahead=0
        )
        for part in (
            TensorRange("x", 0, 4096),
            TensorRange("y", 0, 2048),
            TensorRange("y", 2048, 4096),
        ):
            mover.prefetch(part)
        (all_of_it,) = cut(("x",), 4096, 4096, kept=("x",))
        stream_update(
            lambda _, x: seen.append(x[0].tolist()),
            mover,
            [all_of_it],
            read_ahead=0,
            write_behind=0,
        )
        assert seen == [[float(i // numel * numel + numel) for i in range(4096)]]
        for _ in range(3):
            mover.take()  # also those of what nobody asked for


def test_a_read_ahead_that_is_refused_takes_no_buffer(tmp_path: Path) -> None:
    with FileStore(tmp_path, {"x": FileSpec(4096, "float32")}) as store:
        mover = FileMover(store, num_buffers=1, buffer_nbytes=4096)
        with pytest.raises(ValueError, match="x: the buffer must be 16384 bytes"):
            mover.prefetch(TensorRange("x", 0, 4096))
        assert mover.pool.num_free == 1


def test_what_there_is_no_room_for_is_reported_before_anything_is_done(tmp_path: Path) -> None:
    def never(group: SubGroup, tensors: list[Tensor]) -> None:
        raise AssertionError

    with FileStore(
        tmp_path, {"x": FileSpec(5000, "float32"), "y": FileSpec(5000, "bfloat16")}
    ) as store:
        mover = FileMover(store, num_buffers=5, buffer_nbytes=8192)
        with pytest.raises(
            ValueError,
            match=r"3 sub-groups at once need 6 buffers, and 5 of 5 are free; pass num_buffers=6",
        ):
            stream_update(never, mover, cut(("x", "y"), 5000, 2048))
        with pytest.raises(
            ValueError,
            match=r"4096 elements .* need buffers of 16384 bytes, and they have 8192; pass",
        ):
            stream_update(never, mover, cut(("x", "y"), 5000, 4096), read_ahead=0)
        with pytest.raises(
            ValueError,
            match=r"y: start and stop must be multiples of 2048 elements .* got 0 and 1024",
        ):
            stream_update(never, mover, cut(("x", "y"), 5000, 1024), read_ahead=0)
        with pytest.raises(
            ValueError, match="read_ahead and write_behind must be at least 0, got -1, 1"
        ):
            stream_update(never, mover, [], read_ahead=-1)
        with pytest.raises(
            ValueError, match="sub_group_numel: must be a positive multiple of 32, got 33"
        ):
            cut(("x",), 5000, 33)
        stream_update(lambda _, x: None, mover, cut(("x", "y"), 5000, 2048), read_ahead=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
        ),
    ],
)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_copies_to_a_device_and_back_lose_nothing(device: str, ahead: int) -> None:
    numel = 1_000_003
    host = {
        name: torch.arange(numel, dtype=torch.float64).add_(number)
        for number, name in enumerate("xy")
    }
    host = {name: x.pin_memory() if device == "cuda" else x for name, x in host.items()}

    def update(group: SubGroup, tensors: list[Tensor]) -> None:
        x, y = tensors
        assert x.device.type == y.device.type == device
        x.add_(y)
        y.mul_(2).add_(group.start)

    groups = cut(("x", "y"), numel, 32 * 1024)
    stream_update(update, DeviceMover(host, device), groups, read_ahead=ahead, write_behind=ahead)
    places = torch.arange(numel, dtype=torch.float64)
    starts = (torch.arange(numel) // (32 * 1024) * (32 * 1024)).double()
    assert torch.equal(host["x"], 2 * places + 1) and torch.equal(
        host["y"], 2 * (places + 1) + starts
    )


# --- memory ---------------------------------------------------------------------------------------

ROOM = 96 << 20
"""Bytes of heap, stacks and anonymous maps that the process may have besides what
Python and PyTorch have taken (240 MB).
"""

TRAIN = """
import resource, sys, torch
from fzero.storage.file_tensor import FileSpec
from fzero.storage.file_store import FileStore
from fzero.storage.movers import DeviceMover, FileMover
from fzero.storage.stream import Streamed, init_streamed, update_streamed
from fzero.optim import adamw

torch.set_num_threads(1)
folder, room, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
taken = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = taken + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
numel, sub_group_numel, transform = 3 * limit // 12 // 32 * 32 + 32, 1 << 19, adamw(0.1)
state = transform.init(torch.empty(0))
ones = torch.ones(sub_group_numel)
buffer = Streamed(("w", "w/exp_avg", "w/exp_avg_sq"), numel, lambda *_: transform, lambda a, b: ones[: b - a] * 0.5, state)
assert 12 * numel >= 3 * limit
if where == "memory":
    mover = DeviceMover({name: torch.zeros(numel) for name in buffer.names}, "cpu")
else:
    store = FileStore(folder, {name: FileSpec(numel, "float32") for name in buffer.names}, num_threads=4)
    mover = FileMover(store, num_buffers=9, buffer_nbytes=4 * sub_group_numel)
init_streamed([buffer], lambda _, a, b: ones[: b - a], mover, sub_group_numel=sub_group_numel)
for _ in range(2):
    update_streamed([buffer], mover, sub_group_numel=sub_group_numel)
expected, kept = torch.ones(1), transform.init(torch.ones(1))
for _ in range(2):
    _, expected, kept = transform.update(torch.full((1,), 0.5), expected, kept)
last = numel // sub_group_numel * sub_group_numel
found = store.read("w", last, numel, mover.pool.take())()
assert (found == expected).all() and state.step == 2, (found, expected)
# Not ru_maxrss, which begins with what the process had that started this one.
resident = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(12 * numel, limit, resident)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    def train(where: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", TRAIN, str(tmp_path), str(ROOM), where]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    streamed = train("files")
    assert streamed.returncode == 0, streamed.stderr
    state, limit, resident = map(int, streamed.stdout.split())
    assert state >= 3 * limit > 3 * ROOM and resident < state
    print(f"{state:,} bytes of state, {limit:,} allowed, {resident:,} resident at the peak")
    assert "can't allocate memory" in train("memory").stderr, "the limit holds"


def test_a_mover_that_has_failed_moves_nothing_more() -> None:
    mover, part = DeviceMover({"a": torch.zeros(4)}, "cpu"), SubGroup(("a",), 0, 4)
    mover.fetch(part)()
    mover.fail(OSError("no more"))
    for call in (
        mover.fetch,
        mover.write_back,
        lambda part: mover.check([part], 1),
        lambda _: mover.fence(),
    ):
        with pytest.raises(RuntimeError, match="no more"):
            call(part)
