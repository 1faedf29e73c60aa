"""The cross entropy of a head without logits, against `F.cross_entropy` of its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fzero

TOKENS, WIDTH, CLASSES = 24, 5, 11
Loss = Callable[..., Tensor]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


HIDDEN, WEIGHT, BIAS = (
    drawn(TOKENS, WIDTH, seed=1),
    drawn(CLASSES, WIDTH, seed=2),
    drawn(CLASSES, seed=3),
)
LABELS = torch.randint(0, CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(4))
LABELS[3] = LABELS[20] = -100


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor = LABELS,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    **_: Any,
) -> Any:
    """The oracle, of whole logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts = labels != ignore_index
    total = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    total = total + z_loss * (logits.logsumexp(-1).square() * counts).sum()
    if reduction == "sum_and_count":
        return total, counts.sum()
    return total if reduction == "sum" else total / counts.sum()


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor = LABELS, **how: Any) -> Any:
    chunks = {} if {"shards", "chunk_tokens"} & how.keys() else {"shards": 4}
    return fzero.linear_cross_entropy(hidden, weight, labels, **chunks, **how)


HOWS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2},
    {"z_loss": 0.01},
    {"softcap": 3.0},
    {"reduction": "sum"},
    {"chunk_tokens": 7, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0},
    {"ignore_index": int(LABELS[0]), "label_smoothing": 1.0},
]


def leaves(*given: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in given]


def derivatives(loss: Loss, inputs: list[Tensor], order: int) -> list[Tensor]:
    """The loss and its derivatives, each of a sum that mixes those before it."""
    value, found = loss(*inputs), list[Tensor]()
    found.append(value)
    for _ in range(order):
        grads = torch.autograd.grad(value, inputs, create_graph=True)
        found += grads
        value = sum((x.sin().sum() for x in grads), torch.zeros((), dtype=value.dtype))
    return found


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_loss_and_derivatives_up_to_the_third_are_those_of_whole_logits(
    how: dict[str, Any], has_bias: bool
) -> None:
    given = (HIDDEN, WEIGHT, BIAS) if has_bias else (HIDDEN, WEIGHT)

    def of(function: Loss) -> list[Tensor]:
        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return function(hidden, weight, clean(how), bias=bias, **how)

        return derivatives(loss, leaves(*given), 3)

    torch.testing.assert_close(of(chunked), of(plain))


def clean(how: dict[str, Any]) -> Tensor:
    """Labels without a -100 where that is no longer what is ignored."""
    return LABELS.clamp(min=0) if "ignore_index" in how else LABELS


def test_sum_and_count_are_those_of_the_tokens_that_are_not_ignored() -> None:
    total, count = chunked(HIDDEN, WEIGHT, reduction="sum_and_count")
    assert count.item() == TOKENS - 2 and not count.requires_grad
    torch.testing.assert_close(total / count, plain(HIDDEN, WEIGHT))
    none = torch.full_like(LABELS, -100)
    assert chunked(HIDDEN, WEIGHT, none, reduction="sum_and_count")[0] == 0
    assert chunked(HIDDEN, WEIGHT, none).isnan() and plain(HIDDEN, WEIGHT, none).isnan()


@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(2, 7), st.integers(1, 12), st.integers(0, 99)
)
def test_any_shape_and_any_chunk_give_the_loss_of_whole_logits(
    tokens: int, width: int, classes: int, chunk: int, seed: int
) -> None:
    given = leaves(drawn(tokens, width, seed=seed), drawn(classes, width, seed=seed + 1))
    labels = torch.randint(0, classes, (tokens,), generator=torch.Generator().manual_seed(seed))
    labels[seed % tokens] = -100
    found, expected = (
        derivatives(lambda *x, f=f: f(*x, labels, reduction="sum", chunk_tokens=chunk), given, 1)  # type: ignore[misc]
        for f in (chunked, plain)
    )
    torch.testing.assert_close(found, expected)


def test_tokens_may_have_any_dimensions() -> None:
    found = chunked(HIDDEN.view(2, 3, 4, WIDTH), WEIGHT, LABELS.view(2, 3, 4))
    torch.testing.assert_close(found, plain(HIDDEN, WEIGHT))


def test_a_tied_embedding_gets_both_gradients() -> None:
    def loss(function: Loss, weight: Tensor) -> Tensor:
        return function(F.embedding(LABELS.clamp(min=0), weight), weight)

    (found, expected) = (
        torch.autograd.grad(loss(f, w), w) for f in (chunked, plain) for w in leaves(WEIGHT)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient_and_costs_no_product(frozen: int) -> None:
    given = leaves(HIDDEN, WEIGHT)
    given[frozen].requires_grad_(False)
    with Products() as products:
        chunked(*given).backward()
    assert given[frozen].grad is None and products.num == 2 * 4
    (expected,) = torch.autograd.grad(plain(*given), given[1 - frozen])
    torch.testing.assert_close(given[1 - frozen].grad, expected)


class Products(TorchDispatchMode):
    """Counts products of matrices, and the most elements that an operator makes."""

    num = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.num += name in ("mm", "addmm", "addmm_")
        if isinstance(out, Tensor) and not func.is_view:
            self.most = max(self.most, out.numel())
        return out


def test_a_chunk_costs_the_three_products_of_the_plain_loss_and_one_without_gradients() -> None:
    with Products() as products:
        chunked(*leaves(HIDDEN, WEIGHT)).backward()
    assert products.num == 3 * 4
    with Products() as products, torch.no_grad():
        chunked(*leaves(HIDDEN, WEIGHT))
    assert products.num == 4


def test_logits_never_exist_whole_in_a_first_or_second_derivative() -> None:
    """Nothing is as large as two chunks' logits, for many classes; a chunk by default
    has at most 2²⁵.
    """
    tokens, classes = 64, 4096
    given = leaves(drawn(tokens, 4, seed=1), drawn(classes, 4, seed=2))
    labels = torch.arange(tokens)
    with Products() as products:
        grads = torch.autograd.grad(chunked(*given, labels, shards=16), given, create_graph=True)
        torch.autograd.grad(sum(x.sin().sum() for x in grads), given)
    assert products.most <= 2 * 4 * classes
    with FakeTensorMode(), Products() as products:
        one = [torch.empty(8192, 4, requires_grad=True), torch.empty(131_072, 4)]
        fzero.linear_cross_entropy(*one, torch.zeros(8192, dtype=torch.int64)).backward()
    assert products.most == 1 << 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_fp32_under_half_precision(dtype: torch.dtype) -> None:
    """16 chunks whose parts of the weight's gradient would be lost, one after another,
    in a sum of half precision: error of one rounding, where such a sum has many.
    """
    tokens, classes = 4096, 8
    hidden, weight = (
        drawn(tokens, WIDTH, seed=1, dtype=dtype),
        drawn(classes, WIDTH, seed=2, dtype=dtype),
    )
    labels = torch.randint(0, classes, (tokens,), generator=torch.Generator().manual_seed(3))
    given, wide = leaves(hidden, weight), leaves(hidden.double(), weight.double())
    loss = fzero.linear_cross_entropy(*given, labels, chunk_tokens=16, reduction="sum")
    exact = plain(*wide, labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=torch.finfo(dtype).eps / 8, atol=0)
    loss.backward()
    exact.backward()
    error = (given[1].grad.double() - wide[1].grad).norm() / wide[1].grad.norm()
    assert given[1].grad.dtype == dtype and error < torch.finfo(dtype).eps
    naive = torch.zeros_like(weight)
    for part, own in zip(hidden.split(16), labels.split(16), strict=True):
        given = leaves(part, weight)
        naive += torch.autograd.grad(plain(*given, own, reduction="sum"), given[1])[0]
    assert (naive.double() - wide[1].grad).norm() / wide[1].grad.norm() > 2 * error


def test_autocast_computes_products_in_its_dtype_and_the_loss_in_fp32() -> None:
    given = leaves(HIDDEN.float(), WEIGHT.float())
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (derivatives(f, given, 1) for f in (chunked, plain))
    assert {x.dtype for x in found} == {torch.float32}
    # the gradient of the logits is rounded to bf16, before or after its division by the count
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-3)
    assert not torch.allclose(found[1], derivatives(plain, given, 1)[1], rtol=1e-4)


# --- transformations ------------------------------------------------------------------------------

both = (0, 1)


def mixed(loss: Loss) -> Loss:
    """A function of the gradients, so that its own are second derivatives."""
    grad = torch.func.grad(loss, both)
    return lambda *x: sum(each.sin().sum() for each in grad(*x))


def pair(x: Tensor) -> Tensor:
    return torch.stack([x, 2 * x])


TRANSFORMED: dict[str, Callable[[Loss], Any]] = {
    "grad": lambda f: torch.func.grad(f, both)(HIDDEN, WEIGHT),
    "grad of grad": lambda f: torch.func.grad(mixed(f), both)(HIDDEN, WEIGHT),
    "grad and value": lambda f: torch.func.grad_and_value(f, 1)(HIDDEN, WEIGHT),
    "jvp": lambda f: torch.func.jvp(f, (HIDDEN, WEIGHT), (HIDDEN.cos(), WEIGHT.sin())),
    "jvp of one": lambda f: torch.func.jvp(lambda w: f(HIDDEN, w), (WEIGHT,), (WEIGHT.sin(),)),
    "hessian": lambda f: torch.func.hessian(f, both)(HIDDEN, WEIGHT),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f, 1), 0)(HIDDEN, WEIGHT),
    "vmap": lambda f: torch.vmap(f, (0, None))(pair(HIDDEN), WEIGHT),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f, both), (0, None))(pair(HIDDEN), WEIGHT),
    "vmap of grad of grad": lambda f: torch.vmap(torch.func.grad(mixed(f), both))(
        pair(HIDDEN), pair(WEIGHT)
    ),
    "grad of vmap": lambda f: torch.func.grad(
        lambda h, w: torch.vmap(f, (0, None))(pair(h), w).sum(), both
    )(HIDDEN, WEIGHT),
    "autograd of vmap": lambda f: [
        torch.autograd.grad(torch.vmap(f, (None, 0))(h, pair(w)).sum(), (h, w))
        for h, w in [leaves(HIDDEN, WEIGHT)]
    ],
    "make_fx of grad": lambda f: make_fx(lambda h, w: torch.func.grad(f, both)(h, w))(
        HIDDEN, WEIGHT
    )(HIDDEN.cos(), WEIGHT),
    "fake make_fx": lambda f: make_fx(
        lambda h, w, y: torch.func.grad(mixed(lambda *x: f(*x, y)), both)(h, w),
        tracing_mode="fake",
    )(HIDDEN, WEIGHT, LABELS)(HIDDEN.cos(), WEIGHT, LABELS),
    "checkpoint": lambda f: [
        torch.autograd.grad(checkpoint(f, h, w, use_reentrant=False), (h, w))
        for h, w in [leaves(HIDDEN, WEIGHT)]
    ],
    "compile of grad": lambda f: compiled(torch.func.grad(f, both))(HIDDEN, WEIGHT),
    "grad of compile": lambda f: [
        torch.autograd.grad(compiled(f)(h, w), (h, w)) for h, w in [leaves(HIDDEN, WEIGHT)]
    ],
}


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "how", [{"softcap": 3.0}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str
)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_transformation_gives_what_it_gives_of_whole_logits(
    name: str, how: dict[str, Any]
) -> None:
    found, expected = (
        TRANSFORMED[name](lambda h, w, y=LABELS, f=f: f(h, w, y, **how)) for f in (chunked, plain)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.long
def test_inductor_gives_the_gradients_of_whole_logits() -> None:
    given = leaves(HIDDEN.float(), WEIGHT.float())
    found = derivatives(torch.compile(chunked, fullgraph=True), given, 1)
    torch.testing.assert_close(found, derivatives(plain, given, 1))


def test_forward_mode_over_forward_mode_is_refused() -> None:
    """PyTorch would make it zero."""
    with pytest.raises(ValueError, match=r"once in forward mode, .* jacfwd\(jacrev"):
        torch.func.jacfwd(torch.func.jacfwd(chunked))(HIDDEN, WEIGHT)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"labels": LABELS[1:]}, r"labels must have hidden's shape .* \(24,\), got \(23,\); cut"),
        ({"labels": LABELS.float()}, "classes as integers, got torch.float32"),
        ({"weight": WEIGHT.T}, r"\(V, D\), got \(24, 5\) and \(5, 11\)"),
        ({"bias": BIAS[1:]}, r"bias must have shape \(11,\), got \(10,\)"),
        ({"shards": 7}, "shards must divide the 24 tokens, got 7; pass 6, or pad to a multiple"),
        ({"shards": 2, "chunk_tokens": 2}, "both set the chunks, got 2 and 2; leave one"),
        ({"chunk_tokens": 0}, "chunk_tokens: must be a whole number, at least 1, got 0"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"z_loss": -1.0}, "z_loss must be a factor of at least 0, got -1.0"),
        ({"softcap": 0.0}, "softcap must be above 0, or None for none, got 0.0"),
        ({"reduction": "none"}, "reduction must be 'mean', 'sum' or 'sum_and_count'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_an_error_that_names_the_rule(how: dict[str, Any], message: str) -> None:
    given = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **how}
    with pytest.raises(ValueError, match=f"^linear_cross_entropy.*{message}"):
        fzero.linear_cross_entropy(**given)
