"""`make_runner`: schedules a step's graph, and makes what runs it.

- `"aot_eager"` generates no code: the graph runs node by node in the order of the
  passes.
- `"inductor"` is Inductor with the passes as its custom post-grad pass. `pin_order`
  then ties the collectives to the compute around them by control dependencies, for
  Inductor sorts operators.

The pinning uses private parts of PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile as inductor_compile
from torch._inductor.codegen.cpp import CppKernelProxy
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, GraphModule, Node
from torch.utils._ordered_set import OrderedSet

from fzero.comms.traced import TracedAxis
from fzero.graph.exchange import send_to_others
from fzero.graph.nodes import (
    WAIT,
    aten,
    flops_of,
    is_cheap,
    is_collective,
    is_view,
    nbytes_of,
    numel_of,
    storages,
)
from fzero.graph.remat import is_again, is_backward, rematerialise, rematerialise_in_place
from fzero.graph.schedule import PassOptions, copy_of, run_passes, run_passes_in_place

BackendName = Literal["inductor", "aot_eager"]
Runner = Callable[[list[Tensor]], Sequence[Tensor]]
"""Runs a graph on its inputs, and returns its results."""


def make_runner(
    backend: BackendName,
    module: GraphModule,
    options: PassOptions,
    checkpoint: Sequence[str] = (),
    axes: Sequence[TracedAxis] = (),
) -> tuple[Runner, Graph]:
    """The function that runs a step's graph, and the graph as scheduled.

    Inductor runs the same passes on its own form of the graph, so that a wait may come
    a few nodes earlier or later there.

    Args:
        module: the aten graph, without in-place operators but `copy_` into placeholders
            at its end. `meta["unit"]` of a placeholder is its unit.
        options: the limits of the schedule.
        checkpoint: the modules that the backward runs again, as for `rematerialise`.
        axes: the axes along which an exchange skips the own rank (gloo).
    """
    graph = run_passes(rematerialise(module.graph, checkpoint), options)
    if backend == "inductor":
        return _inductor(module, options, checkpoint, axes), graph
    scheduled = copy_of(graph)
    send_to_others(graph, axes)
    relax_views(graph)
    forward = GraphModule(module, graph).forward
    return lambda tensors: forward(*tensors), scheduled


def _inductor(
    module: GraphModule, options: PassOptions, checkpoint: Sequence[str], axes: Sequence[TracedAxis]
) -> Runner:
    """Inductor with the passes among its own; its cache on disk may have the graph from
    an earlier run.
    """
    mend_reductions()
    placeholders = module.graph.find_nodes(op="placeholder")
    units = [node.meta.get("unit") for node in placeholders]
    patches = {
        "post_grad_custom_post_pass": InductorPass(
            options, units, checkpoint, axes, digest_of_marks(module.graph)
        ),
        "fallback_random": True,  # the random numbers of the eager step
        # it would move weight gradients, and so their reductions, to the end
        "reorder_for_locality": False,
    }
    graph = copy_of(module.graph)
    relax_views(graph)
    with torch.no_grad():
        compiled: Any = inductor_compile(
            GraphModule(module, graph),
            [node.meta["val"] for node in placeholders],
            options=patches,
        )
    return lambda tensors: compiled(*tensors)


def relax_views(graph: Graph) -> None:
    """Lets each view of a graph copy where its input has other strides than in the
    trace. Changes the graph.

    What runs a graph may choose other strides: Inductor's decompositions do, and so do
    kernels that have a formula of their own for tensors without memory. Without
    in-place operators, a copy has the values of a view.
    """
    for view in _VIEWS:
        for node in graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default


def eager_with_views(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The backend `aot_eager` of torch.compile, whose graphs take other strides, too:
    one graph serves all equal blocks.
    """

    def compiled(part: GraphModule, of_part: list[Tensor]) -> Any:
        relax_views(part.graph)
        return boxed_nop(part, of_part)

    make: Any = aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return make(module, inputs, **options)


_VIEWS = (aten.view.default, aten._unsafe_view.default)


@cache
def mend_reductions() -> None:
    """Makes Inductor store the last tile of a reduction no wider than it is, in all
    that this process compiles from here on.

    On the CPU, PyTorch stores a whole vector there if the reduction is not the next
    loop inside the tiled one: past the end of the tensor, into memory of others, or
    over the next row. PyTorch 2.13 mended that for one tiled loop (pytorch #183699), a
    later version may for two (#196882). Its two ways of storing remain; this chooses
    between them.
    """
    aggregate = CppKernelProxy.aggregate_reduction_buffers

    def aggregate_by_tile(kernels: Any, is_by_tile: bool, tiled: Any) -> None:
        if tiled is not None and not tiled.is_reduction:
            # Reductions are the innermost loops.
            is_by_tile |= any(loop.is_reduction for loop in kernels.loop_nest.loops)
        aggregate(kernels, is_by_tile, tiled)

    setattr(CppKernelProxy, "aggregate_reduction_buffers", aggregate_by_tile)  # noqa: B010


class InductorPass(CustomGraphPass):
    """The passes as a value of `torch._inductor.config.post_grad_custom_post_pass`;
    arguments as for `make_runner`.

    Args:
        marks: those of the graph that Inductor gets; see `digest_of_marks`.
    """

    def __init__(
        self,
        options: PassOptions,
        units: Sequence[str | None] = (),
        checkpoint: Sequence[str] = (),
        axes: Sequence[TracedAxis] = (),
        marks: str = "",
    ) -> None:
        self.options, self.units, self.checkpoint = options, tuple(units), tuple(checkpoint)
        self.axes, self.marks = tuple(axes), marks

    def __call__(self, graph: Graph) -> None:
        rematerialise_in_place(graph, self.checkpoint)
        run_passes_in_place(graph, self.options, units=_by_placeholder(graph, self.units))
        send_to_others(graph, self.axes)
        realize_numbers(graph)
        pin_order(graph)

    def uuid(self) -> Any:
        """The further key of Inductor's cache of compiled graphs: all on which the
        passes depend, and the text of fzero.

        Its kernels are written for a number of threads, which its own key lacks before
        PyTorch 2.13.
        """
        files = sorted(map(str, Path(__file__).parents[1].rglob("*.py")))
        read = (
            self.options,
            self.units,
            self.checkpoint,
            self.axes,
            self.marks,
            torch.get_num_threads(),
        )
        return get_hash_for_files(tuple(files), repr(read))


def digest_of_marks(graph: Graph) -> str:
    """A digest of what the trace wrote beside the nodes: the backward, checkpointed
    modules, the labels of collectives.

    Inductor's cache compares operators only.
    """
    marks = [repr(node.meta.get("custom")) for node in graph.nodes]
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()


def _by_placeholder(graph: Graph, units: Sequence[str | None]) -> dict[str, str]:
    """The units by the names of the arguments in this graph.

    Empty if the graph's arguments differ from the captured ones (AOTAutograd merges
    inputs that share memory): each flat buffer is then a unit of its own.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(units):
        return {}
    return {node.name: unit for node, unit in zip(placeholders, units) if unit is not None}


def realize_numbers(graph: Graph) -> None:
    """Computes each 0-d tensor once, not once per vector of the loops that read it.
    Changes the graph.

    Inductor inlines cheap operators into their readers (`beta**step` for each element);
    a strided view of the number makes it store the number first.
    """
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or val.dim() or not is_cheap(node) or is_view(node):
            continue
        users = [user for user in node.users if numel_of(user) > 1]
        if users:
            with graph.inserting_after(node):
                view = graph.call_function(aten.as_strided.default, (node, [], []))
            view.meta["val"] = val
            for user in users:
                user.replace_input_with(node, view)


def pin_order(graph: Graph) -> None:
    """Pins the order of the collectives among themselves and relative to the matrix
    products. Changes the graph.

    A start or a wait follows the preceding collective and product; a product follows
    the preceding collective. A recomputed node follows the preceding product of the
    backward. Otherwise Inductor could fuse it with its original in the forward, and
    would keep its results until the backward.
    """
    roots = storages(graph)
    after: dict[Node, OrderedSet[Node]] = {}
    product: Node | None = None
    collective: Node | None = None
    # the last product of the backward so far; before the first product, the last node
    gradient: Node | None = None
    late: set[Node] = set()  # nodes that cannot run in the forward
    for node in list(graph.nodes):
        is_product = isinstance(node.meta.get("val"), Tensor) and flops_of(node) > 0
        is_communication = node.target is WAIT or is_collective(node)
        before = [collective, product] if is_communication else [collective] if is_product else []
        if is_again(node) and gradient is not None:
            if any(arg in late for arg in node.all_input_nodes):
                late.add(node)
            elif is_product:
                before.append(gradient)
                late.add(node)
            elif roots[node] is node and node.all_input_nodes:
                after[_put_off(graph, node)] = OrderedSet([gradient])
                late.add(node)
        elif (
            is_backward(node)
            and roots[node] is node
            and (is_product or gradient is None or not flops_of(gradient))
        ):
            gradient = node
        others = [
            other for other in before if other is not None and other not in node.all_input_nodes
        ]
        if others:
            after[node] = OrderedSet(others)
        if is_product:
            product = node
        elif is_communication:
            collective = node
    preserve_node_ordering(graph, after)


def _put_off(graph: Graph, node: Node) -> Node:
    """Makes `node` read a copy of its largest input; returns the operator that makes
    the copy.

    Control dependencies hold only for operators that allocate memory; Inductor mostly
    fuses the copy into another kernel.
    """
    largest = max(node.all_input_nodes, key=nbytes_of)
    with graph.inserting_before(node):
        copy = graph.call_function(aten.clone.default, (largest,))
        alone = graph.call_function(torch.ops._inductor_test.realize.default, (copy,))
    copy.meta["val"] = alone.meta["val"] = largest.meta["val"]
    node.replace_input_with(largest, alone)
    return alone
