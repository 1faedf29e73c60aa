"""docs/concepts/agreements.md: its tables have every function that meets, exchanges or
compares values of all ranks, and no other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from test_rooms import ROOT, files, tree_of

PAGE = (ROOT / "docs" / "concepts" / "agreements.md").read_text()
MEETS = {"store_barrier"}
COMPARES = {
    *("check_same", "check_alike", "check_passes", "MismatchError"),
    *(f"collectives.{name}" for name in ("exchange", "exchange_via_store", "stack")),
}
MEASURES = {
    "comms/mesh.py: AxisMesh.stack",
    "deepspeed/comm/comm.py: log_summary",
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py: _of_all_ranks",
    "profiling/machine.py: gather_rate",
    *(f"tuning/probe.py: Probe.{name}" for name in ("has_updated", "_barrier", "_describe")),
}
"""Functions that send what ranks have without an agreement: measurements, the sum of
parts of a mesh, and batches whose sequences ranks share."""


def callers(node: ast.AST, names: set[str], within: str = "") -> Iterator[str]:
    """The functions below a node that call one of these names."""
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{within}.{child.name}".lstrip(".") if is_named else within  # type: ignore[attr-defined]
        if isinstance(child, ast.Call) and ast.unparse(child.func) in names:
            yield inner
        yield from callers(child, names, inner)


def of_code(names: set[str]) -> set[str]:
    lasts = {name.rpartition(".")[2] for name in names}
    return {
        f"{path.relative_to(ROOT / 'fzero')}: {function}"
        for path in files("fzero")
        if any(last in path.read_text() for last in lasts)
        for function in callers(tree_of(path), names)
    }


def of_page(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py: [\w.]+)`", text))


def test_the_page_has_every_call_at_which_ranks_meet() -> None:
    meetings = PAGE[PAGE.index("## Meetings") : PAGE.index("## When a step is made")]
    assert of_page(meetings) == of_code(MEETS)


def test_the_page_has_every_function_in_which_ranks_compare() -> None:
    rest = PAGE[PAGE.index("## When a step is made") :]
    assert of_page(rest) == of_code(COMPARES) - MEASURES
    assert of_code(COMPARES) >= MEASURES
