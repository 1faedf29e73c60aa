"""`compiled_blocks`: the transform that gives units a compiled forward in an otherwise
eager step.

While the model is bound, the `forward` of each unit that is one module becomes a call
of *one* compiled function, which takes the module, its parameters and its buffers as
arguments. Blocks that differ only in their tensors share a compilation, because
torch.compile's guards are the same for all of them. Gathers, reductions and the update
are those of the eager step: the tensors that the compiled forward saves for its
backward are views of gathered buffers, too.

Hooks are Python code, which torch.compile neither guards nor compiles in full. Those of
the block itself run around its compiled forward. A block with hooks on modules inside
it runs as it is, as do all blocks under hooks of all modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from fzero.graph.backends import eager_with_views, mend_reductions
from fzero.graph.capture_errors import no_block
from fzero.model.binding import fill_flat_weights
from fzero.model.changes import own_forward, with_own_code
from fzero.model.module_index import ModuleIndex
from fzero.model.own_params import as_plain
from fzero.model.transforms import Call, Changes, TransformedStep, Wrap
from fzero.plans.units import blocks_of


def compiled_blocks(spec: TransformedStep) -> Changes:
    """See `ModelTransform`: compiles the units that are one module each. A step in one
    graph compiles them in it.
    """
    names = blocks_of(spec.model, spec.units)
    if not names:
        raise ValueError(
            f"compile: 'block' needs units that are one module, and {type(spec.model).__name__} "
            f"has no repeated blocks; name modules in units=, or pass compile='step'"
        )
    blocks = _CompiledBlocks(names, spec.compile_backend)
    return Changes(name="compiled blocks", forwards=blocks.forwards, is_exact=True)


class _CompiledBlocks:
    """The compiled forward of some modules.

    Args:
        names: the names of the modules in the model.
        backend: the backend of torch.compile.
    """

    def __init__(self, names: Sequence[str], backend: Literal["inductor", "aot_eager"]) -> None:
        self._names, self._is_warned = tuple(names), False
        if backend == "inductor":
            mend_reductions()
        # fallback_random: the random numbers of the eager step.
        options: dict[str, Any] = {"fallback_random": True} if backend == "inductor" else {}
        compiler: Any = backend if backend == "inductor" else eager_with_views
        self._run = torch.compile(
            with_own_code(_run_block), dynamic=False, backend=compiler, options=options or None
        )

    def forwards(self, call: Call) -> Mapping[str, Wrap]:
        """See `Changes`. Each length of inputs that a transform holds constant is
        compiled.
        """
        if call.in_graph or not call.is_counted:
            return {}
        # Modules that differ in an attribute (a layer's number) are compiled one by one.
        most = 8 + 2 * len(self._names) * (1 + call.num_constants)
        return dict.fromkeys(self._names, partial(self._forward_of, most))

    def _forward_of(self, most: int, name: str, block: nn.Module) -> Callable[..., Any]:
        own = own_forward(block)
        forward_only = _ForwardOnly(block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            index = ModuleIndex.of(block)
            if (hooked := _hooked_inside(index)) is not None:
                self._warn(name, hooked)
                with _own_forward(block, own):
                    return block.forward(*args, **kwargs)
            params, buffers = _tensors(index, "_parameters"), _tensors(index, "_buffers")
            try:
                with _unbound(block, index, own), torch._dynamo.config.patch(recompile_limit=most):
                    output, replaced = self._run(forward_only, params, buffers, args, kwargs)
            except TorchDynamoException as error:
                raise no_block(name, error) from error
            for slot in index.slots("_buffers", every=True):
                if slot.name in replaced:
                    slot.owner[slot.key] = replaced[slot.name]
            return output

        return forward

    def _warn(self, name: str, hooked: str) -> None:
        """Reports once that blocks run as they are."""
        if not self._is_warned:
            self._is_warned = True
            where = (
                f"{name}.{hooked}"
                if hooked
                else "all modules (torch.nn.modules.module.register_module_…_hook)"
            )
            warnings.warn(
                f"compile: 'block' compiles no block with hooks on modules inside it, so such "
                f"blocks run as they are, got hooks on {where}; remove them, move them to the "
                f"block itself, or pass compile='step'",
                stacklevel=2,
            )


class _ForwardOnly(nn.Module):
    """Calls the forward of a block without its hooks and its `__call__`: these have
    run, or run afterwards, outside.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


def _run_block(
    block: _ForwardOnly,
    params: dict[str, Tensor],
    buffers: dict[str, Tensor],
    args: Any,
    kwargs: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """The output of a module called with these tensors, and the buffers that it
    replaced.
    """
    given = {f"block.{name}": tensor for name, tensor in (*params.items(), *buffers.items())}
    output = torch.func.functional_call(block, given, args, kwargs, tie_weights=False)
    now = {name: given[f"block.{name}"] for name in buffers}
    return output, {name: tensor for name, tensor in now.items() if tensor is not buffers[name]}


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooked_inside(index: ModuleIndex) -> str | None:
    """The first module inside a block that has hooks; "" where all modules have some;
    None if there are no hooks.
    """
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return ""
    for name, module in index.modules.items():
        for kind in _HOOKS if name else ():
            if any(hook is not fill_flat_weights for hook in getattr(module, kind).values()):
                return name
    return None


def _tensors(index: ModuleIndex, kind: Literal["_parameters", "_buffers"]) -> dict[str, Tensor]:
    """The present parameters or buffers, under all of their names."""
    slots = index.slots(kind, every=True)
    return {slot.name: x for slot in slots if (x := slot.owner[slot.key]) is not None}


@contextmanager
def _unbound(block: nn.Module, index: ModuleIndex, own: dict[str, Any]) -> Iterator[None]:
    """In the body, a bound module has plain dicts of parameters, which torch.compile
    can trace.
    """
    bound = [(module, module.__dict__["_parameters"]) for module in index.modules.values()]
    try:
        for module, parameters in bound:
            # A partitioned parameter of the engine (`fzero.deepspeed.engine.param_views`) is
            # replaced by its plain parameter.
            own_parameters = {
                key: as_plain(getattr(own, "fzero_plain", own))
                for key, own in dict.items(parameters)
            }
            module.__dict__["_parameters"] = own_parameters
        with _own_forward(block, own):
            yield
    finally:
        for module, parameters in bound:
            module.__dict__["_parameters"] = parameters


@contextmanager
def _own_forward(block: nn.Module, own: dict[str, Any]) -> Iterator[None]:
    """In the body, a block has its own forward, not the one that runs it compiled."""
    forward = block.__dict__.pop("forward")
    block.__dict__.update(own)
    try:
        yield
    finally:
        block.__dict__["forward"] = forward
