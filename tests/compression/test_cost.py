"""What compression costs: no more than the formula itself, which a parametrization
computes, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.compression.techniques import Mask, Quantize

NUMEL = 512 * 512


def best(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(60):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def quantized(x: Tensor) -> Tensor:
    scale = 2 * x.abs().amax() / 256
    return (x / scale).round().clamp(-128, 127) * scale


def largest(x: Tensor, scores: Tensor) -> Tensor:
    order = scores.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(NUMEL)
    mask[order[: NUMEL // 2]] = 1
    return x * mask.reshape(x.shape)


@pytest.mark.long
def test_a_value_takes_no_longer_than_its_formula() -> None:
    x, scores = torch.randn(512, 512), torch.randn(512, 512)
    mask, quantizer = Mask("sparse", 0.5, "scores", trained=True), Quantize(8, 8)
    with torch.no_grad():
        assert torch.equal(quantizer.value(x, {}, 0), quantized(x))
        assert torch.equal(mask.value(x, {"scores": scores}, 0), largest(x, scores))
        assert best(lambda: quantizer.value(x, {}, 0)) < 1.3 * best(
            lambda: quantized(x)
        )  # 1.3: what the clock varies by
        assert best(lambda: mask.value(x, {"scores": scores}, 0)) < 1.3 * best(
            lambda: largest(x, scores)
        )
