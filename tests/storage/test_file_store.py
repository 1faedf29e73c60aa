"""The laws of files of flat tensors: what is read is what was written, and whatever
goes wrong is reported and ends all.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import server
from torch import Tensor

from fzero.storage import file_store, ownership as claims
from fzero.storage.direct_io import CHECKED
from fzero.storage.file_store import FileStore
from fzero.storage.file_tensor import FileSpec, StoreError
from fzero.storage.host_memory import Pool, _left_by_cgroups, check_host_memory
from fzero.storage.ownership import Owner

NUMEL = 100_000
FILES = {"h.0/float32": FileSpec(NUMEL, "float32")}
NBYTES = 401_408  # padded to 4096


def filled(numel: int = NUMEL, first: float = 1.0) -> Tensor:
    """A buffer of distinct numbers."""
    buffer = Pool(1, 4 * numel + CHECKED).take()
    torch.arange(numel, out=buffer.view(torch.float32)[:numel]).add_(first)
    return buffer


def numbers(store: FileStore) -> Tensor:
    return store.read("h.0/float32", 0, NUMEL, Pool(1, 4 * NUMEL + CHECKED).take())().clone()


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a filesystem in a new folder; who may not do that skips the test."""
    mounted = []

    def make(kind: str, options: str) -> Path:
        folder = tmp_path / f"mounted{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", kind, "-o", options, kind, str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{kind}: this user may not mount")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# --- what is written is what is read --------------------------------------------------------------


@given(
    numel=st.integers(0, 70_000),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "uint8"]),
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5),
    checksums=st.booleans(),
    block_nbytes=st.sampled_from([1, 10_000, 1 << 20]),
    num_threads=st.integers(1, 3),
)
def test_what_is_read_is_what_was_written_last(
    numel: int, dtype: str, ranges: Any, checksums: bool, block_nbytes: int, num_threads: int
) -> None:
    files = {"a": FileSpec(numel, dtype), "b": FileSpec(1, "float32")}
    how = {"checksums": checksums, "block_nbytes": block_nbytes, "num_threads": num_threads}
    with tempfile.TemporaryDirectory(dir=".") as folder, FileStore(folder, files, **how) as store:
        size = torch.tensor([], dtype=getattr(torch, dtype)).element_size()
        unit = store.grain // size
        expected, pool = (
            torch.zeros(numel * size, dtype=torch.uint8),
            Pool(2, numel * size + store.grain),
        )
        source, target = pool.take(), pool.take()
        for index, (start, length) in enumerate(ranges):
            begin = min(start * unit, numel // unit * unit)
            end = min(begin + length * unit, numel)
            source.copy_((torch.arange(len(source)) * (index + 3)) % 251)
            written = store.write("a", begin, end, source)()
            assert written.dtype == getattr(torch, dtype) and len(written) == end - begin
            expected[begin * size : end * size] = source[: (end - begin) * size]
        store.fence()
        found = store.read("a", 0, numel, target)()
        assert torch.equal(found.view(torch.uint8), expected)
        assert store.read("b", 0, 1, target)().item() == 0


@given(
    st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300), max_size=5)
)
def test_every_name_has_a_file_of_its_own(names: set[str]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        FileStore(folder, dict.fromkeys(names, FileSpec(1, "float32"))),
    ):
        assert len(list(Path(folder).rglob("*.flat"))) == len(names)


def test_numbers_do_not_pass_through_memory_of_the_page_cache(tmp_path: Path) -> None:
    with FileStore(tmp_path, FILES) as store:
        assert store.is_direct, "the folder of these tests is on a disk"
        store.write("h.0/float32", 0, NUMEL, filled())()
        assert torch.equal(numbers(store), torch.arange(NUMEL) + 1.0)


@pytest.mark.parametrize("how", ["ramfs", "refused"])
def test_filesystems_without_direct_io_work_with_a_note(
    how: str, tmp_path: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, system = tmp_path, os.open
    if how == "ramfs":
        folder = mount("ramfs", "size=4m")
    else:
        monkeypatch.setattr(
            os, "open", lambda path, flags, *mode: system(path, flags & ~os.O_DIRECT, *mode)
        )
        refused = OSError(22, "Invalid argument")

        def open_(path: Any, flags: int, *mode: int) -> int:
            if flags & os.O_DIRECT:
                raise refused
            return system(path, flags, *mode)

        monkeypatch.setattr(os, "open", open_)
    with pytest.warns(UserWarning, match="no direct I/O"), FileStore(folder, FILES) as store:
        store.write("h.0/float32", 0, NUMEL, filled())
        store.fence()
        assert not store.is_direct and torch.equal(numbers(store), torch.arange(NUMEL) + 1.0)
        late = OSError(5, "a write that the system kept for later has failed")
        monkeypatch.setattr(os, "fdatasync", mock.Mock(side_effect=late))
        store.write("h.0/float32", 0, NUMEL, filled())
        with pytest.raises(StoreError, match="kept for later"):
            store.fence()


@pytest.mark.parametrize("most", [100_000, 12_345, 8192])
def test_short_reads_and_writes_go_on_where_they_stopped(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("preadv", "pwritev"):
        system = getattr(os, name)

        def short(fd: int, buffers: list[memoryview], at: int, system: Any = system) -> int:
            """Moves whole sectors, as it must, and tells of an odd number of bytes."""
            calls.append(at)
            asked = len(buffers[0])
            moved = system(fd, [buffers[0][: most // 4096 * 4096]], at)
            return moved if moved == asked else moved - 1

        monkeypatch.setattr(os, name, short)
    with FileStore(tmp_path, FILES) as store:
        store.write("h.0/float32", 0, NUMEL, filled())
        store.fence()
        assert torch.equal(numbers(store), torch.arange(NUMEL) + 1.0)
    assert len(calls) >= 2 * NBYTES // most


def test_a_system_that_stops_is_reported_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(tmp_path, FILES) as store:
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: 100)
        with pytest.raises(
            StoreError,
            match=r"h\.0%2Ffloat32\.flat, bytes 0 to 401408: .* stopped at byte 0\. .*checkpoint",
        ):
            numbers(store)


def test_bad_arguments_are_reported_and_break_nothing(tmp_path: Path) -> None:
    with FileStore(tmp_path, FILES) as store:
        buffer = filled()
        for start, stop in ((1, 1024), (0, 1023), (1024, 0), (0, NUMEL + 1), (-1024, 0)):
            with pytest.raises(
                ValueError, match=f"multiples of 1024 elements .* got {start} and {stop}"
            ):
                store.read("h.0/float32", start, stop, buffer)
        for wrong in (buffer[:4096], buffer[1:], buffer.view(torch.float32), buffer[::2]):
            with pytest.raises(ValueError, match="the buffer must be 401408 bytes or more"):
                store.write("h.0/float32", 0, NUMEL, wrong)
        with pytest.raises(ValueError, match=r"h\.1: must be one of the 1 files of the store"):
            store.read("h.1", 0, NUMEL, buffer)
        store.fence()
    with pytest.raises(ValueError, match="num_threads and block_nbytes must be at least 1"):
        FileStore(tmp_path, FILES, num_threads=0)


# --- faults ---------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_before_anything_is_written(mount: Callable[..., Path]) -> None:
    folder = mount("tmpfs", "size=1m")
    files = {f"h.{index}": FileSpec(NUMEL, "float32") for index in range(3)}
    with pytest.raises(
        StoreError,
        match=r"mounted0.*need 1,204,224 bytes and 1,0\d\d,\d\d\d are free .*another disk",
    ):
        FileStore(folder, files)
    assert not list(folder.iterdir()), "what was set aside is given back"
    with FileStore(folder, FILES):
        pass


def test_a_file_longer_than_the_system_allows_is_reported(tmp_path: Path) -> None:
    with (
        limited(resource.RLIMIT_FSIZE, NBYTES - 1),
        pytest.raises(StoreError, match="the files need 401,408 bytes"),
    ):
        FileStore(tmp_path, FILES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["waited for", "behind"])
def test_a_failed_write_stops_everything_and_is_reported_ever_after(
    is_waited_for: bool, tmp_path: Path
) -> None:
    with FileStore(tmp_path, FILES, block_nbytes=1 << 16) as store:
        with limited(resource.RLIMIT_FSIZE, 1 << 17):  # the first two blocks can be written
            wait = store.write("h.0/float32", 0, NUMEL, filled())
            with pytest.raises(
                StoreError, match=r"flat, bytes \d+ to \d+: .*File too large.*checkpoint"
            ):
                (wait if is_waited_for else store.fence)()
        for again in (
            store.fence,
            lambda: numbers(store),
            lambda: store.write("h.0/float32", 0, NUMEL, filled()),
        ):
            with pytest.raises(
                StoreError, match=r"cannot be used any more since: .*File too large"
            ):
                again()


def test_a_fence_waits_for_what_fails_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(fd: int, buffers: list[memoryview], at: int) -> int:
        time.sleep(0.3)
        raise OSError(5, "Input/output error")

    with FileStore(tmp_path, FILES) as store:
        monkeypatch.setattr(os, "pwritev", late)
        store.write("h.0/float32", 0, NUMEL, filled())
        with pytest.raises(StoreError, match="Input/output error"):
            store.fence()


def test_a_file_that_is_cut_is_reported_even_if_it_grows_again(tmp_path: Path) -> None:
    for change in (lambda path: os.truncate(path, 4096), lambda path: path.write_bytes(b"")):
        with FileStore(tmp_path, FILES) as store:
            change(next(tmp_path.rglob("*.flat")))
            with pytest.raises(
                StoreError, match=r"the file is .* bytes long and was made with 401408"
            ):
                store.write("h.0/float32", 4096, NUMEL, filled())()
        with FileStore(tmp_path, FILES) as store:
            store.write("h.0/float32", 0, NUMEL, filled())()
            change(next(tmp_path.rglob("*.flat")))
            with pytest.raises(StoreError, match="another process changed it"):
                store.fence()
            with pytest.raises(StoreError, match="cannot be used any more"):
                numbers(store)


def test_a_file_that_is_removed_goes_on_working(tmp_path: Path) -> None:
    with FileStore(tmp_path, FILES) as store:
        store.write("h.0/float32", 0, NUMEL, filled())()
        next(tmp_path.rglob("*.flat")).unlink()
        store.write("h.0/float32", 1024, 2048, filled(1024, -5.0))()
        store.fence()
        assert torch.equal(
            numbers(store)[1020:1026], torch.tensor([1021.0, 1022.0, 1023.0, 1024.0, -5.0, -4.0])
        )


@pytest.mark.parametrize("byte", [0, CHECKED, 399_999, NBYTES])
def test_checksums_report_a_changed_bit(byte: int, tmp_path: Path) -> None:
    with FileStore(tmp_path, FILES, checksums=True) as store:
        store.write("h.0/float32", 0, NUMEL, filled())
        store.fence()
        assert torch.equal(numbers(store), torch.arange(NUMEL) + 1.0)
        with open(next(tmp_path.rglob("*.flat")), "r+b") as file:
            file.seek(byte)
            old = file.read(1)
            file.seek(byte)
            file.write(bytes([old[0] ^ 1]))
        first = byte // CHECKED * CHECKED
        with pytest.raises(
            StoreError, match=f"bytes {first} to {first + CHECKED} are not those that were written"
        ):
            numbers(store)


def test_a_path_that_cannot_be_written_to_is_reported(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        StoreError, match="file: Not a directory; pass a folder that this process may make"
    ):
        FileStore(file, FILES)
    with pytest.raises(
        StoreError, match="mounted0/fzero-rank3: Read-only file system; pass a folder"
    ):
        FileStore(mount("tmpfs", "size=1m,ro"), FILES, rank=3)


def test_too_many_files_are_reported(tmp_path: Path) -> None:
    files = {str(index): FileSpec(1, "float32") for index in range(100)}
    with (
        limited(resource.RLIMIT_NOFILE, 60),
        pytest.raises(StoreError, match="Too many open files; raise the limit"),
    ):
        FileStore(tmp_path, files)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["os.open", "create", "Path.rename"])
def test_a_folder_that_cannot_be_claimed_is_as_it_was(where: str, tmp_path: Path) -> None:
    (tmp_path / "fzero-rank1").mkdir()
    (tmp_path / "fzero-rank1" / "notes").touch()
    before = sorted(tmp_path.rglob("*"))

    def halfway(path: Path, *args: Any) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch(f"fzero.storage.ownership.{where}", halfway):
        for rank, state in ((0, 0), (1, 0), (0, 1)):
            with pytest.raises(StoreError, match="No space left on device"):
                FileStore(tmp_path, FILES, rank=rank, state=state)
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_memory_is_reported_with_the_numbers_before_it_is_taken() -> None:
    with pytest.raises(
        MemoryError,
        match=r"a pool of 4 buffers of 1,099,511,627,776 bytes: needs 4,398,046,511,104 bytes",
    ):
        Pool(4, 1 << 40)
    used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    with limited(resource.RLIMIT_AS, used + (64 << 20)):
        check_host_memory(16 << 20, "a pool")
        with pytest.raises(
            MemoryError,
            match=r"needs 134,217,728 bytes .* RLIMIT_AS of [\d,]+ leaves \d\d,\d\d\d,\d\d\d;",
        ):
            Pool(2, 64 << 20)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        (
            "0::/job",
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 5\ninactive_file 100",
            },
        ),
        (
            "4:memory:/job",
            {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "700",
                "memory.stat": "cache 1\ntotal_inactive_file 100",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_limits_of_control_groups_count_up_to_the_root(
    line: str, files: dict[str, str], tmp_path: Path
) -> None:
    top = tmp_path / line.split(":")[1]
    for folder, factor in ((top / "job", 1), (top, 3)):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(str(int(text) * factor) if text.isdigit() else text)
    (tmp_path / "cgroup").write_text(f"7:cpu:/other\n{line}\n")
    assert [left for _, left in _left_by_cgroups(tmp_path / "cgroup", tmp_path)] == [400, 1000]


# --- the end of a process -------------------------------------------------------------------------

ENDS = """
import os, sys
from pathlib import Path
from fzero.storage.file_tensor import FileSpec
from fzero.storage.file_store import FileStore

folder, numel = sys.argv[1], int(sys.argv[2])
store = FileStore(folder, {"h.0/float32": FileSpec(numel, "float32")}, num_threads=2, block_nbytes=4096)
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(len(list(Path(folder).rglob("*.flat"))), "file")
"""


@contextmanager
def another_process(function: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that calls `function(pipe, *args)`, in a session of its own, and our
    end of the pipe.
    """
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_its_session, args=(sys.path, function, theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        ours.close()


def _in_its_session(
    path: list[str], function: Callable[..., None], pipe: Connection, *args: Any
) -> None:
    os.setsid()
    sys.path[:] = path
    pipe.send("began")
    function(pipe, *args)


def _write_for_ever(pipe: Connection, folder: Path) -> None:
    """A child writes, and nobody asks how it ends."""
    if os.fork():
        time.sleep(100)
    pipe.send(os.getpid())
    store = FileStore(folder, FILES, num_threads=2, block_nbytes=4096)
    if os.fork() == 0:
        time.sleep(60)  # as a worker that outlives the process it was made by, with its files
        os._exit(0)
    buffer = Pool(1, 5 * NUMEL).take()
    while True:
        store.write("h.0/float32", 0, NUMEL, buffer)()
        pipe.send("written")


def test_a_killed_process_leaves_files_that_the_next_one_refuses_or_removes(tmp_path: Path) -> None:
    with another_process(_write_for_ever, tmp_path) as (_, pipe):
        assert pipe.recv() == "began"
        process = psutil.Process(pipe.recv())
        assert pipe.recv() == "written"
        for leftover in ("refuse", "clean"):
            with pytest.raises(
                StoreError, match=rf"is in use by process {process.pid} on .*; give each run a path"
            ):
                FileStore(tmp_path, FILES, leftover=leftover)  # type: ignore[arg-type]
        process.kill()  # amid a write; its child lives on
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        (tmp_path / "fzero-rank0" / "notes.txt").write_text("somebody's own")
        with pytest.raises(
            StoreError,
            match=(
                rf"holds 1 files \(401,408 bytes\) of a run that has ended, in fzero-rank0 "
                rf"\(process {process.pid}"
            ),
        ):
            FileStore(tmp_path, FILES)
        assert list(tmp_path.rglob("*.flat"))
        with FileStore(tmp_path, FILES, leftover="clean") as store:
            assert not numbers(store).any()
    assert [path.name for path in tmp_path.rglob("*")] == ["fzero-rank0", "notes.txt"]


def _hold(pipe: Connection, folder: Path, which: tuple[str, ...], dies: bool) -> None:
    if dies:
        Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    files = {"x": FileSpec(1024, "float32")}
    ranks = [map(int, x.split(".")) for x in which]
    held = [FileStore(folder, files, rank=rank, state=state) for rank, state in ranks]
    pipe.send(len(held))
    time.sleep(100)


@contextmanager
def holding(folder: Path, *which: str, dies: bool = False) -> Iterator[Any]:
    """Another process that has files of 4096 bytes: "2.1" are rank 2's of its state 1;
    or one that dies while it claims them.
    """
    with another_process(_hold, folder, which, dies) as (process, pipe):
        assert pipe.recv() == "began"
        if dies:
            process.join(60)
        else:
            assert pipe.recv() == len(which)
        yield process


def folders(path: Path) -> list[str]:
    return sorted(str(x.relative_to(path)) for x in path.rglob("fzero-rank*"))


@pytest.mark.long
def test_what_a_killed_job_left_of_more_ranks_and_states_is_refused_or_removed_and_nothing_else(
    tmp_path: Path,
) -> None:
    with (
        holding(tmp_path, "0.0", "0.1", "3.0", "3.1") as killed,
        holding(tmp_path, "2.0", "2.1") as living,
    ):
        killed.kill()
        killed.join()
        for name in (
            "notes.txt",
            "state1/fzero-rank3/notes.txt",
            "fzero-rank7/x.flat",
            "mine/fzero-rank0/x.flat",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("somebody's own")
        (tmp_path / "fzero-rank8").write_text("no folder")
        owner = f"process {killed.pid} on .*"
        for rank in (0, 1):  # one that was there, and one that was not
            with pytest.raises(
                StoreError,
                match=rf"holds 4 files \(16,384 bytes\) of a run that has ended, in "
                rf"fzero-rank0 \({owner}\), fzero-rank3 "
                rf"\({owner}\), state1/fzero-rank0 \({owner}\), state1/fzero-rank3 \({owner}\); "
                rf"pass leftover='clean'",
            ):
                FileStore(tmp_path, FILES, rank=rank)
        FileStore(tmp_path, FILES, rank=1, leftover="clean").close()
        assert living.is_alive()
        theirs = ["fzero-rank2", "state1/fzero-rank2"]
        assert folders(tmp_path) == sorted(
            [*theirs, "fzero-rank7", "fzero-rank8", "mine/fzero-rank0", "state1/fzero-rank3"]
        )
        assert all(
            sorted(os.listdir(tmp_path / name)) == ["owner.json", "x.flat"] for name in theirs
        )
        assert os.listdir(tmp_path / "state1/fzero-rank3") == ["notes.txt"]
        FileStore(tmp_path, FILES).close()  # nothing is left of what has ended


def test_many_folders_are_reported_in_one_line(tmp_path: Path) -> None:
    for rank in range(30):
        folder = tmp_path / f"fzero-rank{rank}"
        folder.mkdir()
        (folder / "owner.json").write_text(
            json.dumps(asdict(replace(Owner.this_process(), started=1)))
        )
    with pytest.raises(
        StoreError, match=r"holds 0 files \(0 bytes\) .* in fzero-rank0 \(.*\) and 22 more; pass"
    ):
        FileStore(tmp_path, FILES)


def test_two_runs_with_one_path_are_reported_and_harm_each_other_nowhere(tmp_path: Path) -> None:
    with holding(tmp_path, "0.0", "1.0") as first:
        with pytest.raises(
            StoreError,
            match=rf"fzero-rank0: is in use by process {first.pid} on .*; give each run a path",
        ):
            FileStore(tmp_path, FILES, leftover="clean")
        # a rank beyond those of the other run
        FileStore(tmp_path, FILES, rank=2, leftover="clean").close()
        assert (
            folders(tmp_path) == ["fzero-rank0", "fzero-rank1"]
            and len(list(tmp_path.rglob("*.flat"))) == 2
        )


@pytest.mark.long
def test_a_process_that_is_killed_while_it_claims_a_folder_keeps_nobody_away(
    tmp_path: Path,
) -> None:
    with holding(tmp_path, "0.0", dies=True):
        assert [path.name for path in tmp_path.rglob("*")] == ["fzero-rank0", "owner.new"]
    FileStore(tmp_path, FILES).close()
    assert not list(tmp_path.iterdir())


RANKS = """
import os, random, signal, sys, types
from pathlib import Path

path, draw = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
for name in ("fzero", "fzero.common", "fzero.storage"):  # without torch, for processes that are forked fast
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(Path(sys.argv[3], *name.split(".")[1:]))]
from fzero.storage import ownership as claims


def run(rank, how, ends):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(how == "refuse"))
    names = {}
    for state in range(2):
        folder = claims.folder_of(path, rank, state)
        names[folder] = claims.claim(path, folder, how)
        (folder / "x.flat").touch(exist_ok=False)
    os.write(reported, b".")
    os.read(go, 1)  # when all have theirs
    assert all(claims.is_mine(folder) and (folder / "x.flat").exists() for folder in names)
    if not ends:
        os.kill(os.getpid(), signal.SIGKILL)
    for folder, name in names.items():
        claims.release(path, folder, name)
    os._exit(0)


for _ in range(30):
    (hear, reported), (go, start), world_size = os.pipe(), os.pipe(), draw.randint(1, 5)
    ends = [draw.random() < 0.3 for _ in range(world_size)]
    how, ranks = draw.choice(["refuse", "clean"]), []
    for rank in range(world_size):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.close(hear)
            os.close(start)
            try:
                run(rank, how, ends[rank])
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
    os.close(reported)
    os.close(go)
    while len(os.read(hear, 1)) and (world_size := world_size - 1):
        pass
    os.close(hear)
    os.close(start)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert ended == [0 if end else -signal.SIGKILL for end in ends], ended
    left = {f"fzero-rank{rank}" for rank, end in enumerate(ends) if not end}
    assert {folder.name for folder in path.iterdir()} == left | ({"state1"} if left else set())
    assert {folder.name for folder in path.glob("state1/*")} == left
"""


def test_ranks_that_come_at_once_each_get_their_folder_whoever_removes_what_earlier_ones_left(
    tmp_path: Path,
) -> None:
    """Jobs of other numbers of ranks one after the other, most of which are killed;
    those that refuse are started again.
    """
    subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path), "0", str(Path(claims.__file__).parents[1])],
        check=True,
        timeout=100,
    )


def test_files_go_wherever_the_process_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = FileStore("path", FILES)
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.close()
    assert not list(tmp_path.rglob("*.flat"))


@pytest.mark.parametrize("state", [0, 1])
def test_a_folder_goes_only_while_nobody_can_claim_it(state: int, tmp_path: Path) -> None:
    store, rmdir, fd = (
        FileStore(tmp_path, FILES, state=state),
        Path.rmdir,
        os.open(tmp_path, os.O_RDONLY),
    )

    def goes(folder: Path) -> None:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rmdir(folder)

    with mock.patch.object(Path, "rmdir", goes):
        store.close()
    os.close(fd)
    assert not list(tmp_path.iterdir())


COMING_AND_GOING = """
import os, sys, types
from pathlib import Path

for name in ("fzero", "fzero.common", "fzero.storage"):  # without torch, for processes that are forked fast
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(Path(sys.argv[2], *name.split(".")[1:]))]
from fzero.storage import ownership as claims

path, ranks = Path(sys.argv[1]), []
for rank in range(4):
    ranks.append(os.fork())
    if not ranks[-1]:
        try:
            for _ in range(100):
                folder = claims.folder_of(path, rank, state=1)
                name = claims.claim(path, folder, "refuse")
                (folder / "x.flat").touch(exist_ok=False)
                claims.release(path, folder, name)
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
assert not any([os.waitpid(pid, 0)[1] for pid in ranks])
"""


def test_the_folder_of_a_state_goes_with_its_last_rank_and_none_that_comes_then_misses_it(
    tmp_path: Path,
) -> None:
    folder = str(Path(claims.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", COMING_AND_GOING, str(tmp_path), folder], check=True, timeout=100
    )
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_state_stays_while_it_holds_something(tmp_path: Path) -> None:
    with FileStore(tmp_path, FILES, state=1, rank=1), FileStore(tmp_path, FILES, state=2):
        FileStore(tmp_path, FILES, state=1).close()
        assert folders(tmp_path) == ["state1/fzero-rank1", "state2/fzero-rank0"]
        (tmp_path / "state2" / "notes.txt").write_text("somebody's own")
    assert [str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*")] == [
        "state2",
        "state2/notes.txt",
    ]


def test_a_store_whose_path_was_removed_leaves_those_that_were_made_there_since(
    tmp_path: Path,
) -> None:
    old = FileStore(tmp_path / "path", FILES)
    shutil.rmtree(tmp_path / "path")
    new = FileStore(tmp_path / "path", FILES)
    old.write("h.0/float32", 0, NUMEL, filled())()
    old.fence()  # it works, and is open
    old.close()
    assert len(list(tmp_path.rglob("*.flat"))) == 1 and not numbers(new).any()
    new.close()
    assert [path.name for path in tmp_path.iterdir()] == ["path"]
    gone = FileStore(tmp_path / "path", FILES)
    shutil.rmtree(tmp_path / "path")
    gone.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "may_live"),
    [
        ({}, True),
        ({"host": "elsewhere"}, True),
        ({"host": "elsewhere", "boot": "other"}, True),
        ({"names": "pid:[1]"}, True),
        ({"boot": "other"}, False),
        ({"started": 1}, False),
        ({"pid": 2**22 + 1}, False),
    ],
    ids=lambda value: " and ".join(value) or "itself" if isinstance(value, dict) else "",
)
def test_an_owner_has_ended_only_if_that_can_be_reported_here(
    change: dict[str, Any], may_live: bool, tmp_path: Path
) -> None:
    owner = replace(Owner.this_process(), **change)
    (tmp_path / "fzero-rank0").mkdir()
    (tmp_path / "fzero-rank0" / "owner.json").write_text(json.dumps(asdict(owner)))
    if may_live:
        with pytest.raises(StoreError, match="is in use by"):
            FileStore(tmp_path, FILES, leftover="clean")
    else:
        with pytest.raises(StoreError, match=r"holds 0 files .* of a run that has ended"):
            FileStore(tmp_path, FILES)
        FileStore(tmp_path, FILES, leftover="clean").close()


def test_a_process_removes_its_files_at_its_end_and_its_children_do_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path), str(NUMEL)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout == "1 file\n" and not list(tmp_path.iterdir())


def test_a_store_is_freed_without_waiting_for_what_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may free it where a thread cannot end: within a lock of
    `threading`, say.
    """
    may_end, move, left = threading.Event(), file_store._move_block, list[bool]()

    def slowly(*args: Any) -> None:
        left.append(may_end.wait(60))
        move(*args)

    def open_files() -> list[str]:
        links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return [
            os.readlink(link)
            for link in links
            if link.is_symlink() and str(tmp_path) in os.readlink(link)
        ]

    monkeypatch.setattr(file_store, "_move_block", slowly)
    store: Any = FileStore(
        tmp_path, {"x": FileSpec(4096, "float32"), "y": FileSpec(4096, "float32")}, num_threads=1
    )
    buffer = Pool(1, 16384).take()
    for name in "xy":
        store.write(name, 0, 4096, buffer)
    threads = list(store._threads._threads)
    del store
    gc.collect()
    assert not left, "the collector waited for what moves"
    assert not list(tmp_path.rglob("*.flat"))
    assert len(open_files()) == 1, "what moves still has its file"
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert not open_files()


def test_a_store_that_one_of_its_threads_frees_removes_its_files(tmp_path: Path) -> None:
    held = [FileStore(tmp_path, FILES)]
    threads = held[0]._threads
    threads.submit(held.clear).result()
    threads.shutdown()  # a store that is freed waits for no thread
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_store_that_is_collected_while_another_claims_its_folder_holds_nobody_up(
    tmp_path: Path,
) -> None:
    script = """
import sys
from fzero.storage import ownership as claims
from fzero.storage import file_store
from fzero.storage.file_tensor import FileSpec
from fzero.storage.file_store import FileStore
files = {"a": FileSpec(1024, "float32")}
held = [FileStore(sys.argv[1], files)]
held.append(held)
find = claims._left
def let_go(path):
    held = globals().pop("held", None)
    del held
    return find(path) if [[] for _ in range(100_000)] else {}
claims._left = let_go
with FileStore(sys.argv[1], files, state=1):
    pass
"""
    gone = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert gone.returncode == 0 and not list(tmp_path.rglob("*.flat"))


def test_a_path_that_another_program_has_locked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fzero.storage.ownership.SECONDS_TO_WAIT", 0.1)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with pytest.raises(
        StoreError, match=f"{tmp_path}: has been locked by another process for 0.1 s"
    ):
        FileStore(tmp_path, FILES)
    os.close(fd)
    FileStore(tmp_path, FILES).close()


def test_a_wait_that_fails_holds_nothing_of_who_waited(tmp_path: Path) -> None:
    store = FileStore(tmp_path, FILES)
    os.truncate(next(tmp_path.rglob("*.flat")), 0)
    waiting = store.read("h.0/float32", 0, 1024, Pool(1, 1 << 16).take())

    def waiter() -> weakref.ref[Tensor]:
        state = torch.zeros(1)
        with suppress(StoreError):
            waiting()
        return weakref.ref(state)

    state = waiter()
    gc.collect()
    assert state() is None


def test_nothing_is_left_after_a_store_is_closed(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        num_open = len(os.listdir("/proc/self/fd"))
        store = FileStore(tmp_path / "new", FILES)
        store.write("h.0/float32", 0, NUMEL, filled())
        store.close()
        store.close()
        assert len(os.listdir("/proc/self/fd")) == num_open and not list(
            (tmp_path / "new").iterdir()
        )
        with pytest.raises(StoreError, match="cannot be used any more since: it was closed"):
            numbers(store)
