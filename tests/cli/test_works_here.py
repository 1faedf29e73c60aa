"""`fzero test`: it reports what works, and what does not is named with its error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ranks import RankPool

import fzero
from fzero.__main__ import main
from fzero.cli import works_here
from fzero.cli.works_here import CHECKS, Result, results_of
from fzero.common.platforms import PLATFORMS, platform_here
from fzero.common.text_tables import as_text

NAMES = ["ranks join", *CHECKS]


def _on_rank(folder: str, breaks: str | None) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(torch.distributed.get_rank()))
        if breaks is not None:
            right = getattr(fzero, breaks)
            patch.setattr(fzero, breaks, lambda *args: right(*args) + 1)
            patch.setattr(works_here, "CHECKS", {name: CHECKS[name] for name in NAMES[1:3]})
        return works_here.on_rank(Path(folder), "cpu", 2)


def test_every_check_works_here(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, _on_rank, str(tmp_path), None) == [0, 0]
    found = results_of(tmp_path, "cpu", 2, "")
    assert [result.check for result in found] == NAMES
    assert all(result.outcome == "works" for result in found), found
    assert "GB/s" in found[1].note and "stage 0 bit for bit" in found[6].note


@pytest.mark.parametrize("verb", ["gather", "shard", "reduce_scatter_grads"])
def test_a_collective_that_gives_wrong_numbers_fails_alone(
    verb: str, ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "cpu.log").write_text("")
    assert ranks(2, _on_rank, str(tmp_path), verb) == [0, 0]
    collectives, plain = results_of(tmp_path, "cpu", 2, "ended here")[1:3]
    assert (collectives.outcome, plain.outcome) == (
        "fails",
        "works",
    ) and "must be [" in collectives.note


def _write(folder: Path, *of_ranks: list[Result]) -> None:
    (folder / "cpu.log").write_text("a\nb\nsignal 9\n")
    for rank, results in enumerate(of_ranks):
        (folder / f"cpu.{rank}.jsonl").write_text(
            "".join(json.dumps(asdict(one)) + "\n" for one in results)
        )


def works(name: str, seconds: float = 1.0, slow: str = "") -> Result:
    return Result(name, "cpu", "works", seconds, slow=slow)


def test_a_rank_that_ends_in_a_check_is_reported_there(tmp_path: Path) -> None:
    _write(tmp_path, [works(NAMES[0]), works(NAMES[1])], [works(NAMES[0])])
    *_, last = results_of(tmp_path, "cpu", 2, "the ranks ended with exit code 137")
    assert (
        (last.check, last.outcome) == (NAMES[1], "fails")
        and "137" in last.note
        and "signal 9" in last.note
    )


def test_an_error_of_one_rank_is_the_last_result(tmp_path: Path) -> None:
    error = Result(NAMES[1], "cpu", "fails", 1.0, "ValueError: broken")
    _write(tmp_path, [works(NAMES[0]), works(NAMES[1])], [works(NAMES[0]), error])
    assert results_of(tmp_path, "cpu", 2, "exit code 1")[:2] == [works(NAMES[0]), error]
    _write(tmp_path, [works(NAMES[0])], [works(NAMES[0]), error])
    assert results_of(tmp_path, "cpu", 2, "exit code 1") == [works(NAMES[0]), error]


def test_the_slowest_rank_counts_and_the_report_says_what_is_slow(tmp_path: Path) -> None:
    _write(
        tmp_path,
        [works(name) for name in NAMES],
        [works(name, 2.0, "a slow network") for name in NAMES],
    )
    found = results_of(tmp_path, "cpu", 2, "")
    assert len(found) == len(NAMES) and all(result.seconds == 2.0 for result in found)
    shown = as_text(works_here.report(found))
    assert (
        "works, slow" in shown
        and f"slow: {NAMES[1]}: a slow network" in shown
        and "all works" in shown
    )


@pytest.mark.long
def test_the_command_starts_ranks_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["test", "--json", "--path", str(tmp_path)]) == 0
    results = json.loads(capfd.readouterr().out)["results"]
    assert [result["check"] for result in results if result["device"] == "cpu"] == NAMES
    assert not list(tmp_path.iterdir())  # nothing is left


def test_the_command_fails_where_a_check_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [Result("ranks join", "cpu", "fails", 1.0, "RuntimeError: no")]
    monkeypatch.setattr(works_here, "run", lambda *args: broken)
    assert main(["test", "--path", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "RuntimeError: no" in shown and "1 of" in shown


def test_the_platform_of_a_machine_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        ("Linux", "6.1"): "Linux, CPU (gloo)",
        ("Linux", "5.15-microsoft-standard-WSL2"): "WSL 2",
    }
    kinds |= {("Darwin", "23"): "macOS", ("Windows", "11"): "Windows"}
    for (system, release), name in kinds.items():
        monkeypatch.setattr("platform.system", lambda system=system: system)
        monkeypatch.setattr("platform.release", lambda release=release: release)
        assert platform_here(has_gpu=False).name == name and name in [row.name for row in PLATFORMS]
