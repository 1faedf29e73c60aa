"""The tool that measures the tests finds places for faults, and none where a fault
would say nothing.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults import CHOSEN, Fault
from mutants import ROOT, Mutant, Reached, core_files, draw, failures, find, mutants_of, within


def test_every_chosen_fault_has_its_place_and_leaves_a_program() -> None:
    for mutant in map(find, CHOSEN):
        ast.parse(mutant.applied_to((ROOT / mutant.path).read_text()))


def test_drawn_faults_are_those_of_their_seed_and_leave_a_program() -> None:
    drawn = draw(60, seed=3)
    assert drawn == draw(60, seed=3) != draw(60, seed=4)
    assert len({(mutant.path, mutant.function) for mutant in drawn}) == 60
    for mutant in drawn:
        source = (ROOT / mutant.path).read_text()
        assert ast.dump(ast.parse(mutant.applied_to(source))) != ast.dump(ast.parse(source)), (
            mutant.name
        )


def test_no_fault_is_in_an_error_a_check_a_text_or_a_type_nor_where_order_says_nothing() -> None:
    source = (
        'def f(x: "a | b", y=0) -> None:\n    assert x > 1\n    if y:\n        raise ValueError(f"{x + 1}" + "a")\n'
        "    return zip(max(x, y), strict=True)\n"
    )
    assert mutants_of("a.py", source) == {}


def test_a_fault_is_where_its_line_says() -> None:
    source = "def f(é, x):\n    'é'\n    return (\n        g(é, x)\n    )\n"
    (found,) = mutants_of("a.py", source)["f"]
    mutant = found()
    assert (mutant.line, mutant.old, mutant.new) == (4, "g(é, x)", "g(x, é)")
    assert mutant.applied_to(source) == source.replace("g(é, x)", "g(x, é)")


def test_a_fault_whose_text_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("def f(x):\n    return x + 1\n")
    assert find(Fault("room", "f", "x + 1", "x", "lost"), tmp_path).line == 2
    with pytest.raises(
        LookupError, match=r"'x \+ 2' must be once in a function 'f' of room, and is 0 times"
    ):
        find(Fault("room", "f", "x + 2", "x", "lost"), tmp_path)


def test_tests_of_a_line_come_one_of_each_file_in_turn_and_the_quick_ones_first() -> None:
    reached = Reached(
        {"a.py": {7: ["one::a", "one::b", "two::c"]}}, {"one::a": 2.0, "one::b": 1.0, "two::c": 9.0}
    )
    for line in (7, 8):  # a line that continues another one is reached with that
        mutant = Mutant("a.py", "f", line, 0, 1, "x", "y", "")
        assert reached.tests_of(mutant) == ["one::b", "two::c", "one::a"]
    assert within(["one::b", "two::c", "one::a"], reached.seconds, 3.0) == ["one::b"]


def test_a_failed_case_is_named_with_its_spaces() -> None:
    log = (
        "....F\nFAILED tests/a.py::test_b[two nodes-3] - AssertionError: a - b\nERROR "
        "tests/c.py::test_d\nERROR: not found: x\n"
    )
    assert failures(log) == ["tests/a.py::test_b[two nodes-3]", "tests/c.py::test_d"]


def test_the_core_is_not_empty_and_has_no_doors() -> None:
    names = {str(path.relative_to(ROOT)) for path in core_files()}
    assert {"fzero/step.py", "sharding/layout.py", "fzero/comms/collectives.py"} <= names
    assert not any(name.endswith("__init__.py") for name in names)
