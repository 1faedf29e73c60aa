"""What would a step of a large model on many ranks do? Captured and scheduled in this
process, on tensors without memory.

    python benchmarks/scale.py
        7B on 64 ranks and 70B on 1024, stage 3
    python benchmarks/scale.py --models 7b --ranks 64 --stages 0,1,2,3
    python benchmarks/scale.py --blocks 8,32,128
        what the passes cost, by number of blocks

Builds transformers' Llama on `meta`, plans it in all stages and placements
(`fzero.estimation.compare_plans`), makes a step on a `fzero.comms.AbstractAxis` axis,
captures its graph with `step.trace`, and puts it in order as a compiled step does: bf16
beside an fp32 master, AdamW, one sequence of 4096 tokens on each rank, collectives as
on NCCL. Beside what the graph holds and sends stand the formulas: 16Ψ/W bytes of state,
and 3Ψ(W-1)/W elements sent in stage 3, 2Ψ(W-1)/W in the others (ZeRO, sections 3 and
7). Bytes alive are the graph's: every tensor from the node that makes it to its last
use, nothing fused, no activation checkpointing.
Prints a table; writes it and pictures to out/scale/.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero.common import print_report

CONTEXT = 4096
# as of an accelerator of 2024
MACHINE = fzero.graph.MachineModel(flops=4e14, memory=3e12, network=5e10)
SIZES = {
    "7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    "70b": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
}
PAIRS = (("7b", 64), ("70b", 1024))


@dataclass(frozen=True, slots=True)
class Found:
    """What one step would do; bytes and elements of one rank, and seconds of one core
    (a machine may be shared).
    """

    model: str
    world_size: int
    stage: int
    num_blocks: int
    psi: int
    compare_s: float
    capture_s: float
    passes_s: float
    num_nodes: int
    num_collectives: int
    state_bytes: int
    planned_state_bytes: int
    formula_state_bytes: float
    sent_elements: float
    planned_elements: int
    formula_elements: float
    peak_bytes: int
    peak_gathered_bytes: int
    seconds: float
    peak_rss_bytes: int


def find(
    name: str, sizes: dict[str, int], *, world_size: int, stage: int, context: int = CONTEXT
) -> tuple[Found, fzero.graph.StepTimeline]:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=32000, use_cache=False, tie_word_embeddings=False, **sizes)
        )
        tokens = torch.empty((1, context), dtype=torch.int64)
    model.train()
    cfg = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        # Two of the larger model's blocks: the next unit is gathered while one is used.
        "zero_optimization": {"stage": stage, "stage3_max_live_parameters": 2_000_000_000},
    }
    start = time.process_time()
    fzero.estimation.compare_plans(model, cfg, world_size=world_size)
    compare_s = time.process_time() - start
    step = fzero.make_train_step(model, cfg, mesh=fzero.comms.AbstractAxis("data", world_size))
    start = time.process_time()
    (captured,) = step.trace({"input_ids": tokens, "labels": tokens})
    capture_s = time.process_time() - start
    passes_s = []
    for _ in range(3):
        start = time.process_time()
        ordered = captured.scheduled()
        passes_s.append(time.process_time() - start)
    timeline = ordered.timeline(
        MACHINE, title=f"Llama {name} in stage {stage} on {world_size} ranks"
    )
    psi = sum(param.numel() for param in model.parameters())
    state = [node.meta["val"].nbytes for node in ordered.graph.nodes if node.name in ordered.units]
    found = Found(
        model=name,
        world_size=world_size,
        stage=stage,
        num_blocks=sizes["num_hidden_layers"],
        psi=psi,
        compare_s=compare_s,
        capture_s=capture_s,
        passes_s=min(passes_s),
        num_nodes=len(ordered.graph.nodes),
        num_collectives=timeline.num_collectives,
        state_bytes=sum(state),
        planned_state_bytes=sum(step.plan.bytes_per_rank.values()),
        formula_state_bytes=formula_bytes(psi, world_size, stage),
        sent_elements=timeline.sent / 2,
        planned_elements=sum(step.plan.sent_per_step.values()),
        formula_elements=(3 if stage == 3 else 2) * psi * (world_size - 1) / world_size,
        peak_bytes=timeline.liveness.peak,
        peak_gathered_bytes=timeline.liveness.peak_gathered,
        seconds=timeline.seconds,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    return found, timeline


def formula_bytes(psi: int, world_size: int, stage: int) -> float:
    """ZeRO, figure 1, in bf16 with an fp32 master: 2Ψ parameters, 2Ψ gradients, 12Ψ of
    the optimizer.
    """
    shares = [world_size if stage >= divided_from else 1 for divided_from in (3, 2, 1)]
    return sum(nbytes * psi / share for nbytes, share in zip((2, 2, 12), shares))


ROWS: tuple[tuple[str, Callable[[Found], str]], ...] = (
    ("parameters", lambda f: f"{f.psi / 1e9:.2f}e9"),
    ("plans of all stages and placements, s of one core", lambda f: f"{f.compare_s:.2f}"),
    ("capture, s of one core", lambda f: f"{f.capture_s:.1f}"),
    ("passes, best of 3, s of one core", lambda f: f"{f.passes_s:.2f}"),
    ("passes, μs for a node", lambda f: f"{f.passes_s / f.num_nodes * 1e6:.0f}"),
    ("nodes", lambda f: f"{f.num_nodes:,}"),
    ("collectives", lambda f: f"{f.num_collectives:,}"),
    ("state on a rank, GB", lambda f: f"{f.state_bytes / 1e9:.3f}"),
    ("  plan", lambda f: f"{f.planned_state_bytes / 1e9:.3f}"),
    ("  formula", lambda f: f"{f.formula_state_bytes / 1e9:.3f}"),
    ("alive besides, at the most, GB", lambda f: f"{f.peak_bytes / 1e9:.1f}"),
    ("  gathered, at the most, GB", lambda f: f"{f.peak_gathered_bytes / 1e9:.2f}"),
    ("sent by a rank, GB", lambda f: f"{2 * f.sent_elements / 1e9:.2f}"),
    ("  plan", lambda f: f"{2 * f.planned_elements / 1e9:.2f}"),
    ("  formula", lambda f: f"{2 * f.formula_elements / 1e9:.2f}"),
    ("step in the model of a machine, s", lambda f: f"{f.seconds:.2f}"),
    ("peak RSS so far, MB", lambda f: f"{f.peak_rss_bytes / 1e6:.0f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", help="7b, 70b or both; None is 7b on 64 ranks and 70b on 1024")
    parser.add_argument("--ranks", default="64", help="world sizes W, such as 64,1024")
    parser.add_argument("--stages", default="3")
    parser.add_argument("--blocks", help="numbers of blocks, in place of the model's own")
    parser.add_argument("--out", type=Path, default=Path("out/scale"))
    args = parser.parse_args()
    models = (args.models or ("7b" if args.blocks else "")).split(",")
    pairs = (
        [(name, int(ranks)) for name in models for ranks in args.ranks.split(",")]
        if models[0]
        else PAIRS
    )
    blocks = (
        [{"num_hidden_layers": int(n)} for n in args.blocks.split(",")] if args.blocks else [{}]
    )
    results = [
        find(name, SIZES[name] | other, world_size=ranks, stage=int(stage))
        for name, ranks in pairs
        for other in blocks
        for stage in args.stages.split(",")
    ]
    table = Table("", title="Scale, estimated", title_justify="left")
    for found, _ in results:
        table.add_column(
            f"{found.model}, {found.num_blocks} blocks\n{found.world_size} ranks, stage "
            f"{found.stage}",
            justify="right",
        )
    for name, show in ROWS:
        table.add_row(name, *(show(found) for found, _ in results))
    print_report(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scale.json").write_text(
        json.dumps([asdict(found) for found, _ in results], indent=1)
    )
    for (name, ranks, num_blocks), group in groupby(
        results, lambda r: (r[0].model, r[0].world_size, r[0].num_blocks)
    ):
        first, *others = (timeline for _, timeline in group)
        first.draw(*others).savefig(
            args.out / f"{name}_{num_blocks}_blocks_{ranks}_ranks.png", dpi=110
        )
    print(f"numbers and pictures in {args.out}")


if __name__ == "__main__":
    main()
