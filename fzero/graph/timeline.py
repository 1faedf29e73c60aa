"""`StepTimeline`: when each node of a step's graph runs, by a simple model of the
machine, and the bytes alive meanwhile.

In the model, one *lane* computes and one communicates. A node takes its floating point
operations at a given rate or the bytes that it reads and writes at a given bandwidth,
whichever is longer; a collective takes the bytes that a rank sends. A collective starts
once the compute lane reaches it and the previous collective has ended; a `wait_tensor`
blocks the compute lane until its collective has ended.

The times are estimates, not measurements: they show which parts overlap and which wait.
A dry run, which has no graph (`fzero.estimation.dry_run`), uses the same `Lanes` with
more: copies to and from host memory, and files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from rich.console import Group
from rich.table import Table
from torch.fx import Graph, Node

from fzero.common.notebooks import as_html
from fzero.common.text_tables import as_text
from fzero.common.timelines import Event, Timeline, draw_timelines
from fzero.graph.analysis import analyse
from fzero.graph.liveness import Liveness, liveness
from fzero.graph.nodes import (
    ALL_GATHERS,
    ALL_REDUCE,
    WAIT,
    c10d,
    flops_of,
    is_collective,
    is_view,
    nbytes_of,
    start_of,
)
from fzero.plans.machine_model import MachineModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Along(Protocol):
    """The mesh axis of a collective and its number of ranks, which a graph does not
    contain.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...


Lane = Literal["compute", "wait", "collective", "host", "back", "files"]


class Span(NamedTuple):
    """One node in its lane, in seconds from the start of the step; a rank sends
    `nbytes` along `axis`.
    """

    lane: Lane
    label: str
    begin: float
    end: float
    nbytes: int = 0
    axis: str = ""


class Lanes:
    """One compute lane; each of the other lanes runs its operations one after the
    other.

    >>> lanes = Lanes()
    >>> lanes.compute("forward", 2.0)
    >>> end = lanes.start("collective", "gather", 3.0)
    >>> lanes.compute("beside it", 1.0)
    >>> lanes.wait("gather", end)
    >>> lanes.now, [span.lane for span in lanes.spans]
    (5.0, ['compute', 'collective', 'compute', 'wait'])
    """

    def __init__(self, *, overlap: bool = True) -> None:
        self.now, self._overlap = 0.0, overlap
        self.spans: list[Span] = []
        self._free: defaultdict[str, float] = defaultdict(float)  # when each lane becomes idle

    def compute(self, label: str, seconds: float) -> None:
        """Occupies the compute lane for `seconds`."""
        if seconds:
            self.spans.append(Span("compute", label, self.now, self.now + seconds))
        self.now += seconds

    def start(
        self,
        lane: Lane,
        label: str,
        seconds: float,
        *,
        after: float = 0.0,
        nbytes: int = 0,
        axis: str = "",
    ) -> float:
        """Starts once the lane is free and time `after` has passed; the compute lane
        goes on. Returns the end time.
        """
        begin = max(self.now, self._free[lane], after)
        end = self._free[lane] = begin + seconds
        self.spans.append(Span(lane, label, begin, end, nbytes, axis))
        if not self._overlap:
            self.wait(label, end)
        return end

    def wait(self, label: str, end: float) -> None:
        """Blocks the compute lane until `end`."""
        if end > self.now:
            self.spans.append(Span("wait", label, self.now, end))
            self.now = end

    def settle(self) -> None:
        """Blocks the compute lane until all lanes are idle."""
        self.wait("end", max(self._free.values(), default=0.0))


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The timeline of a step's graph. `print(timeline)` shows a table,
    `timeline.draw()` a picture.

    Attributes:
        spans: compute, waits of the compute lane, and collectives, each lane in order.
        times: seconds at which the compute lane reaches each node of the graph.
        liveness: the bytes alive at each of these times.
        title: the title of the table and the picture.
    """

    spans: tuple[Span, ...] = field(repr=False)
    times: tuple[float, ...] = field(repr=False)
    liveness: Liveness = field(repr=False)
    title: str = "one step"

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def waiting(self) -> float:
        """Seconds in which the compute lane waits for a collective."""
        return sum(span.end - span.begin for span in self.spans if span.lane == "wait")

    @property
    def communicating(self) -> float:
        """Seconds in which a collective runs."""
        return sum(span.end - span.begin for span in self.spans if span.lane == "collective")

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in the step."""
        return sum(span.nbytes for span in self.spans)

    @property
    def sent_by_axis(self) -> dict[str, int]:
        """`sent` per mesh axis; `"world"` is all ranks of a mesh with several axes."""
        sent: Counter[str] = Counter()
        for span in self.spans:
            if span.lane == "collective":
                sent[span.axis] += span.nbytes
        return dict(sent)

    @property
    def num_collectives(self) -> int:
        return sum(span.lane == "collective" for span in self.spans)

    @property
    def hidden(self) -> float:
        """The fraction of the communication that overlaps compute."""
        return 1 - self.waiting / self.communicating if self.communicating else 1.0

    def __rich__(self) -> Group:
        return _report(self)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self, self.draw)

    def draw(self, *others: StepTimeline) -> Figure:
        """A picture: a lane for compute, a lane for collectives, below them the bytes
        alive. Needs matplotlib (extra `pictures`).

        The other timelines are drawn on the same scales.
        """
        timelines = [one.as_timeline() for one in (self, *others)]
        return draw_timelines(timelines, needed_by="explain().draw()")

    def as_timeline(self) -> Timeline:
        """The value that is drawn."""
        events, live = tuple(_events(self.spans)), self.liveness
        used = {event.lane for event in events}
        lanes = ["compute", "collectives", *(x for x in ("host", "back", "files") if x in used)]
        rest = [every - gathered for every, gathered in zip(live.live, live.gathered, strict=True)]
        held = dict(zip(list(_COLORS)[-3:], ([live.arguments] * len(rest), live.gathered, rest)))
        return Timeline(
            end=self.seconds,
            lanes={lane: lane for lane in lanes},
            events=events,
            colors=_COLORS,
            held=held,
            times=self.times,
            title=self.title,
            time="{unit}, by a model of a machine",
            bytes="{unit} alive",
        )


def make_timeline(
    graph: Graph,
    machine: MachineModel | None = None,
    *,
    axes: Mapping[str, Along] | None = None,
    title: str = "one step",
) -> StepTimeline:
    """The timeline of a graph in its present order.

    Args:
        graph: a training step's, as `run_passes` returns it.
        machine: the rates.
        axes: the axis of each process group, by the group's name in the graph. For a
            missing group, the collectives' own arguments give the number of ranks; an
            all-reduce has none, and is assumed to have the largest number of the graph.
        title: the title of the table and the picture.
    """
    machine = MachineModel() if machine is None else machine
    analysis = analyse(graph)
    axes = axes or {}
    most = max(filter(None, map(_num_ranks, graph.nodes)), default=None)
    labels: dict[Node, str] = {}
    for gather in analysis.gathers:
        labels |= {node: f"gather {gather.unit}" for node in gather.issue if is_collective(node)}
    lanes, ends, times = Lanes(overlap=machine.overlap), dict[Node, float](), list[float]()
    for node in graph.nodes:
        times.append(lanes.now)
        if is_collective(node):
            along = axes.get(group_of(node))
            axis, nbytes = (
                ("data", sent_by(node, most))
                if along is None
                else (along.name, sent_by(node, along.size))
            )
            label, seconds = (
                labels.get(node, kind_of(node)),
                machine.latency + nbytes / machine.network,
            )
            ends[node] = lanes.start("collective", label, seconds, nbytes=nbytes, axis=axis)
        elif node.target is WAIT:
            lanes.wait(node.name, ends.get(start_of(node), 0.0))
        else:
            lanes.compute(node.name, _seconds(node, machine))
    return StepTimeline(tuple(lanes.spans), tuple(times), liveness(graph, analysis), title)


def kind_of(node: Node) -> str:
    """The name of a collective without its suffixes, such as `all_gather` or
    `reduce_scatter`.
    """
    name = str(node.target).split(".")[1]
    for suffix in ("_coalesced", "_into_tensor", "_tensor", "_single"):
        name = name.removesuffix(suffix)
    return name


def group_of(node: Node) -> str:
    """The name of a collective's process group."""
    return next(arg for arg in reversed(node.args) if isinstance(arg, str))


def sent_by(node: Node, num_ranks: int | None = None) -> int:
    """Bytes that one rank must send at least in the collective that `node` starts.

    Args:
        num_ranks: the number of ranks of a collective whose arguments do not contain it
            (an all-reduce); None means very many.
    """
    num_ranks = _num_ranks(node) or num_ranks
    nbytes = max(nbytes_of(node), sum(map(nbytes_of, node.all_input_nodes)))
    if node.target is ALL_REDUCE:
        nbytes *= 2
    return (
        nbytes * (num_ranks - 1) // num_ranks
        if num_ranks and node.target is not c10d.broadcast.default
        else nbytes
    )


def _num_ranks(node: Node) -> int | None:
    """The number of ranks, if the collective's arguments contain it."""
    if node.target is c10d.all_to_all_single.default:
        return len(node.args[1])  # type: ignore[arg-type]
    if node.target in (
        c10d.all_gather_into_tensor.default,
        ALL_GATHERS,
        c10d.reduce_scatter_tensor.default,
    ):
        return next(arg for arg in node.args if isinstance(arg, int))
    return None


def joined(timelines: Sequence[StepTimeline]) -> StepTimeline:
    """The timeline of several graphs that run one after the other."""
    if len(timelines) == 1:
        return timelines[0]
    starts = list(accumulate((timeline.seconds for timeline in timelines), initial=0.0))
    spans = [
        span._replace(begin=start + span.begin, end=start + span.end)
        for start, timeline in zip(starts, timelines)
        for span in timeline.spans
    ]
    times = [start + time for start, timeline in zip(starts, timelines) for time in timeline.times]
    lives = [timeline.liveness for timeline in timelines]
    live = Liveness(
        nodes=tuple(chain.from_iterable(live.nodes for live in lives)),
        live=tuple(chain.from_iterable(live.live for live in lives)),
        gathered=tuple(chain.from_iterable(live.gathered for live in lives)),
        gathered_numel=tuple(chain.from_iterable(live.gathered_numel for live in lives)),
        arguments=max(live.arguments for live in lives),
    )
    return StepTimeline(tuple(spans), tuple(times), live, timelines[0].title)


def _seconds(node: Node, machine: MachineModel) -> float:
    if node.op != "call_function" or is_view(node):
        return 0.0
    moved = nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes))
    return machine.seconds(flops_of(node), moved)


def _report(timeline: StepTimeline) -> Group:
    table = Table(title=timeline.title, title_justify="left")
    table.add_column("collective")
    is_mesh = len(timeline.sent_by_axis) > 1
    if is_mesh:
        table.add_column("along")
    for column in ("calls", "MB sent", "ms"):
        table.add_column(column, justify="right")
    calls: Counter[tuple[str, ...]] = Counter()
    nbytes: defaultdict[tuple[str, ...], int] = defaultdict(int)
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for span in timeline.spans:
        if span.lane == "collective":
            row: tuple[str, ...] = (span.label, span.axis) if is_mesh else (span.label,)
            calls[row] += 1
            nbytes[row] += span.nbytes
            seconds[row] += span.end - span.begin
    for row, count in calls.items():
        table.add_row(*row, str(count), f"{nbytes[row] / 1e6:,.3f}", f"{seconds[row] * 1e3:,.3f}")
    live = timeline.liveness
    by_axis = [f"{sent / 1e6:,.3f} MB along {axis}" for axis, sent in timeline.sent_by_axis.items()]
    return Group(
        table,
        *([f"a rank sends {', '.join(by_axis)}"] if is_mesh else []),
        f"a step takes {timeline.seconds * 1e3:,.3f} ms, of which compute waits "
        f"{timeline.waiting * 1e3:,.3f} ms; {timeline.hidden:.0%} of the communication is hidden",
        f"alive at the most: {live.peak / 1e6:,.3f} MB besides arguments of "
        f"{live.arguments / 1e6:,.3f} MB, gathered {live.peak_gathered / 1e6:,.3f} MB",
    )


# --- the picture ----------------------------------------------------------------------------------

_COLORS = {
    "compute": "0.35",
    "waits": "#f3c6c0",
    "gather of parameters": "tab:blue",
    "all_gather": "tab:cyan",
    "reduce_scatter": "tab:orange",
    "all_reduce": "tab:red",
    "all_to_all": "tab:purple",
    "broadcast": "tab:green",
    "reduce": "tab:orange",
    "all_gather_params": "tab:cyan",
    "host": "tab:olive",
    "back": "tab:pink",
    "files": "tab:brown",
    "other collectives": "0.6",
    "state and batch": "#b9aec9",
    "gathered parameters": "#6f9ec9",
    "activations, gradients, new state": "0.88",
}


def _events(spans: Sequence[Span]) -> Iterator[Event]:
    """The bars of a picture: adjacent spans of the compute lane are one."""
    last: Event | None = None  # of the compute lane
    for lane, label, begin, end, *_ in spans:
        if lane == "collective":
            unit = label.removeprefix("gather ")
            known = label if label in _COLORS else "other collectives"
            kind, unit = ("gather of parameters", unit) if unit != label else (known, "")
            yield Event("collectives", kind, begin, end, unit)
        elif lane in _COLORS and lane != "compute":
            yield Event(lane, lane, begin, end)
        else:
            kind = "compute" if lane == "compute" else "waits"
            if last and last.kind == kind and begin - last.end < 1e-9:
                last = last._replace(end=end)
            else:
                yield from [last] if last else []
                last = Event("compute", kind, begin, end)
    yield from [last] if last else []
