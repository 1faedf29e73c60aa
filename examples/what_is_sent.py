"""The traffic of a ZeRO-3 step on each link: two nodes of two ranks, all of them in
this process.

    python examples/what_is_sent.py --out out/what_is_sent.png

`fzero.profiling.trace_comm` records a step: a row for each collective, with its bytes,
axis, unit and phase. If the state is sharded over a node (hybrid sharding), gradients
are all-reduced between the nodes. With hpZ they are reduce-scattered, and updated
shards are all-gathered: the same bytes, and each rank holds a quarter of the optimizer
state instead of half of it. `fzero.profiling.plan_comm` predicts the same for ranks
that do not exist.
"""

import argparse
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

import fzero
from sharding import Mesh

WIDTH, NUM_BLOCKS, NODES = 64, 3, Mesh.of(node=2, data=2)
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return nn.functional.mse_loss(y, x.flip(-1))


def trace(**zero: int) -> fzero.profiling.CommTrace:
    """The traffic of rank 0 of four, from a run of all four in lockstep."""
    mesh = fzero.comms.AbstractAxis.of(NODES)
    step = fzero.make_train_step(
        Model(), {"optimizer": {"type": "AdamW"}, "zero_optimization": ZERO | zero}, mesh=mesh
    )
    ranks = fzero.simulate(step, by="lockstep")
    batch = rearrange(torch.randn(8, WIDTH), "(rank b) width -> rank b width", rank=NODES.size)
    return fzero.profiling.trace_comm(ranks, ranks.init(), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/what_is_sent.png"))
    args = parser.parse_args()
    torch.manual_seed(0)
    hybrid, hpz = trace(), trace(zero_hpz_partition_size=2)
    print(hpz)
    for name, comm in {"hybrid sharding": hybrid, "hpZ": hpz}.items():
        by_axis = ", ".join(
            f"{nbytes:,} bytes along {axis}" for axis, nbytes in comm.by_axis().items()
        )
        print(f"{name}: {by_axis}")
    hpz.save(args.out)
    print(f"drawn to {args.out}")
    many = fzero.make_train_step(
        Model(), {"zero_optimization": ZERO}, mesh=fzero.comms.AbstractAxis("data", 1024)
    )
    planned = fzero.profiling.plan_comm(many, torch.randn(2, WIDTH))
    print(
        f"one rank of 1024 would send {planned.nbytes:,} bytes in {len(planned.rows)} collectives"
    )


if __name__ == "__main__":
    main()
