"""`Timeline`: what happens in a step, as events in lanes, and the bytes in use meanwhile;
`draw_timelines` is its picture.

A graph's timeline, a pipeline's, a dry run's and a trace of collectives each make one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero.common.optional import package
from fzero.common.text_tables import scale_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Event(NamedTuple):
    """A bar in a lane, from `begin` to `end`.

    Attributes:
        lane: a key of `Timeline.lanes`.
        kind: a key of `Timeline.colors`.
        label: written into the bar if it fits.
        height: of the bar, as a fraction of its lane.
        opacity: of its color, from 0 to 1.
    """

    lane: str
    kind: str
    begin: float
    end: float
    label: str = ""
    height: float = 1.0
    opacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Events in lanes, and bytes in use, from 0 to `end`.

    Attributes:
        end: where the last event ends: seconds, or a number of events.
        lanes: the name that is written beside each lane, from above.
        events: in any order; those of a lane do not overlap.
        colors: of the kinds of events and of the purposes of bytes, in the order of the
            legend.
        curves: by lane, steps (time, height as a fraction of the lane).
        held: by purpose, the bytes in use from each of `times` on.
        times: increasing.
        phases: the name and the beginning of each part of the step, for its time axis.
        title: above the picture.
        time: the name of the time axis. With `{unit}` in it, time is in seconds.
        bytes: the name of the axis of bytes; `{unit}` stands for kB, MB or GB.
        peak: the name of the peak, which is marked; "" marks none.
    """

    end: float
    lanes: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[Event] = ()
    colors: Mapping[str, str]
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    held: Mapping[str, Sequence[int]] = field(default_factory=dict)
    times: Sequence[float] = ()
    phases: Sequence[tuple[str, float]] = ()
    title: str = ""
    time: str = "{unit}"
    bytes: str = "{unit}"
    peak: str = ""

    @property
    def most(self) -> int:
        """The most bytes in use at one time."""
        return max(map(sum, zip(*self.held.values(), strict=True)), default=0)

    @property
    def used(self) -> set[str]:
        """The kinds and purposes that occur."""
        return {event.kind for event in self.events} | {
            x for x, row in self.held.items() if any(row)
        }


def draw_timelines(timelines: Sequence[Timeline], *, needed_by: str) -> Figure:
    """The picture of timelines with the same panels, on the same scales: a panel of lanes
    if they have lanes, and below it one of bytes if they have bytes.

    Raises:
        MissingPackageError: matplotlib (extra `pictures`) is missing; `needed_by` begins
            the message.
    """
    figures = package("matplotlib", needed_by=needed_by, module="matplotlib.figure")
    Patch = package("matplotlib", needed_by=needed_by, module="matplotlib.patches").Patch
    num_columns = 1 if len(timelines) < 4 else 2
    num_rows = -(-len(timelines) // num_columns)
    first, scales = timelines[0], _Scales.of(timelines)
    heights = [0.3 + _lane_height(first) * len(first.lanes)] if first.lanes else []
    heights += [(1.9 if first.lanes else 3.2)] if first.times else []
    figure: Figure = figures.Figure(
        figsize=(11 if num_columns == 1 else 13, sum(heights) * num_rows + 0.9),
        layout="constrained",
    )
    axes = figure.subplots(
        len(heights) * num_rows,
        num_columns,
        sharex=True,
        squeeze=False,
        height_ratios=heights * num_rows,
    )
    for index, timeline in enumerate(timelines):
        row, column = divmod(index, num_columns)
        panels = axes[len(heights) * row : len(heights) * (row + 1), column]
        if timeline.lanes:
            _draw_lanes(panels[0], timeline, scales)
        if timeline.times:
            _draw_bytes(panels[-1], timeline, scales)
        panels[0].set_title(timeline.title, loc="left", fontsize=10, fontweight="bold")
        for panel in panels:
            panel.set_xlim(0, scales.end * scales.second)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8, labelbottom=panel is panels[-1] and row == num_rows - 1)
        _draw_phases(list(panels), timeline, scales)
        if row == num_rows - 1:
            panels[-1].set_xlabel(timeline.time.format(unit=scales.unit_of_time), fontsize=8)
    used = set[str]().union(*(timeline.used for timeline in timelines))
    patches = [Patch(color=color, label=x) for x, color in first.colors.items() if x in used]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=max(-(-len(patches) // 2), 4),
        frameon=False,
        fontsize=8,
    )
    return figure


class _Scales(NamedTuple):
    """The scales that the panels of a picture share."""

    end: float
    second: float  # how many units of the time axis
    unit_of_time: str
    most: int
    one: float  # bytes of a unit
    unit: str

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> _Scales:
        end = max(timeline.end for timeline in timelines) or 1.0
        is_short = "{unit}" in timelines[0].time and end < 1
        most = max(timeline.most for timeline in timelines)
        second, unit_of_time = (1e3, "ms") if is_short else (1.0, "s")
        return cls(end, second, unit_of_time, most, *scale_of(most))


def _lane_height(timeline: Timeline) -> float:
    """Inches of a lane: upright labels need more."""
    return 0.8 if any(_is_upright(event) for event in timeline.events) else 0.55


def _is_upright(event: Event) -> bool:
    return len(event.label) > 3


def _draw_lanes(axes: Any, timeline: Timeline, scales: _Scales) -> None:
    from_above = {lane: y for y, lane in enumerate(timeline.lanes)}
    events, colors = (
        timeline.events,
        package("matplotlib", needed_by="", module="matplotlib.colors"),
    )
    axes.barh(
        [from_above[event.lane] + 0.4 - 0.4 * event.height for event in events],
        [(event.end - event.begin) * scales.second for event in events],
        left=[event.begin * scales.second for event in events],
        height=[0.8 * event.height for event in events],
        color=[colors.to_rgba(timeline.colors[x.kind], x.opacity) for x in events],
        edgecolor="white",
        linewidth=[0.4 if x.end - x.begin > 0.005 * scales.end else 0 for x in events],
    )
    for event in events:
        if event.label and _fits(event, scales.end):
            axes.text(
                (event.begin + event.end) / 2 * scales.second,
                from_above[event.lane] + 0.4 - 0.4 * event.height,
                event.label,
                rotation=90 if _is_upright(event) else 0,
                ha="center",
                va="center",
                fontsize=6,
                color="white",
            )
    for lane, steps in timeline.curves.items():
        axes.plot(
            [time * scales.second for time, _ in steps],
            [from_above[lane] + 0.4 - 0.8 * height for _, height in steps],
            drawstyle="steps-post",
            color="black",
            linewidth=0.8,
        )
    axes.set_yticks(list(from_above.values()), list(timeline.lanes.values()))
    axes.set_ylim(len(from_above) - 0.5, -0.5)


def _fits(event: Event, end: float) -> bool:
    return event.end - event.begin > 0.012 * end and event.height > 0.4 and len(event.label) < 12


def _draw_bytes(axes: Any, timeline: Timeline, scales: _Scales) -> None:
    """The bytes in use as areas above each other, the first purpose at the bottom."""
    most = scales.most or 1
    names = [name for name in timeline.colors if name in timeline.held]
    times = [time * scales.second for time in (*timeline.times, timeline.end)]
    heights = [
        [nbytes / scales.one for nbytes in (*timeline.held[x], timeline.held[x][-1])] for x in names
    ]
    colors = [timeline.colors[name] for name in names]
    axes.stackplot(times, heights, step="post", colors=colors, linewidth=0)
    axes.set_ylim(0, 1.12 * most / scales.one)
    axes.set_ylabel(timeline.bytes.format(unit=scales.unit), fontsize=8)
    if timeline.peak:
        totals = list(map(sum, zip(*timeline.held.values(), strict=True)))
        index = totals.index(timeline.most)
        at = ((times[index] + times[index + 1]) / 2, timeline.most / scales.one)
        axes.plot(*([x] for x in at), "v", color="black", markersize=6, clip_on=False)
        side = "right" if at[0] > times[-1] / 2 else "left"
        text = f"{at[1]:.3g} {scales.unit}, {timeline.peak} "
        axes.annotate(text, at, (0, 8), textcoords="offset points", fontsize=9, ha=side)


def _draw_phases(panels: Sequence[Any], timeline: Timeline, scales: _Scales) -> None:
    """Names of phases at their beginnings; of many, some."""
    if not timeline.phases:
        return
    few = timeline.phases[:: -(-len(timeline.phases) // 40)]
    many: dict[str, Any] = {"rotation": 60, "ha": "right"} if len(few) > 6 else {"ha": "left"}
    panels[-1].set_xticks([begin * scales.second for _, begin in few], [x for x, _ in few], **many)
    for panel in panels if len(few) <= 6 else ():
        for _, begin in few:
            panel.axvline(begin * scales.second, color="0.8", linewidth=0.8, zorder=0)
