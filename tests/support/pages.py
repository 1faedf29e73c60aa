"""Runs the code blocks of a page of docs/: what a reader would do who copies every
block.

    python tests/support/pages.py docs/recipes/ema.md            compares
    python tests/support/pages.py --write docs/recipes/ema.md    writes the outputs into the page

A block ```` ```python title="train.py" ```` is a file. A block ```` ```sh ```` is run
in the folder of these files, and a block
```` ```text ```` behind it is its standard output. Other blocks are only read. The pages of one call share a folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
TOLERANCE = 0.02
"""Of numbers with a point: another processor sums in another order, and tens of steps
of training amplify it.
"""


class Block(NamedTuple):
    language: str
    info: str
    text: str
    start: int
    """Where `text` begins in the page."""


def blocks(page: str) -> Iterator[Block]:
    for match in BLOCK.finditer(page):
        yield Block(match[1], match[2].strip(), match[3], match.start(3))


def alike(shown: str, printed: str) -> bool:
    """Whether two outputs have equal words and whole numbers, and nearly equal other
    numbers.

    >>> (
    ...     alike("step 10: loss 0.7645", "step 10: loss 0.7646"),
    ...     alike("10 ranks", "11 ranks"),
    ...     alike("a  b", "a b"),
    ... )
    (True, False, True)
    """
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(one == two or ("." in one and _near(one, two)) for one, two in pairs)


def _near(one: str, two: str) -> bool:
    a, b = (float(x.replace(",", "")) for x in (one, two))
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) + 2e-4


def run_pages(paths: Sequence[Path], folder: Path, *, write: bool = False) -> None:
    """Runs the blocks of pages one after the other; raises where a command fails or
    prints something else.
    """
    for path in paths:
        page = path.read_text()
        outputs, last, printed = list[tuple[Block, str]](), None, ""
        for block in blocks(page):
            title = re.search(r'title="([^"]+)"', block.info)
            if block.language in ("python", "json") and title:
                (folder / title[1]).write_text(block.text)
            elif block.language == "sh" and not block.info:
                printed = run(block.text, folder, path)
            elif block.language == "text" and last == "sh":
                outputs.append((block, printed))
                if not write and not alike(block.text, printed):
                    raise AssertionError(
                        f"{path.name} shows\n{block.text}\nbut this was printed\n{printed}"
                    )
            last = block.language if not block.info or block.language != "sh" else None
        if write:
            for block, printed in reversed(outputs):
                page = page[: block.start] + printed + page[block.start + len(block.text) :]
            path.write_text(page)


def run(command: str, folder: Path, path: Path) -> str:
    """The standard output of a block of commands, with the package of this checkout and
    one thread for each process.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": search,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise AssertionError(
            f"{path.name}: `{command.strip()}` exits with "
            f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return re.sub(r"[ \t]+$", "", done.stdout, flags=re.MULTILINE).strip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the outputs into the pages")
    parser.add_argument("pages", nargs="+", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_pages(args.pages, Path(folder), write=args.write)


if __name__ == "__main__":
    main()
