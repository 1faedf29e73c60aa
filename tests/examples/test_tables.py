"""Reports are whole wherever they go: no figure is cut, on a narrow terminal, in a pipe
or in a file.
"""

from __future__ import annotations

import ast

import pytest
from rich.console import Group
from rich.table import Table
from test_rooms import ROOT, files, nodes_of
from torch import nn

import fzero
from fzero.common.text_tables import CUT, as_text, print_report

COLUMNS = [f"stage {index}, bytes sent" for index in range(9)]
FIGURES = [f"{17**index:,}" for index in range(6, 15)]


def wide(*, no_wrap: bool) -> Table:
    table = Table(title="many figures")
    table.add_column("contender", no_wrap=no_wrap)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=no_wrap)
    table.add_row("a contender", *FIGURES)
    return table


@pytest.mark.parametrize("columns", ["20", "80", "300"])
@pytest.mark.parametrize("no_wrap", [False, True])
def test_no_figure_is_cut_on_any_width(
    columns: str, no_wrap: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for report in (wide(no_wrap=no_wrap), Group(wide(no_wrap=no_wrap), "and a line")):
        print_report(report)
        print_report(report, stderr=True)
        out, err = capsys.readouterr()
        for text in (out, err, as_text(report)):
            assert CUT not in text and all(figure in text for figure in FIGURES)


def test_what_a_cell_says_itself_is_no_cut() -> None:
    table = Table("word")
    table.add_row("and so on …")
    assert as_text(table).count(CUT) == 1 and max(map(len, as_text(table).splitlines())) < 20


def test_a_plan_of_long_names_is_whole() -> None:
    name = "a_module_of_a_name_that_is_longer_than_a_line_of_text_has_columns_and_than_most_people_would_call_one"
    model = nn.ModuleDict({name + "x" * index: nn.Linear(300, 300) for index in range(2)})
    text = str(fzero.plan(model, {"zero_optimization": {"stage": 2}}, world_size=3))
    assert CUT not in text and name in text


def test_tables_are_printed_through_one_door() -> None:
    """`Console.print` cuts a table to the width that it believes in, which is 80
    columns in a pipe.
    """
    for path in files("benchmarks", "examples", "fzero"):
        if path == ROOT / "fzero" / "common" / "text_tables.py":
            continue
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "print"
            ):
                printed = [ast.unparse(argument).lower() for argument in node.args]
                assert not any(
                    x.startswith(("table", "make_table")) or x.endswith((".plan", "report"))
                    for x in printed
                ), (
                    path,
                    node.lineno,
                )
