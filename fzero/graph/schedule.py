"""`run_passes`: the order of a step's graph. ZeRO stage 3, overlap and release are all
orders of the same nodes.

The captured graph has all gathers first, then forward and backward, then all
reductions, then the update. `run_passes` reorders it in one walk over the *trunk*, the
nodes that keep their order:

1. *Gathers sink* to their first use. They are repeated for a later use
   (`plan_live_ranges`) where keeping the parameters would exceed the allowed memory. A
   gather starts one unit early, so that it overlaps compute.
2. *Reductions rise* to where their input is ready. Their waits sink until the bound on
   full gradients in flight is reached, or a consumer needs them.
3. The *update* of a shard runs as soon as its inputs are ready, and is written into the
  state at once.

The numbers do not change: every node keeps its inputs. Nothing depends on the rank, so
that all ranks issue the same collectives in the same order. The cost is n log n in the
number of nodes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.common.collector import collector_paused
from fzero.graph.analysis import analyse, name_units
from fzero.graph.buckets import bucket_gathers, bucket_reductions, bucket_updates
from fzero.graph.holdings import TensorKind
from fzero.graph.nodes import (
    WAIT,
    arrange,
    storages,
    waits_of,
)
from fzero.graph.schedule_tables import GatheredRange, Tables
from fzero.graph.weight_grads import join_products


class CompileError(RuntimeError):
    """A step cannot be captured in one graph."""


@dataclass(frozen=True, slots=True)
class PassOptions:
    """The limits of the schedule, in elements as in DeepSpeed's configuration.

    Args:
        prefetch: `stage3_prefetch_bucket_size`. 0 starts no gather early. Otherwise the
            next unit's gather starts one unit early, and up to `ahead` units together
            within this limit.
        ahead: the most units that are prefetched at once; None sets no bound.
        max_live: `stage3_max_live_parameters`, the most gathered elements alive. The
            parameters that one node uses may exceed it.
        max_reuse_distance: `stage3_max_reuse_distance`. A unit is kept until its next
            use if the units entered meanwhile have at most this many elements.
        max_reducing: the most elements that unfinished reductions keep alive; a single
            reduction may exceed it. None means twice the largest reduction.
        gather_bucket: `allgather_bucket_size`, the largest joined gather. Joins the
            gathers of a unit, and those of consecutive units up to the size of the
            second largest unit; likewise updated shards. 0 joins none.
        reduce_bucket: `reduce_bucket_size`, the largest joined reduction; joins those
            whose inputs are ready consecutively.
        writes: when the new state is written: `early` (as soon as it is ready) or
            `last` (after all other nodes, so that an error leaves the state as it was;
            costs a second copy of the state).
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
                raise ValueError(
                    f"PassOptions: {name} must be at least 0, got {value}; 0 switches it off"
                )
        if self.writes not in ("early", "last"):
            raise ValueError(f"PassOptions: writes must be 'early' or 'last', got {self.writes!r}")


def run_passes(
    graph: Graph, options: PassOptions, *, units: Mapping[str, str] | None = None
) -> Graph:
    """A copy of `graph`, reordered within the limits of `options`.

    Args:
        graph: a training step's, whose only in-place writes are `copy_` into
            placeholders; `meta["val"]` of every node holds its tensors.
        options: the limits of the schedule.
        units: the unit of each flat buffer, by the name of its placeholder; every other
            flat buffer is its own unit.

    Raises:
        ValueError: the graph changes the result of a collective in place, or has a
            collective without a wait.
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


def run_passes_in_place(
    graph: Graph, options: PassOptions, *, units: Mapping[str, str] | None = None
) -> None:
    """`run_passes` on the graph itself, for Inductor's hooks."""
    with collector_paused():
        name_units(graph, units or {})
        join_products(graph)
        if options.gather_bucket:
            bucket_gathers(graph, analyse(graph), options.gather_bucket)
            bucket_updates(graph, analyse(graph), options.gather_bucket)
        if options.reduce_bucket:
            bucket_reductions(graph, analyse(graph), options.reduce_bucket)
        _Walk(graph, Tables.of(graph, analyse(graph), options), options).run()
        graph.lint()


# --- the walk -------------------------------------------------------------------------------------


class _Walk:
    """Emits every node once, and a gather's nodes once per live range, then moves them
    into that order.

    Args:
        graph: changed in place.
        tables: the tables of this graph.
        options: the limits of the schedule.
    """

    def __init__(self, graph: Graph, tables: Tables, options: PassOptions) -> None:
        self.graph, self.tables, self.options = graph, tables, options
        self.unit_of, self.roles = tables.unit_of, tables.roles
        self.pending = dict(tables.num_before)
        self.order: list[Node] = []
        self.done: set[Node] = set()
        self.available: set[Node] = set()
        self.ready: list[tuple[int, int, Node]] = []
        self.under_way: dict[Node, int] = {}  # starts of reductions, in order
        self.reducing = 0
        self.gathered: list[GatheredRange | None] = [None] * tables.num_units
        self.alive: set[int] = set()  # units that are gathered, or being gathered
        self.live = self.in_flight = self.num_ahead = self.next_range = 0

    def run(self) -> None:
        entering: defaultdict[int, list[GatheredRange]] = defaultdict(list)
        leaving: defaultdict[int, list[GatheredRange]] = defaultdict(list)
        for live_range in self.tables.ranges:
            entering[live_range.first].append(live_range)
            leaving[live_range.last].append(live_range)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._emit(node)
        for node in self.roles.lazy:
            if not node.all_input_nodes:
                self._make_available(node)
        self._prefetch()
        for position, node in enumerate(self.tables.trunk):
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
        self._finish(entering[len(self.tables.trunk)])
        self._apply()

    # --- gathers ----------------------------------------------------------------------------------

    def _issue(self, live_range: GatheredRange) -> None:
        live_range.is_issued = True
        self.live += live_range.numel
        self.alive.add(live_range.unit)
        self.next_range += 1
        for gather in live_range.gathers:
            for node in gather.issue:
                self._make(live_range, node)
        for node in self.tables.overwrites.get(live_range.unit, ()):
            self._count_down(node)

    def _enter(self, live_range: GatheredRange) -> None:
        if live_range.is_issued:
            self.in_flight -= live_range.numel
            self.num_ahead -= 1
        else:
            self._issue(live_range)
        self.gathered[live_range.unit] = live_range

    def _settle(self, live_range: GatheredRange) -> None:
        """Emits the remaining waits: parameters gathered together with others may be
        unused.
        """
        for gather in live_range.gathers:
            for node in gather.settle:
                if node.target is WAIT:
                    self._make(live_range, node)

    def _prefetch(self) -> None:
        """Starts the next gathers, as far as memory allows."""
        options = self.options
        ahead = len(self.tables.ranges) if options.ahead is None else options.ahead
        while (
            options.prefetch
            and self.next_range < len(self.tables.ranges)
            and self.num_ahead < ahead
        ):
            live_range = self.tables.ranges[self.next_range]
            # never two copies
            if self.live + live_range.numel > options.max_live or live_range.unit in self.alive:
                return
            if self.num_ahead and self.in_flight + live_range.numel > options.prefetch:
                return
            self._issue(live_range)
            self.in_flight += live_range.numel
            self.num_ahead += 1

    def _make(self, live_range: GatheredRange, node: Node) -> Node:
        """Emits a gather's node for this live range, after the nodes that it needs;
        returns the node or its copy.
        """
        stack = [node]
        while stack:
            item = stack[-1]
            if item in live_range.made:
                stack.pop()
                continue
            missing = [
                arg
                for arg in item.all_input_nodes
                if arg in self.unit_of and arg not in live_range.made
            ]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            for arg in item.all_input_nodes:
                if arg not in self.unit_of:
                    self._need(arg)
            live_range.made[item] = self._emit_in(live_range, item)
        return live_range.made[node]

    def _emit_in(self, live_range: GatheredRange, node: Node) -> Node:
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

    # --- everything else --------------------------------------------------------------------------

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
            before = (*item.all_input_nodes, *self.tables.after.get(item, ()))
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
            stack.extend(user for user in self.tables.users.get(item, ()) if self._count_down(user))

    def _count_down(self, node: Node) -> bool:
        """Counts down the nodes that `node` waits for; returns whether it is lazy and
        may now be emitted on demand.
        """
        self.pending[node] -= 1
        if self.pending[node] or node in self.done:
            return False
        if node in self.roles.eager or node in self.roles.starts:
            # New state is written before the next is computed, so that only one copy is alive.
            priority = 2 * (node in self.roles.starts) + (node not in self.roles.writes)
            heapq.heappush(self.ready, (priority, self.tables.index[node], node))
        return node in self.roles.lazy

    def _cascade(self) -> None:
        """Emits the ready nodes: first the consumers of reductions, then the reductions
        that fit into `max_reducing`.
        """
        while self.ready:
            _, _, node = self.ready[0]
            waits = node in self.roles.starts and self.under_way and node not in self.done
            if waits and self.reducing + self.roles.starts[node] > self.tables.max_reducing:
                self._wait_for_oldest()
                continue
            heapq.heappop(self.ready)
            self._need(node)

    def _wait_for_oldest(self) -> None:
        for wait in waits_of(next(iter(self.under_way))):
            self._need(wait)

    def _finish(self, live_ranges: Sequence[GatheredRange]) -> None:
        """Emits the remaining nodes; `live_ranges` are the gathered parameters that the
        graph returns.
        """
        for live_range in live_ranges:
            self._enter(live_range)
            self._settle(live_range)
        self._cascade()
        while self.under_way:
            self._wait_for_oldest()
            self._cascade()
        for node in (
            *(node for node in self.tables.index if node not in self.roles.last),
            *self.tables.index,
        ):
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
        self._read_from_state()

    def _read_from_state(self) -> None:
        """Lets later nodes read a new value of the state where it was written, so that
        its first copy is freed.

        What the graph returns stays apart from the state, which the next step
        overwrites.
        """
        place, roots = (
            {node: index for index, node in enumerate(self.graph.nodes)},
            storages(self.graph),
        )
        returned = {roots[node] for node in self.graph.output_node().all_input_nodes}
        for write in sorted(self.roles.writes, key=place.__getitem__):
            state, value = write.args[:2]
            assert isinstance(state, Node)
            if (
                not isinstance(value, Node)
                or roots[value] in returned
                or not _are_alike(state, value)
            ):
                continue
            for reader in list(value.users):
                if place[reader] > place[write]:
                    reader.replace_input_with(value, write)


def _are_alike(first: Node, second: Node) -> bool:
    return TensorKind.of(first.meta["val"]) == TensorKind.of(second.meta["val"])
