"""What do logits cost? Peak memory and time of a head and its loss, forward and
backward, beside `fzero.linear_cross_entropy`.

    python benchmarks/long_sequences.py
        8,192 tokens, 131,072 classes, width 512, in fp32: needs 16 GB free, and about
        three minutes on two cores
    python benchmarks/long_sequences.py --tokens 1024 --classes 16384 --rounds 2
        does it run?

Each contender has a process of its own. Its peak is the largest resident memory of the
first round, less that with all inputs in memory; its time that of the fastest round,
because other load only adds to it. Prints a table, the quotients, and the largest
relative difference of the gradients; writes `results.json`.
"""

import argparse
import gc
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.table import Table
from torch import Tensor

import fzero
from fzero.common import print_report

Loss = Callable[[Tensor, Tensor, Tensor], Any]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The logits, and their cross entropy in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


CONTENDERS: dict[str, Loss] = {"plain": plain, "tiled": fzero.linear_cross_entropy}


def resident_nbytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(name: str, args: argparse.Namespace, results: Any) -> None:
    """Puts peak (bytes), seconds, and a sample of each gradient into the queue."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.width).to(dtype).requires_grad_()
    weight = (torch.randn(args.classes, args.width) / args.width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, args.classes, (args.tokens,))
    small = [x[:64].detach().requires_grad_() for x in (hidden, weight)]
    CONTENDERS[name](*small, labels[:64] % 64).backward()  # the libraries, in memory
    gc.collect()
    before, seconds = resident_nbytes(), []
    for _ in range(args.rounds):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        loss = CONTENDERS[name](hidden, weight, labels)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    grads = [x.grad.flatten()[:: max(1, x.numel() // 10_000)].float() for x in (hidden, weight)]
    results.put((peak, min(seconds), loss.item(), [x.tolist() for x in grads]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=131_072)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=Path("results.json"))
    args = parser.parse_args()
    context, found = multiprocessing.get_context("spawn"), dict[str, Any]()
    for name in CONTENDERS:
        results = context.Queue()
        process = context.Process(target=measure, args=(name, args, results))
        process.start()
        found[name] = results.get()
        process.join()
    table = Table(box=box.SIMPLE)
    for title in ("", "peak, MB", "s", "loss"):
        table.add_column(title, justify="right")
    for name, (peak, seconds, loss, _) in found.items():
        table.add_row(name, f"{peak / 1e6:,.0f}", f"{seconds:.2f}", f"{loss:.6f}")
    print_report(table)
    (peak, seconds, _, grads), (own_peak, own_seconds, _, own_grads) = found.values()
    apart = max(
        float((torch.tensor(x) - torch.tensor(y)).norm() / torch.tensor(x).norm())
        for x, y in zip(grads, own_grads, strict=True)
    )
    print(
        f"tiled / plain: peak 1/{peak / own_peak:.1f}, time {own_seconds / seconds:.2f}; "
        f"gradients differ by {apart:.1e}"
    )
    sizes = {key: str(value) if key == "json" else value for key, value in vars(args).items()}
    rows = {name: {"peak": row[0], "seconds": row[1]} for name, row in found.items()}
    args.json.write_text(json.dumps({**sizes, **rows, "apart": apart}, indent=1))


if __name__ == "__main__":
    main()
