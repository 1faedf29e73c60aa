"""How do you train a model with ZeRO? A byte-level GPT learns Python, its state divided among the ranks.

    make demo                                   stage 3 on two processes
    make demo ARGS="--stage 1 --ranks 3"        another stage, another number of ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py --stage 2

`train` is what every rank runs: describe the model without memory, plan who holds what, fill in this rank's part, call
`state, metrics = step(state, batch)`, score. `report` and `draw` tell what happened, `launch` starts the ranks.
"""

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import optree
import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from text import consecutive_windows, gzip_bits_per_byte, random_batch, read_text, to_batch

import fzero

BATCH_SIZE = 8  # windows per rank and step
STAGES = (0, 1, 2, 3)
BITS = 1 / math.log(2)  # the loss is in nats per byte, compressors count bits


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the Python standard library with ZeRO.")
    parser.add_argument("--stage", type=int, default=3, choices=STAGES, help="how much is divided among the ranks")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--size", default="small", choices=SIZES, help="size of the model")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights, the batches and the sample")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the picture and the numbers")
    return parser.parse_args()


def config(stage: int) -> fzero.Config:
    adamw = {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    # By default stage 3 keeps parameters below 100,000 elements whole on every rank. This model has few others.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return fzero.Config.load(
        {
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "optimizer": {"type": "AdamW", "params": adamw},
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
        }
    )


def train(options: argparse.Namespace) -> None:
    """What every rank runs."""
    stop = threading.Event()  # a signal only asks: the ranks agree between two steps, and leave together
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    size = SIZES[options.size]
    with torch.device("meta"):
        model = GPT(size)  # names and shapes: while it trains, no rank holds the whole model
    step = fzero.make_train_step(model, config(options.stage), seed=options.seed)
    state = step.init()

    console = Console(quiet=step.rank != 0, highlight=False)
    training_text, held_out_text = read_text()
    console.print(str(step.plan))
    console.print(f"{len(training_text):,} bytes of Python to learn from; every twentieth file is held out")

    losses: list[float] = []
    with progress_line(console, options.steps) as show:
        while len(losses) < options.steps and not agree(stop):
            where = {"seed": options.seed, "step": len(losses), "rank": step.rank}
            batch = random_batch(training_text, context=size.context, batch_size=BATCH_SIZE, **where)
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item() * BITS)
            show(losses, BATCH_SIZE * size.context * step.world_size)

    # Windows go to the ranks in groups; each rank scores its part of a group, `evaluate` is the mean over the ranks.
    group_size = BATCH_SIZE * step.world_size
    windows = consecutive_windows(held_out_text, context=size.context, multiple_of=group_size)
    scores: list[float] = []
    with console.status("scoring the held-out bytes"):
        while len(scores) < len(windows) // group_size and not agree(stop):
            first = len(scores) * group_size + step.rank * BATCH_SIZE
            batch = to_batch(windows[first : first + BATCH_SIZE])
            scores.append(step.evaluate(state, batch).item() * BITS)

    if agree(stop):
        console.print(f"stopped at step {len(losses)}")
    else:
        weights = step.gather(state, to="rank0")  # whole, in fp32, on rank 0; nothing on the others
        if step.rank == 0:
            held = sum(leaf.nbytes for leaf in optree.tree_leaves((state.params, state.optimizer)))
            scored = held_out_text[1 : 1 + len(windows) * size.context]  # the bytes that were predicted, for gzip
            result = {
                "training_bits_per_byte": losses,
                "validation_bits_per_byte": sum(scores) / len(scores),
                "gzip_bits_per_byte": gzip_bits_per_byte(scored),
                "num_bytes_scored": len(scored),
                "state_nbytes": held,
            }
            report(console, options, result, model, weights)
    fzero.shutdown()


def agree(stop: threading.Event) -> bool:
    """Whether any rank was asked to stop. *Collective*: one that left alone would leave the others waiting for it."""
    asked = torch.tensor(int(stop.is_set()))
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked)


@contextmanager
def progress_line(console: Console, num_steps: int) -> Iterator[Callable[[list[float], int], None]]:
    """One live line on a terminal; where there is none, as in a log, a plain line ten times."""
    columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}")
    live = console.is_terminal and not console.quiet
    started = time.perf_counter()
    with Progress(*columns, console=console, disable=not live, refresh_per_second=4) as bar:
        task = bar.add_task("", total=num_steps)

        def show(losses: list[float], num_tokens: int) -> None:
            seconds_per_step = (time.perf_counter() - started) / len(losses)
            minutes, seconds = divmod(round(seconds_per_step * (num_steps - len(losses))), 60)
            recent = losses[-20:]
            line = f"{sum(recent) / len(recent):.3f} bits per byte, {num_tokens / seconds_per_step:,.0f} tokens/s"
            line += f", {minutes}:{seconds:02} left"
            bar.update(task, completed=len(losses), description=line)
            if not live and len(losses) % max(1, num_steps // 10) == 0:
                console.print(f"step {len(losses)}/{num_steps}: {line}")

        yield show


def report(console: Console, options: argparse.Namespace, result: dict[str, Any], model: GPT, weights: Any) -> None:
    """What rank 0 tells at the end: a sample, the score, the picture, and what to try next."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps(result))
    draw(options, result, model)

    writer = GPT(model.size)
    writer.load_state_dict(weights)
    generator = torch.Generator().manual_seed(options.seed)
    sample = writer.generate(b"def ", num_bytes=300, temperature=0.8, generator=generator).decode(errors="replace")
    console.print(Panel(Text(sample), title="Python by this model"))
    console.print(
        f"[bold]{result['validation_bits_per_byte']:.3f}[/] bits per byte on {result['num_bytes_scored']:,} held-out "
        f"bytes; gzip -9 needs [bold]{result['gzip_bits_per_byte']:.3f}[/] for the same bytes\n"
        f"{options.out}/demo.png shows the loss and the memory of each stage, {options.out}/demo.json has the numbers"
    )
    for stage in STAGES:
        if stage != options.stage:
            console.print(f'make demo ARGS="--stage {stage}"')


def draw(options: argparse.Namespace, result: dict[str, Any], model: GPT) -> None:
    """The loss curve, and the bytes of model state per rank in every stage beside the formula of the ZeRO paper."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")

    losses = torch.tensor(result["training_bits_per_byte"])
    width = max(1, len(losses) // 50)
    smooth = losses.unfold(0, width, 1).mean(-1)
    left.plot(losses, color="0.85", label="training, each step")
    left.plot(range(width - 1, len(losses)), smooth, color="C0", label=f"training, mean of {width} steps")
    left.plot(len(losses), result["validation_bits_per_byte"], "o", color="C3", label="held-out files")
    left.axhline(result["gzip_bits_per_byte"], color="0.3", linestyle="--", label="gzip -9, held-out files")
    left.set(xlabel="step", ylabel="bits per byte", ylim=(1, 6), title="A byte-level GPT on Python's standard library")
    left.legend()

    numel = sum(parameter.numel() for parameter in model.parameters())
    for stage in STAGES:
        divided = [options.ranks if stage >= first else 1 for first in (3, 1, 2)]  # the first stage that divides each
        formula = [4 * numel / divided[0], 8 * numel / divided[1], 4 * numel / divided[2]]
        planned = fzero.plan(model, config(stage), world_size=options.ranks).bytes_per_rank
        bottom = formula_bottom = 0.0
        for color, name, nbytes in zip(("C0", "C1", "C2"), ("parameters", "optimizer", "gradients"), formula):
            label = name if stage == 0 else None
            right.bar(stage - 0.2, planned[name] / 1e6, 0.38, bottom / 1e6, color=color, label=label)
            right.bar(stage + 0.2, nbytes / 1e6, 0.38, formula_bottom / 1e6, color=color, alpha=0.35, hatch="//")
            bottom, formula_bottom = bottom + planned[name], formula_bottom + nbytes
    right.plot(options.stage - 0.2, result["state_nbytes"] / 1e6, "kD", label="held by rank 0 between steps")
    right.set(
        xlabel="stage", ylabel="MB per rank", xticks=STAGES, title="Model state: planned, and by formula (hatched)"
    )
    right.legend()
    figure.savefig(options.out / "demo.png", dpi=120)


def launch(num_ranks: int) -> int:
    """Runs this command line in `num_ranks` processes, as torchrun would; returns the exit code.

    Every rank gets a session of its own, so Ctrl-C reaches only this process, which asks the ranks to stop and waits.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]  # free a moment ago
    job = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    common = {"OMP_NUM_THREADS": "1"} | os.environ | job  # one thread per rank, unless told otherwise

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=common | own, start_new_session=True))
        codes: list[int | None] = [None]
        while None in codes and not any(codes):  # until all are done, or one has failed
            time.sleep(0.1)
            codes = [process.poll() for process in ranks]
        return max(abs(code or 0) for code in codes)
    except KeyboardInterrupt:
        for process in ranks:
            process.terminate()
        deadline = time.monotonic() + 10
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        return 128 + signal.SIGINT
    finally:
        for process in ranks:
            process.kill()  # does nothing to one that has ended
            process.wait()


if __name__ == "__main__":
    options = parse_options()
    if "RANK" in os.environ:  # started by `launch` or torchrun
        train(options)
    else:
        raise SystemExit(launch(options.ranks))
