"""`fzero laws` on a system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fzero.cli.laws import laws
from fzero.testing.conformance import LAWS, Result, System
from fzero.testing.conformance.report import page
from fzero.testing.conformance.training import Setup, Trainer


def made(setup: Setup, rank: int, world_size: int) -> Trainer:
    """A system that refuses stage 3, and is wrong in stage 2."""
    if setup.stage == 3:
        raise NotImplementedError("no stage 3")
    raise AssertionError  # no message


def version() -> str:
    return "1.0"


SYSTEM = System("mine", made, (2, 3), version, in_one_process=True)


def test_results_in_a_file_are_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "results.jsonl"
    words = ["--system", "test_laws_command:SYSTEM", "--results", str(kept), "--json"]
    assert laws([*words, "--law", "adamw"]) == 1
    first = json.loads(capsys.readouterr().out)
    line = kept.read_text()
    assert laws([*words, "--law", "adamw"]) == 1
    assert kept.read_text() == line and json.loads(capsys.readouterr().out) == first
    assert laws([*words, "--law", "adamw", "--law", "one_process"]) == 1
    (result, _) = json.loads(capsys.readouterr().out)["results"]
    assert kept.read_text().startswith(line) and kept.read_text().count("\n") == 2
    assert (result["mark"], result["stages"]) == ("wrong", [2])
    other = line.replace('"1.0"', '"2.0"')
    kept.write_text(other)  # of another version
    laws([*words, "--law", "adamw"])
    assert kept.read_text().count("\n") == 2


def test_the_table_names_the_stages_of_a_mark() -> None:
    results = [
        Result("mine", "adamw", "wrong", "differs", (2,)),
        Result("mine", "one_process", "refused", "no", (2, 3)),
    ]
    written = page(results, [LAWS["adamw"], LAWS["one_process"]], [SYSTEM], 2)
    assert "| adamw | ○ 2 |" in written and "| one process | – |" in written
    assert "○ **adamw**, stage 2: differs" in written
    assert "– **one process**, stages 2, 3: no" in written
