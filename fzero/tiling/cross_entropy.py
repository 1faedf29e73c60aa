"""`linear_cross_entropy`: the cross entropy of a linear head without its logits.

The logits h·Wᵀ (tokens × vocabulary) are made chunk by chunk of tokens, and freed. Where
gradients are asked for, the pass that computes a chunk's loss also makes its part of
the gradients, so the products are the plain loss's three. Sums over tokens and over
chunks are in fp32 (fp64 for fp64).

1. `_Summed` is the loss as a sum over tokens. Its other outputs are the gradients of
   that sum; they are not differentiable themselves.
2. `_Scaled` is its backward: these gradients times that of the sum. Its own derivatives
   compute each chunk once more, so no derivative of any order has all logits; only a
   graph of the second derivative (a third one) keeps them.

Shape letters: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from fzero.common.arguments import check_whole
from fzero.tiling.shapes import check_divides

CHUNK_NUMEL = 1 << 25
"""The most logits that exist at once by default: 128 MiB in fp32."""

Reduction = Literal["mean", "sum", "sum_and_count"]


class _Terms(NamedTuple):
    """The numbers of a loss; graphs hold them as constants.

    Attributes:
        wants: bits 0, 1, 2: the forward makes the gradient of hidden, weight, bias.
        chunk: tokens of a chunk.
        dtype: that of the products.
    """

    wants: int
    chunk: int
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float
    dtype: torch.dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shards: int | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor | tuple[Tensor, Tensor]:
    """`F.cross_entropy(F.linear(hidden, weight, bias), labels)`, whose logits never
    exist whole.

    It may be differentiated any number of times, in reverse and forward mode, by
    autograd and by `torch.func`; `torch.vmap`, `torch.compile` and `make_fx` take it. Every
    rank calls it for its own tokens; it sends nothing.

    Args:
        hidden: (…, D), the inputs of the head.
        weight: (V, D), the head's; it may be an embedding's (tied).
        labels: (…), int64: the class of each token, or `ignore_index`.
        bias: (V,).
        shards: the number of chunks; it must divide the number of tokens.
        chunk_tokens: the tokens of a chunk, of which the last may have fewer. By default
            a chunk has at most 2²⁵ logits.
        ignore_index: tokens with this label count nothing.
        label_smoothing: as `F.cross_entropy`'s, 0 to 1.
        z_loss: adds `z_loss · logsumexp(logits)²` for each token (PaLM, section 5).
        softcap: logits become `softcap · tanh(logits / softcap)` (Gemma 2).
        reduction: "sum" over tokens; "mean" over those that are not ignored; or
            "sum_and_count", both numbers, for a `loss_fn` whose mean is over all ranks.

    Returns:
        A 0-d tensor, in fp32 also for inputs of half precision, or the sum and the count
        (int64). As in PyTorch a mean over no tokens is nan.

    Raises:
        ValueError: shapes do not fit, or a number is out of its range.
    """
    _check(hidden, weight, labels, bias, reduction)
    _check_numbers(label_smoothing, z_loss, softcap)
    chunk = _chunk_of(labels.numel(), weight.shape[0], shards, chunk_tokens)
    given = (hidden, weight, *(() if bias is None else (bias,)))
    wants = sum(1 << index for index, x in enumerate(given) if x.requires_grad)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    total = _summed(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1),
        wants if torch.is_grad_enabled() else 0, chunk, ignore_index, float(label_smoothing),
        float(z_loss), float(softcap or 0), dtype,
    )  # fmt: skip
    if reduction == "sum":
        return total
    count = (labels != ignore_index).sum()
    return (total, count) if reduction == "sum_and_count" else total / count


def _door(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *terms: Any
) -> Tensor:
    """The sum as one node of Dynamo's graph, which otherwise would differentiate the
    forward.
    """
    total: Tensor = _Summed.apply(hidden, weight, bias, labels, *terms)[0]  # type: ignore[no-untyped-call]
    return total


def _let_in() -> None:
    torch.compiler.allow_in_graph(_door)  # type: ignore[no-untyped-call]


_let_in._dynamo_marked_constant = True  # type: ignore[attr-defined] # Dynamo runs it when it traces a call of it


def _summed(*given: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():  # elsewhere Dynamo, which is slow, is not imported
        _let_in()
    return _door(*given)


# --- checks ---------------------------------------------------------------------------------------


def _refuse(rule: str, got: object, fix: str) -> NoReturn:
    raise ValueError(f"linear_cross_entropy: {rule}, got {got}; {fix}")


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1]:
        _refuse(
            "hidden must have shape (…, D) and weight (V, D)",
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}",
            "pass the head's input, and its weight as nn.Linear has it",
        )
    expected = hidden.shape[:-1]
    if labels.shape != expected:
        _refuse(
            f"labels must have hidden's shape without the last dimension, {tuple(expected)}",
            tuple(labels.shape),
            "cut both alike where labels are shifted: hidden[:, :-1], labels[:, 1:]",
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        _refuse("labels must be classes as integers", labels.dtype, "pass each token's class")
    if bias is not None and bias.shape != weight.shape[:1]:
        _refuse(
            f"bias must have shape ({weight.shape[0]},)", tuple(bias.shape), "pass the head's own"
        )
    if reduction not in ("mean", "sum", "sum_and_count"):
        _refuse(
            "reduction must be 'mean', 'sum' or 'sum_and_count', because gradients are made with "
            "the loss, before anything weighs single tokens",
            repr(reduction),
            "pass one of these; to weigh samples, call it for each",
        )


def _check_numbers(smoothing: float, z_loss: float, softcap: float | None) -> None:
    if not 0 <= smoothing <= 1:
        _refuse("label_smoothing must be between 0 and 1", smoothing, "pass 0.1, say")
    if not z_loss >= 0:
        _refuse("z_loss must be a factor of at least 0", z_loss, "pass 1e-4, say")
    if softcap is not None and not softcap > 0:
        _refuse("softcap must be above 0, or None for none", softcap, "pass 30.0, say")


def _chunk_of(num: int, vocabulary: int, shards: int | None, chunk_tokens: int | None) -> int:
    if shards is not None and chunk_tokens is not None:
        _refuse(
            "shards and chunk_tokens both set the chunks",
            f"{shards} and {chunk_tokens}",
            "leave one of them out",
        )
    if shards is not None:
        return max(1, check_divides("linear_cross_entropy", num, shards, "tokens"))
    if chunk_tokens is not None:
        check_whole("linear_cross_entropy: chunk_tokens", chunk_tokens, 1)
        return chunk_tokens
    return max(1, CHUNK_NUMEL // max(1, vocabulary))


def _check_forward_mode() -> None:
    """PyTorch switches forward mode off inside the `jvp` of an `autograd.Function`, and
    a derivative of it would be zero.
    """
    stack = get_interpreter_stack() or ()
    forward = TransformType.Jvp
    if sum(level.key() == forward for level in stack) > 1:
        _refuse(
            "may be differentiated once in forward mode, outside of reverse mode",
            "two torch.func.jvp (or jacfwd) around it",
            "use jacrev for the inner one: jacfwd(jacrev(…)), which is torch.func.hessian",
        )


# --- one chunk ------------------------------------------------------------------------------------


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of numbers of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _loss(logsumexp: Tensor, of_label: Tensor, mean: Tensor | float, terms: _Terms) -> Tensor:
    """The loss of each token (N,), from its logits' logsumexp, mean and that of the
    label.
    """
    loss = logsumexp - (1 - terms.smoothing) * of_label - terms.smoothing * mean
    return loss + terms.z_loss * logsumexp.square() if terms.z_loss else loss


def _plain(
    labels: Tensor, terms: _Terms, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The sum of the losses of one chunk, of operators that have all derivatives."""
    casts = (x if x is None else x.to(terms.dtype) for x in (hidden, weight, bias))
    logits = F.linear(*casts).to(_accumulated(terms.dtype))  # type: ignore[arg-type]
    if terms.softcap:
        logits = terms.softcap * (logits / terms.softcap).tanh()
    counts = labels != terms.ignore_index
    of_label = logits.gather(1, labels.where(counts, 0)[:, None])[:, 0]
    loss = _loss(logits.logsumexp(1), of_label, logits.mean(1), terms)
    return loss.where(counts, 0).sum()


def _in_place(labels: Tensor, terms: _Terms, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """The sum of the losses of one chunk, and its gradient by the logits (N, V), in the
    memory of `logits`, which are in the dtype of the sums.
    """
    capped = None
    if terms.softcap:
        capped = logits.div_(terms.softcap).tanh_()
        logits = capped * terms.softcap
    counts = labels != terms.ignore_index
    labels = labels.where(counts, 0)[:, None]
    of_label = logits.gather(1, labels)[:, 0]
    mean = logits.mean(1) if terms.smoothing else 0.0
    largest = logits.amax(1, keepdim=True)
    exps = logits.sub_(largest).exp_()
    sums = exps.sum(1)
    logsumexp = sums.log() + largest[:, 0]
    total = _loss(logsumexp, of_label, mean, terms).where(counts, 0).sum()
    if not terms.wants:
        return total, None
    factor = (1 + 2 * terms.z_loss * logsumexp) / sums
    grad = exps.mul_(factor.where(counts, 0)[:, None])
    of_each = counts.to(grad.dtype)[:, None]
    grad.scatter_add_(1, labels, of_each * (terms.smoothing - 1))
    if terms.smoothing:
        grad.sub_(of_each * (terms.smoothing / logits.shape[1]))
    return total, grad if capped is None else grad.mul_(1 - capped.square_())


def _one_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses and its gradients by hidden (N, D), weight and bias (these
    in the dtype of sums); empty where they are not wanted.
    """
    sums, wants = _accumulated(terms.dtype), [bool(terms.wants >> index & 1) for index in range(3)]
    total = hidden.new_zeros((), dtype=sums)
    of_hidden = hidden.new_empty(hidden.shape if wants[0] else 0)
    of_weight = weight.new_zeros(weight.shape if wants[1] else 0, dtype=sums)
    of_bias = weight.new_zeros(weight.shape[:1] if wants[2] else 0, dtype=sums)
    weight, bias = weight.to(terms.dtype), None if bias is None else bias.to(terms.dtype)
    for start, part, own in _chunks(terms.chunk, hidden, labels):
        part = part.to(terms.dtype)
        loss, grad = _in_place(own, terms, F.linear(part, weight, bias).to(sums))
        total += loss
        if grad is None:
            continue
        if wants[2]:
            of_bias += grad.sum(0)
        grad = grad.to(terms.dtype)
        if wants[0]:
            of_hidden[start : start + len(own)] = grad @ weight
        if wants[1] and terms.dtype == sums:
            of_weight.addmm_(grad.T, part)
        elif wants[1]:
            of_weight += grad.T @ part
    return total, of_hidden, of_weight, of_bias


def _chunks(chunk: int, hidden: Tensor, *others: Tensor) -> Iterator[tuple[Any, ...]]:
    """Of each chunk the first token's number, and the parts of the tensors."""
    for start in range(0, len(hidden), chunk):
        yield start, *(x[start : start + chunk] for x in (hidden, *others))


# --- as nodes of autograd -------------------------------------------------------------------------


def _by_sample(
    function: Any, info: Any, in_dims: tuple[int | None, ...], *given: Any
) -> tuple[Any, Any]:
    """The rule of `torch.vmap`: one sample after the other, so that logits stay small,
    and in place as without it.
    """
    found = [
        function.apply(
            *(
                x if dim is None else x.select(dim, index)
                for x, dim in zip(given, in_dims, strict=True)
            )
        )
        for index in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(own) for own in zip(*found, strict=True))
    return stacked, (0,) * len(stacked)


class _Summed(torch.autograd.Function):
    """(hidden, weight, bias, labels, terms) → the sum, and its gradients by the first
    three, which only the backward uses.
    """

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *terms: Any
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            return _one_pass(hidden, weight, bias, labels, _Terms(*terms))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, ctx.terms = inputs[:4], inputs[4:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, of_hidden, of_weight, of_bias = ctx.saved_tensors
        needs = sum(1 << index for index in range(3) if ctx.needs_input_grad[index])
        made, terms = (of_hidden, of_weight, of_bias), _Terms(*ctx.terms)
        if needs & ~terms.wants:  # a transform of torch.func asks for what the call could not see
            made = _Summed.apply(*tensors, *terms._replace(wants=needs))[1:]  # type: ignore[no-untyped-call]
        found = _Scaled.apply(grad, *tensors, *made, needs, *terms)  # type: ignore[no-untyped-call]
        grads = [x if needs >> index & 1 else None for index, x in enumerate(found)]
        return (*grads, None, *(None for _ in terms))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        _check_forward_mode()
        tangent, _ = _second(ctx.saved_tensors, tangents[:3], _Terms(*ctx.terms), pulls=False)
        return tangent, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
        """See `_by_sample`."""
        return _by_sample(_Summed, info, in_dims, *given)


class _Scaled(torch.autograd.Function):
    """(gradient of the sum, hidden, weight, bias, labels, the sum's gradients by these
    three, needs, terms) → the gradients of the three; empty where `needs` has no bit.
    """

    @staticmethod
    def forward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        (tensors, made), needs = (given[:3], given[4:7]), given[7]
        return tuple(
            (own * grad).to(x.dtype) if x is not None and needs >> index & 1 else grad.new_empty(0)
            for index, (x, own) in enumerate(zip(tensors, made, strict=True))
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.needs, ctx.terms = inputs[8], inputs[9:]
        ctx.save_for_backward(*inputs[:8])
        ctx.save_for_forward(*inputs[:8])

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        grad, *tensors = ctx.saved_tensors[:5]
        wanted = [u if ctx.needs >> index & 1 else None for index, u in enumerate(directions)]
        of_grad, found = _second(tensors, wanted, _Terms(*ctx.terms))
        return (of_grad, *(x if x is None else x * grad for x in found), *(None,) * (5 + 7))

    @staticmethod
    def jvp(ctx: Any, of_grad: Tensor | None, *tangents: Any) -> tuple[Tensor, ...]:
        _check_forward_mode()
        grad, *tensors, of_hidden, of_weight, of_bias = ctx.saved_tensors
        _, found = _second(tensors, tangents[:3], _Terms(*ctx.terms))
        made = (of_hidden, of_weight, of_bias)
        return tuple(
            grad.new_empty(0)
            if x is None or not ctx.needs >> index & 1
            else (x * grad + (0 if of_grad is None else own * of_grad)).to(x.dtype)
            for index, (x, own) in enumerate(zip(found, made, strict=True))
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
        """See `_by_sample`."""
        return _by_sample(_Scaled, info, in_dims, *given)


def _second(
    tensors: Sequence[Any], directions: Sequence[Any], terms: _Terms, *, pulls: bool = True
) -> tuple[Tensor, list[Tensor | None]]:
    """The derivative of the sum in a direction, and, if `pulls`, the gradients of that
    by hidden, weight and bias. A direction may be None for zeros.
    """
    *primals, labels = tensors
    there = [index for index, x in enumerate(primals) if x is not None]
    sums = _accumulated(terms.dtype)
    total: Any = 0
    found: list[list[Tensor]] = [[], [], []]
    for start, part, own in _chunks(terms.chunk, primals[0], labels):

        def part_of(x: Any, index: int, start: int = start, num: int = len(own)) -> Any:
            return x[start : start + num] if index == 0 and x is not None else x

        given = [part if index == 0 else primals[index] for index in there]
        along = [part_of(directions[index], index) for index in there]
        first = partial(_inner, own, terms, along)
        if pulls:
            pulled: Any = torch.func.vjp(first, *given)
            value = pulled[0]
            for index, grad in zip(there, pulled[1](torch.ones_like(value)), strict=True):
                found[index].append(grad)
        else:
            value = first(*given)
        total = total + value
    of_all = [
        None
        if primals[index] is None or not grads
        else torch.cat(grads)
        if index == 0
        else sum(x.to(sums) for x in grads).to(primals[index].dtype)  # type: ignore[union-attr]
        for index, grads in enumerate(found)
    ]
    return total, of_all


def _inner(labels: Tensor, terms: _Terms, along: Sequence[Any], *given: Tensor) -> Tensor:
    """The derivative of a chunk's sum in a direction."""

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _plain(labels, terms, hidden, weight, bias)

    grads = torch.func.grad(loss, tuple(range(len(given))))(*given)
    sums = _accumulated(terms.dtype)
    products = [
        (grad.to(sums) * own.to(sums)).sum()
        for grad, own in zip(grads, along, strict=True)
        if own is not None
    ]
    return torch.stack(products).sum()
