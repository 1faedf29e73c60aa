"""A picture of all four ZeRO stages: when a step computes, when it communicates, and
which tensors are live.

    python examples/explain_stages.py --out docs/schedules.png

`step.explain(batch)` captures the step as one graph on tensors without memory,
schedules it, and computes its timeline from a simple machine model. Nothing runs: the
eight ranks are abstract (`fzero.comms.AbstractAxis`), and the model is on `meta`.
"""

import argparse
from pathlib import Path

import torch
from gpt import GPT, SIZES

import fzero

NUM_ROWS = 4  # of each rank's batch
# At these rates neither lane is idle.
MACHINE = fzero.graph.MachineModel(flops=4e12, memory=1e12, network=8e9, latency=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/schedules.png"))
    args = parser.parse_args()
    size = SIZES[args.size]
    with torch.device("meta"):
        model = GPT(size)
        tokens_BT = torch.empty((NUM_ROWS, size.context), dtype=torch.int64)
    timelines = []
    for stage in range(4):
        cfg = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
        step = fzero.make_train_step(model, cfg, mesh=fzero.comms.AbstractAxis("data", args.ranks))
        timelines.append(step.explain((tokens_BT, tokens_BT), machine=MACHINE))
        print(timelines[-1])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    timelines[0].draw(*timelines[1:]).savefig(args.out, dpi=100)
    print(f"drawn to {args.out}")


if __name__ == "__main__":
    main()
