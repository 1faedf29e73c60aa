"""Reports printed by rich without cut cells, on a terminal, in a pipe, a log or a
string; and numbers of bytes in them.
"""

from __future__ import annotations

import io
import sys

from rich.console import Console, RenderableType
from rich.measure import Measurement

PLAIN_WIDTH = 120
"""The width of reports that do not go to a terminal, in columns."""


def as_text(report: RenderableType) -> str:
    """A report as rich prints it without colours, in 120 columns, or as many as are
    needed to cut nothing.
    """
    text = _rendered(report, width_of(report, PLAIN_WIDTH))
    return "\n".join(line.rstrip() for line in text.splitlines())


def print_report(report: RenderableType, *, stderr: bool = False) -> None:
    """Prints a report, with colours on a terminal. On a narrow terminal its lines are
    wrapped, and nothing is cut.
    """
    console = Console(
        file=sys.stderr if stderr else sys.stdout, highlight=False, force_jupyter=False
    )
    width = width_of(report, console.width if console.is_terminal else PLAIN_WIDTH)
    Console(file=console.file, highlight=False, width=width, force_jupyter=False).print(
        report, soft_wrap=True
    )


def width_of(report: RenderableType, width: int) -> int:
    """The smallest width of at least `width` columns at which no cell of a table in the
    report is cut.

    >>> from rich.table import Table
    >>> table = Table("figure", "figure")
    >>> table.add_row("123,456,789", "987,654,321")
    >>> width_of(table, 20), width_of(table, 80)
    (29, 80)
    """
    wide = _into(io.StringIO(), 100_000)
    needed = Measurement.get(wide, wide.options, report)
    num_own = _rendered(report, max(width, needed.maximum)).count(CUT)
    widths = (width, max(width, needed.minimum))
    return next(
        (w for w in widths if _rendered(report, w).count(CUT) == num_own),
        max(width, needed.maximum),
    )


CUT = "…"
"""The character that rich writes instead of the end of a cell."""


def _rendered(report: RenderableType, width: int) -> str:
    out = io.StringIO()
    _into(out, width).print(report, soft_wrap=True)
    return out.getvalue()


def _into(file: io.StringIO, width: int) -> Console:
    """A console that writes plain text to a string. In Jupyter rich would show it
    instead, and FORCE_COLOR would add colours.
    """
    return Console(
        width=width, file=file, force_jupyter=False, force_terminal=False, color_system=None
    )


def scale_of(most: float) -> tuple[float, str]:
    """A unit that suits numbers of bytes up to `most`: its bytes and its name.

    >>> scale_of(120e9), scale_of(3e8)
    ((1000000000.0, 'GB'), (1000000.0, 'MB'))
    """
    return next(
        ((one, name) for one, name in ((1e9, "GB"), (1e6, "MB")) if most >= one), (1e3, "kB")
    )


def shown(nbytes: float, scale: float) -> str:
    """Bytes in units of `scale` bytes, in three digits or more; a dot stands for 0.

    >>> [shown(nbytes, 1e9) for nbytes in (0, 1.875e9, 31.4e9, 1.2e12, 4e5)]
    ['·', '1.88', '31.4', '1,200', '<0.001']
    """
    number = nbytes / scale
    if not nbytes:
        return "·"
    if number < 0.001:
        return "<0.001"
    return (
        f"{number:,.0f}"
        if number >= 100
        else f"{number:.3g}"
        if number >= 0.01
        else f"{number:.3f}"
    )
