"""`fzero tune [flags] script.py --config c.json …`: the fastest configuration of a
script on this machine.

The script runs once to plan every candidate (`fzero.tuning.probe`). Candidates that do
not fit are dropped, and some of the others are measured (`fzero.tuning.runs`), in the
order of `fzero.tuning.search`. All results are in `results_dir`, from which the same
command resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fzero import ConfigError
from fzero.cli.plan_profile import nbytes as bytes_of, parser_of, positive, print_result
from fzero.config.autotuning import ABOUT_MODELS, Autotuning, autotuning
from fzero.config.files import changed, read
from fzero.estimation.compare import Keys
from fzero.launch import cli as launch
from fzero.tuning.probe import Request
from fzero.tuning.report import Tuned
from fzero.tuning.runs import Results, Runs, Script, mapped
from fzero.tuning.search import Point, Strategy, next_trial
from fzero.tuning.space import STAGES, OffloadTarget, Trial

TUNE = """the fastest configuration of a script on this machine. All stages, micro-batch sizes and checkpointing are planned with
the script's model and batch; those that fit are run for a few steps, the most promising first, until no improvement is
expected. Flags of fzero run may precede the script. The block "autotuning" of the configuration has further
settings."""

EXAMPLES = """examples:
  fzero tune --num_procs 2 train.py --config c.json
  fzero tune --memory 40GB --time_limit 120 --num_gpus 8 train.py --deepspeed_config ds_config.json --steps 100
  fzero run --autotuning run --num_procs 2 train.py --config c.json       # tunes, then trains with the best

The script must take its configuration from a file, named after --config, --deepspeed_config or --deepspeed, and run longer than
the timed steps. It is started again for each run: let it write to a separate folder."""


def flags() -> argparse.ArgumentParser:
    """The flags of `fzero tune` itself; they precede the script, mixed with those of
    the launcher.
    """
    usage = "fzero tune [flags] [flags of fzero run] script.py [args of the script …]"
    made = parser_of("tune", TUNE, EXAMPLES, usage=usage, add_help=False, allow_abbrev=False)
    made.add_argument(
        "--memory",
        type=bytes_of,
        metavar="BYTES",
        help="limit of a rank (default: available memory)",
    )
    seconds = "seconds of one run (default 300)"
    made.add_argument("--time_limit", type=positive, default=300.0, metavar="S", help=seconds)
    made.add_argument(
        "--stages",
        type=_stages,
        default=STAGES,
        metavar="0,1,…",
        help="stages to try (default all)",
    )
    memories = "also try offload to it; otherwise only if nothing fits"
    made.add_argument("--offload", choices=("host", "nvme"), help=memories)
    made.add_argument("--nvme", metavar="PATH", help="a folder on a local disk, for --offload nvme")
    made.add_argument(
        "--out", metavar="FILE", help="the best configuration (default: best.json in results_dir)"
    )
    made.add_argument("--overwrite", action="store_true", help="discard results and measure again")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _stages(word: str) -> tuple[int, ...]:
    if not all(part in ("0", "1", "2", "3") for part in word.split(",")):
        raise argparse.ArgumentTypeError(f"must be stages from 0 to 3, such as 1,2,3, got {word!r}")
    return tuple(sorted({int(part) for part in word.split(",")}))


def tune(arguments: list[str], *, then_run: bool = False) -> int:
    """`fzero tune`, and `fzero run --autotuning`; `then_run` starts the script with the
    best configuration.
    """
    own, both = flags(), launch.parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(own.format_help())
        return 0 if arguments else 2
    for action in own._actions:
        both._add_action(action)
    both.prog, both.usage = own.prog, own.usage
    given = both.parse_args(arguments)
    before = arguments[: len(arguments) - len(given.args) - 1]
    _, launcher = own.parse_known_args([word for word in before if word != "--"])
    outcome: list[Tuned] = []

    def made() -> tuple[RenderableType, dict[str, Any]]:
        if given.offload == "nvme" and not given.nvme:
            raise ConfigError(
                "--offload nvme: needs --nvme PATH, got none; pass a folder on a local disk"
            )
        tuned = Tuning.of(given, Script.of(launcher, given.script, given.args)).run()
        outcome.append(tuned)
        return tuned, tuned.as_dict()

    try:
        code = print_result(made, given.json)
    except KeyboardInterrupt:
        print("fzero: stopped; the same command resumes with the results so far", file=sys.stderr)
        return 130
    if code or outcome[0].best is None:
        return code or 1
    return launch.main(shlex.split(outcome[0].use)[1:]) if then_run else 0


def run(arguments: list[str]) -> int:
    """`fzero run`; `--autotuning` tunes the configuration first."""
    given = launch.parser().parse_args(arguments)
    if given.autotuning is None:
        return launch.main(arguments)
    head = arguments[: len(arguments) - len(given.args) - 1]
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument("--autotuning")
    _, rest = chosen.parse_known_args(head)
    return tune([*rest, given.script, *given.args], then_run=given.autotuning == "run")


@dataclass(frozen=True, slots=True)
class Tuning:
    """One call of `fzero tune`."""

    script: Script
    keys: Keys  # its configuration, as in the file
    settings: Autotuning
    request: Request  # to the ranks; the mode varies
    time_limit: float  # seconds of one run
    out: Path  # the file of the best configuration
    overwrite: bool  # whether to discard earlier results

    @classmethod
    def of(cls, given: argparse.Namespace, script: Script) -> Tuning:
        """From the command line and the configuration."""
        keys = read(script.config)
        settings = autotuning(keys)
        kinds: tuple[OffloadTarget, ...] = (
            ("device",) if given.offload is None else ("device", given.offload)
        )
        request = Request(
            "measure",
            "",
            memory=given.memory,
            start=settings.start_profile_step,
            end=settings.end_profile_step,
            stages=given.stages,
            offload=kinds,
            nvme_path=given.nvme,
        )
        out = Path(given.out) if given.out else Path(settings.results_dir) / "best.json"
        return cls(
            script,
            keys,
            settings,
            request,
            given.time_limit,
            out,
            given.overwrite or settings.overwrite,
        )

    def run(self) -> Tuned:
        """Plans, measures, and writes the best configuration.

        Raises:
            ConfigError: the script cannot be run with its configuration, or nothing
                fits.
            OSError: a folder cannot be written to.
        """
        self._check_out()
        runs = Runs(
            self.script, Path(self.settings.exps_dir), self.settings.arg_mappings, self.time_limit
        )
        results = Results(Path(self.settings.results_dir), overwrite=self.overwrite)
        with _shown() as show:
            tuned = self._search(self._described(runs, results, show), runs, results, show)
        return self._written(tuned)

    def _check_out(self) -> None:
        """Checks before the long runs that the best configuration can be written;
        leaves no file.
        """
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            existed = self.out.exists()
            self.out.open("a").close()
            if not existed:
                self.out.unlink()
        except OSError as error:
            is_default = self.out == Path(self.settings.results_dir) / "best.json"
            name = "autotuning.results_dir" if is_default else "--out"
            raise ConfigError(
                f"{name}: cannot write {str(self.out)!r}, {error.strerror}; name another"
            ) from None

    def _described(self, runs: Runs, results: Results, show: _Show) -> Tuned:
        for mode in ("describe", "describe without a batch"):
            request = replace(self.request, mode=mode, keys=dict(self.keys))  # type: ignore[arg-type]
            if (known := results.described(runs.key(self.keys, request))) is not None:
                with suppress(KeyError, TypeError):  # another version wrote the plan
                    return self._planned(known)
            show("planning all candidates", 0, 1)
            described, error = runs.describe(self.keys, request)
            if described is not None:
                results.add(described)
                return self._planned(described)
            # after these, the script may still make its model
            if not error.startswith(("out of memory", "no result")):
                break
        raise ConfigError(
            f"{self.script.path}: cannot be planned, because it {error}; run it alone first: "
            f"fzero {shlex.join(self.script.words(self.script.config))} (its output is in "
            f"{runs.folder})"
        )

    def _planned(self, described: dict[str, Any]) -> Tuned:
        limit = self.request.memory or described["memory"]
        rows = [Trial.of(one) for one in described["candidates"]]
        notes = [described["note"]] if described["note"] else []
        if rows[0].micro is None:
            notes.append(
                "micro-batches are not tuned: the configuration sets no batch size, or elasticity "
                "chooses it"
            )
        elif "train_batch_size" not in self.keys:
            notes.append(
                "the batch of a step varies with the micro-batch: set train_batch_size to keep it"
            )
        block = self.keys.get("autotuning") or {}
        notes += [
            f"autotuning.{name}: has no effect here" for name in ABOUT_MODELS if name in block
        ]
        return Tuned(
            tuple(rows), self.settings.metric, described["world_size"], limit, tuple(notes)
        )

    def _search(self, tuned: Tuned, runs: Runs, results: Results, show: _Show) -> Tuned:
        rows = list(tuned.rows)
        possible = [n for n, row in enumerate(rows) if not row.refused]
        if not possible:
            least = min(rows, key=lambda row: (not row.nbytes, row.nbytes))
            what = f"{least.name}: {least.refused}"
            raise ConfigError(f"nothing fits: {what}; pass more --memory, ranks, or --nvme PATH")
        costs_by_plan = (max(tuned.cost_of(rows[n], rows[n].predicted), 1e-12) for n in possible)
        points = [
            Point(rows[n].features, cost, rows[n].nbytes)
            for n, cost in zip(possible, costs_by_plan)
        ]
        kind, most = self.settings.tuner_type, self.settings.tuner_num_trials
        most = (
            (max(5, len(possible) // 3) if kind == "model_based" else 50) if most is None else most
        )
        strategy, short = Strategy(kind, most, self.settings.tuner_early_stopping), frozenset[int]()
        costs: dict[int, float | None] = {}
        while (index := next_trial(points, costs, strategy, out_of_memory=short)) is not None:
            row = rows[possible[index]]
            result = results.find(runs.key(row.keys, self.request), self.time_limit)
            if result is None:
                name = row.name
                show(
                    f"run {len(costs) + 1}: {name}",
                    len(costs),
                    min(strategy.num_trials, len(possible)),
                )
                result = runs.measure(name, row.keys, self.request, memory=tuned.memory)
                results.add(result.as_dict())
            rows[possible[index]] = row = replace(row, result=result, number=len(costs))
            costs[index] = tuned.cost(row)
            short |= {index} if result.out_of_memory else set()
        return replace(tuned, rows=tuple(rows))

    def _written(self, tuned: Tuned) -> Tuned:
        """Writes the best configuration and the picture; adds the command that uses it."""
        best, notes = tuned.best, [*tuned.notes]
        if best is None:
            return replace(
                tuned, notes=(*notes, "every run failed: there is no best configuration")
            )
        sizes = {row.micro or 0 for row in tuned.rows}
        if len(sizes) > 1 and best.micro == max(sizes):
            what = "the best micro-batch is the largest tried"
            notes.append(f"{what}: raise autotuning.num_tuning_micro_batch_sizes for larger ones")
        keys = changed(best.keys, {"autotuning": None})
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(keys, indent=2) + "\n")
        picture = Path(self.settings.results_dir) / "tuning.png"
        out = self.out.resolve() if Path(self.script.config).is_absolute() else self.out  # as given
        words = self.script.words(str(out), mapped(keys, self.settings.arg_mappings))
        tuned = replace(tuned, use=f"fzero {shlex.join(words)}")
        try:
            tuned.draw().savefig(picture, dpi=120)
            notes.append(f"picture: {picture}")
        except ImportError:
            notes.append("no picture: matplotlib is not installed; pip install 'fzero[pictures]'")
        return replace(tuned, notes=tuple(notes))


_Show = Callable[[str, int, int], None]  # (what, number of runs before it, the most runs)


@contextmanager
def _shown() -> Iterator[_Show]:
    """Shows on stderr the current run and the time left; prints one line per run if
    stderr is no terminal.
    """
    console = Console(stderr=True, highlight=False)
    title, left = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
    columns = SpinnerColumn(), title, BarColumn(20), left, TimeElapsedColumn()
    began = time.monotonic()
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=1, left="")
        num_ended = -1  # runs; each is shown at its start, and known results take no time

        def show(what: str, done: int, most: int) -> None:
            nonlocal num_ended
            num_ended += 1
            pace = (time.monotonic() - began) / max(1, num_ended)
            left = f"at most {pace * (most - done):.0f} s left" if num_ended and done else ""
            progress.update(task, description=what, completed=done, total=most, left=left)
            if not console.is_terminal:
                console.print(
                    f"fzero: {what}" + (f", {left}" if left else ""), soft_wrap=True, markup=False
                )

        yield show
