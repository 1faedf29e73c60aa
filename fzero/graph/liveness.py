"""`liveness`: the bytes that are alive while each node of a step's graph runs, and how
many of them are gathered parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from fzero.graph.analysis import Analysis, analyse
from fzero.graph.host_inputs import TO_HOST
from fzero.graph.nodes import WAIT, is_collective, nbytes_of, numel_of, start_of, storages


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes alive while each node runs, besides the arguments of the graph.

    Attributes:
        nodes: the names of the nodes, in order.
        live: bytes while each node runs, including its inputs and its result.
        gathered: bytes of gathered parameters, without the codes from which a comm hook
            decodes them.
        gathered_numel: the same in elements.
        arguments: bytes of the placeholders, which are alive throughout.
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
    """The bytes that are alive while each node runs, if each tensor is freed after its
    last use.

    A collective keeps its inputs alive until its wait.
    """
    analysis = analyse(graph) if analysis is None else analysis
    roots, nodes = storages(graph), list(graph.nodes)
    from_gather = {
        roots[node]
        for gather in analysis.gathers
        for node in gather.settle
        if node not in gather.codes
    }
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
    """Adds the bytes and elements of `root` to the totals `now`, or subtracts them."""
    is_tuple = isinstance(root.meta.get("val"), list | tuple)  # its items are counted one by one
    if root.op != "call_function" or (is_tuple and not is_collective(root)):
        return
    if root.target is TO_HOST:  # it is in host memory
        return
    now[0] += sign * nbytes_of(root)
    if is_gathered:
        now[1] += sign * nbytes_of(root)
        now[2] += sign * numel_of(root)
