"""The notebooks run from the first cell to the last, and what a cell ends with shows
itself.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fzero

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    """The sources of the code cells."""
    found = json.loads(notebook.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert all(not cell["outputs"] for cell in found["cells"] if cell["cell_type"] == "code"), (
        "clear the outputs"
    )
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


def run(source: str, names: dict[str, Any], title: str) -> Any:
    """Runs a cell as IPython does: the value of a last expression is shown."""
    *body, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shows else [*body, last], []), title, "exec"), names)
    return (
        eval(compile(ast.Expression(last.value), title, "eval"), names)
        if isinstance(last, ast.Expr)
        else None
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_values(notebook: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [
        run(source, names, f"{notebook.stem}, cell {n}") for n, source in enumerate(cells(notebook))
    ]
    html = [
        value._repr_html_()
        for value in shown
        if type(value).__module__.startswith(("fzero", "sharding"))
    ]
    assert all("<pre" in text for text in html)
    if notebook.stem == "zero_in_pictures":
        assert len(html) == 5  # plan, state, trace, schedule, explain
        assert [text.startswith("<svg") for text in html] == [False, False, True, False, True]
    if notebook.stem == "your_own_optimizer":
        beyond = names["difference"].beyond
        assert (beyond.step, beyond.quantity) == (0, "weight")


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3 and fzero.notebook_launch


def test_a_report_is_plain_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Jupyter rich shows what it prints instead of writing it, and the kernel asks
    for colours.
    """
    plan = fzero.plan(nn.Linear(4, 4), {"zero_optimization": {"stage": 2}}, world_size=2)
    expected, html = str(plan), plan._repr_html_()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(plan) == expected and plan._repr_html_() == html
    assert "ZeRO stage 2 on 2 ranks" in html and "\x1b" not in html


KERNEL_CELLS = [
    "import torch, fzero\nfrom torch import nn\nmodel = nn.Linear(4, 4)\ncfg = "
    "{'zero_optimization': {'stage': 2}}",
    """def train():
    step = fzero.make_train_step(model, cfg, loss_fn=lambda model, x: (model(x) - x).square().mean())
    state, metrics = step(step.init(), torch.ones(2, 4))
    return step.rank, step.world_size, metrics.loss.item()
results = fzero.notebook_launch(train, num_procs=2)
[(rank, world) for rank, world, _ in results], results[0][2] == results[1][2]""",
    "fzero.plan(model, cfg, world_size=2)",
]


@pytest.mark.long
def test_a_real_kernel_launches_ranks_and_shows_a_plan_once() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in KERNEL_CELLS]
    )
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert notebook.cells[1].outputs[-1]["data"]["text/plain"] == "([(0, 2), (1, 2)], True)"
    (shown,) = notebook.cells[2].outputs
    assert "ZeRO stage 2 on 2 ranks" in shown["data"]["text/html"]
