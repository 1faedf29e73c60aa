"""`kept_on_host`: inputs of checkpointed modules in host memory, in a step's graph.

Such a module begins with two operators for each input that needs a gradient: `to_host`
copies it to host memory, and `from_host` copies it back. `rematerialise` lets the
forward read the input itself. The backward reads what `from_host` brings back, just
before it runs the module again, so that the input is freed after the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx import Node


def copy_to_host(x: Tensor) -> Tensor:
    """A copy in host memory, pinned for a device."""
    is_pinned = not x.is_cpu
    # Both copies run on the stream of the compute, so that neither needs an event of its own.
    return torch.empty_like(x, device="cpu", pin_memory=is_pinned).copy_(x, non_blocking=True)


@torch.library.custom_op("fzero::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """`copy_to_host` as an operator."""
    return copy_to_host(x)


@to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.custom_op("fzero::from_host", mutates_args=())
def from_host(x: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; one operator, so that no compiler leaves it out."""
    return torch.empty_like(x, device=device).copy_(x, non_blocking=True)


@from_host.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


# The gradient of a copy and of the copy back is the gradient, which stays on the device.
to_host.register_autograd(lambda ctx, grad: grad)
from_host.register_autograd(lambda ctx, grad: (grad, None))

TO_HOST, FROM_HOST = torch.ops.fzero.to_host.default, torch.ops.fzero.from_host.default


def kept_on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module whose inputs wait for the backward in host memory, where
    it is traced.
    """

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return from_host(to_host(x), x.device)
        return x

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = optree.tree_map(moved, (args, kwargs), none_is_leaf=True)  # type: ignore[assignment]
        return forward(*args, **kwargs)

    return run


def read_inputs(forward: Iterable[Node]) -> None:
    """Lets the forward read the inputs themselves, in place, once the backward has
    copies of its operators.
    """
    for node in forward:
        if node.target is FROM_HOST:
            node.replace_all_uses_with(node.all_input_nodes[0].all_input_nodes[0])
            node.graph.erase_node(node)
