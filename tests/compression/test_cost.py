"""What compression costs: no more passes over the elements than the formula itself,
which a parametrization computes, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.compression.techniques import Mask, Quantize

NUMEL = 512 * 512
VIEWS = {"view", "detach", "slice", "lift_fresh", "promote_types"}


class Passes(TorchDispatchMode):
    """Notes the operators that read or write all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in optree.tree_leaves((args, out)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        if name not in VIEWS and any(x.numel() >= NUMEL for x in tensors):
            self.names.append(name)
        return out


def passes(function: Callable[[], Any]) -> list[str]:
    with torch.no_grad(), Passes() as noted:
        function()
    return noted.names


def quantized(x: Tensor) -> Tensor:
    scale = 2 * x.abs().amax() / 256
    return (x / scale).round().clamp(-128, 127) * scale


def largest(x: Tensor, scores: Tensor) -> Tensor:
    order = scores.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(NUMEL)
    mask[order[: NUMEL // 2]] = 1
    return x * mask.reshape(x.shape)


def test_a_value_makes_no_more_passes_than_its_formula() -> None:
    """A mask passes more often, and sorts nothing: a sort of n elements is log2(n) = 18
    passes and more."""
    x, scores = torch.randn(512, 512), torch.randn(512, 512)
    mask, quantizer = Mask("sparse", 0.5, "scores", trained=True), Quantize(8, 8)
    with torch.no_grad():
        assert torch.equal(quantizer.value(x, {}, 0), quantized(x))
        assert torch.equal(mask.value(x, {"scores": scores}, 0), largest(x, scores))
    assert len(passes(lambda: quantizer.value(x, {}, 0))) <= len(passes(lambda: quantized(x)))
    of_mask = passes(lambda: mask.value(x, {"scores": scores}, 0))
    assert "sort" in passes(lambda: largest(x, scores)) and "sort" not in of_mask
    assert len(of_mask) < 18
