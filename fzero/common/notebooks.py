"""`as_html`: how a value shows itself in a notebook (`_repr_html_`): its report, and
its picture if matplotlib is there.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rich.console import RenderableType

from fzero.common.text_tables import as_text

FRAME = '<pre style="overflow-x: auto; line-height: 1.25; font-size: 0.9em">{}</pre>'


def as_html(report: RenderableType, draw: Callable[[], Any] | None = None) -> str:
    """A report as HTML, below the figure that `draw` makes.

    >>> as_html("a < b")
    '<pre style="overflow-x: auto; line-height: 1.25; font-size: 0.9em">a &lt; b</pre>'
    """
    picture = "" if draw is None or find_spec("matplotlib") is None else _svg(draw())
    return picture + FRAME.format(html.escape(as_text(report), quote=False))


def _svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element."""
    written = io.StringIO()
    figure.savefig(written, format="svg")
    return written.getvalue()[written.getvalue().index("<svg") :]
