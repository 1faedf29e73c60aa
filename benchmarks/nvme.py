"""How fast is state read, written and updated in files? Beside what `fio` reaches on
the same path, block and depth.

    python benchmarks/nvme.py
        a table and out/nvme/nvme.json; needs fio (apt-get install -y fio)
    python benchmarks/nvme.py --path /mnt/nvme --megabytes 1024 --rounds 9

Every contender moves as many bytes as the others, in files that were written before,
and they take turns in rounds: `GB/s` is the median of the rounds, `of fio` the median
of each round's ratio to fio's `io_uring` in that round, so that another load on the
disk hits both. fio's `psync` is a thread for each block in flight that calls pread and
pwrite, as the store does.

`update` is AdamW in fp32, streamed through the pool: it reads 12 bytes for each element
and writes 12, at the same time, beside fio's `rw` (half reads, half writes). `no disk`
is the same stream without moving anything: what is left is the update itself.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from rich.table import Table

import fzero
from fzero.common import print_report
from fzero.storage.file_store import FileStore
from fzero.storage.file_tensor import FileSpec
from fzero.storage.host_memory import Pool
from fzero.storage.movers import FileMover
from fzero.storage.stream import Mover, Streamed, SubGroup, init_streamed, update_streamed

AHEAD = (0, 1, 2)
"""How many sub-groups are read ahead, and as many written behind; 0 is one after the
other.
"""

Contender = Callable[[], float]
"""Does its work once, and returns the GB/s of it."""


def fio(
    folder: Path, kind: str, args: argparse.Namespace, *, engine: str = "io_uring", direct: int = 1
) -> float:
    """What fio reaches: `read`, `write` or `rw`."""
    per_job = args.megabytes // (args.depth if engine == "psync" else 1)
    jobs = (
        ["--thread", f"--numjobs={args.depth}"]
        if engine == "psync"
        else [f"--iodepth={args.depth}"]
    )
    command = [
        "fio",
        "--name=fzero",
        f"--directory={folder}",
        f"--rw={kind}",
        f"--bs={args.block}",
        f"--size={per_job}m",
        f"--direct={direct}",
        f"--ioengine={engine}",
        "--overwrite=1",
        "--group_reporting",
        "--output-format=json",
        *jobs,
        *([] if direct else ["--end_fsync=1", "--invalidate=1"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (job,) = json.loads(done.stdout)["jobs"]
    return (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9


def move(store: FileStore, kind: str, buffers: list[torch.Tensor], numel: int) -> float:
    """Reads or writes a whole file, with all the buffers in flight."""
    waits: deque[Callable[[], object]] = deque()
    block = store.block_nbytes // 4
    begin = time.perf_counter()
    for index, start in enumerate(range(0, numel, block)):
        if len(waits) == len(buffers):
            waits.popleft()()
        one = store.read if kind == "read" else store.write
        waits.append(one("0", start, min(start + block, numel), buffers[index % len(buffers)]))
    store.fence()
    return 4 * numel / (time.perf_counter() - begin) / 1e9


class NoDisk:
    """A mover that moves nothing: the update works on the same buffers again and again."""

    def __init__(self, num: int, numel: int) -> None:
        self.tensors = [torch.ones(numel) for _ in range(num)]

    def check(self, sub_groups: Any, num_alive: int) -> None: ...

    def fetch(self, group: SubGroup) -> Callable[[], list[torch.Tensor]]:
        return lambda: [x[: group.numel] for x in self.tensors]

    def write_back(self, group: SubGroup) -> Callable[[], object]:
        return lambda: None

    def fence(self) -> None: ...

    def fail(self, cause: BaseException) -> None: ...


def update(buffer: Streamed, mover: Mover, sub_group_numel: int, ahead: int) -> float:
    begin = time.perf_counter()
    update_streamed(
        [buffer], mover, sub_group_numel=sub_group_numel, read_ahead=ahead, write_behind=ahead
    )
    return 24 * buffer.numel / (time.perf_counter() - begin) / 1e9


@contextmanager
def buffered() -> Iterator[None]:
    """A filesystem without direct I/O: everything goes through the page cache."""

    def nothing(self: object) -> None:
        return None

    with (
        mock.patch("fzero.storage.direct_io.DirectFile._use_direct", nothing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


Made = dict[str, dict[str, Contender]]
"""By what is done, and by whom."""


def fio_contenders(folder: Path, args: argparse.Namespace) -> Made:
    return {
        kind: {
            "fio io_uring": partial(fio, folder, kind, args),
            "fio psync": partial(fio, folder, kind, args, engine="psync"),
            "fio psync, page cache": partial(fio, folder, kind, args, engine="psync", direct=0),
        }
        for kind in ("read", "write", "rw")
    }


def stores(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name, how each store is made."""
    return {
        f"{args.depth} threads": {"num_threads": args.depth},
        "1 thread": {"num_threads": 1},
        "4 threads": {"num_threads": 4},
        "checksums": {"num_threads": args.depth, "checksums": True},
        "page cache": {"num_threads": args.depth},
    }


def streamed_adamw(numel: int, gradient: torch.Tensor) -> Streamed:
    transform = fzero.adamw(1e-3)
    state = transform.init(torch.empty(0))
    names = "w", "w/exp_avg", "w/exp_avg_sq"
    return Streamed(
        names, numel, lambda *_: transform, lambda start, stop: gradient[: stop - start], state
    )


def make_contenders(folder: Path, args: argparse.Namespace, stack: ExitStack) -> Made:
    made = fio_contenders(folder, args)
    numel, pool = args.megabytes * (1 << 20) // 4, Pool(2 * args.depth, args.block)
    buffers, gradient = [pool.take() for _ in range(2 * args.depth)], torch.randn(args.sub_group)
    buffer = streamed_adamw(numel // 6 // 32 * 32, gradient)
    files = {"0": FileSpec(numel, "float32")} | dict.fromkeys(
        buffer.names, FileSpec(buffer.numel, "float32")
    )
    for name, how in stores(args).items():
        with buffered() if name == "page cache" else ExitStack():
            store = stack.enter_context(
                FileStore(folder / name, files, block_nbytes=args.block, **how)
            )
        move(store, "write", buffers, numel)
        for kind in ("read", "write"):
            made[kind][name] = partial(move, store, kind, buffers, numel)
        mover = FileMover(
            store, num_buffers=3 * (1 + 2 * AHEAD[-1]), buffer_nbytes=4 * args.sub_group
        )
        init_streamed(
            [buffer],
            lambda _, start, stop: gradient[: stop - start],
            mover,
            sub_group_numel=args.sub_group,
        )
        for ahead in AHEAD if name == f"{args.depth} threads" else (AHEAD[-1],):
            made["rw"][f"update, {name}, {ahead} ahead"] = partial(
                update, buffer, mover, args.sub_group, ahead
            )
    made["rw"]["update, no disk"] = partial(
        update, buffer, NoDisk(3, args.sub_group), args.sub_group, 1
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the disk")
    parser.add_argument(
        "--megabytes", type=int, default=384, help="that each contender moves in a round"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=int, default=1 << 22, help="bytes of a block")
    parser.add_argument(
        "--depth", type=int, default=8, help="blocks in flight: the store's threads, fio's iodepth"
    )
    parser.add_argument("--sub-group", type=int, default=1 << 20, help="elements of a sub-group")
    parser.add_argument("--out", type=Path, default=Path("out/nvme"))
    args = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("nvme: needs fio to compare with; install it with: apt-get install -y fio")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.path) as folder, ExitStack() as stack:
        made = make_contenders(Path(folder), args, stack)
        found: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in row} for kind, row in made.items()
        }
        for _ in track(range(args.rounds), "rounds"):
            for kind, row in made.items():
                for name, contender in row.items():
                    found[kind][name].append(contender())
    table = Table("", "who", "GB/s", "min", "max", "of fio")
    for kind, row in found.items():
        for name, speeds in row.items():
            ratio = statistics.median(
                x / y for x, y in zip(speeds, row["fio io_uring"], strict=True)
            )
            table.add_row(
                kind,
                name,
                *(f"{f(speeds):.2f}" for f in (statistics.median, min, max)),
                f"{ratio:.2f}",
            )
    print_report(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "nvme.json").write_text(
        json.dumps({"args": vars(args), "GB/s": found}, default=str, indent=1)
    )


if __name__ == "__main__":
    main()
