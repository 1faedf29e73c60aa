"""What DeepSpeed and fzero both train in the tests of its checkpoints: a model, batches
and configurations. Imports neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, GLOBAL_BATCH = 29, 12


class Odd(nn.Module):
    """Odd sizes, tied weights, parameters that are frozen, unused, of one element and,
    if asked, 0-d; two kinds of buffers.
    """

    def __init__(self, width: int = 11, *, has_scalar: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(3)
        )
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full(() if has_scalar else (1,), 1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[1][1].weight.requires_grad_(False)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, width))
        self.register_buffer("table", torch.linspace(1.5, 0.5, width), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = hidden * self.gain.to(hidden.dtype) * self.table.to(hidden.dtype)
        logits = self.head(hidden) * self.scale + self.shift
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make(seed: int = 0, *, has_scalar: bool = False) -> Odd:
    torch.manual_seed(seed)
    return Odd(has_scalar=has_scalar)


def batch(number: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A rank's rows of a global batch."""
    generator = torch.Generator().manual_seed(number)
    whole = [torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 5), generator=generator) for _ in range(2)]
    return tuple(x.chunk(world_size)[rank] for x in whole)  # type: ignore[return-value]


# `torch_adam` saves DeepSpeed the compilation of a kernel
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    "Adam": {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "torch_adam": True,
        "adam_w_mode": False,
        "betas": [0.8, 0.9],
    },
    "Adagrad": {"lr": 1e-2, "eps": 1e-8},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


def config(
    stage: int, precision: str = "fp32", optimizer: str = "AdamW", **changes: Any
) -> dict[str, Any]:
    """Of both."""
    cfg: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        },
    }
    if precision == "bf16":
        cfg["bf16"] = {"enabled": True}
    if precision == "fp16":
        cfg["fp16"] = {
            "enabled": True,
            "initial_scale_power": 17,
            "loss_scale_window": 3,
            "hysteresis": 2,
        }
    return cfg | changes


DECAY_FREE = r"(\.0\.weight|bias|scale|shift)$"
"""The parameters of a second group, without weight decay."""
