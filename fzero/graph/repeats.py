"""`Repeats`: traces a pure function of tensors once for each kind of tensors. Further
calls copy the nodes of the first.

Tracing a node goes through four layers of PyTorch, and copying one through none. The
updates of equal blocks are such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree
from torch.utils._python_dispatch import _disable_current_modes

from fzero.graph.impure import value_of


class _Recorded(NamedTuple):
    """The first call: the nodes of its arguments before and after, and those in
    between.
    """

    before: list[Node]
    between: list[Node]
    after: list[Node]


class Repeats:
    """Calls within one trace. Without a trace every call is an ordinary one."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Recorded] = {}

    def __call__(
        self, function: Callable[..., None], tensors: Sequence[Tensor], *, kind: Hashable
    ) -> None:
        """Calls `function(*tensors)`, which writes in place into these tensors and does
        nothing else.

        Args:
            tensors: no two of them share memory.
            kind: functions of one kind do the same to tensors of the same shapes,
                strides and dtypes.
        """
        mode = get_proxy_mode()
        if mode is None or not all(isinstance(x, FunctionalTensor) for x in tensors):
            function(*tensors)
            return
        graph = mode.tracer.graph
        kind = (kind, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
        before = [_node(value_of(x), mode.tracer) for x in tensors]
        known = self._known.get(kind)
        if known is None:
            last = next(iter(reversed(graph.nodes)))
            function(*tensors)
            between, node = list[Node](), last.next
            while node.op != "root":
                between.append(node)
                node = node.next
            self._known[kind] = _Recorded(
                before, between, [_node(value_of(x), mode.tracer) for x in tensors]
            )
            return
        copies = dict(zip(known.before, before, strict=True))
        for node in known.between:
            copies[node] = graph.node_copy(node, lambda x: copies.get(x, x))
        for x, then, now in zip(tensors, known.before, known.after, strict=True):
            if now is not then:
                _write(x, copies[now], mode.tracer)


def _node(value: Tensor, tracer: Any) -> Node:
    """The node that computes a traced tensor."""
    slot: Any = get_proxy_slot(value, tracer)
    node: Node = slot.proxy.node
    return node


def _write(x: Tensor, node: Node, tracer: Any) -> None:
    """Writes the value of a node into a traced tensor."""
    fakes = detect_fake_mode()
    assert fakes is not None and isinstance(x, FunctionalTensor)
    with _disable_current_modes(), fakes:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    track_tensor_tree(fake, Proxy(node, tracer), constant=None, tracer=tracer)
    x.replace_(fake)
    x.commit_update()
    x.sync()
