"""Quantizers, masks and schedules: values from the formulas, and laws."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

from fzero.compression import formulas
from fzero.compression.formulas import bits_at, quantize, share_at, top_share, uniform_noise
from fzero.compression.inputs import quantized_inputs
from fzero.compression.plan import CompressionPlan
from fzero.compression.techniques import Mask, Quantize, QuantizeInput
from fzero.model.transforms import PulledGrad
from fzero.runtime.param_views import ParamViews


def test_quantizers_have_the_values_of_their_formulas() -> None:
    w = torch.tensor([-1.0, -0.3, 0.1, 0.9])
    # s = 1/4, at most 3
    assert quantize(w, 3, 1, symmetric=True).tolist() == [-1.0, -0.25, 0.0, 0.75]
    s = 1.9 / 8
    # z = -4 s
    assert quantize(w, 3, 1, symmetric=False).tolist() == pytest.approx([-4 * s, -s, 0, 3 * s])
    # above 0.7 · 0.575
    assert quantize(w, 2, 1, symmetric=True).tolist() == pytest.approx([-0.95, 0.0, 0.0, 0.95])
    assert quantize(w, 1, 1, symmetric=True).tolist() == pytest.approx(
        [-0.575, -0.575, 0.575, 0.575]
    )
    for bits in (1, 2, 8):
        # not 0/0
        assert torch.equal(quantize(torch.zeros(4), bits, 2, symmetric=True), torch.zeros(4))
    assert torch.equal(
        quantize(torch.full((4,), 0.3), 8, 2, symmetric=False), torch.full((4,), 0.3)
    )


@pytest.mark.parametrize("range_of", [None, "x_min_max"])
def test_nothing_is_quantized_to_nothing(range_of: str | None) -> None:
    """A module of zero size, and an input without samples, for example of an expert
    that gets no token.
    """
    for shape in ((0,), (0, 4), (3, 0)):
        assert quantize(torch.empty(shape), 4, 1, symmetric=True).shape == shape
        inputs = {"": QuantizeInput(4, True, range_of=range_of)}
        module = torch.nn.Linear(shape[-1], 2)
        module.register_buffer("x_min_max", torch.ones(2))
        with quantized_inputs(module, CompressionPlan(inputs=inputs)):
            assert module(torch.empty(shape)).shape == (*shape[:-1], 2)
        assert torch.equal(module.x_min_max, torch.ones(2))


def test_an_input_given_by_its_name_is_quantized_too() -> None:
    module, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    with quantized_inputs(module, CompressionPlan(inputs={"": QuantizeInput(4, True)})):
        assert torch.equal(module(input=x), module(x))
    assert not torch.equal(module(x), module(quantize(x, 4, 3, symmetric=True)))


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_group_has_at_most_2_to_the_bits_values(
    bits: int, num_groups: int, symmetric: bool, seed: int, dtype: str
) -> None:
    w = torch.randn(num_groups * 40, generator=torch.Generator().manual_seed(seed)).to(
        getattr(torch, dtype)
    )
    once = quantize(w, bits, num_groups, symmetric=symmetric or bits < 3)
    assert once.dtype == w.dtype and once.shape == w.shape
    assert all(len(of_group.unique()) <= 2**bits for of_group in once.reshape(num_groups, -1))
    falling = quantize(
        w, torch.tensor(bits), num_groups, symmetric=symmetric or bits < 3, bounds=(1, 8)
    )
    if symmetric or bits >= 3:
        assert torch.equal(falling, once)  # bits as a tensor, as in a graph: the same bits


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_mask_keeps_the_share_rounded_up_and_the_first_of_equal_scores(
    count: int, ratio: float, seed: int
) -> None:
    scores = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(seed)).float()
    order = scores.argsort(descending=True, stable=True)[: math.ceil(ratio * count)]
    for most in (0, count):  # by a selection, and by a sort
        with mock.patch.object(formulas, "SORTED_AT_MOST", most):
            mask = top_share(scores, ratio)
        assert sorted(order.tolist()) == mask.nonzero().reshape(-1).tolist()


@given(st.integers(0, 40), st.integers(3, 16), st.integers(0, 6), st.integers(1, 5))
def test_schedules_are_the_same_for_tensors_and_numbers(
    n: int, target: int, falls: int, period: int
) -> None:
    start = target + falls
    closed = start - min(falls, 0 if n < period else math.floor(math.log2(n / period)) + 1)
    assert (
        bits_at(n, start, target, period)
        == int(bits_at(torch.tensor(n), start, target, period))
        == closed
    )
    share = share_at(torch.tensor(n), start, target, period, 0.1)
    assert share_at(n, start, target, period, 0.1) == float(share)


def test_stochastic_noise_is_uniform_and_depends_on_update_and_salt_only() -> None:
    noise = uniform_noise(torch.empty(100_000), 7, 3)
    assert noise.min() >= -0.5 and noise.max() < 0.5
    assert abs(float(noise.mean())) < 0.005 and float(noise.var()) == pytest.approx(
        1 / 12, rel=0.02
    )
    assert torch.equal(noise, uniform_noise(torch.empty(100_000), 7, torch.tensor(3)))
    assert not torch.equal(noise, uniform_noise(torch.empty(100_000), 7, 4))
    w = torch.full((100_000,), 0.3)
    w[0] = 1.0
    mean = quantize(w, 3, 1, symmetric=True, noise=noise)[1:].mean()
    assert float(mean) == pytest.approx(0.3, abs=0.002)  # 0.25 and 0.5 in turn


@pytest.mark.parametrize("kind", ["sparse", "row", "head", "channel"])
@pytest.mark.parametrize("n", [1, 2])
def test_gradients_by_hand_are_those_of_autograd(kind: str, n: int) -> None:
    """Eager steps take the first, captured ones the second."""
    torch.manual_seed(0)
    shape = (6, 8, 3, 3) if kind == "channel" else (6, 8)
    shapes = {"sparse": shape, "row": (6, 1), "head": (1, 4), "channel": (6, 1, 1, 1)}
    x, scores, grad = torch.randn(shape), torch.randn(shapes[kind]), torch.randn(shape)
    mask = Mask(kind, 0.5, "scores", trained=True, offset=2)  # type: ignore[arg-type]
    leaf, of_scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    for number in (n, torch.tensor(n)):
        seen = mask.value(leaf, {"scores": of_scores}, number)
        grads = torch.autograd.grad(seen, [leaf, of_scores], grad, allow_unused=True)
        views = ParamViews({"x": (mask,)}, lambda: n, {})
        pulled = views.pulled("x", grad, lambda names: {"x": x, "scores": scores})
        torch.testing.assert_close(grads[0], pulled["x"].whole)
        expected = pulled["scores"].grad if "scores" in pulled else torch.zeros_like(scores)
        torch.testing.assert_close(
            torch.zeros_like(scores) if grads[1] is None else grads[1], expected
        )
        with torch.no_grad():
            assert torch.equal(seen.detach(), mask.value(x, {"scores": scores}, n))


@pytest.mark.parametrize("trained", [True, False], ids=["scores", "l1"])
@pytest.mark.parametrize("names", [("w", "b"), ("b", "w")], ids=" ".join)
def test_a_mask_that_is_made_once_has_the_bits_of_a_new_one(
    names: tuple[str, ...], trained: bool
) -> None:
    torch.manual_seed(0)
    tensors = {"w": torch.randn(6, 6).bfloat16(), "b": torch.randn(6)}
    tensors["source"] = torch.randn(6, 1) if trained else torch.rand(6, 1) > 0.5
    with torch.no_grad():
        for name in names:
            x, mask = tensors[name], Mask("row", 0.5, "source", trained, of_bias=name == "b")
            made = mask.shared(x, tensors)
            assert len(made) == 1
            seen = mask.value(x, {**tensors, **made}, 0)
            assert seen.dtype == x.dtype and torch.equal(seen, mask.value(x, tensors, 0))
            kept, new = (
                mask.pulled(PulledGrad(x), x, of, 0).grad for of in ({**tensors, **made}, tensors)
            )
            assert kept.mask is not None and torch.equal(kept.whole, new.whole)


@pytest.mark.parametrize(
    "technique", [Quantize(2, 5, 1, 2), Quantize(4, 8, 1, 2, 3, False, 0.1, 5)]
)
def test_gradients_go_straight_through_and_a_number_is_a_tensor(technique: Quantize) -> None:
    x = torch.randn(6, 8).requires_grad_()
    for n in range(8):
        seen, in_graph = (technique.value(x, {}, number) for number in (n, torch.tensor(n)))
        assert torch.equal(seen, in_graph) and torch.equal(
            seen.detach(), technique.value(x.detach(), {}, n)
        )
        # a share begins at 1, and again at each loss of a bit
        if technique.change_ratio is None or n < 2:
            assert torch.equal(seen.detach(), x.detach()) is (n < 2)
        for found in (seen, in_graph):
            assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.ones_like(x))


def test_inputs_have_a_range_for_each_token_or_image_or_a_static_one() -> None:
    x = torch.randn(2, 3, 4, 4)
    per_token = QuantizeInput(4, symmetric=True).seen(x, None, 0)
    assert torch.equal(per_token[1, 2, 3], quantize(x[1, 2, 3], 4, 1, symmetric=True))
    per_image = QuantizeInput(4, symmetric=False, per_image=True).seen(x, None, 0)
    assert torch.equal(per_image[1], quantize(x[1], 4, 1, symmetric=False))
    static = QuantizeInput(8, symmetric=False, range_of="x_min_max").seen(
        x, torch.tensor([-1.0, 1.0]), 0
    )
    assert static.min() >= -1 and static.max() <= 1 and len(static.unique()) <= 256
