"""The text of the demo: the sources of the Python standard library, which every machine
has.

The split is by file, by a hash of the file's name: no line of a held-out file is in the
training text, and the split is the same in every run. Batches are functions of (seed,
step, rank): nothing is stored to draw them again.
"""

import gzip
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# `encodings` and `pydoc_data` are left out because they are generated: their tables repeat from
# file to file and would put near copies of a held-out file into the training text. The others are
# tests, old tools, and installed packages.
LEFT_OUT = {
    *("encodings", "pydoc_data"),
    *(
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "site-packages",
        "dist-packages",
        "__pycache__",
    ),
}


def is_held_out(name: str) -> bool:
    """Whether the file of this name, relative to the library, is for validation; about
    one in twenty is.

    >>> [name for name in ("ast.py", "copy.py", "glob.py", "os.py") if is_held_out(name)]
    ['copy.py', 'glob.py']
    """
    return zlib.crc32(name.encode()) % 20 == 0


def list_files(library: Path) -> list[str]:
    """The names of the library's source files, relative to it, with forward slashes,
    sorted.
    """
    names = []
    for folder, folders, files in os.walk(library):
        folders[:] = set(folders) - LEFT_OUT  # os.walk visits the folders that remain in this list
        names += [
            (Path(folder) / file).relative_to(library).as_posix()
            for file in files
            if file.endswith(".py")
        ]
    return sorted(names)


def read_text(library: Path | None = None) -> tuple[Tensor, Tensor]:
    """The training bytes and the held-out bytes, each one long uint8 tensor."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    names = list_files(library)

    def join(chosen: list[str]) -> Tensor:
        return torch.frombuffer(
            bytearray().join((library / name).read_bytes() for name in chosen), dtype=torch.uint8
        )

    return join([name for name in names if not is_held_out(name)]), join(
        [name for name in names if is_held_out(name)]
    )


def to_batch(windows: Tensor, *, num_given: int = 0) -> tuple[Tensor, Tensor]:
    """Windows of context + 1 bytes as (tokens, targets): the target of each byte is the
    byte after it.

    The first `num_given` targets of each window are -100, which torch's cross-entropy
    excludes from its mean.
    """
    tokens, targets = windows[:, :-1].long(), windows[:, 1:].long()
    targets[:, :num_given] = -100
    return tokens, targets


def random_batch(
    text: Tensor, *, context: int, batch_size: int, seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Windows at random positions of the text; each rank draws its own."""
    starts = np.random.default_rng((seed, step, rank)).integers(
        len(text) - context, size=(batch_size, 1)
    )
    return to_batch(text[torch.from_numpy(starts + np.arange(context + 1))])


def scoring_windows(text: Tensor, *, context: int, multiple_of: int) -> tuple[Tensor, Tensor]:
    """Windows of context + 1 bytes that overlap by half, and the bytes that they score;
    a multiple of `multiple_of` windows.

    A window is scored on its second half: every byte is scored once, given at least
    context / 2 bytes.

    >>> windows, scored = scoring_windows(torch.arange(12), context=4, multiple_of=2)
    >>> windows.tolist(), scored.tolist()
    ([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8], [6, 7, 8, 9, 10]], [3, 4, 5, 6, 7, 8, 9, 10])
    """
    half = context // 2
    num_windows = (len(text) - 1 - half) // half // multiple_of * multiple_of
    last = (num_windows + 1) * half
    return text[: last + 1].unfold(0, context + 1, half), text[half + 1 : last + 1]


def scoring_batches(
    text: Tensor, *, context: int, batch_size: int, rank: int, world_size: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """This rank's batches of scoring windows, the same number on every rank, and the
    bytes that all ranks score.
    """
    windows, scored = scoring_windows(text, context=context, multiple_of=batch_size * world_size)
    mine = windows.split(batch_size)[rank::world_size]
    return [to_batch(some, num_given=context // 2) for some in mine], scored


def gzip_bits_per_byte(text: Tensor) -> float:
    """The bits per byte of `gzip -9` for this text."""
    return 8 * len(gzip.compress(text.numpy().tobytes(), compresslevel=9, mtime=0)) / len(text)
