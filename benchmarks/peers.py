"""Is fzero as fast as its peers? Every ZeRO stage against the peers of that stage and
against the floor, in one run.

    python benchmarks/peers.py
        everything, about half an hour on two cores
    python benchmarks/peers.py --quick
        the small model, a few steps: does it run?
    python benchmarks/peers.py --dtype bf16
        with an fp32 master
    python benchmarks/peers.py --compile
        everybody compiled, and fzero's eager step
    python benchmarks/peers.py --alone
        one process: the bare loop, eager and compiled, and fzero's
    python benchmarks/peers.py --contenders FSDP2,fzero,floor --stages 2,3

A contender is a job of two ranks with one thread each, so its peak resident memory is
its own. The jobs of a stage are alive together and take turns of a few steps while the
others sleep: they meet the same machine. The floor (forward and backward, the fastest
collectives and the update, each measured alone) takes its turn in every stage, so
stages compare by their ratios to it. The efficiency is the bare model's forward and
backward over the step; `CPU ms` is the processor time of a rank's threads, which varies
less than the time on a shared machine. Writes a table, `results.json`, `peers.png` and
the contenders' logs. Runs of some stages each are joined by `--join FOLDER FOLDER`.
With --compile the peak is that of the steps after the warm-up.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from contenders import ALONE, COMPILED, EAGER, SETS, run_rank
from gpt import SIZES
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fzero.common import print_report

WORLD_SIZE = 2
GOAL = {0: 0.95, 1: 0.95, 2: 0.75, 3: 0.75}  # times the fastest peer's step
FLOOR_GOAL = 1.1  # times the floor
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}  # the peers round in other places: bf16 has 8 bits
NUM_WARMUP_STEPS = 3
REPLY_SECONDS = 900
BARE = "forward + backward"  # the floor's largest part, shown as a row of its own


class Job:
    """The ranks of one contender in one stage; dead after its first error, which it
    remembers.
    """

    def __init__(
        self, contender: str, stage: int, size: str, arguments: argparse.Namespace, folder: Path
    ) -> None:
        # of each step after the warm-up, the mean over the ranks
        self.measured: list[dict[str, float]] = []
        self.peak_mb: float | None = None
        self.error: str | None = None
        self.processes, self.pipes = [], []
        spawn = get_context("spawn")
        self.world_size = 1 if arguments.set_name == "alone" else WORLD_SIZE
        for rank in range(self.world_size):
            ours, theirs = spawn.Pipe()
            what = (contender, stage, SIZES[size], arguments.dtype, arguments.set_name)
            where = (rank, self.world_size, folder, theirs)
            # Not daemons: Inductor compiles in processes of its own.
            self.processes.append(spawn.Process(target=run_rank, args=(*what, *where)))
            self.pipes.append(ours)
            self.processes[-1].start()
            theirs.close()  # so that the pipe ends when the rank dies
        self.replies()

    def send(self, num_steps: int) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):  # a dead rank shows in the replies
                pipe.send(num_steps)

    def replies(self) -> list[Any]:
        """What each rank answered; nothing, and the job's end, once one failed: the
        other may wait for it forever.
        """
        answers: dict[int, Any] = {}
        while len(answers) < self.world_size and not self.error:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = connection.wait(waiting, timeout=REPLY_SECONDS)
            if not ready:
                self.error = f"no answer for {REPLY_SECONDS} s"
            for rank in map(self.pipes.index, ready):
                try:
                    kind, answers[rank] = self.pipes[rank].recv()
                    self.error = answers[rank] if kind == "failed" else self.error
                except EOFError:
                    self.processes[rank].join()
                    self.error = f"rank {rank} died with exit code {self.processes[rank].exitcode}"
        if self.error:
            self.end()
            return []
        return [answers[rank] for rank in range(self.world_size)]

    def run(self, num_steps: int) -> list[dict[str, float]]:
        """Runs a block of steps and returns what they measured."""
        if self.error:
            return []
        self.send(num_steps)
        if not (replies := self.replies()):
            return []
        self.peak_mb = max(peak_mb for _, peak_mb in replies)
        steps = zip(*(measured for measured, _ in replies))
        return [
            {name: statistics.fmean(rank[name] for rank in step) for name in step[0]}
            for step in steps
        ]

    def end(self) -> None:
        if not self.error:
            self.send(0)
        for process in self.processes:
            process.join(timeout=0 if self.error else 10)
            process.kill()
            process.join()


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Ratios are of medians; `None` where there is nothing to
    compare.
    """

    size: str
    stage: int
    contender: str
    median_ms: float | None = None
    iqr_ms: float | None = None
    processor_ms: float | None = None
    to_fastest_peer: float | None = None
    to_floor: float | None = None
    efficiency: float | None = None
    peak_mb: float | None = None
    loss: float | None = None
    error: str | None = None

    @property
    def is_bound(self) -> bool:
        return self.contender in ("floor", BARE)


def run_stage(
    size: str, stage: int, contenders: list[str], arguments: argparse.Namespace, progress: Progress
) -> dict[str, Job]:
    """Starts the jobs, warms each up, then gives each a block of steps per round, in an
    order that turns by one.
    """
    folder = (arguments.out / "logs" / f"{size}_{stage}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task = progress.add_task(
        f"{size}, stage {stage}", total=(arguments.rounds + 1) * len(contenders)
    )
    jobs: dict[str, Job] = {}
    for contender in contenders:
        jobs[contender] = Job(contender, stage, size, arguments, folder)
        jobs[contender].run(NUM_WARMUP_STEPS)
        progress.advance(task)
    for round_ in range(arguments.rounds):
        first = round_ % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            jobs[contender].measured += jobs[contender].run(arguments.steps_per_round)
            progress.advance(task)
    for job in jobs.values():
        job.end()
    return jobs


def make_rows(size: str, stage: int, jobs: dict[str, Job]) -> list[Row]:
    """A row per contender, in the order given, and one for the floor's forward and
    backward pass.
    """
    times = {
        name: [step["step"] for step in job.measured] for name, job in jobs.items() if not job.error
    }
    if "floor" in times:
        times[BARE] = [step["compute"] for step in jobs["floor"].measured]
    medians = {name: statistics.median(of_name) for name, of_name in times.items()}
    peers = [
        name for name in medians if not name.startswith("fzero") and name not in ("floor", BARE)
    ]
    fastest = min((medians[name] for name in peers), default=None)
    rows = [Row(size, stage, name, error=job.error) for name, job in jobs.items() if job.error]
    for name, median in medians.items():
        low, _, high = statistics.quantiles(times[name], n=4)
        row = Row(
            size,
            stage,
            name,
            median_ms=median,
            iqr_ms=high - low,
            to_fastest_peer=median / fastest if fastest else None,
            to_floor=median / medians["floor"] if "floor" in medians else None,
            efficiency=medians[BARE] / median if BARE in medians else None,
        )
        if not row.is_bound:
            processor_ms = statistics.median(step["processor"] for step in jobs[name].measured)
            loss = jobs[name].measured[-1]["loss"]
            row = dataclasses.replace(
                row, processor_ms=processor_ms, peak_mb=jobs[name].peak_mb, loss=loss
            )
        rows.append(row)
    order = [*jobs, BARE]
    return sorted(rows, key=lambda row: order.index(row.contender))


def make_table(size: str, rows: list[Row]) -> Table:
    """Of fzero's rows, green meets the goal, yellow is no slower than the fastest peer,
    red is slower.
    """
    table = Table(
        title=f"{size}: ranks of one thread, medians", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for title in (
        "stage",
        "contender",
        "ms",
        "IQR",
        "CPU ms",
        "/ peer",
        "/ floor",
        "efficiency",
        "peak MB",
        "loss",
    ):
        table.add_column(title, no_wrap=True, justify="left" if title == "contender" else "right")
    for row, after in zip(rows, [*rows[1:], None]):
        style = "dim" if row.is_bound else ""
        if row.contender.startswith("fzero") and row.to_fastest_peer:
            met = row.to_fastest_peer <= GOAL[row.stage] and (row.to_floor or 0) <= FLOOR_GOAL
            style = "green" if met else "yellow" if row.to_fastest_peer <= 1 else "red"
        times = (row.median_ms, 0), (row.iqr_ms, 0), (row.processor_ms, 0)
        ratios = (row.to_fastest_peer, 3), (row.to_floor, 3), (row.efficiency, 3)
        more = (row.peak_mb, 0), (row.loss, 5)
        texts = [
            "–" if value is None else f"{value:.{digits}f}"
            for value, digits in (*times, *ratios, *more)
        ]
        if row.error:
            texts[0], style = "failed", "red"
        last_of_stage = after is None or after.stage != row.stage
        table.add_row(str(row.stage), row.contender, *texts, style=style, end_section=last_of_stage)
    return table


def warnings(rows: list[Row], dtype: str) -> Iterator[str]:
    """What a reader of one size's table has to know before believing it."""
    middle = statistics.median_low([row.loss for row in rows if row.loss is not None] or [0.0])
    for row in rows:
        if row.error:
            yield f"{row.contender}, stage {row.stage}: {row.error}"
        if row.loss is not None and not abs(row.loss - middle) <= LOSS_TOLERANCE[dtype]:
            yield (
                f"{row.contender}, stage {row.stage}: its last loss is {row.loss:.5f}, the "
                f"others' {middle:.5f}"
            )


def floors_parts(size: str, steps: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """The medians of the floor's parts in each stage; `copies` and `casts` are beside
    it.
    """
    for name, measured in steps.items():
        if name.startswith(f"{size}, ") and name.endswith(", floor") and measured:
            parts = {
                part: statistics.median(step[part] for step in measured) for part in measured[0]
            }
            yield f"{name}: " + ", ".join(f"{part} {ms:.1f} ms" for part, ms in parts.items())


COLOURS = {
    "fzero": "#d9622b",
    "fzero engine": "#8c8c8c",
    "fzero block": "#e8965f",
    "fzero step": "#8f3a12",
}


def draw(rows: list[Row], path: Path) -> None:
    """fzero's step time and peak memory by stage, each over the best peer's: a bar
    below the line is better than every peer.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.median_ms and row.peak_mb and not row.is_bound]
    figure, both = pyplot.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    for axes, what, unit in zip(both, ("median_ms", "peak_mb"), ("ms", "MB")):
        ticks, place = dict[float, str](), 0.0
        for size, stage in dict.fromkeys((row.size, row.stage) for row in measured):
            of_stage = [row for row in measured if (row.size, row.stage) == (size, stage)]
            peers = [row for row in of_stage if not row.contender.startswith("fzero")]
            own = [row for row in of_stage if row not in peers]
            if not own or not peers:
                continue
            best = min(peers, key=lambda row: getattr(row, what))
            if not stage and place:
                place += 0.6  # between two sizes
            name = best.contender.removesuffix(" + compile").replace(
                "ZeroRedundancyOptimizer", "ZeRO-opt."
            )
            ticks[place + 0.9 * (len(own) - 1) / 2] = (
                f"{size}\nstage {stage}\n{name}\n{getattr(best, what):.0f} {unit}"
            )
            for row in own:
                ratio = getattr(row, what) / getattr(best, what)
                axes.bar(place, ratio, width=0.8, color=COLOURS[row.contender], label=row.contender)
                axes.text(place, 0.04, f"{ratio:.2f}", ha="center", color="white")
                place += 0.9
            place += 0.3
        axes.axhline(1, color="black", linewidth=1.2)
        title = "step time" if unit == "ms" else "peak memory of a rank"
        axes.set_title(
            f"{title} / that of the best peer; below the line is better", loc="left", fontsize=11
        )
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
        axes.tick_params(axis="x", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(both[0].get_legend_handles_labels())))
    if len(handles) > 1:
        figure.legend(
            handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False
        )
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    def names_of(known: list[str]) -> Any:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(
                    f"{', '.join(unknown)} is none of {', '.join(known)}"
                )
            return [name for name in known if name in text.split(",")]

        return parse

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    everybody = list(dict.fromkeys((*EAGER, *COMPILED, *ALONE)))
    for option, known in (
        ("--sizes", list(SIZES)),
        ("--contenders", everybody),
        ("--stages", list("0123")),
    ):
        parser.add_argument(
            option,
            type=names_of(known),
            default=known,
            help=f"of: {','.join(known)} (default: all)",
        )
    parser.add_argument(
        "--dtype",
        choices=LOSS_TOLERANCE,
        default="fp32",
        help="of the model (default: %(default)s)",
    )
    sets = parser.add_mutually_exclusive_group()
    for name, what in (
        ("compile", "compiled contenders, and fzero's eager step"),
        (
            "alone",
            "one process: the bare loop, eager and compiled, beside fzero's; peaks are those after "
            "the warm-up",
        ),
    ):
        sets.add_argument(
            f"--{name}",
            dest="set_name",
            action="store_const",
            const=name,
            default="eager",
            help=what,
        )
    parser.add_argument(
        "--rounds", type=int, default=6, help="blocks per contender (default: %(default)s)"
    )
    parser.add_argument(
        "--steps-per-round", type=int, default=5, help="steps per block (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/peers"), help="folder (default: %(default)s)"
    )
    joined = (
        "run nothing: one table and picture of runs whose folders these are, and of their "
        "results alone"
    )
    parser.add_argument("--join", type=Path, nargs="+", metavar="FOLDER", help=joined)
    parser.add_argument("--quick", action="store_true", help="the small size, 2 rounds of 3 steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.rounds, arguments.steps_per_round = ["small"], 2, 3
    return arguments


def join(folders: list[Path], out: Path) -> None:
    """The table and the picture of several runs, say of two stages each."""
    rows = [
        Row(**row)
        for folder in folders
        for row in json.loads((folder / "results.json").read_text())["rows"]
    ]
    rows.sort(key=lambda row: (list(SIZES).index(row.size), row.stage))
    for size in dict.fromkeys(row.size for row in rows):
        print_report(make_table(size, [row for row in rows if row.size == size]))
    out.mkdir(parents=True, exist_ok=True)
    draw(rows, out / "peers.png")


def main() -> None:
    arguments = parse_arguments()
    if arguments.join:
        return join(arguments.join, arguments.out)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    console = Console()
    rows: list[Row] = []
    steps: dict[str, list[dict[str, float]]] = {}
    for size in arguments.sizes:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            for stage in map(int, arguments.stages):
                known = {name: stages for name, (_, stages, _) in SETS[arguments.set_name].items()}
                if not (
                    contenders := [
                        name for name in arguments.contenders if stage in known.get(name, ())
                    ]
                ):
                    continue
                jobs = run_stage(size, stage, contenders, arguments, progress)
                rows += make_rows(size, stage, jobs)
                steps |= {
                    f"{size}, stage {stage}, {name}": job.measured for name, job in jobs.items()
                }
        of_size = [row for row in rows if row.size == size]
        print_report(make_table(size, of_size))
        for line in floors_parts(size, steps):
            console.print(line, highlight=False, soft_wrap=True)
        for warning in warnings(of_size, arguments.dtype):
            console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    results = {"rows": [dataclasses.asdict(row) for row in rows], "steps": steps}
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    if any(row.to_floor for row in rows):
        draw(rows, arguments.out / "peers.png")
    console.print(f"wrote {arguments.out}: results.json, peers.png, logs", highlight=False)


if __name__ == "__main__":
    main()
