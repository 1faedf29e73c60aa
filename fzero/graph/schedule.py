"""In which order does the graph of a training step run? ZeRO's stage 3 is an order, and so are overlap and release.

The captured graph has all gathers first, then forward and backward, then all reductions, then the update. `run_passes`
gives the same nodes another order, in one walk over the *trunk*, the nodes that keep their order:

1. *Gathers sink* to their first use, and are made again for a later use (`plan_live_ranges`) where keeping the parameters would
   cost more memory than asked. A gather starts one unit early, so that it runs beside the compute.
2. *Reductions rise* to where their input is ready. Their waits come as late as the bound on full gradients in flight
   allows, or their consumers need them.
3. The *update* of a shard runs as soon as everything that it needs is there, and is written into the state at once.

The numbers do not change: every node has the inputs that it had. Nothing here depends on a rank, so that all ranks
issue the same collectives in the same order. The cost is n log n in the number of nodes.
"""

from __future__ import annotations

import gc
import heapq
import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.analysis import Analysis, Gather, analyse, name_units
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
    """What the schedule may cost; all in elements, as in DeepSpeed's configuration.

    Args:
        prefetch: `stage3_prefetch_bucket_size`. 0 starts no gather early; otherwise the next unit's starts one unit
            early, and up to `ahead` units together while they stay within this.
        ahead: the most units that are gathered before their use; None sets no bound.
        max_live: `stage3_max_live_parameters`, the most gathered elements alive. What a node uses at once is alive in
            any case.
        max_reuse_distance: `stage3_max_reuse_distance`. A unit is kept until its next use if the units entered meanwhile
            have at most this many elements.
        max_reducing: the most elements that reductions under way keep alive, besides those of one; None is twice the
            largest.
        gather_bucket: `allgather_bucket_size`. The gathers of a unit are joined up to this, and those of units used one
            after the other, never beyond the second largest unit; and so are updated shards. 0 joins none.
        reduce_bucket: `reduce_bucket_size`. Reductions whose inputs are ready one after the other are joined up to this.
        writes: when the new state is written, `early` (as soon as it is there) or `last` (after everything else, so that
            an error on the way leaves the state as it was, at the cost of a second copy of it).
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
    """A copy of `graph` in the order that `options` asks for.

    Args:
        graph: a training step's, functional but for `copy_` into placeholders; every node has its tensors in `meta["val"]`.
        options: what the schedule may cost.
        units: the unit of each flat buffer, by the name of its placeholder; one that is not named is its own unit.

    Raises:
        ValueError: the graph changes the result of a collective in place, or has a collective without a wait.
    """
    with _no_collection():
        copy = copy_of(graph)
        run_passes_in_place(copy, options, units=units)
    return copy


def copy_of(graph: Graph) -> Graph:
    """The same nodes once more, with the same `meta`."""
    copy = Graph(graph.owning_module)
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, lambda arg: copies[arg])
    copy._codegen = graph._codegen
    return copy


def run_passes_in_place(graph: Graph, options: PassOptions, *, units: Mapping[str, str] | None = None) -> None:
    """`run_passes` on the graph itself, as the hooks of Inductor want it."""
    with _no_collection():
        name_units(graph, units or {})
        join_products(graph)
        if options.gather_bucket:
            bucket_gathers(graph, analyse(graph), options.gather_bucket)
            bucket_updates(graph, analyse(graph), options.gather_bucket)
        if options.reduce_bucket:
            bucket_reductions(graph, analyse(graph), options.reduce_bucket)
        _Walk(graph, analyse(graph), options).run()
        graph.lint()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector out: it would walk all that the process holds, again and again as nodes are made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- the walk ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Gathered:
    """One stay of a unit in the new order, with those of its gathers that are used in it."""

    unit: int
    first: int
    last: int
    gathers: list[Gather]
    numel: int
    is_issued: bool = False
    made: dict[Node, Node] = field(default_factory=dict)  # a node of the gather → the one that stands for it here


class _Roles(NamedTuple):
    """What the walk does with each node besides the trunk, the arguments and the gathers."""

    lazy: set[Node]  # cheap, emitted when somebody needs it
    eager: set[Node]  # cheap, emitted as soon as it can be: what follows a reduction
    writes: set[Node]  # those that write new state
    last: set[Node]  # emitted after everything else
    starts: dict[Node, int]  # of reductions, with the elements under way
    waits: dict[Node, Node]  # of reductions, with their start


class _Walk:
    """Emits every node once, the gathers' as often as they are needed, and then puts them into that order.

    Args:
        graph: will be changed.
        analysis: of this graph.
        options: what the schedule may cost.
    """

    def __init__(self, graph: Graph, analysis: Analysis, options: PassOptions) -> None:
        self.graph, self.options = graph, options
        self.index = {node: index for index, node in enumerate(graph.nodes)}
        self.gathers = analysis.units
        self.unit_of: dict[Node, int] = {}
        self.part_of: dict[Node, int] = {}  # which of its unit's gathers
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
        self.stays = self._plan_stays()
        # What each node still waits for, besides what is emitted on demand.
        self.users: defaultdict[Node, list[Node]] = defaultdict(list)
        self.pending: dict[Node, int] = {}
        for node in graph.nodes:
            before = [arg for arg in (*node.all_input_nodes, *self.after.get(node, ())) if arg not in self.unit_of]
            self.pending[node] = len(before)
            for arg in before:
                self.users[arg].append(node)
        # `copy_` into a shard also waits for all gathers that read it.
        num_stays = [0] * len(self.gathers)
        for stay in self.stays:
            num_stays[stay.unit] += 1
        self.overwrites: defaultdict[int, list[Node]] = defaultdict(list)
        for node, units in readers.items():
            for unit in units:
                self.pending[node] += num_stays[unit]
                self.overwrites[unit].append(node)
        self.order: list[Node] = []
        self.done: set[Node] = set()
        self.available: set[Node] = set()
        self.ready: list[tuple[int, int, Node]] = []
        self.under_way: dict[Node, int] = {}  # starts of reductions, in order
        self.reducing = 0
        self.gathered: list[_Gathered | None] = [None] * len(self.gathers)
        self.alive: set[int] = set()  # units that are gathered, or under way
        self.live = self.in_flight = self.num_ahead = self.next_stay = 0

    def run(self) -> None:
        entering: defaultdict[int, list[_Gathered]] = defaultdict(list)
        leaving: defaultdict[int, list[_Gathered]] = defaultdict(list)
        for stay in self.stays:
            entering[stay.first].append(stay)
            leaving[stay.last].append(stay)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._emit(node)
        for node in self.roles.lazy:
            if not node.all_input_nodes:
                self._make_available(node)
        self._prefetch()
        for position, node in enumerate(self.trunk):
            for stay in entering[position]:
                self._enter(stay)
            self._run_node(node)
            for stay in leaving[position]:
                self._settle(stay)
                self.live -= stay.numel
                self.alive.remove(stay.unit)
                self.gathered[stay.unit] = None
            if leaving[position]:
                self._prefetch()
            self._cascade()
        self._finish(entering[len(self.trunk)])
        self._apply()

    # --- gathers -----------------------------------------------------------------------------------------------

    def _plan_stays(self) -> list[_Gathered]:
        numels = [sum(gather.numel for gather in gathers) for gathers in self.gathers]
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        uses = []
        parts: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)  # unit → positions, and what is used there
        for position, node in enumerate([*self.trunk, output]):
            args = [arg for arg in node.all_input_nodes if arg in self.unit_of]
            if args:
                uses.append((position, tuple(dict.fromkeys(self.unit_of[arg] for arg in args))))
            for arg in args:
                parts[self.unit_of[arg]].append((position, self.part_of[arg]))
        stays = []
        for unit, first, last in plan_live_ranges(
            uses, numels, max_live=self.options.max_live, max_reuse_distance=self.options.max_reuse_distance
        ):
            used: set[int] = set()
            while parts[unit] and parts[unit][0][0] <= last:
                used.add(parts[unit].popleft()[1])
            gathers = [self.gathers[unit][part] for part in sorted(used)]
            stays.append(_Gathered(unit, first, last, gathers, sum(gather.numel for gather in gathers)))
        return stays

    def _issue(self, stay: _Gathered) -> None:
        stay.is_issued = True
        self.live += stay.numel
        self.alive.add(stay.unit)
        self.next_stay += 1
        for gather in stay.gathers:
            for node in gather.issue:
                self._make(stay, node)
        for node in self.overwrites[stay.unit]:
            self._count_down(node)

    def _enter(self, stay: _Gathered) -> None:
        if stay.is_issued:
            self.in_flight -= stay.numel
            self.num_ahead -= 1
        else:
            self._issue(stay)
        self.gathered[stay.unit] = stay

    def _settle(self, stay: _Gathered) -> None:
        """Waits for what was gathered together with something and is not used here."""
        for gather in stay.gathers:
            for node in gather.settle:
                if node.target is WAIT:
                    self._make(stay, node)

    def _prefetch(self) -> None:
        """Starts the next gathers, as far as memory allows."""
        options = self.options
        ahead = len(self.stays) if options.ahead is None else options.ahead
        while options.prefetch and self.next_stay < len(self.stays) and self.num_ahead < ahead:
            stay = self.stays[self.next_stay]
            if self.live + stay.numel > options.max_live or stay.unit in self.alive:  # once is enough
                return
            if self.num_ahead and self.in_flight + stay.numel > options.prefetch:
                return
            self._issue(stay)
            self.in_flight += stay.numel
            self.num_ahead += 1

    def _make(self, stay: _Gathered, node: Node) -> Node:
        """The node of a gather as it stands for this stay, with what it is made of."""
        stack = [node]
        while stack:
            item = stack[-1]
            if item in stay.made:
                stack.pop()
                continue
            missing = [arg for arg in item.all_input_nodes if arg in self.unit_of and arg not in stay.made]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            for arg in item.all_input_nodes:
                if arg not in self.unit_of:
                    self._need(arg)
            stay.made[item] = self._stand_in(item, stay)
        return stay.made[node]

    def _stand_in(self, node: Node, stay: _Gathered) -> Node:
        def here(arg: Node) -> Node:
            return stay.made.get(arg, arg)

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
        """Emits a node of the trunk, after what it needs."""
        made: dict[Node, Node] = {}
        for arg in node.all_input_nodes:
            if arg in self.unit_of:
                stay = self.gathered[self.unit_of[arg]]
                assert stay is not None
                made[arg] = self._make(stay, arg)
        if made:
            self._prefetch()
        if any(made[arg] is not arg for arg in made):
            node.args = map_arg(node.args, lambda arg: made.get(arg, arg))
            node.kwargs = map_arg(node.kwargs, lambda arg: made.get(arg, arg))
        self._need(node)

    def _need(self, node: Node) -> None:
        """Emits the node after everything that it needs and that is not there yet."""
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
        """Tells the users of a node that they need not wait for it any more."""
        stack = [node]
        while stack:
            item = stack.pop()
            if item in self.available:
                continue
            self.available.add(item)
            stack.extend(user for user in self.users[item] if self._count_down(user))

    def _count_down(self, node: Node) -> bool:
        """One thing less to wait for; whether `node` may now be emitted whenever somebody needs it."""
        self.pending[node] -= 1
        if self.pending[node] or node in self.done:
            return False
        if node in self.roles.eager or node in self.roles.starts:
            # New state is written at once, before more of it is made.
            priority = 2 * (node in self.roles.starts) + (node not in self.roles.writes)
            heapq.heappush(self.ready, (priority, self.index[node], node))
        return node in self.roles.lazy

    def _cascade(self) -> None:
        """Emits what is ready: first what follows a reduction, then the reductions that there is room for."""
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

    def _finish(self, stays: Sequence[_Gathered]) -> None:
        """Ends what is under way; `stays` are those that the graph returns."""
        for stay in stays:
            self._enter(stay)
            self._settle(stay)
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
        """Moves the nodes into the new order, and forgets gathers that nobody uses."""
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
    # A model may have all-reduces of its own (SyncBatchNorm); what follows them keeps its place.
    computes: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in computes or flops_of(node):
            computes.update(node.all_input_nodes)
    followed = {wait for wait, start in waits.items() if start.target is not ALL_REDUCE or wait not in computes}
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
    # What a comm hook remembers is written as soon as it is there, like what it sends: both are made of the full gradient.
    prepares = [*starts, *(w for w in writes if any(is_coding(arg, "reduce") for arg in w.all_input_nodes))]
    while prepares:
        for arg in prepares.pop().all_input_nodes:
            if arg in cheap and arg not in eager and arg not in lazy:
                lazy.add(arg)
                prepares.append(arg)
    return _Roles(lazy, eager, writes, last, starts, waits)
