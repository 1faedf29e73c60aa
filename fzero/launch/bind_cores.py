"""Binds a rank to its share of a host's cores, and becomes the rank's program:
`--bind_cores_to_rank`.

    python -I -S bind_cores.py CORES NUM_RANKS LOCAL_RANK program args…

CORES is a list such as 0-3,8, or "all" for the cores that this process may use. Memory
follows: Linux places it beside the core that touches it first. Standard library only,
so that the start costs little.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores of a list of numbers and ranges, in order.

    >>> parse_cores("1,3-5,7")
    (1, 3, 4, 5, 7)
    >>> parse_cores("3-1")
    Traceback (most recent call last):
    ValueError: '3-1' must be numbers and ranges in ascending order, such as 0-3,8
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            break
        cores += range(int(first), int(last or first) + 1)
    else:
        if cores == sorted({*cores}) and len(cores) >= len(text.split(",")):
            return tuple(cores)
    raise ValueError(f"{text!r} must be numbers and ranges in ascending order, such as 0-3,8")


def share(cores: Sequence[int], num_ranks: int, local_rank: int) -> tuple[int, ...]:
    """The cores of one rank: as many for each, in order; a rest is used by none.

    >>> share((0, 1, 2, 3, 4), 2, 1)
    (2, 3)
    """
    each = len(cores) // num_ranks
    if not each:
        raise ValueError(
            f"--bind_cores_to_rank: needs a core for each of the {num_ranks} ranks of a host, and "
            f"there are {len(cores)}; start fewer ranks, or leave it out"
        )
    return tuple(cores[each * local_rank : each * (local_rank + 1)])


def main(words: Sequence[str]) -> int:
    """Binds this process, and replaces it by the program; returns only after an error."""
    text, num_ranks, local_rank, program, *args = words
    try:
        usable = sorted(os.sched_getaffinity(0))
        chosen = share(
            usable if text == "all" else parse_cores(text), int(num_ranks), int(local_rank)
        )
        os.sched_setaffinity(0, chosen)
    except (ValueError, OSError) as error:
        print(
            f"fzero: {error}"
            if isinstance(error, ValueError)
            else f"fzero: --bind_core_list {text}: {error}",
            file=sys.stderr,
        )
        return 2
    os.environ["OMP_NUM_THREADS"] = str(len(chosen))
    os.execv(shutil.which(program) or program, [program, *args])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
