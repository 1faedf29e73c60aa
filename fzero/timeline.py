"""When does each part of a step's graph run, and how much is gathered meanwhile?

A simple model of the machine: one *lane* computes, one communicates. A node of the graph costs its floating point
operations at a given rate or the bytes that it reads and writes at a given bandwidth, whichever takes longer; a
collective costs the bytes that a rank sends. A collective starts when both the compute lane has come to it and the
collective before it has ended; a `wait_tensor` holds the compute lane until its collective has ended.

The times are no measurement. They show what overlaps what, and what waits.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from torch.fx import Graph, Node

from fzero.graph_analysis import (
    ALL_GATHERS,
    ALL_REDUCE,
    WAIT,
    Liveness,
    analyse,
    c10d,
    flops_of,
    is_collective,
    is_view,
    liveness,
    nbytes_of,
    start_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model of the machine knows: one rank's rates, per second.

    Args:
        flops: floating point operations.
        memory: bytes read and written.
        network: bytes that a rank sends.
        latency: seconds that every collective takes besides.
    """

    flops: float = 1e14
    memory: float = 1e12
    network: float = 5e10
    latency: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "network"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"Machine: {name} must be positive, got {getattr(self, name)}; it is a rate per second"
                )


class Span(NamedTuple):
    """One node in its lane, in seconds from the beginning of the step."""

    lane: Literal["compute", "wait", "collective"]
    label: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step's graph in time. `print(timeline)` shows a table, `timeline.draw()` a picture.

    Attributes:
        spans: compute, waits of the compute lane, and collectives, each lane in order.
        times: seconds at which each node of the graph begins on the compute lane.
        liveness: the bytes alive at each of these.
        title: what the table and the picture are called.
    """

    spans: tuple[Span, ...] = field(repr=False)
    times: tuple[float, ...] = field(repr=False)
    liveness: Liveness = field(repr=False)
    title: str = "one step"

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def waiting(self) -> float:
        """Seconds in which the compute lane waits for a collective."""
        return sum(span.end - span.begin for span in self.spans if span.lane == "wait")

    @property
    def communicating(self) -> float:
        """Seconds in which a collective is under way."""
        return sum(span.end - span.begin for span in self.spans if span.lane == "collective")

    @property
    def hidden(self) -> float:
        """The part of the communication beside which the compute lane computes."""
        return 1 - self.waiting / self.communicating if self.communicating else 1.0

    def __rich__(self) -> Group:
        return _report(self)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(width=120, file=out).print(self, soft_wrap=True)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def draw(self) -> Figure:
        """One lane for compute, one for collectives, and below them the gathered bytes alive. Needs matplotlib (extra `demo`)."""
        figure: Figure = _draw(self)
        return figure


def make_timeline(graph: Graph, machine: Machine | None = None, *, title: str = "one step") -> Timeline:
    """The timeline of a graph in the order in which it stands.

    Args:
        graph: a training step's, as `run_passes` returns it.
        machine: the rates.
        title: what the table and the picture are called.
    """
    machine = Machine() if machine is None else machine
    analysis = analyse(graph)
    labels: dict[Node, str] = {}
    for gather in analysis.gathers:
        labels |= {node: f"gather {gather.unit}" for node in gather.issue if is_collective(node)}
    now = free = 0.0  # when the compute lane and the collectives' lane have nothing left to do
    ends: dict[Node, float] = {}
    spans: list[Span] = []
    times: list[float] = []
    for node in graph.nodes:
        times.append(now)
        if is_collective(node):
            nbytes = sent_by(node)
            begin = max(now, free)
            free = begin + machine.latency + nbytes / machine.network
            ends[node] = free
            kind = (
                str(node.target)
                .split(".")[1]
                .removesuffix("_coalesced")
                .removesuffix("_into_tensor")
                .removesuffix("_tensor")
                .removesuffix("_single")
            )
            spans.append(Span("collective", labels.get(node, kind), begin, free, nbytes))
        elif node.target is WAIT:
            end = max(now, ends.get(start_of(node), now))
            if end > now:
                spans.append(Span("wait", node.name, now, end))
            now = end
        else:
            seconds = _seconds(node, machine)
            if seconds:
                spans.append(Span("compute", node.name, now, now + seconds))
            now += seconds
    return Timeline(tuple(spans), tuple(times), liveness(graph, analysis), title)


def sent_by(node: Node) -> int:
    """Bytes that one rank sends in the collective that `node` starts, by the fewest that it can be done with."""
    numbers = [arg for arg in node.args if isinstance(arg, int)]
    if node.target is c10d.all_to_all_single.default:
        num_ranks = len(node.args[1])  # type: ignore[arg-type]
        return nbytes_of(node) * (num_ranks - 1) // num_ranks
    if node.target in (c10d.all_gather_into_tensor.default, ALL_GATHERS, c10d.reduce_scatter_tensor.default):
        num_ranks = numbers[0]
        whole = max(nbytes_of(node), sum(map(nbytes_of, node.all_input_nodes)))
        return whole * (num_ranks - 1) // num_ranks
    return nbytes_of(node) * (2 if node.target is ALL_REDUCE else 1)


def _seconds(node: Node, machine: Machine) -> float:
    if node.op != "call_function" or is_view(node):
        return 0.0
    moved = nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes))
    return max(flops_of(node) / machine.flops, moved / machine.memory)


def _report(timeline: Timeline) -> Group:
    table = Table(title=timeline.title, title_justify="left")
    table.add_column("collective")
    for column in ("calls", "MB sent", "ms"):
        table.add_column(column, justify="right")
    calls: Counter[str] = Counter()
    nbytes: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.lane == "collective":
            calls[span.label] += 1
            nbytes[span.label] += span.nbytes
            seconds[span.label] += span.end - span.begin
    for label, count in calls.items():
        table.add_row(label, str(count), f"{nbytes[label] / 1e6:,.3f}", f"{seconds[label] * 1e3:,.3f}")
    live = timeline.liveness
    return Group(
        table,
        f"a step takes {timeline.seconds * 1e3:,.3f} ms, of which compute waits {timeline.waiting * 1e3:,.3f} ms; "
        f"{timeline.hidden:.0%} of the communication is hidden",
        f"alive at the most: {live.peak / 1e6:,.3f} MB besides arguments of {live.arguments / 1e6:,.3f} MB, "
        f"gathered {live.peak_gathered / 1e6:,.3f} MB",
    )


def _draw(timeline: Timeline) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
    labels = dict.fromkeys(span.label for span in timeline.spans if span.lane == "collective")
    palette = colormaps["tab20"]
    colors: dict[str, Any] = {label: palette(place % 20) for place, label in enumerate(labels)}
    for lane, y in (("compute", 1), ("wait", 1), ("collective", 0)):
        spans = [span for span in timeline.spans if span.lane == lane]
        fixed = {"compute": "0.35", "wait": "0.9"}.get(lane)
        lanes.broken_barh(
            [(span.begin * 1e3, (span.end - span.begin) * 1e3) for span in spans],
            (y - 0.4, 0.8),
            facecolors=[fixed or colors[span.label] for span in spans],
            edgecolor="white" if lane == "collective" else "none",
            linewidth=0.3,
        )
    lanes.set_yticks([1, 0], ["compute", "collectives"])
    lanes.set_title(timeline.title, loc="left")
    times = [time * 1e3 for time in timeline.times]
    memory.step(times, [n / 1e6 for n in timeline.liveness.live], where="post", color="0.6", label="alive")
    gathered = [n / 1e6 for n in timeline.liveness.gathered]
    memory.fill_between(times, gathered, step="post", color="tab:blue", alpha=0.6, label="gathered")
    memory.set_xlabel("ms")
    memory.set_ylabel("MB")
    memory.set_ylim(bottom=0)
    memory.legend(loc="upper right", frameon=False)
    for axes in (lanes, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
