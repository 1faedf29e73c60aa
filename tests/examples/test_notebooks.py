"""The notebooks run from the first cell to the last, and what a cell ends with shows itself."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import fzero

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    """The sources of the code cells."""
    found = json.loads(notebook.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert all(not cell["outputs"] for cell in found["cells"] if cell["cell_type"] == "code"), "clear the outputs"
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


def run(source: str, names: dict[str, Any], title: str) -> Any:
    """Runs a cell as IPython does: the value of a last expression is shown."""
    *body, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shows else [*body, last], []), title, "exec"), names)
    return eval(compile(ast.Expression(last.value), title, "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_values(notebook: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [run(source, names, f"{notebook.stem}, cell {n}") for n, source in enumerate(cells(notebook))]
    html = [value._repr_html_() for value in shown if type(value).__module__.startswith(("fzero", "sharding"))]
    assert all("<pre" in text for text in html)
    if notebook.stem == "zero_in_pictures":
        assert len(html) == 5  # plan, state, trace, schedule, explain
        assert [text.startswith("<svg") for text in html] == [False, False, True, False, True]


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3 and fzero.notebook_launch
