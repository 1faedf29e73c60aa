"""Errors for effects of a traced function that its graph would not repeat, with the
reason and the fix.

A graph repeats operators on tensors. It repeats no write to a tensor that goes past the
operators, no seed of random numbers, and no look at a tensor's class, which is another
one in a trace.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import random
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fzero.comms.stacked import VmapError
from fzero.graph.guards import Guard, names_of_code
from fzero.graph.nodes import aten
from fzero.model.errors import was_changed
from fzero.model.module_index import ModuleIndex

LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)
"""Operators that bring a constant into a trace."""


_sync: Callable[[Tensor], None] = torch._sync  # type: ignore[attr-defined]


def value_of(x: Tensor) -> Tensor:
    """The traced tensor behind a functional one, after all changes."""
    if not isinstance(x, FunctionalTensor):
        return x
    _sync(x)
    value: Tensor = torch._from_functional_tensor(x.elem)
    return value


class ImpureError(RuntimeError):
    """A function does something that a graph would not repeat."""


def check_no_grads(tensors: Iterable[Tensor]) -> None:
    """Raises ImpureError for a gradient that the traced body leaves in a tensor: a
    graph would not. (In a batch it trains nothing.)"""
    found = [tensor for tensor in tensors if isinstance(tensor.grad, FunctionalTensor)]
    for tensor in found:
        tensor.grad = None
    if found:
        raise ImpureError(
            f"a backward leaves a gradient in the .grad of a tensor of shape "
            f"{tuple(found[0].shape)} that is no parameter of the model, and a graph would not; "
            f"use its .detach() where none is wanted, or make it an nn.Parameter"
        )


@contextmanager
def same_contents(guard: Guard) -> Iterator[None]:
    """Raises ImpureError if the body changes the contents of a container, and undoes
    the change, after another error, too.
    """
    try:
        yield
    except BaseException:
        guard.undo()
        raise
    if (name := guard.undo()) is not None:
        raise ImpureError(
            f"the forward changes the contents of {name}, and a graph would not; keep what changes "
            f"in a module buffer, or each tensor in an attribute of its own"
        )


def check_caches(index: ModuleIndex, aliases: Mapping[str, str], of_state: Collection[str]) -> None:
    """Raises ImpureError for a buffer with `persistent=False` that the forward of a
    bound model makes from data.

    A graph would make it anew in each step. A table of constants is the same each time.

    Args:
        of_state: the buffers that the state has, by name.

    Raises:
        VmapError: instead of ImpureError under `torch.vmap` outside of a trace.
    """
    for slot in index.slots("_buffers"):
        name, made = slot.name, slot.owner[slot.key]
        if not slot.is_cache or made is None or aliases.get(name, name) in of_state:
            continue
        if _is_of_data(made):
            text = (
                f"the forward keeps data in the buffer {name!r}, which would be made anew in each "
                f"step here; register the buffer when the module is made (it is part of the state "
                f"then), or do not keep it"
            )
            raise VmapError(text) if get_proxy_mode() is None else ImpureError(text)


def check_class(name: str, own: Tensor) -> None:
    """Raises ImpureError for a parameter or buffer whose class has methods of its own,
    which a traced tensor lacks.

    Raises:
        VmapError: in place of ImpureError under `torch.vmap` outside of a trace.
    """
    kind = type(own)
    if not kind.__module__.startswith(("torch", "fzero.")):
        text = (
            f"{name!r} is a {kind.__name__}, and tensors of all ranks, or in one graph, have no "
            f"methods of other classes; make functions of the methods, or leave compile='step' and "
            f"by='vmap' out"
        )
        raise VmapError(text) if get_proxy_mode() is None else ImpureError(text)


def check_not_kept(index: ModuleIndex, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks that modules hold in attributes after a forward under
    `torch.vmap`.

    Args:
        before: those after the last forward.

    Raises:
        ValueError: an attribute still holds the tensor of an earlier forward, whose
            values are not those of one rank.
    """
    found = {
        name + (f"[{place!r}]" if place != "" else ""): value
        for name, own, key in index.attributes()
        for place, value in _items_of(own[key])
        if key not in _OF_MODULES
        and isinstance(value, Tensor)
        and is_functorch_wrapped_tensor(value)
    }
    for name, value in found.items():
        if before.get(name) is value:
            raise ValueError(
                f"simulate: the model must not keep a tensor from one step to the next under "
                f"torch.vmap, and {name!r} does; pass by='lockstep', or register it as a buffer"
            )
    return found


def held_by_modules(
    index: ModuleIndex, is_of_params: Callable[[Tensor], bool]
) -> dict[str, Tensor]:
    """The tensors that modules hold in attributes and that lie in the memory of
    parameters, by name.
    """
    return {
        name: own[key]
        for name, own, key in index.attributes()
        if isinstance(own[key], Tensor) and is_of_params(own[key])
    }


def check_follows(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Raises ImpureError if a module still holds one of these tensors, which were
    parameters in an earlier capture.

    In a plain loop such a tensor has the parameter's values after each update.
    """
    for name, value in before.items():
        if value is not None and _attribute(model, name) is value:
            raise ImpureError(
                f"the forward keeps the parameter that {name!r} was in an earlier step, whose "
                f"values a graph would not change; read the parameter in each forward, or keep a "
                f"copy of it (.detach().clone())"
            )


def attributes_of(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of these names, or None where there is none."""
    return {name: _attribute(model, name) for name in names}


def _attribute(model: nn.Module, name: str) -> Any:
    prefix, _, key = name.rpartition(".")
    return vars(model.get_submodule(prefix)).get(key)


_OF_MODULES = ("_parameters", "_buffers", "_flat_weights")


def _items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    """The values of a container by place; another value has the place ""."""
    if isinstance(held, Mapping):
        return held.items()
    return enumerate(held) if isinstance(held, list | tuple) else [("", held)]


def _is_of_data(x: Tensor) -> bool:
    """Whether a tensor in a trace, or under `torch.vmap`, depends on more than
    constants.
    """
    if is_functorch_wrapped_tensor(x):
        return True
    mode = get_proxy_mode()
    if mode is None or not isinstance(x, FunctionalTensor):
        return False
    found = get_proxy_slot(value_of(x), mode.tracer, None)
    todo, seen = [] if found is None else [found.proxy.node], set[Node]()
    while todo:
        if (node := todo.pop()) in seen:
            continue
        seen.add(node)
        is_constant = node.op == "get_attr" and all(user.target in LIFTS for user in node.users)
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_random or (node.op in ("placeholder", "get_attr") and not is_constant):
            return True
        todo += node.all_input_nodes
    return False


# --- random numbers -------------------------------------------------------------------------------


@contextmanager
def draws_in_order() -> Iterator[None]:
    """Raises ImpureError if the traced body draws after it has set the random state: a
    graph would draw other numbers.
    """
    mode = get_proxy_mode()
    assert mode is not None
    nodes, set_at, thread = mode.tracer.graph.nodes, list[int](), threading.get_ident()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                set_at.append(len(nodes))
            return function(*args, **kwargs)

        return noted

    before = torch.set_rng_state, torch.manual_seed
    torch.set_rng_state, torch.manual_seed = map(noting, before)
    try:
        yield
    finally:
        torch.set_rng_state, torch.manual_seed = before
    for node in list(nodes)[set_at[0] :] if set_at else ():
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ImpureError(
                "it draws random numbers after it has set the random state (fork_rng, or "
                "torch.utils.checkpoint around dropout), and a graph would draw others; for "
                "checkpointing pass checkpoint= to make_train_step"
            )


@contextmanager
def pure() -> Iterator[None]:
    """Raises ImpureError if the body draws random numbers that a graph would hold as
    constants.
    """

    def states() -> Mapping[str, Any]:
        numpy = sys.modules.get("numpy.random")
        own = {
            "Python's random": random.getstate(),
            "torch's generator": torch.get_rng_state().tolist(),
        }
        return own | ({} if numpy is None else {"numpy.random": pickle.dumps(numpy.get_state())})

    before = states()
    yield
    drawn = [name for name, state in states().items() if before.get(name, state) != state]
    if drawn:
        raise ImpureError(
            f"it draws numbers from {drawn[0]}, and a graph would draw them once only; use "
            f"torch.rand"
        )


# --- writes and seeds -----------------------------------------------------------------------------


class WritesAndSeeds(TorchFunctionMode):
    """Raises where the body sets `.data` of a tensor, or draws from a generator that it
    has made or seeded itself.

    Args:
        index: the generators of its modules may be drawn from: a graph goes on with
            their numbers.
    """

    def __init__(self, index: ModuleIndex) -> None:
        super().__init__()
        attributes = (own[key] for _, own, key in index.attributes())
        held = [x for x in attributes if isinstance(x, torch.Generator)]
        with _disable_current_modes():
            self._states = [(x, x.get_state()) for x in held]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:
            if (name := getattr(args[0], "fzero_name", None)) is not None:
                raise was_changed(name)
            raise ImpureError(
                "it sets the .data of a tensor, and a graph would not; write tensor.copy_(values) "
                "under no_grad"
            )
        if isinstance(generator := kwargs.get("generator"), torch.Generator) and not self._goes_on(
            generator
        ):
            raise ImpureError(
                "it draws from a generator that the forward makes or seeds, and a graph would go "
                "on with its numbers in the next step; keep the generator in an attribute of a "
                "module and seed it before, or draw without one"
            )
        return func(*args, **kwargs)

    def _goes_on(self, generator: torch.Generator) -> bool:
        """Whether the generator is the model's, and as it was before the trace."""
        with _disable_current_modes():
            return any(
                x is generator and torch.equal(x.get_state(), then) for x, then in self._states
            )


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


# --- the class of a tensor ------------------------------------------------------------------------


@contextmanager
def no_tensor_classes(functions: Iterable[FunctionType]) -> Iterator[None]:
    """Raises ImpureError if one of the functions runs that compares `type(x)` with
    `Tensor` or `Parameter`.

    Raises:
        VmapError: instead of ImpureError under `torch.vmap` outside of a trace.
    """
    found = {
        function.__code__: line
        for function in functions
        if (line := asks_for_class(function)) is not None
    }
    if not found:
        yield
        return
    before = sys.getprofile()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (line := found.get(frame.f_code)) is not None:
            sys.setprofile(before)
            text = (
                f"{frame.f_code.co_filename}, line {line}, compares the type of a tensor, which is "
                f"another one here; write isinstance(x, torch.Tensor) or isinstance(x, "
                f"nn.Parameter)"
            )
            raise VmapError(text) if get_proxy_mode() is None else ImpureError(text)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def asks_for_class(function: FunctionType) -> int | None:
    """The line of a function that compares `type(x)` or `x.__class__` with `Tensor` or
    `Parameter`, if there is one.

    >>> asks_for_class(lambda x: isinstance(x, Tensor))
    """
    names = names_of_code(function.__code__)
    if names.isdisjoint(_ASKS) or names.isdisjoint(_CLASSES):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # made without a file, or a part of a line
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            asks = any(
                isinstance(x, ast.Call) and getattr(x.func, "id", "") == "type" for x in parts
            )
            asks |= any(isinstance(x, ast.Attribute) and x.attr == "__class__" for x in parts)
            if asks and any(getattr(x, "id", getattr(x, "attr", "")) in _CLASSES for x in parts):
                return function.__code__.co_firstlineno + node.lineno - 1
    return None


_ASKS, _CLASSES = {"type", "__class__"}, {"Tensor", "Parameter"}
