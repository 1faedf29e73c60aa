"""The command `fzero diff A B`: where two recorded runs part."""

from __future__ import annotations

from typing import Any

from fzero.cli.plan_profile import parser_of, print_result, save_picture
from fzero.common.optional import package
from fzero.digests import Difference, diff

WHAT = """the first step, unit and tensor at which two runs part, and how the difference grows. A and B are folders
that fzero.record or fzero.digests.record_module wrote. Returns 0 if the runs are equal or differ by rounding,
1 if they part, 2 if they cannot be compared."""
EXAMPLES = """examples:
  fzero diff runs/a runs/b
  fzero diff runs/origin runs/port --tolerance 1e-4 --picture diff.png
  fzero diff runs/a runs/b --json"""


def difference(arguments: list[str]) -> int:
    """Prints the difference; its exit code is that of the help."""
    parser = parser_of("diff", WHAT, EXAMPLES)
    parser.add_argument("a", metavar="A", help="the folder of a recording")
    parser.add_argument("b", metavar="B", help="the folder of another one")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="relative differences up to it count as rounding (default: by the runs' dtypes)",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(arguments)
    found: list[Difference] = []

    def make() -> tuple[Difference, dict[str, Any]]:
        if given.picture:
            package("matplotlib", needed_by="--picture")
        found.append(diff(given.a, given.b, tolerance=given.tolerance))
        if given.picture:
            save_picture(given.picture, found[0].draw())
        return found[0], found[0].as_dict()

    if print_result(make, given.json):
        return 2
    return int(found[0].beyond is not None)
