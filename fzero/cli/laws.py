"""`fzero laws`: the laws of data-parallel training, tried on a system in this environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from fzero.cli.plan_profile import count, parser_of, print_result
from fzero.testing.conformance import LAWS, SYSTEMS, Law, Result, System, try_laws
from fzero.testing.conformance.report import page, shown

WHAT = """tries the laws of data-parallel training on a system, in this environment: each trains a tiny model on real gloo
processes, in each ZeRO stage of the system, and compares it with a plain loop. Prints law, result (● right, ○ wrong,
– refused with an error) and, of what is wrong, a reproducer. Returns 1 if something is wrong."""

EXAMPLES = """examples:
  fzero laws --system fsdp2
  fzero laws --system deepspeed --law tied_weights --law accumulation --ranks 4
  fzero laws --system my_module:SYSTEM"""


def laws(arguments: list[str]) -> int:
    """`fzero laws`; 1 if a law is broken."""
    parser = parser_of("laws", WHAT, EXAMPLES)
    parser.add_argument(
        "--system",
        action="append",
        metavar="NAME",
        help=f"{', '.join(SYSTEMS)}, or MODULE:NAME of a conformance.System of your own; repeat it "
        f"for several (default: fzero; with --write all that are installed)",
    )
    parser.add_argument(
        "--law", action="append", metavar="NAME", help="repeat it for several (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the laws, and try nothing")
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="default 2")
    parser.add_argument(
        "--seconds", type=count, default=60, help="after which a law counts as hanging (default 60)"
    )
    parser.add_argument("--write", metavar="FILE", help="write the page of all laws, as Markdown")
    parser.add_argument(
        "--results",
        metavar="FILE",
        help="append each result to this file, as a line of JSON, and try no law again whose result is there: a run of all "
        "systems takes an hour, and may be interrupted",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(arguments)
    results: list[Result] = []

    def make() -> tuple[RenderableType, dict[str, Any]]:
        chosen = [_law(name) for name in given.law or LAWS]
        if given.list:
            return "\n".join(f"{one.name}: {one.sentence} ({one.source})" for one in chosen), {
                "laws": {one.name: one.sentence for one in chosen}
            }
        default = (
            [name for name in SYSTEMS if SYSTEMS[name].is_here()] if given.write else ["fzero"]
        )
        systems = [_system(name) for name in given.system or default]
        kept, is_collected = Kept(given.results), False
        for system in systems:
            known = kept.of(system, given.ranks)
            results.extend(known[one.name] for one in chosen if one.name in known)
            is_collected = is_collected or bool(known)
            rest = [one for one in chosen if one.name not in known]
            tried = try_laws(system, rest, given.ranks, seconds=given.seconds)
            for index, result in enumerate(tried, 1):
                results.append(result)
                kept.add(system, given.ranks, result)
                _progress(f"{system.name} {index}/{len(rest)} {result.law}: {result.mark}")
        _progress("")
        if given.write:
            text = page(results, chosen, systems, given.ranks, is_collected=is_collected)
            Path(given.write).write_text(text, "utf-8")
        return shown(results, given.ranks), {"results": [result._asdict() for result in results]}

    return print_result(make, given.json) or int(any(r.mark == "wrong" for r in results))


class Kept:
    """The results in a file of lines of JSON; none, without a file."""

    def __init__(self, file: str | None) -> None:
        self._path = None if file is None else Path(file)

    def of(self, system: System, num_ranks: int) -> dict[str, Result]:
        """By law, those of this version of a system; of several, the last one."""
        found: dict[str, Result] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text("utf-8").splitlines():
                of = json.loads(line)
                if of["about"] == self._about(system, num_ranks):
                    result = Result(**{**of["result"], "stages": tuple(of["result"]["stages"])})
                    found[result.law] = result
        return found

    def add(self, system: System, num_ranks: int, result: Result) -> None:
        if self._path is not None:
            line = {"about": self._about(system, num_ranks), "result": result._asdict()}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    @staticmethod
    def _about(system: System, num_ranks: int) -> list[Any]:
        return [system.name, system.version(), num_ranks]


def _progress(text: str) -> None:
    """A line that replaces itself on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _law(name: str) -> Law:
    if name not in LAWS:
        raise ValueError(f"--law: must be one of {', '.join(LAWS)}, got {name!r}; see --list")
    return LAWS[name]


def _system(name: str) -> System:
    module, _, attribute = name.partition(":")
    if attribute:
        sys.path.insert(0, "")
        found = getattr(__import__(module, fromlist=[attribute]), attribute, None)
    else:
        found = SYSTEMS.get(name)
    if not isinstance(found, System):
        raise ValueError(
            f"--system: must be one of {', '.join(SYSTEMS)}, or MODULE:NAME of a "
            f"fzero.testing.conformance.System, got {name!r}; pass one of these"
        )
    return found
