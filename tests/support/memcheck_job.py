"""A rank of the job that `memcheck.py` watches: all stages in fp32 and bf16, state in
files, and a peer that is killed.

python tests/support/memcheck_job.py RANK PORT FOLDER
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fzero

BF16 = {
    "bf16": {"enabled": True, "auto_cast": True, "bf16_master_weights_and_grads": True},
    "data_types": {"buffer_dtype": "bf16"},
}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(4, 3)


def train(num_steps: int, **zero: object) -> None:
    extra = zero.pop("extra", {})
    cfg = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        **extra,  # type: ignore[dict-item]
    }
    step = fzero.make_train_step(Normed(), cfg)
    state = step.init()
    for _ in range(num_steps):
        state, _ = step(state, batch())


class Killed(nn.Module):
    """Its backward ends rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        if dist.get_rank() == 1:
            x.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return nn.functional.mse_loss(self.last(x), y)


def main(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for stage in range(4):
        for extra in ({}, BF16):
            train(2, stage=stage, extra=extra)
    train(2, stage=2, offload_optimizer={"device": "nvme", "nvme_path": folder})
    train(2, stage=3, offload_optimizer={"device": "cpu"})
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    cfg = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD"},
        "zero_optimization": zero,
    }
    step = fzero.make_train_step(Killed(), cfg)
    try:
        step(step.init(), batch())
    except fzero.CollectiveError:
        fzero.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
