"""The laws of the stream of all ranks' errors: no line is lost or changes its place,
and an equal error is shown once.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, strategies as st

from fzero.launch.forwarder import BEGINS, OF_TORCH, Forwarder

BEGIN = "Traceback (most recent call last):"
SAME = re.compile(r"has the error of rank (\d+), in the same (\d+) lines")

frames = st.lists(
    st.sampled_from(['  File "a.py", line 3, in f', "    g()", "      ^^^"]), min_size=1, max_size=3
)
errors = st.sampled_from(
    [["ValueError: a"], ["ValueError: b"], ["ValueError: a", "more"], ["E: a", "  more"]]
)


@st.composite
def blocks(draw: st.DrawFn) -> list[str]:
    """The lines of a traceback, perhaps with its cause."""
    block = [BEGIN, *draw(frames), *draw(errors)]
    return (
        [*block, "", "During handling:", "", *draw(blocks())]
        if draw(st.integers(0, 4)) == 0
        else block
    )


@st.composite
def streams(draw: st.DrawFn) -> list[list[str]]:
    """The lines of each rank: plain ones, those that C++ logs, and errors, of which
    ranks have some in common.
    """
    common = draw(st.lists(blocks(), min_size=1, max_size=2))
    plain = st.sampled_from([["step 1"], ["  indented"], ["[W1127 10:05 x.cpp:1] late"], [""]])
    part = st.one_of(plain, st.sampled_from(common), blocks())
    found = []
    for rank in range(draw(st.integers(2, 3))):
        lines = [line for lines in draw(st.lists(part, max_size=5)) for line in lines]
        found.append([f"[rank{rank}]: {line}" for line in lines] if draw(st.booleans()) else lines)
    return found


def shown(writes: list[tuple[int, str] | None], pause: float = -1.0) -> list[str]:
    """The lines that are shown of what ranks write; None is a pause of all."""
    to = io.StringIO()
    forwarder = Forwarder(to, pause)
    forwarder._wait = lambda: None  # type: ignore[method-assign]  # the test says when
    for write in writes:
        if write is None:
            forwarder._look()
        else:
            forwarder.write(f"[rank {write[0]}] {write[1]}")
    forwarder.finish()
    return to.getvalue().splitlines()


def mixed(
    of_ranks: list[list[str]], chance: Random, *, pauses: bool
) -> list[tuple[int, str] | None]:
    """The lines of all ranks as they may come: a log may also be read before a line has
    ended.
    """
    left, writes = (
        {rank: [*lines] for rank, lines in enumerate(of_ranks)},
        list[tuple[int, str] | None](),
    )
    while any(left.values()):
        rank = chance.choice([rank for rank, lines in left.items() if lines])
        line = left[rank].pop(0) + "\n"
        cut = chance.randrange(2 * len(line))
        writes += [(rank, part) for part in (line[:cut], line[cut:]) if part]
        writes += [None] * (pauses and chance.random() < 0.2)
    return writes


@given(streams(), st.integers(0, 99))
def test_no_line_of_a_rank_is_lost_or_changes_its_place(
    of_ranks: list[list[str]], seed: int
) -> None:
    writes = mixed(of_ranks, Random(seed), pauses=True)
    rest = {rank: [*lines] for rank, lines in enumerate(of_ranks)}
    for line in shown(writes):
        rank, text = int(line[6]), line[9:]
        if same := SAME.fullmatch(text):
            lead, number = int(same[1]), int(same[2])
            block = [OF_TORCH.sub("", line) for line in rest[rank][:number]]
            theirs = [OF_TORCH.sub("", line) for line in of_ranks[lead]]
            assert lead != rank and len(block) == number > 1 and block[0].startswith(BEGINS)
            assert any(theirs[start : start + number] == block for start in range(len(theirs)))
            del rest[rank][:number]
        else:
            assert rest[rank] and text == rest[rank].pop(0)
    assert not any(rest.values())


@given(blocks(), st.integers(2, 4), st.integers(0, 99))
def test_an_error_of_all_ranks_is_shown_once(block: list[str], num_ranks: int, seed: int) -> None:
    of_ranks = [[f"[rank{rank}]: {line}" for line in block] for rank in range(num_ranks)]
    writes = mixed(of_ranks, Random(seed), pauses=False)
    lines = shown(writes)
    assert len(lines) == len(block) + num_ranks - 1
    assert sum(SAME.fullmatch(line[9:]) is not None for line in lines) == num_ranks - 1


def test_after_a_pause_what_is_held_is_shown_by_itself() -> None:
    to = io.StringIO()
    forwarder = Forwarder(to, 0.1)
    for rank in (0, 1):
        forwarder.write(f"[rank {rank}] {BEGIN}\n")
        forwarder.write(f"[rank {rank}] ValueError: {'x' * (1 + rank) if rank else 'x'}\n"[:-1])
    deadline = time.monotonic() + 20
    while "[rank 1] ValueError: xx\n" not in to.getvalue():
        assert time.monotonic() < deadline, to.getvalue()
        time.sleep(0.02)


SCRIPT = """
import os, sys, time
rank, kind = int(os.environ["RANK"]), sys.argv[1]
print("before", rank, file=sys.stderr, flush=True)
open(f"{sys.argv[0]}.{rank}", "w").close()
while not all(os.path.exists(f"{sys.argv[0]}.{each}") for each in (0, 1)):  # no rank is ended before it has begun
    time.sleep(0.01)
if kind == "alike":
    raise ValueError("of all ranks")
if kind == "own":
    raise ValueError(f"of rank {rank}")
if rank == 0:
    raise ValueError("of rank 0")
time.sleep(600)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "counts"), [("alike", {"of all ranks": 2}), ("one", {"of rank 0": 2})]
)
def test_a_job_shows_an_error_once_and_names_the_rank(
    tmp_path: Path, kind: str, counts: dict[str, int]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fzero", "--num_procs", "2", str(script), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    for text, number in counts.items():
        # the line of the script, and the error
        assert ended.stderr.count(text) == number, ended.stderr
    assert "ended with code 1, so the job has been ended; its error is above" in ended.stderr
    assert all(f"[rank {rank}] before {rank}\n" in ended.stderr for rank in (0, 1))


def test_a_job_shows_the_errors_of_ranks_that_differ(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fzero", "--num_procs", "2", str(script), "own"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.findall(r"\[rank (\d)\] ValueError: of rank (\d)", ended.stderr)
    assert found and all(rank == other for rank, other in found) and ended.returncode == 1
