"""What does the graph of a training step communicate, and what does it keep alive?

The graph is one functional fx graph of aten operators: forward, backward, collectives and update, with the state as
placeholders, into which `copy_` writes the new state at the end. This file reads it and changes nothing:

1. `storages`: which nodes share memory (a view shares with its base, a `wait_tensor` with its collective).
2. `analyse`: the *gathers*, collectives that make full parameters from placeholders, with everything that is cheap to
   make again from their result; and the *reductions*, all other collectives. What a comm hook makes of shards before a gather,
   and of codes after it, belongs to it: the captured step says so by the label of these nodes (`fzero.graph.traffic`).
3. `liveness`: the bytes that are alive while each node runs.

All of it is linear in the number of nodes. Counts are elements (`numel`) or bytes (`nbytes`).
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.common.flops import flops_of_call, is_counted

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

WAIT = c10d.wait_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_GATHERS = c10d.all_gather_into_tensor_coalesced.default
"""Several all-gathers as one collective; it returns a list, and each item of it has a wait of its own."""
GATHERS = frozenset(
    {c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default, c10d.broadcast.default, ALL_GATHERS}
)
"""Collectives that an all-gather may be made of."""

_MOVES = frozenset(
    {
        operator.getitem,
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.stack.default,
        torch.ops.prims.convert_element_type.default,
    }
)
_CREATES = frozenset(
    {
        *(aten.empty.memory_format, aten.full.default, aten.full_like.default, aten.new_empty.default),
        *(aten.new_full.default, aten.new_zeros.default, aten.ones.default, aten.scalar_tensor.default),
        *(aten.zeros.default, aten.zeros_like.default, aten.empty_like.default),
    }
)
_PASSES = frozenset(
    {
        *(aten.copy.default, aten.fill.Scalar, aten.lift_fresh_copy.default, aten.rsub.Tensor),
        *(aten.select_scatter.default, aten.slice_scatter.default, aten.where.ScalarOther),
    }
)
"""Operators that are one pass over their inputs and do not say so by `torch.Tag.pointwise`."""


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    return _schema_name(node).startswith("_c10d_functional::") and node.target is not WAIT


def waits_of(start: Node) -> list[Node]:
    """The waits of a collective, one for each tensor that it returns."""
    results = [result for user in start.users for result in (user.users if user.target is operator.getitem else [user])]
    return [result for result in results if result.target is WAIT]


def start_of(wait: Node) -> Node:
    """The collective that is waited for."""
    result = wait.all_input_nodes[0]
    return result.all_input_nodes[0] if result.target is operator.getitem else result


def is_view(node: Node) -> bool:
    """Whether the node moves nothing."""
    target = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and bool(target.is_view))


def is_move(node: Node) -> bool:
    """Whether the node only views, casts, cuts or joins what it is given."""
    return node.target in _MOVES or is_view(node)


def is_cheap(node: Node) -> bool:
    """Whether the node costs no more than a pass over its inputs, and may stand anywhere after them."""
    if node.op != "call_function" or is_mutation(node):
        return False
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if pointwise or is_move(node) or node.target in _PASSES or node.target in _CREATES:
        return True
    return is_coding(node, "gather") or is_coding(node, "reduce")


def is_mutation(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def is_write(node: Node, roots: Mapping[Node, Node]) -> bool:
    """Whether the node writes into an argument of the graph."""
    return is_mutation(node) and roots[node].op in ("placeholder", "get_attr")


def _label(node: Node) -> str:
    """Under which a captured step made the node, "" for none: `fzero.graph.traffic`."""
    return str((node.meta.get("custom") or {}).get("sent", ""))


def is_coding(node: Node, purpose: str) -> bool:
    """Whether a comm hook made the node on the way to or from a collective with this purpose, and would make the same again."""
    if not _label(node).startswith(purpose) or node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (is_collective(node) or node.target is WAIT or is_mutation(node) or is_effect(node) or is_random)


def is_effect(node: Node) -> bool:
    """Whether the node is there for what it does (an assertion), not for what it returns."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.returns
        and not is_mutation(node)
        and node.op == "call_function"
    )


def numel_of(node: Node) -> int:
    """Elements of the tensors that the node returns."""
    return sum(tensor.numel() for tensor in _tensors(node.meta.get("val")))


def nbytes_of(node: Node) -> int:
    """Bytes of the tensors that the node returns."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(node.meta.get("val")))


def flops_of(node: Node) -> int:
    """Floating point operations of a matrix product, a convolution or an attention; 0 for everything else."""
    if node.op != "call_function" or not is_counted(node.target):
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return flops_of_call(node.target, args, kwargs, node.meta["val"])


def _tensors(val: Any) -> list[Tensor]:
    if isinstance(val, Tensor):
        return [val]
    return [tensor for item in val for tensor in _tensors(item)] if isinstance(val, list | tuple) else []


def _schema_name(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


# --- shared memory -----------------------------------------------------------------------------------------------


def storages(graph: Graph) -> dict[Node, Node]:
    """For each node, the node that made the memory it returns.

    Read from the operators' schemas, not from the recorded tensors: a node that was copied to run twice has the tensors
    of its original, and memory of its own.
    """
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        views = []
        made: Node | None = node
        while made is not None and made not in roots:
            views.append(made)
            made = _base(made)
        root = views[-1] if made is None else roots[made]
        roots.update(dict.fromkeys(views, root))
    return roots


def _base(node: Node) -> Node | None:
    """The input whose memory the node returns."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    base = node.all_input_nodes[0]
    if node.target is operator.getitem:
        return base if is_move(base) or is_collective(base) else None
    if node.target is WAIT or is_mutation(node):
        return base
    if node.target is aten.reshape.default:  # a view where it can be
        return base if _shares(node, base) else None
    return base if is_view(node) else None


def _shares(node: Node, base: Node) -> bool:
    val, base_val = node.meta.get("val"), base.meta.get("val")
    if not isinstance(val, Tensor) or not isinstance(base_val, Tensor):
        return True
    return bool(val.untyped_storage()._cdata == base_val.untyped_storage()._cdata)


# --- what is changed in place ------------------------------------------------------------------------------------


def overwrites(graph: Graph) -> dict[Node, list[Node]]:
    """What each node must come after besides its inputs, for the sake of what is changed in place.

    A `copy_` comes after all that reads what it overwrites, and after assertions that stand before it: they may say that
    the state must stay as it is. What reads the new state through its placeholder comes after the `copy_`.

    Raises:
        ValueError: the result of a collective is changed in place.
    """
    roots = storages(graph)
    reads: defaultdict[Node, dict[Node, None]] = defaultdict(dict)
    after: dict[Node, list[Node]] = {}
    writers: dict[Node, Node] = {}
    effect: list[Node] = []
    for node in graph.nodes:
        if writers and node.op == "call_function":
            args = dict.fromkeys(writers[roots[arg]] for arg in node.all_input_nodes if roots[arg] in writers)
            if any(writer not in node.all_input_nodes for writer in args):
                after[node] = [writer for writer in args if writer not in node.all_input_nodes]
        if is_effect(node):
            effect = [node]
        if is_mutation(node):
            target = roots[node]
            if is_collective(target):
                raise ValueError(
                    f"{node.name}: a step's graph must not change what a collective returns in place, and this changes "
                    f"{target.name}; functionalize the graph first"
                )
            readers = reads.pop(target, {})
            after.setdefault(node, []).extend(effect)
            after[node].extend(reader for reader in readers if reader not in node.all_input_nodes)
            writers[target] = node
        if node.op == "call_function":
            for arg in node.all_input_nodes:
                reads[roots[arg]][node] = None
    return after


def sort(graph: Graph) -> None:
    """Puts every node after what it needs, and otherwise leaves the order as it is. Changes the graph."""
    index = {node: place for place, node in enumerate(graph.nodes)}
    after = overwrites(graph)
    users: defaultdict[Node, list[Node]] = defaultdict(list)
    missing: dict[Node, int] = {}
    for node in graph.nodes:
        before = dict.fromkeys((*node.all_input_nodes, *after.get(node, ())))
        missing[node] = len(before)
        for other in before:
            users[other].append(node)
    ready = [(index[node], node) for node in graph.nodes if not missing[node] and node.op != "output"]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user] and user.op != "output":
                heapq.heappush(ready, (index[user], user))
    arrange(order)


def arrange(order: Sequence[Node]) -> None:
    """Moves the nodes so that each follows the one before it. Changes their graph."""
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)


# --- what is communicated ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gather:
    """Full parameters made from placeholders by one collective, or by several whose results are joined.

    Attributes:
        unit: those of one unit are gathered and released together.
        sources: the placeholders that it reads.
        issue: the nodes up to the collectives' start, in order.
        settle: the waits, and what is cheap to make again from them, in order.
        codes: those of `settle` that a comm hook decodes the parameters from; they go as soon as these are there.
        numel: elements of parameters that it brings to life.
        nbytes: the same in bytes.
    """

    unit: str
    sources: tuple[Node, ...]
    issue: tuple[Node, ...]
    settle: tuple[Node, ...]
    codes: frozenset[Node]
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """A collective that is no `Gather`.

    Attributes:
        start: its start.
        waits: its waits, one for each tensor that it returns.
        numel: elements that it keeps alive while it is under way: the larger of its input and its result.
        needs_other: whether it reads what was made from another reduction's result.
    """

    start: Node
    waits: tuple[Node, ...]
    numel: int
    needs_other: bool


@dataclass(frozen=True, slots=True)
class Analysis:
    """The collectives of a graph, each kind in the order of the graph."""

    gathers: tuple[Gather, ...]
    reductions: tuple[Reduction, ...]

    @property
    def units(self) -> list[list[Gather]]:
        """The gathers that go together. A graph may gather a unit several times itself, and each time stands alone."""
        found: dict[tuple[str, int], list[Gather]] = {}
        times: Counter[tuple[Node, ...]] = Counter()
        for gather in self.gathers:
            found.setdefault((gather.unit, times[gather.sources]), []).append(gather)
            times[gather.sources] += 1
        return list(found.values())


def name_units(graph: Graph, units: Mapping[str, str]) -> None:
    """Names the unit of each flat buffer, by the name of its placeholder; one that is not named is its own unit."""
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in units:
            node.meta["unit"] = units[node.name]


def analyse(graph: Graph) -> Analysis:
    """Finds the gathers and the reductions of a step's graph, which is functional but for `copy_` into placeholders."""
    fresh = _fresh(graph)
    parts = _Parts()
    homes: dict[Node, int] = {}  # the gather that a node is made from
    for node in graph.nodes:
        made = [arg for arg in node.all_input_nodes if arg in homes]
        if _may_gather(node) and all(arg in fresh for arg in node.all_input_nodes):
            homes[node] = parts.new()
        elif node.target is WAIT and node.args[0] in homes:
            homes[node] = homes[node.args[0]]
        elif is_coding(node, "gather"):
            if made and all(arg in homes or arg in fresh for arg in node.all_input_nodes):
                for arg in made:
                    parts.join(homes[made[0]], homes[arg])
                homes[node] = homes[made[0]]
        elif is_move(node) and node.all_input_nodes and all(arg in homes for arg in node.all_input_nodes):
            if node.target is aten.cat.default and all(arg.target is WAIT for arg in node.all_input_nodes):
                for arg in node.all_input_nodes:
                    parts.join(homes[node.all_input_nodes[0]], homes[arg])
            if len({parts.find(homes[arg]) for arg in node.all_input_nodes}) == 1:
                homes[node] = homes[node.all_input_nodes[0]]
    starts: dict[int, list[Node]] = {}
    settle: dict[int, list[Node]] = {}
    for node, home in homes.items():
        (starts if node.target in GATHERS else settle).setdefault(parts.find(home), []).append(node)
    gathers = tuple(_gather(starts[home], settle.get(home, [])) for home in starts)
    return Analysis(gathers, _reductions(graph, homes))


def _may_gather(node: Node) -> bool:
    """Whether the node sends the same to all; an exchange of different parts is a reduction's."""
    if node.target is c10d.all_to_all_single.default:
        return bool(node.all_input_nodes[0].target is aten.repeat.default)
    return node.target in GATHERS


def _fresh(graph: Graph) -> set[Node]:
    """What is made from placeholders by moves alone, or by what encodes them, before anything is written into them."""
    roots, written = storages(graph), set()
    fresh: set[Node] = set()
    for node in graph.nodes:
        if is_mutation(node):
            written.add(roots[node])
        movable = node.op == "placeholder" or is_move(node) or node.target in _CREATES or is_coding(node, "gather")
        if movable and all(arg in fresh and roots[arg] not in written for arg in node.all_input_nodes):
            fresh.add(node)
    return fresh


class _Parts:
    """Union-find over integers."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def new(self) -> int:
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, part: int) -> int:
        while self._parents[part] != part:
            self._parents[part] = self._parents[self._parents[part]]
            part = self._parents[part]
        return part

    def join(self, one: int, other: int) -> None:
        one, other = self.find(one), self.find(other)
        self._parents[max(one, other)] = min(one, other)


def _gather(starts: list[Node], settle: list[Node]) -> Gather:
    made: dict[Node, None] = {}  # inputs first
    stack = list(reversed(starts))
    while stack:
        missing = [arg for arg in stack[-1].all_input_nodes if arg not in made]
        if missing:
            stack.extend(reversed(missing))
        else:
            made[stack.pop()] = None
    sources = tuple(node for node in made if node.op == "placeholder")
    issue: set[Node] = set()  # without what others use as well
    for node in reversed(made):
        if node in starts or (node.op != "placeholder" and all(user in issue for user in node.users)):
            issue.add(node)
    first = sources[0] if sources else starts[0]
    decoded, codes = _decoded(settle)
    return Gather(
        unit=first.meta.get("unit", first.name),
        sources=sources,
        issue=tuple(node for node in made if node in issue),
        settle=tuple(settle),
        codes=codes,
        numel=sum(map(numel_of, decoded or starts)),
        nbytes=sum(map(nbytes_of, decoded or starts)),
    )


def _decoded(settle: list[Node]) -> tuple[list[Node], frozenset[Node]]:
    """Where a comm hook ends, and what it makes its result from; neither where the collectives' results are the parameters."""
    coding = {node for node in settle if is_coding(node, "gather")}
    decoded = [node for node in settle if node in coding and not any(user in coding for user in node.users)]
    codes: set[Node] = set()
    for node in reversed(settle if decoded else []):
        if any(user in codes or user in decoded for user in node.users):
            codes.add(node)
    return decoded, frozenset(codes)


def _reductions(graph: Graph, gathered: Mapping[Node, int]) -> tuple[Reduction, ...]:
    reductions = []
    reduced: set[Node] = set()  # what needs the result of one
    for node in graph.nodes:
        needs_other = any(arg in reduced for arg in node.all_input_nodes)
        if needs_other:
            reduced.add(node)
        if not is_collective(node) or node in gathered:
            continue
        waits, num_results = waits_of(node), len(_tensors(node.meta.get("val")))
        if len(waits) != num_results:
            raise ValueError(
                f"{node.name}: a collective must have one wait_tensor, got {len(waits)} for {num_results} tensors; capture the "
                f"step again without them"
            )
        reduced.update(waits)
        numel = max(numel_of(node), sum(map(numel_of, node.all_input_nodes)))
        reductions.append(Reduction(node, tuple(waits), numel, needs_other))
    return tuple(reductions)


class Content(NamedTuple):
    """What a collective moves of one flat buffer.

    `fzero.graph.traffic` says what a label is; that of a model's own collective is "other".
    """

    label: str
    numel: int
    """Elements, as they travel."""
    coded: tuple[int, int]
    """How many elements become how many of these, in a comm hook."""


def contents_of(start: Node) -> tuple[Content, ...]:
    """What a collective moves, several flat buffers where it was joined from several."""
    joined: tuple[Content, ...] | None = start.meta.get("sent")
    if joined is not None:
        return joined
    numel = max(numel_of(start), sum(map(numel_of, start.all_input_nodes)))
    coded: tuple[int, int] = (start.meta.get("custom") or {}).get("coded", (1, 1))
    return (Content(_label(start) or "other", numel, coded),)


def name_contents(start: Node, parts: Iterable[Node]) -> None:
    """Labels a collective that moves what several others did."""
    start.meta["sent"] = tuple(content for part in parts for content in contents_of(part))


# --- what is alive -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes alive while each node runs, besides the arguments of the graph.

    Attributes:
        nodes: the names of the nodes, in order.
        live: bytes while each runs, what it reads and makes included.
        gathered: bytes of gathered parameters, without the codes that a comm hook makes them of.
        gathered_numel: the same in elements.
        arguments: bytes of the placeholders, alive all the time.
    """

    nodes: tuple[str, ...]
    live: tuple[int, ...]
    gathered: tuple[int, ...]
    gathered_numel: tuple[int, ...]
    arguments: int

    @property
    def peak(self) -> int:
        return max(self.live, default=0)

    @property
    def peak_gathered(self) -> int:
        return max(self.gathered, default=0)

    @property
    def peak_gathered_numel(self) -> int:
        return max(self.gathered_numel, default=0)


def liveness(graph: Graph, analysis: Analysis | None = None) -> Liveness:
    """The bytes that are alive while each node runs, when each tensor is freed after its last use.

    What a collective reads lives until its wait.
    """
    analysis = analyse(graph) if analysis is None else analysis
    roots, nodes = storages(graph), list(graph.nodes)
    from_gather = {roots[node] for gather in analysis.gathers for node in gather.settle if node not in gather.codes}
    last_use: dict[Node, int] = {}
    for index, node in enumerate(nodes):
        for held in (node, *node.all_input_nodes):
            last_use[roots[held]] = index
        if node.target is WAIT:
            last_use |= {roots[arg]: index for arg in start_of(node).all_input_nodes}
    dies: dict[int, list[Node]] = {}
    for root, index in last_use.items():
        dies.setdefault(index, []).append(root)
    now = [0, 0, 0]
    alive: list[tuple[int, int, int]] = []
    for index, node in enumerate(nodes):
        if roots[node] is node:
            _count(now, node, 1, node in from_gather)
        alive.append((now[0], now[1], now[2]))
        for root in dies.get(index, ()):
            _count(now, root, -1, root in from_gather)
    live, gathered, gathered_numel = (tuple(column) for column in zip(*alive))
    arguments = sum(nbytes_of(node) for node in nodes if node.op == "placeholder")
    return Liveness(tuple(node.name for node in nodes), live, gathered, gathered_numel, arguments)


def _count(now: list[int], root: Node, sign: int, is_gathered: bool) -> None:
    """Adds what `root` made to the totals, or takes it away."""
    is_tuple = isinstance(root.meta.get("val"), list | tuple)  # whose items are counted one by one
    if root.op != "call_function" or (is_tuple and not is_collective(root)):
        return
    now[0] += sign * nbytes_of(root)
    if is_gathered:
        now[1] += sign * nbytes_of(root)
        now[2] += sign * numel_of(root)
