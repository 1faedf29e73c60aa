"""`diff`: where two recorded runs part, and how their difference grows.

The steps that both recordings have are compared in order, and in a step the tensors in
the order in which it computes them: the weights that it is given, the loss, module
buffers, gradients (from the last unit to the first, as the backward goes), the norm, the
optimizer's tensors, the new weights. The first that differs in its bits is where the
runs part. Sums in another order differ, too, by rounding; so the first that differs by
more than a tolerance is named beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fzero.common.notebooks import as_html
from fzero.common.optional import package
from fzero.common.text_tables import as_text
from fzero.digests.recording import (
    Recorded,
    Recording,
    RecordingError,
    check_same_model,
    finite,
)
from fzero.digests.sums import ZERO, Sums

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative differences that sums in another order make in a step, by the coarsest dtype
of the run: about 10 to 100 times the spacing of its numbers."""
MOST_ROWS = 16
"""Steps in the table."""
NUMBERS = ("loss", "grad_norm", "lr", "loss_scale")


class Part(NamedTuple):
    """The difference of two runs in one tensor, or number, of one step.

    Attributes:
        step: the number of updates before it.
        quantity: "given weight", "loss", "gradient", "exp_avg", "weight", …
        unit, tensor: of the model; "" for a number.
        is_same: whether the bits are equal.
        relative: the norm of the difference over the larger norm, estimated from
            sketches (to 13 % for one tensor; exact for a number); NaN where a run is
            not finite.
        of_all: the norm of the difference over that of all tensors of the quantity.
        square, norm: the estimated square of the difference, and the larger norm.
    """

    step: int
    quantity: str
    unit: str
    tensor: str
    is_same: bool
    relative: float
    of_all: float
    square: float
    norm: float

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {name: finite(x) for name, x in self._asdict().items()}

    def __str__(self) -> str:
        of = f" of unit {self.unit!r}" if self.unit else ""
        tensor = f", {self.tensor!r}" if self.tensor else ""
        size = f"relative difference {self.relative:.2g}"
        return f"step {self.step}, {self.quantity}{of}{tensor}: {size}"


@dataclass(frozen=True)
class Difference:
    """Where two runs part, and how their difference grows. `print` it for a table.

    Attributes:
        a, b: the two runs.
        parts: all compared tensors and numbers, in the order of steps and computation.
        tolerance: relative differences up to it count as rounding.
        notes: what is in one of the runs only.
        first: the first part with different bits; None if all bits are equal.
        beyond: the first part that differs by more than the tolerance, and by more than
            a hundredth of it of all tensors of its quantity. (A gradient that is 0 but
            for rounding, as of a bias before BatchNorm, is as different as can be.)
    """

    a: Recording
    b: Recording
    parts: tuple[Part, ...] = field(repr=False)
    tolerance: float
    notes: tuple[str, ...]

    @property
    def first(self) -> Part | None:
        return next((part for part in self.parts if not part.is_same), None)

    @property
    def beyond(self) -> Part | None:
        # a NaN is beyond, too
        return next((x for x in self.parts if not x.is_same and not self._is_small(x)), None)

    def _is_small(self, part: Part) -> bool:
        return part.relative <= self.tolerance or part.of_all <= self.tolerance / 100

    @property
    def steps(self) -> tuple[int, ...]:
        """The compared steps."""
        return tuple(dict.fromkeys(part.step for part in self.parts))

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """The settings that differ."""
        a, b = self.a.header.settings, self.b.header.settings
        names = dict.fromkeys([*a, *b])
        pairs = {name: (a.get(name, "–"), b.get(name, "–")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def growth(self) -> dict[str, dict[int, float]]:
        """By quantity, the relative difference of all its tensors together in each step;
        0 for equal bits.
        """
        squares: dict[str, dict[int, tuple[float, float, bool]]] = {}
        for part in self.parts:
            of = squares.setdefault(part.quantity, {})
            square, norm, is_same = of.get(part.step, (0.0, 0.0, True))
            of[part.step] = square + part.square, norm + part.norm**2, is_same and part.is_same
        return {
            quantity: {
                step: 0.0 if is_same else _ratio(math.sqrt(square), math.sqrt(norm))
                for step, (square, norm, is_same) in of.items()
            }
            for quantity, of in squares.items()
        }

    def largest(self, step: int, num: int = 5) -> list[Part]:
        """The parts of a step with the largest relative differences."""
        found = [part for part in self.parts if part.step == step and not part.is_same]
        return sorted(found, key=lambda x: -math.inf if math.isnan(x.relative) else -x.relative)[
            :num
        ]

    @property
    def conclusion(self) -> str:
        """One sentence."""
        if self.first is None:
            return f"All bits of {len(self.steps)} steps are equal."
        if self.beyond is None:
            return (
                f"The runs differ by rounding only: by at most "
                f"{max((x.relative for x in self.parts), default=0.0):.2g}, and up to {self.tolerance:g} counts "
                f"as rounding."
            )
        return f"The runs part beyond rounding ({self.tolerance:g}) at {self.beyond}."

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "a": str(self.a.path),
            "b": str(self.b.path),
            "settings": self.settings,
            "steps": list(self.steps),
            "tolerance": self.tolerance,
            "first": None if self.first is None else self.first.as_dict(),
            "beyond_rounding": None if self.beyond is None else self.beyond.as_dict(),
            "growth": {
                quantity: {step: finite(x) for step, x in of.items()}
                for quantity, of in self.growth().items()
            },
            "notes": list(self.notes),
            "conclusion": self.conclusion,
        }

    def __rich__(self) -> Group:
        runs = Table("", "A", "B", box=None, padding=(0, 2, 0, 0))
        runs.add_row("run", str(self.a.path), str(self.b.path))
        for name, pair in self.settings.items():
            runs.add_row(name, *pair)
        lines: list[Any] = [runs, ""]
        if self.first is not None:
            lines += [f"first different bits: {self.first}"]
        if self.beyond is not None:
            lines += [f"first beyond rounding: {self.beyond}"]
        if self.first is not None:
            lines += ["", self._table()]
            lines += [self._largest((self.beyond or self.first).step)]
        return Group(*(Text(x) if isinstance(x, str) else x for x in lines), *self._ends())

    def _ends(self) -> Iterator[Text]:
        for note in self.notes:
            yield Text(f"note: {note}")
        yield Text(self.conclusion)

    def _table(self) -> Table:
        growth = self.growth()
        title = "relative difference of all tensors together; · for equal bits"
        table = Table("step", title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for quantity in growth:
            table.add_column(quantity, justify="right", no_wrap=True)
        for step in spread(self.steps):
            cells = (of.get(step) for of in growth.values())
            table.add_row(str(step), *("–" if x is None else _shown(x) for x in cells))
        return table

    def _largest(self, step: int) -> Table:
        title = f"the largest in step {step}"
        table = Table(
            "quantity", "unit", "tensor", title=title, title_justify="left", box=None,
            padding=(0, 2, 0, 0),
        )  # fmt: skip
        table.add_column("relative", justify="right")
        for part in self.largest(step):
            cells = map(Text, (part.quantity, part.unit, part.tensor, _shown(part.relative)))
            table.add_row(*cells)
        return table

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self, self.draw)

    def draw(self) -> Figure:
        """A picture: the relative differences over the steps, by quantity, and of the
        weights by unit. Needs matplotlib (extra `pictures`).
        """
        figures = package("matplotlib", needed_by="diff", module="matplotlib.figure")
        figure: Figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        for quantity, of in self.growth().items():
            shown = {step: x for step, x in of.items() if x and math.isfinite(x)}
            if shown and not quantity.startswith("given "):  # that of the step before
                left.plot([*shown], [*shown.values()], marker=".", label=quantity)
        left.axhline(self.tolerance, color="0.6", linestyle=":")
        left.text(0.01, self.tolerance, "rounding", transform=left.get_yaxis_transform(),
                  color="0.4", va="bottom", fontsize="small")  # fmt: skip
        left.set(yscale="log", xlabel="step", ylabel="relative difference")
        left.set_title(f"{self.a.path.name} and {self.b.path.name}", loc="left")
        if left.lines[:-1]:
            left.legend(frameon=False, fontsize="small")
        self._draw_units(figure, right)
        for panel in (left, right):
            panel.spines[["top", "right"]].set_visible(False)
        return figure

    def _draw_units(self, figure: Figure, axes: Any) -> None:
        weights = [part for part in self.parts if part.quantity == "weight"]
        units = [*dict.fromkeys(part.unit or part.tensor for part in weights)]
        squares, norms = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for part in weights:
            key = part.unit or part.tensor, part.step
            squares[key] += part.square  # type: ignore[assignment]
            norms[key] += part.norm**2  # type: ignore[assignment]
        steps = [*dict.fromkeys(part.step for part in weights)]
        rows = [
            [
                _log10(_ratio(math.sqrt(squares[unit, step]), math.sqrt(norms[unit, step])))
                for step in steps
            ]
            for unit in units
        ]
        if rows:
            image = axes.imshow(rows, aspect="auto", cmap="magma", vmin=-9, vmax=0)
            figure.colorbar(image, ax=axes, label="log10 of the relative difference")
            places = range(0, len(units), max(1, len(units) // 24))
            axes.set_yticks(places, [units[i] for i in places], fontsize="x-small")
            marks = range(0, len(steps), max(1, len(steps) // 8))
            axes.set_xticks(marks, [steps[i] for i in marks])
        axes.set(xlabel="step")
        axes.set_title("weights, by unit", loc="left")


def diff(
    a: str | Path | Recording, b: str | Path | Recording, *, tolerance: float | None = None
) -> Difference:
    """Compares two recorded runs.

        print(fzero.digests.diff("runs/a", "runs/b"))

    Args:
        a, b: folders of `record` or `record_module`.
        tolerance: relative differences up to it count as rounding; None is `ROUNDING`
            of the coarser of the two runs' dtypes.

    Raises:
        RecordingError: a folder has no recording, the models have other tensors, or no
            step is in both.
    """
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):
        raise ValueError(
            f"diff: tolerance must be a number from 0 on, got {tolerance!r}; leave it out for that "
            f"of the precision"
        )
    a, b = (x if isinstance(x, Recording) else Recording.load(x) for x in (a, b))
    check_same_model(a.path, a.header.params, b.path, b.header.params)
    pairs = list(_pairs(a.steps, b.steps))
    if not pairs:
        steps = [", ".join(str(x.step) for x in spread(y.steps)) or "none" for y in (a, b)]
        raise RecordingError(
            f"diff: the runs must have a step in common, but {a.path} has {steps[0]} and {b.path} "
            f"has {steps[1]}; record both with every= of which one divides the other"
        )
    notes = dict.fromkeys(note for x, y in pairs for note in _only_in_one(x, y))
    named = (a if a.header.of == "step" else b).header
    units = {name: tensor.unit for name, tensor in (named.params | named.buffers).items()}
    parts = tuple(part for x, y in pairs for part in _compared(x, y, units))
    if tolerance is None:
        precisions = " ".join(x.header.settings["precision"] for x in (a, b))
        tolerance = max((ROUNDING[x] for x in ROUNDING if x in precisions), default=1e-5)
    return Difference(a, b, parts, tolerance, tuple(notes))


def _pairs(a: Sequence[Recorded], b: Sequence[Recorded]) -> Iterator[tuple[Recorded, Recorded]]:
    """The steps that both have. A step that was repeated after it was skipped is several
    ones.
    """

    def keyed(steps: Sequence[Recorded]) -> dict[tuple[int, bool, int], Recorded]:
        seen, found = Counter[tuple[int, bool]](), {}
        for step in steps:
            key = step.step, not step.skipped
            found[*key, seen[key]] = step
            seen[key] += 1
        return found

    of_a, of_b = keyed(a), keyed(b)
    return ((of_a[key], of_b[key]) for key in sorted(of_a.keys() & of_b.keys()))


def _only_in_one(x: Recorded, y: Recorded) -> Iterator[str]:
    for quantity in dict.fromkeys([*x.made, *y.made]):
        if (quantity in x.made) != (quantity in y.made):
            run = "A" if quantity in x.made else "B"
            yield f"{quantity} is recorded in {run} only, and not compared"


def _compared(x: Recorded, y: Recorded, units: dict[str, str]) -> Iterator[Part]:
    """The parts of a step in the order in which it computes them."""
    made = [of for of in x.made if of in y.made]
    state = [of for of in made if of not in ("gradient", "module buffer", "weight")]
    for quantity in ("weight", "module buffer"):
        if quantity in x.given and quantity in y.given:
            yield from _tensors(x, y, f"given {quantity}", units, is_given=True)
    yield from _numbers(x, y, "loss")
    for quantity in ("module buffer", "gradient"):
        if quantity in made:
            yield from _tensors(x, y, quantity, units)
    for name in NUMBERS[1:]:
        yield from _numbers(x, y, name)
    for quantity in (*state, "weight"):
        if quantity in made:
            yield from _tensors(x, y, quantity, units)


def _numbers(x: Recorded, y: Recorded, name: str) -> Iterator[Part]:
    a, b = x.numbers.get(name), y.numbers.get(name)
    if a is None or b is None:
        return
    if name == "loss_scale" and (a == 1) != (b == 1):  # only one of them scales its loss
        return
    is_same = a == b or (math.isnan(a) and math.isnan(b))
    size = max(abs(a), abs(b))
    relative = 0.0 if is_same else _ratio(abs(a - b), size)
    square = 0.0 if is_same else (a - b) ** 2
    yield Part(x.step, name, "", "", is_same, relative, relative, square, size)


def _tensors(
    x: Recorded, y: Recorded, quantity: str, units: dict[str, str], *, is_given: bool = False
) -> Iterator[Part]:
    of = quantity.removeprefix("given ")
    a, b = (s.given[of] if is_given else s.made[of] for s in (x, y))
    names = [name for name in units if name in a or name in b]
    factors = (1.0, 1.0)
    if quantity == "gradient":
        names.reverse()  # a backward begins at the end
        if (x.clip is None) != (y.clip is None):  # one has clipped gradients, the other not
            factors = (1.0 if x.clip is None else x.clip, 1.0 if y.clip is None else y.clip)
    pairs = {name: (a.get(name, ZERO), b.get(name, ZERO)) for name in names}
    whole = math.sqrt(sum(max(p.times(f).square for p, f in zip(pair, factors, strict=True))
                          for pair in pairs.values()))  # fmt: skip
    for name, (one, other) in pairs.items():
        part = _of_tensor(x.step, quantity, units[name], name, one, other, factors)
        yield part._replace(of_all=_ratio(math.sqrt(part.square), whole))


def _of_tensor(
    step: int, quantity: str, unit: str, name: str, a: Sums, b: Sums, factors: tuple[float, float]
) -> Part:
    is_same = a.bits == b.bits and factors == (1.0, 1.0)
    if is_same:
        return Part(step, quantity, unit, name, True, 0.0, 0.0, 0.0, a.norm)
    a, b = a.times(factors[0]), b.times(factors[1])
    distance, norm = a.distance(b), max(a.norm, b.norm)
    relative = _ratio(distance, norm)
    return Part(step, quantity, unit, name, False, relative, relative, distance**2, norm)


def _ratio(distance: float, norm: float) -> float:
    return distance / norm if norm and norm != math.inf else (0.0 if distance == 0 else math.nan)


def _shown(relative: float) -> str:
    return "·" if relative == 0 else f"{relative:.2g}"


def _log10(x: float) -> float:
    return math.log10(x) if x > 0 else -math.inf


def spread(items: Sequence[Any]) -> list[Any]:
    """At most `MOST_ROWS` of them, from the first to the last.

    >>> len(spread(range(100))), spread(range(3))
    (16, [0, 1, 2])
    """
    if len(items) <= MOST_ROWS:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]
