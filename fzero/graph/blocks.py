"""`CompiledBlocks`: units with a compiled forward in an otherwise eager step.

While the model is bound, the `forward` of each unit that is one module becomes a call of *one* compiled function, which
takes the module, its parameters and its buffers as arguments. Blocks that differ only in their tensors share a
compilation, because torch.compile's guards are the same for all of them. Gathers, reductions and the update are those of
the eager step: the tensors that the compiled forward saves for its backward are views of gathered buffers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch._dynamo
from torch import Tensor, nn

from fzero.graph.backends import mend_reductions
from fzero.model.changes import own_forward, replaced_forwards, with_own_code
from fzero.model.own_params import as_plain


class CompiledBlocks:
    """The compiled forward of some modules.

    Args:
        names: of the modules in the model.
        backend: of torch.compile.
        num_lengths: how many lengths of their inputs are expected, each of which is compiled.
    """

    def __init__(
        self, names: Sequence[str], backend: Literal["inductor", "aot_eager"], *, num_lengths: int = 0
    ) -> None:
        self.names, self._num_lengths = tuple(names), num_lengths
        if backend == "inductor":
            mend_reductions()
        # fallback_random: the random numbers of the eager step.
        options: dict[str, Any] = {"fallback_random": True} if backend == "inductor" else {}
        self._run = torch.compile(with_own_code(_run_block), dynamic=False, backend=backend, options=options or None)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """In the body, the modules of a bound model run compiled; afterwards the model is as before."""
        with replaced_forwards(model, self.names, self._forward_of):
            yield

    def _forward_of(self, name: str, block: nn.Module) -> Callable[..., Any]:
        own = own_forward(block)
        # Modules that differ in an attribute (a layer's number) are compiled one by one.
        most = 8 + 2 * len(self.names) * (1 + self._num_lengths)

        def forward(*args: Any, **kwargs: Any) -> Any:
            params = {name: tensor for name, _, _, tensor in _slots(block, "_parameters")}
            buffers = {name: tensor for name, _, _, tensor in _slots(block, "_buffers")}
            with _unbound(block, own), torch._dynamo.config.patch(recompile_limit=most):
                output, replaced = self._run(block, params, buffers, args, kwargs)
            for name, slots, key, _ in list(_slots(block, "_buffers")):
                if name in replaced:
                    slots[key] = replaced[name]
            return output

        return forward


def _run_block(
    block: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """The output of a module called with these tensors, and the buffers that it replaced."""
    given = {**params, **buffers}
    output = torch.func.functional_call(block, given, args, kwargs, tie_weights=False)
    return output, {name: given[name] for name in buffers if given[name] is not buffers[name]}


def _slots(block: nn.Module, kind: str) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """The parameters or buffers of a module and its submodules, with the dict that holds each: (name, dict, key, tensor)."""
    for prefix, module in block.named_modules(remove_duplicate=False):
        slots = getattr(module, kind)
        for key in slots:
            tensor = slots[key]
            if tensor is not None:
                yield f"{prefix}.{key}".removeprefix("."), slots, key, tensor


@contextmanager
def _unbound(block: nn.Module, own: dict[str, Any]) -> Iterator[None]:
    """In the body, a bound module has plain dicts of parameters, which torch.compile can trace."""
    bound = [(module, module.__dict__["_parameters"]) for module in block.modules()]
    forward = block.__dict__.pop("forward")
    block.__dict__.update(own)
    try:
        for module, parameters in bound:
            # A partitioned parameter of the engine (`fzero.engine.param_views`) is replaced by its plain parameter.
            own_parameters = {key: as_plain(getattr(own, "fzero_plain", own)) for key, own in dict.items(parameters)}
            module.__dict__["_parameters"] = own_parameters
        yield
    finally:
        for module, parameters in bound:
            module.__dict__["_parameters"] = parameters
        block.__dict__["forward"] = forward
