"""`Tuned`: the result of `fzero tune` as a table of all candidates, a picture, and the
command that uses the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.table import Table

from fzero.common.optional import package
from fzero.common.text_tables import as_text, scale_of, shown
from fzero.tuning.space import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = Literal["throughput", "latency", "flops"]
UNITS = {"throughput": "samples/s", "latency": "s/step", "flops": "Gflop/s"}


@dataclass(frozen=True, slots=True)
class Tuned:
    """All candidates. `print(tuned)` shows the table."""

    # in the order of the search space; the first is the configuration that the script was given
    rows: tuple[Trial, ...]
    metric: Metric  # the optimized one
    world_size: int
    memory: float  # bytes that a rank may use
    notes: tuple[str, ...] = ()  # below the table
    use: str = field(default="", repr=False)  # the command that uses the best configuration

    def score(self, row: Trial) -> float | None:
        """The metric of a measured candidate, in its unit."""
        if row.seconds is None or self.metric == "latency":
            return row.seconds
        if self.metric == "flops":
            return row.flops * self.world_size / row.seconds / 1e9
        return row.samples(self.world_size) / row.seconds

    def cost(self, row: Trial) -> float | None:
        """The cost that the search minimizes."""
        return None if row.seconds is None else self.cost_of(row, row.seconds)

    def cost_of(self, row: Trial, seconds: float) -> float:
        """The cost at this many seconds per step."""
        return seconds if self.metric == "latency" else seconds / row.samples(self.world_size)

    @property
    def best(self) -> Trial | None:
        """The best measured candidate."""
        measured = [row for row in self.rows if row.seconds is not None]
        return min(measured, key=lambda row: self.cost(row) or 0.0, default=None)

    @property
    def gain(self) -> float | None:
        """The improvement of the best over the given configuration, as a factor."""
        given = self.cost(self.rows[0])
        best = None if self.best is None else self.cost(self.best)
        return None if given is None or best is None else given / (best or 1.0)

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON types."""
        return {
            "metric": self.metric,
            "world_size": self.world_size,
            "memory": self.memory,
            "candidates": [self._row_as_dict(row) for row in self.rows],
            "best": None if self.best is None else self.best.name,
            "gain": self.gain,
            "config": None if self.best is None else self.best.keys,
            "use": self.use,
            "notes": list(self.notes),
        }

    def _row_as_dict(self, row: Trial) -> dict[str, Any]:
        result = row.result
        return {
            "name": row.name,
            "given": row.is_given,
            "planned": {"nbytes": row.nbytes, "seconds": row.predicted},
            "seconds": row.seconds,
            "score": self.score(row),
            "nbytes": result.nbytes if result and row.seconds else None,
            "trial": row.number,
            "reason": row.reason,
        }

    def __rich__(self) -> Group:
        scale, unit = scale_of(max((row.nbytes for row in self.rows), default=1) or 1)
        title = f"{self.metric} on {self.world_size} ranks, {shown(self.memory, scale)} {unit} each"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("", no_wrap=True)
        table.add_column("candidate", min_width=24)
        for name in (
            "run",
            f"planned, {unit}",
            "s/step",
            f"took, {unit}",
            "s/step",
            UNITS[self.metric],
        ):
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        table.add_column("")
        for row in _ordered(self):
            table.add_row(*_cells(self, row, scale))
        conclusion = [] if self.best is None else [_conclusion(self, self.best)]
        return Group(table, "", *self.notes, *conclusion, *(["", self.use] if self.use else []))

    def __str__(self) -> str:
        return as_text(self)

    def draw(self) -> Figure:
        """A picture of the candidates' measurements, and of the best score over the
        trials.
        """
        rows = _ordered(self)[::-1]
        figures = package("matplotlib", needed_by="Tuned.draw()", module="matplotlib.figure")
        figure: Figure = figures.Figure(figsize=(12, 2 + 0.22 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        scores = [self.score(row) or 0.0 for row in rows]
        left.barh(
            range(len(rows)), scores, color=["C2" if row is self.best else "C0" for row in rows]
        )
        for y, (row, score) in enumerate(zip(rows, scores)):
            left.text(score, y, f" {_mark(row)}", va="center", fontsize="x-small", color="0.3")
        left.set_yticks(range(len(rows)), [row.name for row in rows], fontsize="x-small")
        left.set(
            xlabel=UNITS[self.metric],
            title="candidates: measured, failed, not tried, pruned",
            xmargin=0.2,
        )
        trials = sorted(
            (row for row in rows if row.number is not None), key=lambda row: row.number or 0
        )
        _draw_trials(right, self, trials)
        return figure


def _cells(tuned: Tuned, row: Trial, scale: float) -> list[str]:
    measured = ["", "", ""]
    if row.result is not None and row.seconds is not None:
        measured = [
            shown(row.result.nbytes, scale),
            f"{row.seconds:.3g}",
            f"{tuned.score(row):.4g}",
        ]
    why = row.reason or ("as given" if row.is_given else "")
    return [
        "→" if tuned.best is not None and row.name == tuned.best.name else "",
        row.name,
        "" if row.number is None else str(row.number + 1),
        shown(row.nbytes, scale) if row.nbytes else "",
        f"{row.predicted:.3g}" if row.predicted else "",
        *measured,
        why.replace("[", r"\["),
    ]


def _ordered(tuned: Tuned) -> list[Trial]:
    """The rows: measured ones, best first; failed ones; untried ones, by the plan;
    refused ones.
    """

    def rank(row: Trial) -> tuple[int, float]:
        cost = tuned.cost(row)
        if cost is not None:
            return 0, cost
        if row.refused:
            return 3, row.nbytes
        return (1, row.number or 0) if row.result else (2, tuned.cost_of(row, row.predicted))

    return sorted(tuned.rows, key=rank)


def _conclusion(tuned: Tuned, best: Trial) -> str:
    num_runs = sum(row.number is not None for row in tuned.rows)
    text = f"{num_runs} of {len(tuned.rows)} candidates were run; the best is {best.name}"
    if best.is_given:
        return f"{text}, the given configuration"
    return (
        text
        if tuned.gain is None
        else f"{text}, {tuned.gain:.2f} times as good as the given configuration"
    )


def _mark(row: Trial) -> str:
    if row.refused:
        return f"pruned: {row.refused}"[:60]
    if row.result and row.result.error:
        return f"run {(row.number or 0) + 1}: {row.result.error}"[:60]
    return "" if row.number is None else f"run {row.number + 1}"


def _draw_trials(axes: Any, tuned: Tuned, trials: Sequence[Trial]) -> None:
    good = [row for row in trials if row.seconds is not None]
    xs = [(row.number or 0) + 1 for row in good]
    ys = [tuned.score(row) or 0.0 for row in good]
    better = min if tuned.metric == "latency" else max
    axes.plot(xs, ys, "o", label="measured")
    axes.step(
        xs,
        [better(ys[: n + 1]) for n in range(len(ys))],
        where="post",
        color="C2",
        label="best so far",
    )
    failed = [(row.number or 0) + 1 for row in trials if row.seconds is None]
    axes.plot(failed, [0.0] * len(failed), "x", color="C3", label="failed")
    if (given := tuned.score(tuned.rows[0])) is not None:
        axes.axhline(given, color="0.5", linestyle="--", label="as given")
    axes.set(xlabel="run", ylabel=UNITS[tuned.metric], ylim=(0, None), title="in the order of runs")
    axes.legend(fontsize="small")
