"""How does a report that rich prints read as plain text, and how do numbers of bytes in it?"""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def as_text(report: RenderableType) -> str:
    """What rich prints of a report, in 120 columns and without colours; wider lines stay whole."""
    out = io.StringIO()
    Console(width=120, file=out).print(report, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def scale_of(most: float) -> tuple[float, str]:
    """The unit in which numbers of bytes up to `most` read well.

    >>> scale_of(120e9), scale_of(3e8)
    ((1000000000.0, 'GB'), (1000000.0, 'MB'))
    """
    return next(((one, name) for one, name in ((1e9, "GB"), (1e6, "MB")) if most >= one), (1e3, "kB"))


def shown(nbytes: float, scale: float) -> str:
    """Bytes in that unit, in three digits or more; a dot is nothing.

    >>> [shown(nbytes, 1e9) for nbytes in (0, 1.875e9, 31.4e9, 1.2e12, 4e5)]
    ['·', '1.88', '31.4', '1,200', '<0.001']
    """
    number = nbytes / scale
    if not nbytes:
        return "·"
    if number < 0.001:
        return "<0.001"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}" if number >= 0.01 else f"{number:.3f}"
