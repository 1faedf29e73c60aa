"""The laws of codecs: exactly `nbytes` bytes, an error within the bound, and no lost
overflow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fzero.comms.codecs import FLOATS, Codec, cast, quantize


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    if draw(st.booleans()):
        return cast(draw(st.sampled_from(FLOATS)))
    return quantize(draw(st.sampled_from([4, 8])), 2 * draw(st.integers(1, 40)))


@st.composite
def numbers(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of normal numbers of any magnitude, a few of which have another magnitude."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(0, 300)))
    sizes = torch.tensor([10.0 ** draw(st.integers(-44, 4)), 10.0 ** draw(st.integers(-5, 4))])
    which = (torch.rand(shape, generator=generator) < 0.1).long()
    return (torch.randn(shape, generator=generator) * sizes[which]).to(dtype)


@given(codecs(), numbers())
def test_decoded_numbers_are_within_the_bound_and_nbytes_is_exact(
    codec: Codec, x: torch.Tensor
) -> None:
    hook = codec.encode(x)
    assert hook.dtype == torch.uint8 and hook.shape == (*x.shape[:-1], codec.nbytes(x.shape[-1]))
    arrived = codec.decode(hook, x.shape[-1], torch.float32)
    assert arrived.dtype == torch.float32 and arrived.shape == x.shape
    assert ((arrived.double() - x.double()).abs() <= codec.bound(x)).all()


EDGES = (
    3.4028234663852886e38,
    3.4028232635611926e38,
    1e38,
    1.0,
    1.1754943508222875e-38,
    1e-44,
    1.401298464324817e-45,
    0.0,
)
"""The largest fp32 number, the one below it, the smallest normal one, subnormal ones,
and others.
"""


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 6),
    st.lists(st.sampled_from(EDGES) | st.floats(0, 1), min_size=1),
    st.data(),
)
def test_finite_numbers_at_the_edges_of_the_range_stay_finite_and_within_the_bound(
    bits: Any, half: int, sizes: list[float], data: Any
) -> None:
    signs = data.draw(
        st.lists(st.sampled_from([-1.0, 1.0]), min_size=len(sizes), max_size=len(sizes))
    )
    # 127 times a 127th of the largest number would be infinite
    scale = data.draw(st.just(1.0) | st.floats(0.99, 1.0))
    x = torch.tensor(sizes, dtype=torch.float64) * torch.tensor(signs, dtype=torch.float64) * scale
    codec, x = quantize(bits, 2 * half), x.float()
    arrived = codec.decode(codec.encode(x), len(x), torch.float32)
    assert (
        arrived.isfinite().all() and ((arrived.double() - x.double()).abs() <= codec.bound(x)).all()
    )
    x[-1] = data.draw(st.sampled_from([float("inf"), float("-inf"), float("nan")]))
    arrived, broken = (
        codec.decode(codec.encode(x), len(x), torch.float32),
        (len(x) - 1) // (2 * half) * 2 * half,
    )
    assert arrived[broken:].isnan().all() and arrived[:broken].isfinite().all()


@given(codecs(), numbers())
def test_rows_are_coded_independently(codec: Codec, x: torch.Tensor) -> None:
    together = codec.encode(x)
    for row, hook in zip(x, together, strict=True):
        assert torch.equal(codec.encode(row), hook)
    arrived = [codec.decode(hook, x.shape[-1], torch.float32) for hook in together]
    assert torch.equal(torch.stack(arrived), codec.decode(together, x.shape[-1], torch.float32))


@given(codecs(), st.integers(1, 100), st.data())
def test_an_overflow_is_decoded_as_an_overflow(codec: Codec, numel: int, data: Any) -> None:
    x = torch.ones(numel)
    place = data.draw(st.integers(0, numel - 1))
    x[place] = data.draw(st.sampled_from([float("inf"), float("-inf"), float("nan")]))
    assert not codec.decode(codec.encode(x), numel, torch.float32)[place].isfinite()


@pytest.mark.parametrize(("bits", "times"), [(8, 3.9), (4, 7.5)])
def test_quantised_fp32_is_about_a_quarter_or_an_eighth(bits: Any, times: float) -> None:
    assert 4 * 2**20 / quantize(bits, 256).nbytes(2**20) > times


def test_integers_times_the_scale_are_decoded_exactly() -> None:
    for bits, most in ((4, 7), (8, 127)):
        x = torch.arange(-most, most + 1, dtype=torch.float32)
        x = torch.nn.functional.pad(x, (0, 1)) * 0.5  # a power of two, so that no product rounds
        codec = quantize(bits, len(x))
        assert torch.equal(codec.decode(codec.encode(x), len(x), torch.float32), x)


def test_bad_codecs_are_refused() -> None:
    with pytest.raises(ValueError, match="quantize: bits must be 4 or 8, got 3"):
        quantize(3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="quantize: block must be an even number of elements, got 7"
    ):
        quantize(8, 7)
    with pytest.raises(ValueError, match=r"cast: dtype must be one of float64.* got 'int8'"):
        cast("int8")


@pytest.mark.parametrize("codec", [cast("bfloat16"), quantize(4, 4)])
def test_rows_of_vmap_are_coded_as_alone_also_compiled(codec: Codec) -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(x), 5, torch.float32)

    rows = torch.arange(15.0).view(3, 5)
    alone, mapped = torch.stack([code(row) for row in rows]), torch.vmap(code)
    assert torch.equal(mapped(rows), alone)
    # before, Dynamo reaches the function that stands in for vmap's missing rule
    if torch.__version__ >= "2.13":
        assert torch.equal(torch.compile(mapped, backend="aot_eager")(rows), alone)
