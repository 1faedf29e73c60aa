"""The results of laws: as a table for a terminal, and as the page docs/reference/laws.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from fzero.testing.conformance.laws import Law
from fzero.testing.conformance.ranks import Mark, Result
from fzero.testing.conformance.reproducers import REPRODUCERS
from fzero.testing.conformance.training import System

SIGNS: dict[Mark, str] = {"right": "●", "wrong": "○", "refused": "–", "-": ""}

INTRO = """# Laws of training, by system

<!-- written by `fzero laws --write docs/reference/laws.md` -->

A law is a sentence of a paper or of a documentation, and a program of some ten lines that tries it: a tiny model is
trained on {ranks} processes (gloo), in each ZeRO stage of a system, and compared with a plain loop of one process,
or with another run.
● right in all stages · ○ wrong · – refused with an error, which is below · empty: the law does not apply. Numbers
are the stages of a mark, where a system is right in others.

A system is used as its own documentation says, with the calls that it recommends where they are needed (the adapters are
`fzero/testing/conformance/*_system*.py`). `fzero laws --system fsdp2 --law tied_weights` tries a law in your environment, and
`--system my_module:SYSTEM` your own system ([the kit](../kit.md#conformance)). Each ○ has a program below that shows it without
fzero, or the command that does; tests run both, so that it stays true. An error counts as a refusal if every
rank raises it, whatever it says.

These laws are about results on CPUs in small models. They say nothing about speed, about GPUs, or about what no law asks.

Two systems have no column. Megatron-FSDP 0.6.1 asks for a CUDA device when it is made, also with `device="cpu"`. SimpleFSDP
(torchtitan 0.3.0) asks for a nightly build of PyTorch; its adapter is `--system simple-fsdp`. In stage 3 of DeepSpeed on
CPUs single runs of a law go another way.{collected}
"""


def shown(results: Sequence[Result], num_ranks: int) -> RenderableType:
    """Law, result and reproducer of one or several systems, for a terminal."""
    table = Table("law", "system", "", "what was found", box=None)
    parts: list[RenderableType] = [table]
    for result in results:
        where = f"{result.where}: " if result.is_bad else ""
        table.add_row(result.law, result.system, SIGNS[result.mark], escape(where + result.note))
        if result.mark == "wrong":
            parts += ["", reproducer(result, num_ranks)]
    sums = [
        f"{SIGNS[mark] or 'does not apply'} {sum(r.mark == mark for r in results)}"
        for mark in SIGNS
    ]
    return Group(*parts, "", " · ".join(sums))


def reproducer(result: Result, num_ranks: int) -> str:
    """How a broken law is seen again."""
    command = f"fzero laws --system {result.system} --law {result.law} --ranks {num_ranks}"
    known = REPRODUCERS.get((result.system, result.law))
    if known is None:
        return f"{result.law}: {command}"
    return f"{result.law}: {command}, or torchrun --nproc-per-node {num_ranks} of:\n{known.program}"


def page(
    results: Sequence[Result],
    laws: Sequence[Law],
    systems: Sequence[System],
    num_ranks: int,
    *,
    is_collected: bool = False,
) -> str:
    """The page, of all laws on these systems. `is_collected`: whether some of the results
    are of earlier runs.
    """
    collected = " The results were collected by several calls (`--results`)." * is_collected
    marks = {(result.system, result.law): result for result in results}
    lines = [INTRO.format(ranks=num_ranks, collected=collected), *_versions(systems), ""]
    names = [system.name for system in systems]
    lines += ["| law | " + " | ".join(names) + " | it says | source |"]
    lines += ["| --- |" + " :-: |" * len(names) + " --- | --- |"]
    for one in laws:
        cells = [_cell(system, marks[system.name, one.name]) for system in systems]
        title = one.name.replace("_", " ")
        lines.append(f"| {title} | {' | '.join(cells)} | {one.sentence} | {one.source} |")
    lines += ["", *_sums(marks.values(), names)]
    for system in systems:
        own = [marks[system.name, one.name] for one in laws]
        lines += _notes(system, own)
    return "\n".join(lines) + "\n"


def _cell(system: System, result: Result) -> str:
    """The sign; with the stages, where there are others."""
    is_whole = not result.is_bad or len(result.stages) in (0, len(system.stages))
    stages = "" if is_whole else f" {', '.join(map(str, result.stages))}"
    return SIGNS[result.mark] + stages


def _versions(systems: Sequence[System]) -> Iterable[str]:
    yield f"Tried with Python {platform.python_version()}:"
    yield ""
    for system in systems:
        aside = f": {system.aside}" if system.aside else ""
        yield f"- {system.name} {system.version()}{aside}"


def _sums(results: Iterable[Result], names: Sequence[str]) -> Iterable[str]:
    found = list(results)
    yield "| | " + " | ".join(names) + " |"
    yield "| --- |" + " --: |" * len(names)
    for mark in ("right", "wrong", "refused"):
        counts = [sum(r.mark == mark and r.system == name for r in found) for name in names]
        yield f"| {SIGNS[mark]} | " + " | ".join(map(str, counts)) + " |"


def _notes(system: System, results: Sequence[Result]) -> Iterable[str]:
    """What was found where a system is not right."""
    found = [result for result in results if result.is_bad]
    seen = dict[str, str]()
    if found:
        yield from ("", f"## {system.name} {system.version()}")
    for result in found:
        title = result.law.replace("_", " ")
        text = " ".join(result.note.split()).replace("<", "&lt;")[:300]
        yield from ("", f"{SIGNS[result.mark]} **{title}**, {result.where}: {text}")
        known = REPRODUCERS.get((system.name, result.law))
        if result.mark == "wrong" and known is not None:
            if known.program in seen:
                yield f"It is shown by the program under *{seen[known.program]}*."
                continue
            seen[known.program] = title
            yield from ("", known.tried, "", "```python", known.program.strip(), "```")
        elif result.mark == "wrong":
            yield from ("", f"`fzero laws --system {system.name} --law {result.law}`")
