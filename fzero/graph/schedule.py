"""`run_passes`: the order of a step's graph. ZeRO stage 3, overlap and release are all orders of the same nodes.

The captured graph has all gathers first, then forward and backward, then all reductions, then the update. `run_passes`
reorders it in one walk over the *trunk*, the nodes that keep their order:

1. *Gathers sink* to their first use. They are repeated for a later use (`plan_live_ranges`) where keeping the parameters
   would exceed the allowed memory. A gather starts one unit early, so that it overlaps compute.
2. *Reductions rise* to where their input is ready. Their waits sink until the bound on full gradients in flight is
   reached, or a consumer needs them.
3. The *update* of a shard runs as soon as its inputs are ready, and is written into the state at once.

The numbers do not change: every node keeps its inputs. Nothing depends on the rank, so that all ranks issue the same
collectives in the same order. The cost is n log n in the number of nodes.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.common.collector import collector_paused
from fzero.graph.analysis import Analysis, Gather, analyse, name_units, sending_updates
from fzero.graph.buckets import bucket_gathers, bucket_reductions, bucket_updates
from fzero.graph.nodes import (
    ALL_REDUCE,
    WAIT,
    arrange,
    flops_of,
    is_cheap,
    is_coding,
    is_write,
    overwrites,
    storages,
    waits_of,
)
from fzero.graph.reuse import plan_live_ranges
from fzero.graph.weight_grads import join_products


class CompileError(RuntimeError):
    """A step cannot be captured in one graph."""


@dataclass(frozen=True, slots=True)
class PassOptions:
    """The limits of the schedule, in elements as in DeepSpeed's configuration.

    Args:
        prefetch: `stage3_prefetch_bucket_size`. 0 starts no gather early. Otherwise the next unit's gather starts one unit
            early, and up to `ahead` units together within this limit.
        ahead: the most units that are prefetched at once; None sets no bound.
        max_live: `stage3_max_live_parameters`, the most gathered elements alive. The parameters that one node uses may
            exceed it.
        max_reuse_distance: `stage3_max_reuse_distance`. A unit is kept until its next use if the units entered meanwhile
            have at most this many elements.
        max_reducing: the most elements that unfinished reductions keep alive; a single reduction may exceed it. None means
            twice the largest reduction.
        gather_bucket: `allgather_bucket_size`, the largest joined gather. Joins the gathers of a unit, and those of
            consecutive units up to the size of the second largest unit; likewise updated shards. 0 joins none.
        reduce_bucket: `reduce_bucket_size`, the largest joined reduction; joins those whose inputs are ready consecutively.
        writes: when the new state is written: `early` (as soon as it is ready) or `last` (after all other nodes, so that an
            error leaves the state as it was; costs a second copy of the state).
    """

    prefetch: int = 50_000_000
    ahead: int | None = 1
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 0
    max_reducing: int | None = None
    gather_bucket: int = 0
    reduce_bucket: int = 0
    writes: Literal["early", "last"] = "early"

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"PassOptions: {name} must be at least 0, got {value}; 0 switches it off")
        if self.writes not in ("early", "last"):
            raise ValueError(f"PassOptions: writes must be 'early' or 'last', got {self.writes!r}")


def run_passes(graph: Graph, options: PassOptions, *, units: Mapping[str, str] | None = None) -> Graph:
    """A copy of `graph`, reordered within the limits of `options`.

    Args:
        graph: a training step's, whose only in-place writes are `copy_` into placeholders; `meta["val"]` of every node holds
            its tensors.
        options: the limits of the schedule.
        units: the unit of each flat buffer, by the name of its placeholder; every other flat buffer is its own unit.

    Raises:
        ValueError: the graph changes the result of a collective in place, or has a collective without a wait.
    """
    with collector_paused():
        copy = copy_of(graph)
        run_passes_in_place(copy, options, units=units)
    return copy


def copy_of(graph: Graph) -> Graph:
    """A copy of the nodes, with the same `meta`."""
    copy = Graph(graph.owning_module)
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, lambda arg: copies[arg])
    copy._codegen = graph._codegen
    return copy


def run_passes_in_place(graph: Graph, options: PassOptions, *, units: Mapping[str, str] | None = None) -> None:
    """`run_passes` on the graph itself, for Inductor's hooks."""
    with collector_paused():
        name_units(graph, units or {})
        join_products(graph)
        if options.gather_bucket:
            bucket_gathers(graph, analyse(graph), options.gather_bucket)
            bucket_updates(graph, analyse(graph), options.gather_bucket)
        if options.reduce_bucket:
            bucket_reductions(graph, analyse(graph), options.reduce_bucket)
        _Walk(graph, analyse(graph), options).run()
        graph.lint()


# --- the walk ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Gathered:
    """One live range of a unit in the new order, with those of its gathers that are used in it."""

    unit: int
    first: int
    last: int
    gathers: list[Gather]
    numel: int
    is_issued: bool = False
    made: dict[Node, Node] = field(default_factory=dict)  # a node of the gather → its copy in this live range


class _Roles(NamedTuple):
    """The nodes outside the trunk, besides arguments and gathers, by when the walk emits them."""

    lazy: set[Node]  # cheap, emitted when another node needs it
    eager: set[Node]  # cheap, emitted as soon as its inputs are ready: the consumers of reductions
    writes: set[Node]  # the nodes that write new state
    last: set[Node]  # emitted after all other nodes
    starts: dict[Node, int]  # starts of reductions → elements that they keep alive
    waits: dict[Node, Node]  # waits of reductions → their start


class _Walk:
    """Emits every node once, and a gather's nodes once per live range, then moves them into that order.

    Args:
        graph: changed in place.
        analysis: of this graph.
        options: the limits of the schedule.
    """

    def __init__(self, graph: Graph, analysis: Analysis, options: PassOptions) -> None:
        self.graph, self.options = graph, options
        self.index = {node: index for index, node in enumerate(graph.nodes)}
        self.gathers = analysis.units
        self.unit_of: dict[Node, int] = {}
        self.part_of: dict[Node, int] = {}  # index among its unit's gathers
        for unit, gathers in enumerate(self.gathers):
            for part, gather in enumerate(gathers):
                self.unit_of |= dict.fromkeys((*gather.issue, *gather.settle), unit)
                self.part_of |= dict.fromkeys((*gather.issue, *gather.settle), part)
        self.roles = _roles(graph, analysis, self.unit_of, options)
        largest = max(self.roles.starts.values(), default=0)
        self.max_reducing = 2 * largest if options.max_reducing is None else options.max_reducing
        beside = (self.unit_of, *self.roles)
        inside = [node for node in graph.nodes if node.op == "call_function"]
        self.trunk = [node for node in inside if not any(node in role for role in beside)]
        self.after: dict[Node, list[Node]] = {}
        readers: dict[Node, set[int]] = {}
        for node, others in overwrites(graph).items():
            self.after[node] = [other for other in others if other not in self.unit_of]
            readers[node] = {self.unit_of[other] for other in others if other in self.unit_of}
        self.ranges = self._plan_ranges()
        # How many nodes must be emitted before each node, not counting gathers, which are emitted on demand.
        self.users: defaultdict[Node, list[Node]] = defaultdict(list)
        self.pending: dict[Node, int] = {}
        for node in graph.nodes:
            before = [arg for arg in (*node.all_input_nodes, *self.after.get(node, ())) if arg not in self.unit_of]
            self.pending[node] = len(before)
            for arg in before:
                self.users[arg].append(node)
        # `copy_` into a shard also waits for all gathers that read it.
        num_ranges = [0] * len(self.gathers)
        for live_range in self.ranges:
            num_ranges[live_range.unit] += 1
        self.overwrites: defaultdict[int, list[Node]] = defaultdict(list)
        for node, units in readers.items():
            for unit in units:
                self.pending[node] += num_ranges[unit]
                self.overwrites[unit].append(node)
        self.order: list[Node] = []
        self.done: set[Node] = set()
        self.available: set[Node] = set()
        self.ready: list[tuple[int, int, Node]] = []
        self.under_way: dict[Node, int] = {}  # starts of reductions, in order
        self.reducing = 0
        self.gathered: list[_Gathered | None] = [None] * len(self.gathers)
        self.alive: set[int] = set()  # units that are gathered, or being gathered
        self.live = self.in_flight = self.num_ahead = self.next_range = 0

    def run(self) -> None:
        entering: defaultdict[int, list[_Gathered]] = defaultdict(list)
        leaving: defaultdict[int, list[_Gathered]] = defaultdict(list)
        for live_range in self.ranges:
            entering[live_range.first].append(live_range)
            leaving[live_range.last].append(live_range)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._emit(node)
        for node in self.roles.lazy:
            if not node.all_input_nodes:
                self._make_available(node)
        self._prefetch()
        for position, node in enumerate(self.trunk):
            for live_range in entering[position]:
                self._enter(live_range)
            self._run_node(node)
            for live_range in leaving[position]:
                self._settle(live_range)
                self.live -= live_range.numel
                self.alive.remove(live_range.unit)
                self.gathered[live_range.unit] = None
            if leaving[position]:
                self._prefetch()
            self._cascade()
        self._finish(entering[len(self.trunk)])
        self._apply()

    # --- gathers -----------------------------------------------------------------------------------------------

    def _plan_ranges(self) -> list[_Gathered]:
        numels = [sum(gather.numel for gather in gathers) for gathers in self.gathers]
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        uses = []
        parts: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)  # unit → (position, gather used there)
        for position, node in enumerate([*self.trunk, output]):
            args = [arg for arg in node.all_input_nodes if arg in self.unit_of]
            if args:
                uses.append((position, tuple(dict.fromkeys(self.unit_of[arg] for arg in args))))
            for arg in args:
                parts[self.unit_of[arg]].append((position, self.part_of[arg]))
        ranges = []
        for unit, first, last in plan_live_ranges(
            uses, numels, max_live=self.options.max_live, max_reuse_distance=self.options.max_reuse_distance
        ):
            used: set[int] = set()
            while parts[unit] and parts[unit][0][0] <= last:
                used.add(parts[unit].popleft()[1])
            gathers = [self.gathers[unit][part] for part in sorted(used)]
            ranges.append(_Gathered(unit, first, last, gathers, sum(gather.numel for gather in gathers)))
        return ranges

    def _issue(self, live_range: _Gathered) -> None:
        live_range.is_issued = True
        self.live += live_range.numel
        self.alive.add(live_range.unit)
        self.next_range += 1
        for gather in live_range.gathers:
            for node in gather.issue:
                self._make(live_range, node)
        for node in self.overwrites[live_range.unit]:
            self._count_down(node)

    def _enter(self, live_range: _Gathered) -> None:
        if live_range.is_issued:
            self.in_flight -= live_range.numel
            self.num_ahead -= 1
        else:
            self._issue(live_range)
        self.gathered[live_range.unit] = live_range

    def _settle(self, live_range: _Gathered) -> None:
        """Emits the remaining waits: parameters gathered together with others may be unused."""
        for gather in live_range.gathers:
            for node in gather.settle:
                if node.target is WAIT:
                    self._make(live_range, node)

    def _prefetch(self) -> None:
        """Starts the next gathers, as far as memory allows."""
        options = self.options
        ahead = len(self.ranges) if options.ahead is None else options.ahead
        while options.prefetch and self.next_range < len(self.ranges) and self.num_ahead < ahead:
            live_range = self.ranges[self.next_range]
            if self.live + live_range.numel > options.max_live or live_range.unit in self.alive:  # never two copies
                return
            if self.num_ahead and self.in_flight + live_range.numel > options.prefetch:
                return
            self._issue(live_range)
            self.in_flight += live_range.numel
            self.num_ahead += 1

    def _make(self, live_range: _Gathered, node: Node) -> Node:
        """Emits a gather's node for this live range, after the nodes that it needs; returns the node or its copy."""
        stack = [node]
        while stack:
            item = stack[-1]
            if item in live_range.made:
                stack.pop()
                continue
            missing = [arg for arg in item.all_input_nodes if arg in self.unit_of and arg not in live_range.made]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            for arg in item.all_input_nodes:
                if arg not in self.unit_of:
                    self._need(arg)
            live_range.made[item] = self._emit_in(live_range, item)
        return live_range.made[node]

    def _emit_in(self, live_range: _Gathered, node: Node) -> Node:
        def here(arg: Node) -> Node:
            return live_range.made.get(arg, arg)

        if node in self.done:
            with self.graph.inserting_before(node):
                node = self.graph.node_copy(node, here)
        elif any(here(arg) is not arg for arg in node.all_input_nodes):
            node.args, node.kwargs = map_arg(node.args, here), map_arg(node.kwargs, here)
        self.done.add(node)
        self.order.append(node)
        return node

    # --- everything else ---------------------------------------------------------------------------------------

    def _run_node(self, node: Node) -> None:
        """Emits a node of the trunk, after the nodes that it needs."""
        made: dict[Node, Node] = {}
        for arg in node.all_input_nodes:
            if arg in self.unit_of:
                live_range = self.gathered[self.unit_of[arg]]
                assert live_range is not None
                made[arg] = self._make(live_range, arg)
        if made:
            self._prefetch()
        if any(made[arg] is not arg for arg in made):
            node.args = map_arg(node.args, lambda arg: made.get(arg, arg))
            node.kwargs = map_arg(node.kwargs, lambda arg: made.get(arg, arg))
        self._need(node)

    def _need(self, node: Node) -> None:
        """Emits the node, after all nodes that it needs and that are not yet emitted."""
        stack = [node]
        while stack:
            item = stack[-1]
            if item in self.done:
                stack.pop()
                continue
            before = (*item.all_input_nodes, *self.after.get(item, ()))
            missing = [arg for arg in before if arg not in self.done and arg not in self.unit_of]
            if missing:
                stack.extend(reversed(missing))
            else:
                self._emit(stack.pop())

    def _emit(self, node: Node) -> None:
        self.order.append(node)
        self.done.add(node)
        if node in self.roles.starts:
            self.under_way[node] = self.roles.starts[node]
            self.reducing += self.roles.starts[node]
        elif node in self.roles.waits:
            self.reducing -= self.under_way.pop(self.roles.waits[node], 0)
        self._make_available(node)

    def _make_available(self, node: Node) -> None:
        """Counts down the users of a node, which no longer wait for it."""
        stack = [node]
        while stack:
            item = stack.pop()
            if item in self.available:
                continue
            self.available.add(item)
            stack.extend(user for user in self.users[item] if self._count_down(user))

    def _count_down(self, node: Node) -> bool:
        """Counts down the nodes that `node` waits for; returns whether it is lazy and may now be emitted on demand."""
        self.pending[node] -= 1
        if self.pending[node] or node in self.done:
            return False
        if node in self.roles.eager or node in self.roles.starts:
            # New state is written before the next is computed, so that only one copy is alive.
            priority = 2 * (node in self.roles.starts) + (node not in self.roles.writes)
            heapq.heappush(self.ready, (priority, self.index[node], node))
        return node in self.roles.lazy

    def _cascade(self) -> None:
        """Emits the ready nodes: first the consumers of reductions, then the reductions that fit into `max_reducing`."""
        while self.ready:
            _, _, node = self.ready[0]
            waits = node in self.roles.starts and self.under_way and node not in self.done
            if waits and self.reducing + self.roles.starts[node] > self.max_reducing:
                self._wait_for_oldest()
                continue
            heapq.heappop(self.ready)
            self._need(node)

    def _wait_for_oldest(self) -> None:
        for wait in waits_of(next(iter(self.under_way))):
            self._need(wait)

    def _finish(self, live_ranges: Sequence[_Gathered]) -> None:
        """Emits the remaining nodes; `live_ranges` are the gathered parameters that the graph returns."""
        for live_range in live_ranges:
            self._enter(live_range)
            self._settle(live_range)
        self._cascade()
        while self.under_way:
            self._wait_for_oldest()
            self._cascade()
        for node in (*(node for node in self.index if node not in self.roles.last), *self.index):
            if node not in self.unit_of and node.op != "output":
                self._need(node)
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        self._run_node(output)

    def _apply(self) -> None:
        """Moves the nodes into the new order, and erases unused gathers."""
        arrange(self.order)
        for node in reversed(list(self.unit_of)):
            if node not in self.done:
                self.graph.erase_node(node)


def _roles(graph: Graph, analysis: Analysis, gathered: Mapping[Node, int], options: PassOptions) -> _Roles:
    roots = storages(graph)
    fixed = {node for node in graph.nodes if any(arg in gathered for arg in node.all_input_nodes)}
    cheap = {node for node in graph.nodes if is_cheap(node) and node not in gathered and node not in fixed}
    starts = {r.start: r.numel for r in analysis.reductions if r.start not in fixed}
    waits = {wait: r.start for r in analysis.reductions for wait in r.waits}
    # A model may have all-reduces of its own (SyncBatchNorm); their consumers keep their order.
    computes: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in computes or flops_of(node):
            computes.update(node.all_input_nodes)
    followed = {wait for wait, start in waits.items() if start.target is not ALL_REDUCE or wait not in computes}
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
        elif node in cheap and all(arg.op in ("placeholder", "get_attr") or arg in lazy for arg in args):
            lazy.add(node)
    # A comm hook's new state is written as early as its message is sent: both are computed from the full gradient.
    prepares = [*starts, *(w for w in writes if any(is_coding(arg, "reduce") for arg in w.all_input_nodes))]
    while prepares:
        for arg in prepares.pop().all_input_nodes:
            if arg in cheap and arg not in eager and arg not in lazy:
                lazy.add(arg)
                prepares.append(arg)
    for role in (lazy, eager):
        role -= own_order
    starts = {start: numel for start, numel in starts.items() if start not in own_order}
    waits = {wait: start for wait, start in waits.items() if start not in own_order}
    return _Roles(lazy, eager, writes, last | own_order, starts, waits)
