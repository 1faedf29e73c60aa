"""`analyse`: the collectives of a step's graph. This module reads the graph and changes
only labels in `meta`.

- *Gathers* are the collectives that make full parameters from placeholders, with
  everything that is cheap to make again from their results.
- *Reductions* are all other collectives.

The nodes of a comm hook before a gather (encoding shards) and after it (decoding)
belong to the gather; the captured step labels them (`fzero.graph.traffic`). The cost is
linear in the number of nodes. Counts are elements (`numel`) or bytes (`nbytes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.comms.collectives import OTHER
from fzero.comms.records import Label
from fzero.graph.nodes import (
    CREATES,
    GATHERS,
    WAIT,
    aten,
    c10d,
    is_coding,
    is_collective,
    is_move,
    is_mutation,
    label_of,
    nbytes_of,
    numel_of,
    storages,
    tensors_of,
    waits_of,
)


@dataclass(frozen=True, slots=True)
class Gather:
    """Full parameters, gathered from placeholders by one collective or by several whose
    results are joined.

    Attributes:
        unit: the unit's name; gathers of one unit are issued and released together.
        sources: the placeholders that it reads.
        issue: the nodes up to the start of the collectives, in order.
        settle: the waits, and the nodes that are cheap to recompute from them, in
            order.
        codes: the nodes of `settle` from which a comm hook decodes the parameters; they
            are freed once it has.
        numel: elements of the full parameters.
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
        start: the node that starts it.
        waits: its waits, one per returned tensor.
        numel: elements that it keeps alive from start to wait: the larger of its input
            and its result.
        needs_other: whether its input depends on another reduction's result.
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
        """The gathers, grouped by unit. If the graph itself gathers a unit repeatedly,
        each time is a group of its own.
        """
        groups: dict[tuple[str, int], list[Gather]] = {}
        times: Counter[tuple[Node, ...]] = Counter()
        for gather in self.gathers:
            groups.setdefault((gather.unit, times[gather.sources]), []).append(gather)
            times[gather.sources] += 1
        return list(groups.values())


def name_units(graph: Graph, units: Mapping[str, str]) -> None:
    """Sets the unit of flat buffers by the names of their placeholders; every other
    flat buffer is a unit of its own.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in units:
            node.meta["unit"] = units[node.name]


def analyse(graph: Graph) -> Analysis:
    """Finds the gathers and reductions of a step's graph, whose only in-place writes
    are `copy_` into placeholders.
    """
    fresh = _fresh(graph)
    parts = _Parts()
    homes: dict[Node, int] = {}  # the gather on which a node depends
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
        elif (
            is_move(node)
            and node.all_input_nodes
            and all(arg in homes for arg in node.all_input_nodes)
        ):
            if node.target is aten.cat.default and all(
                arg.target is WAIT for arg in node.all_input_nodes
            ):
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
    """Whether the node sends the same tensor to all ranks; an all-to-all of different
    parts belongs to a reduction.

    The partial sums of an optimizer may be a constant on a rank that holds no part of
    the parameters.
    """
    if getattr(label_of(node), "purpose", "gather") != "gather":
        return False
    if node.target is c10d.all_to_all_single.default:
        return bool(node.all_input_nodes[0].target is aten.repeat.default)
    return node.target in GATHERS


def _fresh(graph: Graph) -> set[Node]:
    """Nodes computed from placeholders by moves or a hook's encoding alone, before the
    placeholders are overwritten.
    """
    roots, written = storages(graph), set()
    fresh: set[Node] = set()
    for node in graph.nodes:
        if is_mutation(node):
            written.add(roots[node])
        movable = (
            node.op == "placeholder"
            or is_move(node)
            or node.target in CREATES
            or is_coding(node, "gather")
        )
        if movable and all(
            arg in fresh and roots[arg] not in written for arg in node.all_input_nodes
        ):
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
    ancestors: dict[Node, None] = {}  # inputs first
    stack = list(reversed(starts))
    while stack:
        missing = [arg for arg in stack[-1].all_input_nodes if arg not in ancestors]
        if missing:
            stack.extend(reversed(missing))
        else:
            ancestors[stack.pop()] = None
    sources = tuple(node for node in ancestors if node.op == "placeholder")
    issue: set[Node] = set()  # without nodes that others use as well
    for node in reversed(ancestors):
        if node in starts or (
            node.op != "placeholder" and all(user in issue for user in node.users)
        ):
            issue.add(node)
    first = sources[0] if sources else starts[0]
    decoded, codes = _decoded(settle)
    return Gather(
        unit=first.meta.get("unit", first.name),
        sources=sources,
        issue=tuple(node for node in ancestors if node in issue),
        settle=tuple(settle),
        codes=codes,
        numel=sum(map(numel_of, decoded or starts)),
        nbytes=sum(map(nbytes_of, decoded or starts)),
    )


def _decoded(settle: list[Node]) -> tuple[list[Node], frozenset[Node]]:
    """The nodes at which a comm hook's decoding ends, and the nodes that they read;
    both empty without a hook.
    """
    coding = {node for node in settle if is_coding(node, "gather")}
    decoded = [
        node for node in settle if node in coding and not any(user in coding for user in node.users)
    ]
    codes: set[Node] = set()
    for node in reversed(settle if decoded else []):
        if any(user in codes or user in decoded for user in node.users):
            codes.add(node)
    return decoded, frozenset(codes)


def _reductions(graph: Graph, gathered: Mapping[Node, int]) -> tuple[Reduction, ...]:
    reductions = []
    reduced: set[Node] = set()  # nodes that depend on a reduction's result
    for node in graph.nodes:
        needs_other = any(arg in reduced for arg in node.all_input_nodes)
        if needs_other:
            reduced.add(node)
        if not is_collective(node) or node in gathered:
            continue
        waits, num_results = waits_of(node), len(tensors_of(node.meta.get("val")))
        if len(waits) != num_results:
            raise ValueError(
                f"{node.name}: a collective must have one wait_tensor, got {len(waits)} for "
                f"{num_results} tensors; capture the step again with one wait for each"
            )
        reduced.update(waits)
        numel = max(numel_of(node), sum(map(numel_of, node.all_input_nodes)))
        reductions.append(Reduction(node, tuple(waits), numel, needs_other))
    return tuple(reductions)


def sending_updates(graph: Graph) -> set[Node]:
    """If an optimizer sends: its collectives, the gathers of updated parameters, and
    the nodes that depend on either.

    They keep their order, after all other nodes. Other parts of parameters lie on each
    rank, so that its update has other nodes, and yet all ranks must send in one order.
    """
    purposes = {
        node: label.purpose
        for node in graph.nodes
        if is_collective(node) and (label := label_of(node))
    }
    if not {"optimizer", "owners"} & set(purposes.values()):
        return set()
    found = {
        node
        for node, purpose in purposes.items()
        if purpose in ("optimizer", "owners", "all_gather_params")
    }
    for node in graph.nodes:
        if node.op == "call_function" and any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


class Content(NamedTuple):
    """The part of a collective that belongs to one flat buffer."""

    label: Label
    """A model's own collective has "other"."""
    numel: int
    """Elements as sent, after a comm hook's encoding."""
    coded: tuple[int, int]
    """(elements before, elements after) a comm hook's encoding, as a ratio."""


def contents_of(start: Node) -> tuple[Content, ...]:
    """The contents of a collective: one per flat buffer, several if passes joined it
    from several.
    """
    joined: tuple[Content, ...] | None = start.meta.get("sent")
    if joined is not None:
        return joined
    numel = max(numel_of(start), sum(map(numel_of, start.all_input_nodes)))
    coded: tuple[int, int] = (start.meta.get("custom") or {}).get("coded", (1, 1))
    return (Content(label_of(start) or OTHER, numel, coded),)


def name_contents(start: Node, parts: Iterable[Node]) -> None:
    """Labels a collective that replaces several others by their contents."""
    start.meta["sent"] = tuple(content for part in parts for content in contents_of(part))
