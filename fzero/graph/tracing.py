"""`trace`: a function of trees of tensors, as one aten graph. It runs once, on tensors
without memory.

    traced = trace(function, (state, batch), model, regions)
    results = traced.call(run, (state, batch))      # where `run` runs traced.graph on a list of tensors

1. `make_fx` records every operator that the function calls, those of its backward, too.
   The function may do whatever Python can, but it cannot read the value of a tensor.
2. Functional tensors stand for the arguments, so that the graph has no in-place
   operator. A `copy_` at its end writes each argument that the function has changed.
3. Tensors that the function finds elsewhere become inputs of the graph: attributes of
   modules, and tensors that it holds (`constants`). The graph reads their values at
   each run.
4. Attributes that the function sets are set again after each run: to a result of the
   graph, or to the value that they got during the trace.

`Traced.guard` holds everything else that the function read. The graph is valid while
these values are unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from fzero.common.collector import collector_paused
from fzero.common.random_states import order_in_memory
from fzero.graph.guards import OF_RECURRENT, DictEntry, Guard, has_traced
from fzero.graph.holdings import MISSING
from fzero.graph.impure import (
    LIFTS,
    ImpureError,
    WritesAndSeeds,
    check_no_grads,
    draws_in_order,
    no_tensor_classes,
    pure,
    same_contents,
    value_of,
)  # fmt: skip
from fzero.graph.nodes import aten
from fzero.graph.remat import marked
from fzero.model.changes import attributes_kept
from fzero.model.errors import late
from fzero.model.held_tensors import SharedTensor
from fzero.model.module_index import ModuleIndex
from fzero.model.own_params import HeldStandIn, StandIn, marks_of

_is_written: Callable[[Tensor], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
_ONE_AT_A_TIME = threading.RLock()
_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


@dataclass(frozen=True)
class Traced:
    """A function as a graph.

    Attributes:
        module: its graph's placeholders are the tensors of the arguments in order, then
            `attributes`, then `constants`.
        paths: per tensor of the arguments, its place in their tree.
        attributes: the attributes that the graph reads.
        constants: further tensors that it reads.
        treespec: the tree of the function's result.
        others: the result's leaves; None where the graph returns a tensor.
        kept: the attributes that become further results of the graph.
        replaced: the attributes that get other values, which are no tensors.
        written: the tensors that the function holds and writes; their new values are
            the last results of the graph.
        guard: the Python values that the function read.
    """

    module: GraphModule
    paths: Sequence[tuple[Any, ...]]
    attributes: Sequence[DictEntry]
    constants: Sequence[Tensor]
    treespec: optree.PyTreeSpec
    others: Sequence[Any]
    kept: Sequence[DictEntry]
    replaced: Sequence[tuple[DictEntry, Any]]
    written: Sequence[Tensor]
    guard: Guard

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def call(
        self, run: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]
    ) -> Any:
        """The function's result on other tensors of the same shapes, computed by `run`,
        which runs the graph.
        """
        results = iter(
            run([*tensors, *(entry.get() for entry in self.attributes), *self.constants])
        )
        leaves = [next(results) if other is None else other[0] for other in self.others]
        for entry in self.kept:
            entry.set(next(results))
        for entry, value in self.replaced:
            entry.set(value)
        for tensor in self.written:
            tensor.copy_(next(results))
        return self.treespec.unflatten(leaves)


@collector_paused()
def trace(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    model: nn.Module,
    regions: Sequence[str] = (),
    reads: Sequence[Callable[..., Any]] = (),
    *,
    held: Sequence[SharedTensor] = (),
) -> Traced:
    """Traces `function(*arguments)`. Nothing changes: not the arguments, not the model,
    no random state.

    Args:
        arguments: trees of tensors; other leaves are constants of the graph.
        model: the module whose attributes the function may read and set.
        regions: names of modules whose operators are marked for `fzero.graph.remat`.
        reads: further functions of the user, whose globals and closures are guarded.
        held: the tensors that the function substitutes itself, also where they are
            attributes.

    Raises:
        ImpureError: the function draws random numbers of Python or NumPy, or keeps a
            tensor where a graph cannot put it.
    """
    tracing = _Tracing(function, arguments, model, {id(each.tensor()) for each in held})
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        stack.enter_context(attributes_kept(model))
        guard = stack.enter_context(Guard.recording(tracing.index, reads))
        stack.enter_context(same_contents(guard))
        stack.enter_context(no_tensor_classes(guard.functions))
        stack.enter_context(
            FakeTensorMode(allow_non_fake_inputs=True, shape_env=_no_symbols(), static_shapes=True)
        )
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(marked(model, regions))
        stack.enter_context(_as_compiling())
        stack.enter_context(_without_mkldnn())
        stack.enter_context(pure())
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            for x in tracing.inputs
        ]
        with torch.enable_grad():
            module = make_fx(tracing.run)(*fakes)
    return tracing.result(module, guard)


def _no_symbols() -> ShapeEnv:
    """An environment in which every size is a number; Inductor caches no graph that was
    traced without one.
    """
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


class _Tracing:
    """One trace: its inputs, what it runs, and what it found."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        model: nn.Module,
        held: Collection[int],
    ) -> None:
        self.function, self.model, self.index = function, model, ModuleIndex.of(model)
        self.leaves, self.treespec = optree.tree_flatten(arguments, none_is_leaf=True)
        paths = optree.treespec_paths(self.treespec)
        self.paths = [
            path for path, leaf in zip(paths, self.leaves, strict=True) if isinstance(leaf, Tensor)
        ]
        own = (DictEntry(own, key, name) for name, own, key in self.index.attributes())
        tensors = [
            x for x in own if isinstance(x.get(), Tensor) and not isinstance(x.get(), nn.Parameter)
        ]
        self.attributes = [x for x in tensors if id(x.get()) not in held]
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.inputs += [entry.get() for entry in self.attributes]

    def run(self, *given: Tensor) -> list[Tensor]:
        """The function on functional tensors; then writes the arguments that it has
        changed.
        """
        with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE), _Functional() as mode:
            inputs = [FunctionalTensor.to_functional(x) for x in given]
            tensors = iter(inputs)
            leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            for entry in self.attributes:
                marks = marks_of(entry.get())
                entry.set(next(tensors))
                vars(entry.get()).update(marks)
            before = [
                (name, own, dict(own))
                for name, module in self.index.modules.items()
                for own in (vars(module), module._modules)
            ]
            names = {name for name, _ in self.model.named_parameters()}
            with draws_in_order(), WritesAndSeeds(self.index):
                result = self.function(*self.treespec.unflatten(leaves))
            for name, _ in self.model.named_parameters():
                if name not in names:
                    raise late("parameter", name)
            check_no_grads([*inputs[len(self.paths) :], *(real for real, _ in mode.held.values())])
            leaves, self.result_spec = optree.tree_flatten(result, none_is_leaf=True)
            self.others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
            self.kept, self.replaced = _set_by(before, self.index)
            kept = [entry.get() for entry in self.kept]
            held = {real: now for real, now in mode.held.values() if has_changed(now)}
            self.written = list(held)
            results = [
                value_of(x) for x in (*leaves, *kept, *held.values()) if isinstance(x, Tensor)
            ]
            changed = [
                (x, value_of(now)) for x, now in zip(given, inputs, strict=True) if has_changed(now)
            ]
        for x, now in changed:
            x.copy_(now)
        return results

    def result(self, module: GraphModule, guard: Guard) -> Traced:
        num_given = len(self.paths)
        placeholders = module.graph.find_nodes(op="placeholder")
        attributes = []
        for entry, node in zip(self.attributes, placeholders[num_given:], strict=True):
            if node.users:
                attributes.append(entry)
            else:
                module.graph.erase_node(node)
        constants = _take_constants(module)
        how = (self.result_spec, self.others, self.kept, self.replaced, self.written, guard)
        return Traced(module, self.paths, attributes, constants, *how)


class _Functional(FunctionalTensorMode):  # type: ignore[no-untyped-call]
    """Replaces each real tensor that the function holds by one without memory, which it
    must neither read nor write.

    Attributes:
        held: the real tensors by identity, each with its stand-in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.bernoulli_.float and (order := order_in_memory(args[0])) is not None:
            with self:
                args[0].permute(order).bernoulli_(*args[1:], **(kwargs or {}))
            return args[0]
        if func not in LIFTS:
            args, kwargs = optree.tree_map(
                self._stand_in, (tuple(args), kwargs or {}), none_is_leaf=True
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _stand_in(self, x: Any) -> Any:
        if type(x) not in (Tensor, nn.Parameter, StandIn, HeldStandIn):
            return x
        if id(x) not in self.held:
            proxies, fakes = get_proxy_mode(), detect_fake_mode()
            assert proxies is not None and fakes is not None
            with _disable_current_modes():
                fake = fakes.from_tensor(x.detach(), static_shapes=True)
                node: Any = proxies.tracer.create_arg(x)
            track_tensor_tree(
                fake, Proxy(node, proxies.tracer), constant=None, tracer=proxies.tracer
            )
            with self:
                self.held[id(x)] = x, FunctionalTensor.to_functional(fake)
        return self.held[id(x)][1]


def alone(x: Tensor) -> Tensor:
    """The same values; in a trace a tensor that shares its memory with no other one, so
    that `has_changed` is about it alone.
    """
    return FunctionalTensor.to_functional(value_of(x)) if isinstance(x, FunctionalTensor) else x


def has_changed(x: Tensor) -> bool:
    """Whether a traced function has written into the tensor, by whatever way (`.data`
    is one).
    """
    if not isinstance(x, FunctionalTensor):
        return False
    value_of(x)
    return bool(_is_written(x.elem))


def memory_of(x: Tensor) -> int:
    """The identity of the memory in which the values of a tensor are, also of one in a
    trace or under `torch.vmap`.
    """
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    memory: int = value_of(x).untyped_storage()._cdata
    return memory


def _set_by(
    before: list[tuple[str, dict[str, Any], dict[str, Any]]], index: ModuleIndex
) -> tuple[list[DictEntry], list[tuple[DictEntry, Any]]]:
    """The attributes that a function has set: to tensors, and to other values, such as
    other children of the modules in `index`.
    """
    known = set(map(id, index.modules.values()))
    params = {id(slot.owner[slot.key]) for slot in index.slots("_parameters")}
    kept: list[DictEntry] = []
    replaced: list[tuple[DictEntry, Any]] = []
    for name, now, then in before:
        for key, value in now.items():
            entry = DictEntry(now, key, f"{name}.{key}" if name else key)
            if then.get(key, now) is value or key in OF_RECURRENT:
                continue
            if isinstance(value, Tensor) and id(value) not in params:
                if value.requires_grad:
                    raise ImpureError(
                        f"the forward stores a tensor that requires grad in {entry.name!r}; store "
                        f"its .detach()"
                    )
                kept.append(entry)
                continue
            if has_traced(value):
                raise ImpureError(
                    f"the forward stores tensors in a {type(value).__name__}, {entry.name!r}; "
                    f"store each in an attribute"
                )
            made = value.modules() if isinstance(value, nn.Module) else ()
            if any(has_traced(vars(module)) for module in made if id(module) not in known):
                raise ImpureError(
                    f"the forward makes the module {entry.name!r} with tensors in it, and a graph "
                    f"would keep those of its trace; make it in __init__, or with a forward before "
                    f"make_train_step"
                )
            replaced.append((entry, value))
        replaced += [(DictEntry(now, key, key), MISSING) for key in then.keys() - now.keys()]
    return kept, replaced


def _take_constants(module: GraphModule) -> list[Tensor]:
    """Turns the tensors that a graph holds into inputs of the graph, and returns them.
    Those made by the trace itself stay.
    """
    graph, constants = module.graph, list[Tensor]()
    by_name: dict[str, Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if not isinstance(tensor, Tensor) or all(user.target in LIFTS for user in node.users):
            continue
        if node.target not in by_name:
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(constants)}")
            last.meta["val"] = node.meta.get("val", tensor)
            by_name[str(node.target)] = last
            constants.append(tensor)
        node.replace_all_uses_with(by_name[str(node.target)])
        graph.erase_node(node)
    return constants


@contextmanager
def _as_compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` is true, and a traced tensor has no text."""

    def has_no_text(*_: Any, **__: Any) -> str:
        raise ImpureError(
            "it makes a text of a tensor's values, which a graph does not know, and would do so "
            "once only"
        )

    before, text = torch.compiler._is_compiling_flag, FunctionalTensor.__repr__
    torch.compiler._is_compiling_flag = True
    FunctionalTensor.__repr__ = has_no_text  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        FunctionalTensor.__repr__ = text  # type: ignore[assignment, method-assign]


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Inside, an LSTM is made of simple operators: the backward of oneDNN's needs a
    tensor that a trace does not have.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
