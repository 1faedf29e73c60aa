"""How does a report that rich prints read as plain text?"""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def as_text(report: RenderableType) -> str:
    """What rich prints of a report, in 120 columns and without colours; wider lines stay whole."""
    out = io.StringIO()
    Console(width=120, file=out).print(report, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
