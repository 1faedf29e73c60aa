"""What the tests of compression share: a model, its configurations, and the formulas as
autograd functions, as the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fzero

WIDTH, HEADS, CLASSES, SAMPLES = 8, 4, 3, 16


class Net(nn.Module):
    """Two repeated blocks and a head; `head_pruning` goes on `out`, row pruning on
    `up`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(x), y)

    def logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.out(torch.tanh(self.value(x))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def technique(
    params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any
) -> dict[str, Any]:
    group = {"params": params, "modules": modules, "related_modules": related}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"group": group}}


ALL: dict[str, Any] = {
    "weight_quantization": technique(
        {"start_bits": 8, "target_bits": 4, "quantization_period": 1},
        ["up", "out"],
        schedule_offset=1,
        quantize_groups=4,
    ),
    "sparse_pruning": technique({"dense_ratio": 0.3}, ["up"], method="topk", schedule_offset=2),
    "row_pruning": technique({"dense_ratio": 0.5}, ["up"], method="topk", schedule_offset=1),
    "head_pruning": technique({"dense_ratio": 0.5}, ["out"], num_heads=HEADS, schedule_offset=1),
    "activation_quantization": technique(
        {"bits": 8}, ["head"], range_calibration="static", schedule_offset=2
    ),
}
"""Every technique of linear layers, each on from another update on."""


def settings(techniques: dict[str, Any], stage: int = 0, **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {
        "zero_optimization": zero,
        "optimizer": optimizer,
        "compression_training": techniques,
        **keys,
    }


def data(index: int = 0, size: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(
        0, CLASSES, (size,), generator=generator
    )


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def trained(
    techniques: dict[str, Any],
    stage: int = 0,
    *,
    num_steps: int = 4,
    num_samples: int = SAMPLES,
    **how: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of a step on this rank's part of each batch."""
    step = fzero.make_train_step(net(), settings(techniques, stage, gradient_clipping=0), **how)
    state, losses = step.init(), []
    size = num_samples // step.world_size
    for index in range(num_steps):
        batch = tuple(
            x[step.rank * size : (step.rank + 1) * size] for x in data(index, num_samples)
        )
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses, step.gather(state)


# --- the formulas, one after the other, with gradients by hand ------------------------------------


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def symmetric(bits: int, num_groups: int) -> Callable[[Tensor], Tensor]:
    def quantized(x: Tensor) -> Tensor:
        of_group = x.reshape(num_groups, -1)
        scale = 2 * of_group.abs().amax(1, keepdim=True) / 2**bits
        steps = (of_group / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return (steps * scale).reshape(x.shape)

    return quantized


def largest(ratio: float) -> Callable[[Tensor], Tensor]:
    def mask(scores: Tensor) -> Tensor:
        order = scores.flatten().argsort(descending=True, stable=True)
        kept = torch.zeros(scores.numel())
        kept[order[: math.ceil(ratio * scores.numel())]] = 1
        return kept.reshape(scores.shape)

    return mask


def plain_loss(
    model: Net, scores: Mapping[str, Tensor], n: int, bounds: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    """The loss of a plain loop with the techniques of `ALL` after n updates; `bounds`
    is the static range, which moves.
    """
    bits = [8, 7, 6, 6, 5][n - 1] if n else 0
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        out, up, up_bias = block.out.weight, block.mlp.up.weight, block.mlp.up.bias
        prefix = f"blocks.{number}"
        if n >= 1:
            heads = StraightThrough.apply(scores[f"{prefix}.out.head_pruning_scores"], largest(0.5))
            out = StraightThrough.apply(out, symmetric(bits, 4))
            out = (out.t().reshape(HEADS, -1) * heads.view(-1, 1)).reshape(WIDTH, WIDTH).t()
            up = StraightThrough.apply(up, symmetric(bits, 4))
        if n >= 2:
            up = up * StraightThrough.apply(
                scores[f"{prefix}.mlp.up.sparse_mask_scores"], largest(0.3)
            )
        if n >= 1:
            rows = StraightThrough.apply(scores[f"{prefix}.mlp.up.row_mask_scores"], largest(0.5))
            up, up_bias = up * rows, up_bias * rows.view(-1)
        x = x + nn.functional.linear(torch.tanh(block.value(x)), out, block.out.bias)
        x = x + block.mlp.down(torch.relu(nn.functional.linear(x, up, up_bias)))
    now = torch.stack([x.min(), x.max()]).detach()
    bounds.copy_((now if bounds[0] == bounds[1] else bounds) * 0.95 + now * (1 - 0.95))
    if n >= 2:
        scale = 2 * torch.max(bounds[0].abs(), bounds[1]) / 2**8
        x = StraightThrough.apply(x, lambda x: (x / scale).round().clamp(-128, 127) * scale)
    return nn.functional.cross_entropy(model.head(x), y)
