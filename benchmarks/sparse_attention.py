"""When is sparse attention faster? Gathered blocks against PyTorch's dense attention,
by length and density.

    python benchmarks/sparse_attention.py
        1k to 8k tokens: tables, and out/sparse_attention/results.json
    python benchmarks/sparse_attention.py --lengths 1024 --repeats 1

Forward and backward of causal attention in fp32, blocks of 64 tokens, one thread. Time
is the processor's own (`time.process_time`), so that another load on the machine counts
little; the contenders take turns in rounds, and the best round counts. Memory is the
growth of the process' peak in a forward and backward, each in a process of its own, and
the mask. The break-even is the density at which blocks take as long as the baseline, on
the line between the nearest two.
"""

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fzero.attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    Layout,
    Local,
    Pattern,
    dense_mask,
    density,
    sparse_attention,
)
from fzero.common import print_report

BLOCK = 64
M_MMAP_THRESHOLD = -3  # of malloc.h
Row = dict[str, float | str]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def patterns(num_blocks: int) -> dict[str, Pattern]:
    """Causal patterns from thin to full."""
    half, one_way = num_blocks // 2, "unidirectional"
    return {
        "longformer": BSLongformer(attention=one_way),
        "bigbird": BigBird(attention=one_way, num_random_blocks=2),
        "fixed": Fixed(attention=one_way),
        "window of 1/8": Local(num_sliding_window_blocks=half // 2),
        "window of 1/4": Local(num_sliding_window_blocks=half),
        "window of 1/2": Local(num_sliding_window_blocks=2 * half),
        "all": Dense(),
    }


def of_layout(layout: Layout) -> Attend:
    return lambda q, k, v: sparse_attention(
        q, k, v, layout, block=BLOCK, causal=True, backend="blocks"
    )


def contenders(length: int) -> tuple[dict[str, Attend], dict[str, float]]:
    """The attentions of a length by name, and their densities."""
    layouts = {
        name: pattern.layout(length // BLOCK).lower_triangle()
        for name, pattern in patterns(length // BLOCK).items()
    }
    mask = dense_mask(layouts["fixed"], BLOCK, causal=True)
    baselines: dict[str, Attend] = {
        "SDPA, mask": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "SDPA, is_causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    found = {name: density(layout) for name, layout in layouts.items()}
    full = density(Dense().layout(length // BLOCK))
    return baselines | {n: of_layout(x) for n, x in layouts.items()}, dict.fromkeys(
        baselines, full
    ) | found


def inputs(length: int, heads: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, width, requires_grad=True) for _ in range(3)]


def run(attend: Attend, of: list[Tensor]) -> tuple[float, float]:
    """Processor seconds of a forward and of its backward."""
    start = time.process_time()
    loss = attend(*of).square().sum()
    middle = time.process_time()
    torch.autograd.grad(loss, of)
    return middle - start, time.process_time() - middle


def peak_of(attend: Attend, of: list[Tensor]) -> int:
    """Bytes by which the peak of a process of its own grows in a forward and backward."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        libc = ctypes.CDLL(None)
        # tensors are mapped, and unmapped when they are freed
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)
        libc.malloc_trim(0)  # what the rounds before have freed
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = in_status("VmRSS")
        run(attend, of)
        os.write(write, str(in_status("VmHWM") - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 32))


def in_status(field: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def measure(length: int, heads: int, width: int, repeats: int) -> list[Row]:
    """A row for each contender: density, seconds of forward and backward, bytes."""
    attends, densities = contenders(length)
    of, best = inputs(length, heads, width), dict[str, tuple[float, float]]()
    for _ in range(repeats):
        for name, attend in attends.items():
            best[name] = min(best.get(name, (1e9, 1e9)), run(attend, of), key=sum)
    return [
        {
            "name": name,
            "length": length,
            "density": densities[name],
            "forward": best[name][0],
            "backward": best[name][1],
            "seconds": sum(best[name]),
            "bytes": peak_of(attend, of) + (length**2 if name == "SDPA, mask" else 0),
        }
        for name, attend in attends.items()
    ]


def break_even(rows: list[Row], baseline: str) -> float | None:
    """The density at which blocks take the baseline's time; None where they are always
    faster.
    """
    points = sorted(
        (float(row["density"]), float(row["seconds"]))
        for row in rows
        if not str(row["name"]).startswith("SDPA")
    )
    (limit,) = (float(row["seconds"]) for row in rows if row["name"] == baseline)
    for (low, fast), (high, slow) in zip(points, points[1:], strict=False):  # noqa: RUF007
        if fast <= limit < slow:
            return low + (high - low) * (limit - fast) / (slow - fast)
    return None if points[-1][1] <= limit else 0.0


def table(length: int, rows: list[Row]) -> Table:
    shown = Table(title=f"{length} tokens", title_justify="left")
    for column in (
        "attention",
        "density",
        "forward s",
        "backward s",
        "both s",
        "of is_causal",
        "peak MB",
    ):
        shown.add_column(column, justify="left" if column == "attention" else "right")
    causal = next(float(row["seconds"]) for row in rows if row["name"] == "SDPA, is_causal")
    for row in rows:
        both = float(row["seconds"])
        cells = [f"{row[key]:.3f}" for key in ("density", "forward", "backward", "seconds")]
        shown.add_row(
            str(row["name"]), *cells, f"{both / causal:.2f}", f"{float(row['bytes']) / 1e6:.0f}"
        )
    found = {name: break_even(rows, name) for name in ("SDPA, is_causal", "SDPA, mask")}
    words = ", ".join(f"{name}: {'none' if x is None else f'{x:.2f}'}" for name, x in found.items())
    shown.caption, shown.caption_justify = f"break-even density against {words}", "left"
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in args.lengths:
        rows += (found := measure(length, args.heads, args.width, args.repeats))
        print_report(table(length, found))
    out = Path("out/sparse_attention")
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
