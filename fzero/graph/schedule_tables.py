"""The tables that the walk of `fzero.graph.schedule` reads: computed once from a graph,
and not changed by the walk.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch.fx import Graph, Node

from fzero.graph.analysis import Analysis, Gather, sending_updates
from fzero.graph.nodes import (
    ALL_REDUCE,
    flops_of,
    is_cheap,
    is_coding,
    is_write,
    overwrites,
    storages,
)
from fzero.graph.reuse import plan_live_ranges

if TYPE_CHECKING:
    from fzero.graph.schedule import PassOptions


@dataclass(slots=True, eq=False)
class GatheredRange:
    """One live range of a unit in the new order, with those of its gathers that are
    used in it.
    """

    unit: int
    first: int
    last: int
    gathers: list[Gather]
    numel: int
    is_issued: bool = False
    # a node of the gather → its copy in this live range
    made: dict[Node, Node] = field(default_factory=dict)


class Roles(NamedTuple):
    """The nodes outside the trunk, besides arguments and gathers, by when the walk
    emits them.
    """

    lazy: set[Node]  # cheap, emitted when another node needs it
    eager: set[Node]  # cheap, emitted as soon as its inputs are ready: the consumers of reductions
    writes: set[Node]  # the nodes that write new state
    last: set[Node]  # emitted after all other nodes
    starts: dict[Node, int]  # starts of reductions → elements that they keep alive
    waits: dict[Node, Node]  # waits of reductions → their start


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a graph that the walk reads.

    Attributes:
        num_units: the number of units that are gathered.
        index: the place of each node in the graph.
        unit_of: the unit of each node of a gather.
        roles: the nodes outside the trunk.
        trunk: the nodes that keep their order.
        after: for a node that overwrites memory, the nodes besides gathers that must
            come before it.
        ranges: the live ranges of the units, in the order of their first use.
        users: the nodes that wait for a node.
        num_before: how many nodes must be emitted before each node, not counting
            gathers, which are emitted on demand.
        overwrites: by unit, the nodes that write into a shard after all gathers that
            read it.
        max_reducing: the most elements that unfinished reductions keep alive.
    """

    num_units: int
    index: Mapping[Node, int]
    unit_of: Mapping[Node, int]
    roles: Roles
    trunk: Sequence[Node]
    after: Mapping[Node, Sequence[Node]]
    ranges: Sequence[GatheredRange]
    users: Mapping[Node, Sequence[Node]]
    num_before: Mapping[Node, int]
    overwrites: Mapping[int, Sequence[Node]]
    max_reducing: int

    @classmethod
    def of(cls, graph: Graph, analysis: Analysis, options: PassOptions) -> Tables:
        """The tables of a graph within these limits."""
        units = analysis.units
        unit_of = {
            node: unit
            for unit, gathers in enumerate(units)
            for gather in gathers
            for node in (*gather.issue, *gather.settle)
        }
        roles = _roles(graph, analysis, unit_of, options)
        beside = (unit_of, *roles)
        inside = [node for node in graph.nodes if node.op == "call_function"]
        trunk = [node for node in inside if not any(node in role for role in beside)]
        after: dict[Node, list[Node]] = {}
        readers: dict[Node, set[int]] = {}
        for node, others in overwrites(graph).items():
            after[node] = [other for other in others if other not in unit_of]
            readers[node] = {unit_of[other] for other in others if other in unit_of}
        ranges = _plan_ranges(graph, analysis, unit_of, trunk, options)
        users: defaultdict[Node, list[Node]] = defaultdict(list)
        num_before: dict[Node, int] = {}
        for node in graph.nodes:
            before = [
                arg for arg in (*node.all_input_nodes, *after.get(node, ())) if arg not in unit_of
            ]
            num_before[node] = len(before)
            for arg in before:
                users[arg].append(node)
        num_ranges = Counter(live_range.unit for live_range in ranges)
        overwritten: defaultdict[int, list[Node]] = defaultdict(list)
        for node, read in readers.items():
            for unit in read:
                num_before[node] += num_ranges[unit]
                overwritten[unit].append(node)
        largest = max(roles.starts.values(), default=0)
        return cls(
            num_units=len(units),
            index={node: index for index, node in enumerate(graph.nodes)},
            unit_of=unit_of,
            roles=roles,
            trunk=trunk,
            after=after,
            ranges=ranges,
            users=users,
            num_before=num_before,
            overwrites=overwritten,
            max_reducing=2 * largest if options.max_reducing is None else options.max_reducing,
        )


def _plan_ranges(
    graph: Graph,
    analysis: Analysis,
    unit_of: Mapping[Node, int],
    trunk: Sequence[Node],
    options: PassOptions,
) -> list[GatheredRange]:
    """The live ranges of all units, in the order of their first use."""
    units = analysis.units
    part_of = {  # index among its unit's gathers
        node: part
        for gathers in units
        for part, gather in enumerate(gathers)
        for node in (*gather.issue, *gather.settle)
    }
    numels = [sum(gather.numel for gather in gathers) for gathers in units]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    uses = []
    # unit → (position, gather used there)
    parts: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
    for position, node in enumerate([*trunk, output]):
        args = [arg for arg in node.all_input_nodes if arg in unit_of]
        if args:
            uses.append((position, tuple(dict.fromkeys(unit_of[arg] for arg in args))))
        for arg in args:
            parts[unit_of[arg]].append((position, part_of[arg]))
    ranges = []
    for unit, first, last in plan_live_ranges(
        uses, numels, max_live=options.max_live, max_reuse_distance=options.max_reuse_distance
    ):
        used: set[int] = set()
        while parts[unit] and parts[unit][0][0] <= last:
            used.add(parts[unit].popleft()[1])
        gathers = [units[unit][part] for part in sorted(used)]
        ranges.append(
            GatheredRange(unit, first, last, gathers, sum(gather.numel for gather in gathers))
        )
    return ranges


def _roles(
    graph: Graph, analysis: Analysis, gathered: Mapping[Node, int], options: PassOptions
) -> Roles:
    roots = storages(graph)
    fixed = {node for node in graph.nodes if any(arg in gathered for arg in node.all_input_nodes)}
    cheap = {
        node
        for node in graph.nodes
        if is_cheap(node) and node not in gathered and node not in fixed
    }
    starts = {r.start: r.numel for r in analysis.reductions if r.start not in fixed}
    waits = {wait: r.start for r in analysis.reductions for wait in r.waits}
    # A model may have all-reduces of its own (SyncBatchNorm); their consumers keep their order.
    computes: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in computes or flops_of(node):
            computes.update(node.all_input_nodes)
    followed = {
        wait
        for wait, start in waits.items()
        if start.target is not ALL_REDUCE or wait not in computes
    }
    own_order = sending_updates(graph)
    lazy = {user for start in starts for user in start.users if user.target is operator.getitem}
    eager: set[Node] = set()
    last: set[Node] = set()
    writes = {node for node in graph.nodes if is_write(node, roots)}
    for node in graph.nodes:
        args = node.all_input_nodes
        follows = node in cheap and any(arg in eager or arg in followed for arg in args)
        if node in writes and node not in fixed:
            (eager if options.writes == "early" else last).add(node)
        elif follows:
            eager.add(node)
        elif node in cheap and all(
            arg.op in ("placeholder", "get_attr") or arg in lazy for arg in args
        ):
            lazy.add(node)
    # A comm hook's new state is written as early as its message is sent: both are computed from the
    # full gradient.
    prepares = [
        *starts,
        *(w for w in writes if any(is_coding(arg, "reduce") for arg in w.all_input_nodes)),
    ]
    while prepares:
        for arg in prepares.pop().all_input_nodes:
            if arg in cheap and arg not in eager and arg not in lazy:
                lazy.add(arg)
                prepares.append(arg)
    for role in (lazy, eager):
        role -= own_order
    starts = {start: numel for start, numel in starts.items() if start not in own_order}
    waits = {wait: start for wait, start in waits.items() if start not in own_order}
    return Roles(lazy, eager, writes, last | own_order, starts, waits)
