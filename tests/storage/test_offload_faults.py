"""The law of faults: a fault in the files of one rank is reported on all ranks, in the
same step, and none goes on with less.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import RankPool
from test_offload import (
    ADAMW,
    PRECISIONS,
    blocks,
    config,
    data,
    differing,
    nvme,
    on,
    step_of,
    train,
)
from test_offload_params import in_files
from training import make, part

import fzero
from fzero.storage import direct_io as direct_files, stream
from fzero.storage.ownership import Owner


def everything(path: Path | str, **keys: Any) -> dict[str, Any]:
    """Masters, optimizer state, gradients and parameters in files."""
    return {**nvme(path, **keys), **in_files(path)}


def cut(pattern: str) -> Callable[[Path], None]:
    """Cuts the files off in their middle."""

    def fault(folder: Path) -> None:
        found = list(folder.glob(pattern))
        assert found
        for file in found:
            os.truncate(file, file.stat().st_size // 2)

    return fault


def turn_a_bit(folder: Path) -> None:
    (file, *_) = sorted(folder.glob("*exp_avg_sq.flat"))
    content = bytearray(file.read_bytes())
    content[1000] ^= 16
    file.write_bytes(content)


def remove(folder: Path) -> None:
    for file in folder.glob("*.flat"):
        file.unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "parameters are cut off": (cut("*params.flat"), "made with"),
    "gradients are cut off": (cut("*grads.flat"), "made with"),
    "moments are cut off": (cut("*exp_avg.flat"), "made with"),
    "masters are cut off": (cut("blocks.1%2Fbfloat16-float32.flat"), "made with"),
    "a bit turns": (turn_a_bit, "checksum"),
    "files are removed": (remove, None),
}


def _told(work: Callable[[], object]) -> str:
    try:
        work()
    except fzero.StoreError as error:
        return str(error)
    return "nothing"


def _after(path: str, fault: str, failing: int, optimizer: str) -> list[str]:
    """On a real rank: what a step, the same again, an evaluation and a save say after a
    fault of one rank's files.
    """
    cfg = (
        config(3, optimizer={"type": optimizer}, **everything(path, checksums=True))
        | PRECISIONS["bfloat16"]
    )
    step = fzero.make_train_step(make(blocks), cfg)
    mine = [part(data(index), step.rank, step.world_size) for index in range(2)]
    state, _ = step(step.init(), mine[0])
    if step.rank == failing:
        FAULTS[fault][0](Path(path) / f"fzero-rank{failing}")
    uses: list[Callable[[], object]] = [lambda: step(state, mine[1])] * 2
    if FAULTS[fault][1] is not None:
        uses += [
            lambda: step.evaluate(state, mine[1]),
            lambda: fzero.save(state, f"{path}/saved", step=step),
        ]
        return [_told(use) for use in uses]
    return [_told(uses[0])]


@pytest.mark.parametrize(
    ("fault", "optimizer"),
    # LAMB adds up over ranks in the middle of the update.
    [
        *((fault, "AdamW") for fault in FAULTS),
        ("moments are cut off", "Lamb"),
        ("files are removed", "Lamb"),
    ],
)
def test_a_fault_of_one_rank_is_reported_on_all_in_the_same_step_and_nobody_goes_on(
    ranks: RankPool, fault: str, optimizer: str, tmp_path: Path
) -> None:
    theirs, ours = ranks(2, _after, str(tmp_path), fault, 1, optimizer)
    says = FAULTS[fault][1]
    if says is None:
        assert ours == theirs == ["nothing"], "what is open works on"
        return
    assert says in ours[0] and theirs[0].startswith("rank 1: its state in files cannot be used"), (
        ours[0],
        theirs[0],
    )
    for reported in (*ours[1:], *theirs[1:]):
        assert "cannot be used any more" in reported and says in reported, (ours, theirs)


def _evaluation_fails(path: str, failing: int) -> list[str]:
    cfg = config(3, optimizer=ADAMW, **in_files(path))
    step = fzero.make_train_step(make(blocks), cfg)
    state = step.init()
    if step.rank == failing:
        cut("blocks.0*.flat")(Path(path) / f"fzero-rank{failing}")
    batch = part(data(0), step.rank, step.world_size)
    return [_told(lambda: step.evaluate(state, batch)), _told(lambda: step.gather(state))]


def test_a_fault_in_an_evaluation_is_reported_on_all(ranks: RankPool, tmp_path: Path) -> None:
    theirs, ours = ranks(2, _evaluation_fails, str(tmp_path), 1)
    assert "made with" in ours[0] and theirs[0].startswith("rank 1: its state"), (ours, theirs)
    assert "cannot be used any more" in ours[1] and "cannot be used any more" in theirs[1]


def _read_ahead_fails(path: str, failing: int, precision: str) -> list[str]:
    """On a real rank: of a step whose passes use no files, and the same again; an
    overflow (float16) skips the update.
    """
    step = fzero.make_train_step(
        make(blocks), config(1, optimizer=ADAMW, **nvme(path)) | PRECISIONS[precision]
    )
    state = step.init()
    if step.rank == failing:
        cut("*exp_avg*.flat")(Path(path) / f"fzero-rank{failing}")
    mine, look = part(data(0), step.rank, step.world_size), os.fstat
    # the read fails when the update could have been skipped already
    late = 0.2 if step.rank == failing else 0.0
    with mock.patch.object(direct_files.os, "fstat", lambda fd: time.sleep(late) or look(fd)):
        return [_told(lambda: step(state, mine)) for _ in range(2)]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_read_ahead_that_fails_on_one_rank_is_reported_on_all(
    ranks: RankPool, precision: str, tmp_path: Path
) -> None:
    theirs, ours = ranks(2, _read_ahead_fails, str(tmp_path), 1, precision)
    assert "made with" in ours[0] and theirs[0].startswith("rank 1: its state"), (ours, theirs)
    assert "cannot be used any more" in ours[1] and "cannot be used any more" in theirs[1]


@pytest.mark.parametrize("pattern", ["*exp_avg.flat", "*grads.flat", "*params.flat"])
def test_the_files_of_a_state_that_broke_in_a_backward_go_with_it(
    pattern: str, tmp_path: Path
) -> None:
    step = fzero.make_train_step(
        make(blocks), config(3, optimizer=ADAMW, **everything(tmp_path)) | PRECISIONS["bfloat16"]
    )

    def life() -> None:
        state, _ = step(step.init(), data(0))
        cut(pattern)(tmp_path / "fzero-rank0")
        assert "made with" in _told(lambda: step(state, data(1)))

    life()
    gc.collect()
    assert not list(tmp_path.rglob("*.flat"))


def test_an_error_of_an_update_is_raised_as_it_is_and_the_files_go_with_the_state(
    tmp_path: Path,
) -> None:
    step = fzero.make_train_step(make(blocks), config(2, optimizer=ADAMW, **nvme(tmp_path)))

    def life() -> None:
        state = step.init()
        with (
            mock.patch.object(stream, "update_streamed", side_effect=AssertionError),
            pytest.raises(AssertionError),
        ):
            step(state, data(0))
        with pytest.raises(
            fzero.StoreError, match=r"cannot be used any more since: AssertionError\(\)"
        ):
            step(state, data(0))

    life()
    gc.collect()
    assert not list(tmp_path.rglob("*.flat"))


def test_the_system_may_read_and_write_less_than_it_was_asked_for(tmp_path: Path) -> None:
    expected, _ = train(ranks := on(2, step_of(3, "bfloat16")), ranks.init(), 0, 2)
    short = {name: getattr(os, name) for name in ("preadv", "pwritev")}

    def less(name: str) -> Callable[..., int]:
        return lambda fd, buffers, at: short[name](fd, [buffers[0][:4096]], at)

    ranks = on(2, step_of(3, "bfloat16", **everything(tmp_path)))
    with mock.patch.multiple(direct_files.os, preadv=less("preadv"), pwritev=less("pwritev")):
        state, _ = train(ranks, ranks.init(), 0, 2)
        assert differing(state, expected) == []
    with (
        mock.patch.object(direct_files.os, "preadv", lambda fd, buffers, at: 0),
        pytest.raises(fzero.StoreError) as reported,
    ):
        train(ranks, state, 2, 1)
    assert "the system stopped at byte 0" in str(reported.value)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A filesystem of so many bytes."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.filterwarnings("ignore:.*has no direct I/O")
def test_a_disk_that_is_too_small_is_reported_with_the_numbers_and_the_old_state_goes_on(
    tmp_path: Path,
) -> None:
    here = on(2, step_of(3))
    expected, _ = train(here, here.init(), 0, 2)
    with small_disk(tmp_path / "disk", 1 << 17) as disk:
        there = on(2, step_of(3, **everything(disk)))
        with pytest.raises(
            fzero.StoreError,
            match=r"the files need [\d,]+ bytes and [\d,]+ are free \(No space left",
        ):
            there.init()
        state, _ = train(here, here.init(), 0, 1)
        for move in (lambda: fzero.place(state, there), lambda: fzero.reshard(state, here, there)):
            with pytest.raises(fzero.StoreError, match="No space left"):
                move()
        assert not list(disk.rglob("*.flat")), "what was made is removed"
    state, _ = train(here, state, 1, 1)
    assert differing(state, expected) == []


def _after_a_larger_job(path: str) -> list[str]:
    reported = []
    for leftover in ("refuse", "clean"):
        step = fzero.make_train_step(
            make(blocks), config(2, optimizer=ADAMW, **nvme(path, leftover=leftover))
        )
        reported.append(_told(step.init))
    return reported


def test_what_a_larger_job_left_is_reported_on_all_ranks_or_removed_by_whichever_comes_first(
    ranks: RankPool, tmp_path: Path
) -> None:
    for rank in (0, 1, 2, 3):
        folder = tmp_path / f"fzero-rank{rank}"
        folder.mkdir()
        (folder / "owner.json").write_text(
            json.dumps(asdict(replace(Owner.this_process(), started=1)))
        )
        (folder / "x.flat").write_bytes(bytes(4096))
    for refused, then in ranks(2, _after_a_larger_job, str(tmp_path)):
        assert (
            "holds 4 files (16,384 bytes) of a run that has ended" in refused
            and "in fzero-rank0" in refused
        )
        assert then == "nothing"
    assert not list(tmp_path.glob("fzero-rank[23]"))


def _too_little_memory(path: str, failing: int) -> str:
    keys = everything(path) | {"sub_group_size": 1 << 18}
    step = fzero.make_train_step(make(blocks), config(3, optimizer=ADAMW, **keys))
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    try:
        if step.rank == failing:
            resource.setrlimit(resource.RLIMIT_DATA, (taken + (1 << 19), limit[1]))
        step.init()
    except (fzero.StoreError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    return "nothing"


def test_too_little_host_memory_is_reported_before_it_is_taken_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    ours, theirs = ranks(2, _too_little_memory, str(tmp_path), 0)
    assert (
        ours.startswith("MemoryError: a pool of ")
        and "bytes of host memory, and the process's RLIMIT_DATA" in ours
    ), ours
    assert theirs.startswith("StoreError: rank 0: its state in files cannot be used"), theirs
    assert not list(tmp_path.rglob("*.flat"))
