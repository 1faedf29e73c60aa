"""`join_products`: weight gradients computed directly in the flat buffer from which
they are sent.

The captured graph has a matrix product for the gradient of every weight, and copies
them all into a flat buffer:

    cat([left₁ @ right₁, bias, left₂ @ right₂, zeros])  →  join_gradients([left₁, right₁, bias, left₂, right₂], [2, 1, 2], numel)

The numbers are the same. The copy and its memory are saved; all operands live until the
last of them is ready.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import mm_flop, register_flop_formula

from fzero.graph.nodes import aten, is_view, numel_of

_TRANSPOSES = (aten.t.default, aten.permute.default)
_SAME_ORDER = (aten.view.default, aten.reshape.default)


@torch.library.custom_op("fzero::join_gradients", mutates_args=())
def join_gradients(operands: list[Tensor], counts: list[int], numel: int) -> Tensor:
    """A flat buffer of tensors and matrix products, one after the other, padded with
    zeros to `numel` elements.

    Args:
        operands: the operands of all parts, in order.
        counts: the number of operands of each part: 1 for a tensor that is copied, 2
            for the matrices of a product.
        numel: the number of elements of the result.
    """
    flat, rest, stop = operands[0].new_empty(numel), iter(operands), 0
    for count in counts:
        start, left = stop, next(rest)
        if count == 1:
            stop += left.numel()
            flat[start:stop].copy_(left.reshape(-1))
            continue
        right = next(rest)
        stop += left.shape[0] * right.shape[1]
        torch.mm(left, right, out=flat[start:stop].view(left.shape[0], right.shape[1]))
    flat[stop:].zero_()
    return flat


@join_gradients.register_fake
def _(operands: list[Tensor], counts: list[int], numel: int) -> Tensor:
    return operands[0].new_empty(numel)


@register_flop_formula(torch.ops.fzero.join_gradients)
def _(operands: list[tuple[int, ...]], counts: list[int], numel: int, **kwargs: object) -> int:
    flops, start = 0, 0
    for count in counts:
        flops += mm_flop(*operands[start : start + 2]) if count == 2 else 0
        start += count
    return flops


def join_products(graph: Graph) -> None:
    """Computes products in the buffer that joins them. Changes the graph."""
    index = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or node.meta["val"].dim() != 1:
            continue
        pieces = [_source_of(piece) for piece in node.args[0] if numel_of(piece)]
        if len(pieces) > 1 and _is_zero(pieces[-1]):
            pieces.pop()
        parts: list[list[Node]] = [list(p.args) if _is_own_product(p) else [p] for p in pieces]  # type: ignore[arg-type]
        if len(parts) == sum(map(len, parts)) or any(
            p.meta["val"].dtype != node.meta["val"].dtype for p in pieces
        ):
            continue
        operands = [operand for part in parts for operand in part]
        # an operand is itself the result of a join
        if any(operand not in index for operand in operands):
            continue
        with graph.inserting_after(
            _last_use(max(operands, key=index.__getitem__), index, before=index[node])
        ):
            joined = graph.call_function(
                torch.ops.fzero.join_gradients.default,
                (operands, [len(part) for part in parts], numel_of(node)),
            )
        product = next(piece for piece in pieces if _is_own_product(piece))
        joined.meta |= {"val": node.meta["val"], "custom": product.meta.get("custom") or {}}
        node.replace_all_uses_with(joined)
        _forget(node)


def _source_of(piece: Node) -> Node:
    """The base of the view `piece`, as long as its elements are in the same order."""
    source, node, is_transposed = piece, piece, False
    while is_view(node) or node.target is aten.reshape.default:
        base = node.all_input_nodes[0]
        if not isinstance(base.meta["val"], Tensor) or numel_of(base) != numel_of(node):
            break
        if node.target in _TRANSPOSES and base.meta["val"].dim() == 2:
            is_transposed = not is_transposed
        elif is_transposed or node.target not in _SAME_ORDER:
            break
        node = base
        source = source if is_transposed else node
    return source


def _is_zero(node: Node) -> bool:
    return node.target is aten.new_zeros.default or (
        node.target is aten.full.default and bool(node.args[1] == 0)
    )


def _is_own_product(node: Node) -> bool:
    return node.target is aten.mm.default and len(node.users) == 1


def _last_use(operand: Node, index: dict[Node, int], *, before: int) -> Node:
    """The last product that reads the memory of `operand`: after it, a unit's
    parameters are released before its gradients.
    """
    last, base = operand, operand
    while is_view(base) and isinstance(base.all_input_nodes[0].meta["val"], Tensor):
        base = base.all_input_nodes[0]
    readers = [base, operand]
    for reader in readers:
        for user in reader.users:
            if user.target is aten.mm.default and index[last] < index[user] < before:
                last = user
            elif is_view(user) and user not in readers:
                readers.append(user)
    return last


def _forget(node: Node) -> None:
    """Erases an unused node, and the nodes that only it used."""
    unused = {node: None}
    while unused:
        node, _ = unused.popitem()
        if node.op == "call_function" and not node.users:
            unused |= dict.fromkeys(node.all_input_nodes)
            node.graph.erase_node(node)
