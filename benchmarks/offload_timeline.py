"""When does what move in a step whose state lives in files? A picture of one measured
step of two ranks.

    python benchmarks/offload_timeline.py                    writes out/offload/timeline.png
    python benchmarks/offload_timeline.py --path /mnt/nvme --size large

Two ranks with one thread each train the GPT of the other benchmarks in stage 2, with
master, moments and gradients in files, once in the order of declaration and once with
`round_robin_gradients`. Seconds begin with the forward. Every call that reads or writes
a block is a bar of its lane; it also shows when each rank's first gradient leaves.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from contenders import ADAMW
from gpt import GPT, SIZES, Size, first_values, make_batch
from ladder import meet
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import fzero
from fzero.storage.direct_io import DirectFile
from fzero.storage.stream import update_streamed

WORLD_SIZE, NUM_STEPS = 2, 4
LANES = ("computes", "gradients leave", "state is read", "state is written")
COLORS = {"forward": "0.75", "backward": "0.45", "update": "tab:purple"}
OF_LANES = {
    "gradients leave": "tab:orange",
    "state is read": "tab:blue",
    "state is written": "tab:green",
}


class Span(NamedTuple):
    """What a rank did, in seconds."""

    lane: str
    kind: str
    begin: float
    end: float


def watched(
    spans: list[Span], lane_of: Callable[..., tuple[str, str]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, which also returns when it ran."""

    def run(*args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        spans.append(Span(*lane_of(*args), begin, time.perf_counter()))
        return result

    return run


def lane_of_read(file: DirectFile, *_: Any) -> tuple[str, str]:
    return "state is read", "gradients" if "grads" in file.path.name else "state"


def lane_of_write(file: DirectFile, *_: Any) -> tuple[str, str]:
    return (
        ("gradients leave", "gradients")
        if "grads" in file.path.name
        else ("state is written", "state")
    )


def rank_of(
    size: Size, is_turned: bool, folder: str, sub_group: int, rank: int, pipe: Connection
) -> None:
    """Trains some steps, and sends the spans of the last."""
    torch.set_num_threads(1)
    meet(folder, rank)
    cfg = {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "sub_group_size": sub_group,
            "round_robin_gradients": is_turned,
            "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        },
    }
    with torch.device("meta"):
        model = GPT(size)
    step = fzero.make_train_step(model, cfg)
    state, spans = step.init(init_fn=first_values), []
    with ExitStack() as stack:
        for owner, name, lane_of in (
            (DirectFile, "read", lane_of_read),
            (DirectFile, "write", lane_of_write),
            (sys.modules[update_streamed.__module__], "_update", lambda *_: ("computes", "update")),
        ):
            stack.enter_context(
                mock.patch.object(owner, name, watched(spans, lane_of, getattr(owner, name)))
            )
        for number in range(NUM_STEPS):
            batch = make_batch(size, step=number, rank=rank)
            dist.barrier()
            spans.clear()
            times = [time.perf_counter()]
            round_ = step.begin(state)
            loss = step.forward(round_, lambda batch=batch: model(*batch))
            times.append(time.perf_counter())
            round_ = step.backward(round_, loss)
            times.append(time.perf_counter())
            state, _ = step.update(round_)
    passes = [
        Span("computes", kind, *times[i : i + 2]) for i, kind in enumerate(("forward", "backward"))
    ]
    pipe.send(
        [
            span._replace(begin=span.begin - times[0], end=span.end - times[0])
            for span in (*passes, *spans)
        ]
    )
    del state, round_
    dist.destroy_process_group()


def measured(size: Size, is_turned: bool, args: argparse.Namespace) -> list[list[Span]]:
    """The spans of each rank."""
    spawn, pipes, processes = get_context("spawn"), [], []
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        for rank in range(WORLD_SIZE):
            ours, theirs = spawn.Pipe()
            pipes.append(ours)
            given = (size, is_turned, folder, args.sub_group, rank, theirs)
            processes.append(spawn.Process(target=rank_of, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
        spans = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return spans


def draw(axes: Any, ranks: list[list[Span]], title: str) -> None:
    labels = []
    for rank, spans in enumerate(ranks):
        for index, lane in enumerate(LANES):
            y = rank * (len(LANES) + 0.6) + index
            labels.append((y, f"rank {rank} {lane}"))
            bars = defaultdict(list)
            for span in spans:
                if span.lane == lane:
                    color = COLORS[span.kind] if lane == "computes" else OF_LANES[lane]
                    bars[
                        "tab:red" if span.kind == "gradients" and lane == "state is read" else color
                    ].append(span)
            for color, of_color in bars.items():
                # blocks that move at once lie over each other
                alpha = 1.0 if lane == "computes" else 0.35
                parts = [(1e3 * span.begin, 1e3 * (span.end - span.begin)) for span in of_color]
                axes.broken_barh(parts, (y - 0.4, 0.8), facecolor=color, linewidth=0, alpha=alpha)
        for span in spans:
            if span.kind == "backward":
                axes.vlines(
                    [1e3 * span.begin, 1e3 * span.end],
                    labels[-4][0] - 0.5,
                    labels[-1][0] + 0.5,
                    "0.3",
                    "dotted",
                    lw=1,
                )
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws one step whose state lives in files.")
    parser.add_argument(
        "--path", type=Path, help="a folder on the disk to use (default: the temporary one)"
    )
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--sub-group", type=int, default=1 << 20, help="elements of a sub-group")
    parser.add_argument("--out", type=Path, default=Path("out/offload"))
    args = parser.parse_args()
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axes, is_turned in zip(panels, (False, True), strict=True):
        title = f"round_robin_gradients: {str(is_turned).lower()}"
        ranks = measured(SIZES[args.size], is_turned, args)
        draw(axes, ranks, title)
        for rank, spans in enumerate(ranks):
            _, backward = spans[:2]
            lasts = backward.end - backward.begin
            lanes = {lane: [s for s in spans if s.lane == lane] for lane in LANES[1:]}
            begins = {
                lane: (min(s.begin for s in of) - backward.begin) / lasts
                for lane, of in lanes.items()
            }
            inside = sum(s.end <= backward.end for s in lanes["gradients leave"]) / len(
                lanes["gradients leave"]
            )
            print(
                f"{title}, rank {rank}: backward of {1e3 * lasts:.0f} ms; the first gradient "
                f"leaves at {begins['gradients leave']:.2f} of it, {inside:.0%} of the blocks are "
                f"written when it ends; state is read from {begins['state is read']:.2f} on"
            )
    panels[-1].set_xlabel("ms since the forward began; dotted: the backward", fontsize=8)
    patches = [
        Patch(color=color, label=label)
        for label, color in (COLORS | OF_LANES | {"gradients are read": "tab:red"}).items()
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8
    )
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "timeline.png", dpi=120)


if __name__ == "__main__":
    main()
