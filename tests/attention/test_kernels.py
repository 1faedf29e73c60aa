"""Every kernel computes attention under the mask of the layout, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import fzero
from fzero.attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    Layout,
    Local,
    blocks as blocks_module,
    choose_backend,
    dense_mask,
    density,
    mask_mod,
    sparse_attention,
)

LAYOUTS = {
    "fixed": Fixed(),
    "fixed by tokens": Fixed(attention="unidirectional"),
    "above the diagonal": Fixed(num_global_blocks=2, attention="unidirectional"),
    "global rows": BSLongformer(global_block_indices=(0, 2)),
    "longformer by tokens": BSLongformer(attention="unidirectional"),
    "random for each head": BigBird(different_layout_per_head=True),
    "patterns of heads": Fixed(
        num_different_global_patterns=3,
        different_layout_per_head=True,
        num_local_blocks=3,
        attention="unidirectional",
    ),
    "local": Local(),
    "dense": Dense(),
}
BATCH, HEADS, BLOCK, WIDTH = 2, 3, 4, 8


def inputs(length: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, length, WIDTH)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *biases: Tensor) -> Tensor:
    """Attention in the words of its definition; a query without keys gets 0."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    for bias in biases:
        scores = scores + bias
    scores = scores.masked_fill(~mask, float("-inf"))
    never = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(never, 0), -1).masked_fill(never, 0) @ v


def with_grads(y: Tensor, *of: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad(y, of, weights)]


def same(made: list[Tensor], expected: list[Tensor], *, atol: float = 1e-11) -> None:
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)


@pytest.mark.parametrize("backend", ["blocks", "sdpa", "auto"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_kernel_gives_the_numbers_and_gradients_of_masked_attention(
    name: str, backend: Any
) -> None:
    layout = LAYOUTS[name].layout(7, heads=HEADS)
    causal = layout.attention == "unidirectional"
    of = inputs(7 * BLOCK)
    made = sparse_attention(*of, layout, block=BLOCK, backend=backend)
    expected = plain(*of, dense_mask(layout, BLOCK, causal=causal))
    same(with_grads(made, *of), with_grads(expected, *of))


@pytest.mark.parametrize("most", [1, 500, 2**30])
def test_sizes_of_chunks_change_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BigBird(different_layout_per_head=True).layout(8, heads=HEADS)
    of = inputs(8 * BLOCK)
    expected = with_grads(plain(*of, dense_mask(layout, BLOCK)), *of)
    monkeypatch.setitem(blocks_module.CHUNK_SCORES, "cpu", most)
    same(with_grads(sparse_attention(*of, layout, block=BLOCK, backend="blocks"), *of), expected)


@settings(max_examples=40, deadline=None)
@given(
    st.data(), st.integers(1, 6), st.sampled_from([1, HEADS]), st.sampled_from([None, False, True])
)
def test_any_layout_of_any_blocks_is_that_of_its_mask(
    data: st.DataObject, size: int, heads: int, causal: bool | None
) -> None:
    bits = [
        [data.draw(st.integers(0, 2**size - 1)) | 1 << row for row in range(size)]
        for _ in range(heads)
    ]
    layout = Layout(tuple(tuple(head) for head in bits))
    of = inputs(size * BLOCK)
    made = sparse_attention(*of, layout, block=BLOCK, causal=causal, backend="blocks")
    same(
        with_grads(made, *of),
        with_grads(plain(*of, dense_mask(layout, BLOCK, causal=bool(causal))), *of),
    )


@pytest.mark.parametrize("name", ["fixed by tokens", "random for each head", "global rows"])
@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
def test_masks_of_keys_and_biases_of_every_shape_are_added(name: str, backend: Any) -> None:
    layout = LAYOUTS[name].layout(5, heads=HEADS)
    length, generator = 5 * BLOCK, torch.Generator().manual_seed(1)
    key_mask = torch.ones(BATCH, length, dtype=torch.bool)
    key_mask[0, -6:] = False
    key_mask[1, :] = False  # every query of a sample: no key is left
    shapes = [
        (length, length),
        (BATCH, 1, 1, length),
        (HEADS, length, length),
        (BATCH, HEADS, length, length),
    ]
    biases = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    of = inputs(length)
    made = sparse_attention(
        *of, layout, block=BLOCK, key_mask=key_mask, biases=biases, backend=backend
    )
    mask = (
        dense_mask(layout, BLOCK, causal=layout.attention == "unidirectional")
        & key_mask[:, None, None]
    )
    expected = plain(*of, mask, *biases)
    same(with_grads(made, *of), with_grads(expected, *of))
    assert not made[1].any()


def test_a_trained_bias_gets_its_gradient_from_the_reference() -> None:
    layout = Local().layout(8)
    of, bias = (
        inputs(8 * BLOCK),
        torch.zeros(HEADS, 8 * BLOCK, 8 * BLOCK, dtype=torch.float64, requires_grad=True),
    )
    made = sparse_attention(*of, layout, block=BLOCK, biases=[bias])
    same(
        with_grads(made, bias),
        with_grads(plain(*of, dense_mask(layout, BLOCK, causal=True), bias), bias),
    )
    with pytest.raises(ValueError, match="backend 'blocks' has no gradient for biases"):
        sparse_attention(*of, layout, block=BLOCK, biases=[bias], backend="blocks")


@pytest.mark.parametrize("shape", [(0, 2, 8, 4), (2, 0, 8, 4), (2, 2, 8, 0)])
@pytest.mark.parametrize("backend", ["auto", "blocks", "sdpa"])
def test_a_batch_without_elements_gives_one(shape: tuple[int, ...], backend: Any) -> None:
    parts = [torch.empty(shape, requires_grad=True) for _ in range(3)]
    found = sparse_attention(*parts, Local().layout(4), block=2, backend=backend)
    found.sum().backward()
    assert found.shape == shape and all(x.grad is not None and x.grad.shape == shape for x in parts)


def test_in_fp32_blocks_and_masked_sdpa_agree_to_1e_5() -> None:
    layout = BSLongformer(attention="unidirectional").layout(16)
    q, k, v = (torch.randn(2, 2, 16 * 16, 64, requires_grad=True) for _ in range(3))
    found = [
        with_grads(sparse_attention(q, k, v, layout, block=16, backend=x), q, k, v)
        for x in ("blocks", "sdpa")
    ]
    same(*found, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_those_of_fp32_to_rounding(dtype: torch.dtype) -> None:
    layout = Fixed().layout(6)
    wide = inputs(6 * BLOCK, dtype=torch.float32)
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    made = with_grads(sparse_attention(*narrow, layout, block=BLOCK, backend="blocks"), *narrow)
    assert {x.dtype for x in made} == {dtype}
    expected = with_grads(sparse_attention(*wide, layout, block=BLOCK, backend="sdpa"), *wide)
    same([x.float() for x in made], expected, atol=0.03)


@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
def test_under_autocast_attention_is_computed_in_its_dtype(backend: Any) -> None:
    layout = Fixed().layout(6)
    of = inputs(6 * BLOCK, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = sparse_attention(*of, layout, block=BLOCK, backend=backend)
    narrow = [x.detach().bfloat16().requires_grad_() for x in of]
    expected = sparse_attention(*narrow, layout, block=BLOCK, backend=backend)
    assert made.dtype == torch.bfloat16 and made.equal(expected)
    same([x.bfloat16() for x in with_grads(made, *of)], with_grads(expected, *narrow), atol=0)


def test_no_token_sees_a_later_one_where_it_must_not() -> None:
    layout = Fixed(num_global_blocks=2, attention="unidirectional").layout(8)
    q, k, v = inputs(8 * BLOCK)
    for causal, by_tokens in ((None, True), (True, True), (False, False)):
        y = sparse_attention(q, k, v, layout, block=BLOCK, causal=causal, backend="blocks")
        (grad,) = torch.autograd.grad(y[:, :, 2 * BLOCK].sum(), v)
        assert (
            not grad[:, :, 2 * BLOCK + 1 :].any()
        ) == by_tokens  # by blocks, the later ones of the block, and block 3


def test_gradients_of_gradients_and_torch_func_are_right() -> None:
    layout = BSLongformer(attention="unidirectional").layout(3)
    of = [x.detach()[:1, :1].requires_grad_() for x in inputs(3 * BLOCK)]
    bias = torch.randn(3 * BLOCK, 3 * BLOCK, dtype=torch.float64)

    def f(*x: Tensor) -> Tensor:
        return sparse_attention(*x, layout, block=BLOCK, backend="blocks", biases=[bias])

    torch.autograd.gradcheck(f, of, fast_mode=True)
    torch.autograd.gradgradcheck(f, of, fast_mode=True)
    expected = torch.autograd.grad(f(*of).square().sum(), of[0])[0]
    functional = torch.func.grad(lambda q: f(q, *of[1:]).square().sum())
    torch.testing.assert_close(functional(of[0]), expected)
    stacked = [torch.stack([x, 2 * x]).detach() for x in of]
    each = torch.vmap(torch.func.grad(lambda q, k, v: f(q, k, v).square().sum()))(*stacked)
    torch.testing.assert_close(each[0], expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
def test_torch_compile_takes_it_as_one_graph(backend: Any) -> None:
    layout = BigBird(attention="unidirectional").layout(6)
    of = inputs(6 * BLOCK)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, layout, block=BLOCK, backend=backend)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    same(with_grads(compiled(*of), *of), with_grads(f(*of), *of))
    functional = torch.func.grad(lambda q, k, v: f(q, k, v).square().sum())
    plain_q, *others = (x.detach() for x in of)
    # Dynamo differentiates the forward itself
    inside = torch.compile(functional, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(inside(plain_q, *others), functional(plain_q, *others))


# --- FlexAttention --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["fixed by tokens", "random for each head"])
def test_flex_attention_sees_the_same_mask(name: str) -> None:
    """On the CPU only its forward can be tried."""
    layout = LAYOUTS[name].layout(5, heads=HEADS)
    q, k, v = (x.detach().float() for x in inputs(5 * BLOCK))
    made = sparse_attention(q, k, v, layout, block=BLOCK, backend="flex")
    expected = plain(
        q, k, v, dense_mask(layout, BLOCK, causal=layout.attention == "unidirectional")
    )
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


def test_a_mask_function_is_the_mask() -> None:
    layout = LAYOUTS["random for each head"].layout(4, heads=HEADS)
    at = torch.arange(4 * BLOCK)
    keeps = mask_mod(layout, BLOCK, causal=True)
    made = keeps(torch.tensor(0), torch.arange(HEADS)[:, None, None], at[:, None], at)
    assert made.equal(dense_mask(layout, BLOCK, causal=True)[0])


def test_the_kernel_follows_from_device_density_and_biases() -> None:
    sparse, dense = Local().layout(32), Dense().layout(32)
    expected = ["blocks", "sdpa", "flex", "sdpa"]
    found = [choose_backend(x, device) for device in ("cpu", "cuda") for x in (sparse, dense)]
    assert found == expected
    assert (
        choose_backend(sparse, "cuda", has_biases=True)
        == choose_backend(sparse, "cuda", in_graph=True)
        == "blocks"
    )
    assert choose_backend(sparse, "cpu", has_biases=True, biases_need_grad=True) == "sdpa"
    assert density(sparse) == 63 / 1024


# --- refusals -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_fix() -> None:
    q, k, v = (x.detach() for x in inputs(16))
    layout, flex = Local().layout(4), {"backend": "flex"}
    for args, more, says in [
        (
            (q, k[:, :, :8], v, layout),
            {},
            r"one shape \(B, H, L, D\), got \(2, 3, 16, 8\), \(2, 3, 8, 8\)",
        ),
        (
            (q, k, v.float(), layout),
            {},
            "one dtype, got torch.float64, torch.float64, torch.float32",
        ),
        (
            (q[:, :, :15], k[:, :, :15], v[:, :, :15], layout),
            {},
            "multiple of block, 4, got 15; pad .*pad_to_block_size",
        ),
        (
            (q, k, v, Local().layout(5)),
            {},
            r"must have 4 blocks for 16 tokens in blocks of 4, got 5; .* layout.corner\(4\)",
        ),
        ((q, k, v, Layout(layout.rows * 2)), {}, "for 1 or all 3 heads, got 2"),
        ((q, k, v, Layout(((1, 1, 0, 1),))), {}, "row 2 of head 0 keeps none"),
        ((q, k, v, Layout(((2, 2, 2, 2),))), {"causal": True}, "row 0 of head 0 keeps none"),
        (
            (q, k, v, layout),
            {"key_mask": torch.ones(2, 16)},
            r"key_mask must be bool of .* \(2, 16\), got torch.float",
        ),
        (
            (q, k, v, layout),
            {"biases": [torch.ones(4, 16)]},
            r"biases\[0\] must be broadcastable .* got \(4, 16\)",
        ),
        ((q, k, v, layout), {"biases": [torch.ones(16, 1)]}, "with L keys"),
        (
            (q, k, v, layout),
            {"backend": "triton"},
            "backend must be one of auto, sdpa, blocks, flex, got 'triton'",
        ),
        ((q, k, v, layout), {"biases": [torch.ones(16)], **flex}, "takes no biases"),
        ((q.clone().requires_grad_(), k, v, layout), flex, "needs CUDA for gradients"),
    ]:
        with pytest.raises(ValueError, match=says):
            sparse_attention(*args, block=4, **more)  # type: ignore[arg-type]


# --- inside a step --------------------------------------------------------------------------------


class Attends(nn.Module):
    """One layer of attention over a layout."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.backend = nn.Linear(16, 48), nn.Linear(16, 16), backend
        self.layout = BSLongformer(attention="unidirectional").layout(6)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTC).view(*x_BTC.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = sparse_attention(q, k, v, self.layout, block=BLOCK, backend=self.backend)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return (x_BTC + mixed).square().mean()


def weights_after(backend: Any, *, compile: Any = None) -> dict[str, Tensor]:
    batch = torch.linspace(-1, 1, 2 * 6 * BLOCK * 16).view(2, 6 * BLOCK, 16)
    step = fzero.make_train_step(
        Attends(backend),
        {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}},
        compile=compile,
        compile_backend="aot_eager",
    )
    state = step.init()
    for _ in range(2):
        state, _ = step(state, batch)
    return step.gather(state)


@pytest.mark.parametrize("compile", [None, pytest.param("step", marks=pytest.mark.long)])
def test_a_step_trains_through_blocks_as_through_the_reference(compile: Any) -> None:
    expected, made = weights_after("sdpa"), weights_after("blocks", compile=compile)
    for name in expected:
        torch.testing.assert_close(made[name], expected[name], atol=1e-6, rtol=1e-5)
