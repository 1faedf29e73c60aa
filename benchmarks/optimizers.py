"""How fast is an update? Each optimizer on one flat buffer, beside PyTorch's own and
the memory's bandwidth.

    python benchmarks/optimizers.py
        a table, out/optimizers/optimizers.json and a picture
    python benchmarks/optimizers.py --numel 1e8

One thread. The contenders take turns in rounds, and the best round counts, so that
another load on the machine hits all alike. `bytes` is what an update must read and
write for each parameter; `of copy` is the bandwidth that this makes, as a share of what
one large copy reaches in the same run (8 bytes for each fp32 element), and
`of in place` as a share of an in-place product, which has no cache line to fetch before
it writes and is the fastest that memory can be rewritten.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from rich.table import Table
from torch import Tensor

import fzero
from fzero.common import print_report
from sharding import FlatLayout

Update = Callable[[], object]
GROUPS = {
    "memory": "#b5bfc9",
    "PyTorch": "#4f6d8f",
    "fzero, fp32": "#d9622b",
    "fzero, 16 bits": "#e8965f",
}
"""The colour of each group."""


def transform_update(
    transform: fzero.Transform,
    numel: int,
    *,
    param: str = "float32",
    state: str = "float32",
    has_master: bool = False,
    tiles: bool = True,
) -> Update:
    """One update as the step makes it, clipping included: gradients in the parameters'
    dtype, with or without a master.
    """
    dtype = getattr(torch, param)
    grad, params = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    master = params.float() if has_master else params
    how = {"factor": torch.tensor(1.0), "out": params if has_master else None} | (
        {} if tiles else {"tile": None}
    )
    update = fzero.optim.mixed_precision(transform, state_dtype=state, **how)
    optimizer_state = update.init(master)
    return lambda: update.update(grad, master, optimizer_state)


def torch_update(make: Callable[[list[Tensor]], torch.optim.Optimizer], numel: int) -> Update:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    return make([param]).step


SIDE = 768


def layout_of(numel: int) -> FlatLayout:
    """Square matrices of a transformer block's size."""
    names = tuple(f"p{index}" for index in range(numel // SIDE**2))
    return FlatLayout(names, ((SIDE, SIDE),) * len(names), world_size=1)


def contenders(numel: int) -> dict[str, tuple[str, int, Update]]:
    """Group, bytes for each parameter, and the update, by name."""
    source, target = torch.randn(numel), torch.empty(numel)
    whole = fzero.optim.ShardContents.whole(layout_of(numel))
    AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
    adamw, bf16 = fzero.adamw(1e-3), {"param": "bfloat16", "state": "bfloat16"}
    return {
        "copy": ("memory", 8, lambda: target.copy_(source)),
        "in-place product": ("memory", 8, lambda: target.mul_(1.0)),
        "torch AdamW fused": ("PyTorch", 28, torch_update(lambda p: AdamW(p, fused=True), numel)),
        "torch AdamW foreach": (
            "PyTorch",
            28,
            torch_update(lambda p: AdamW(p, foreach=True), numel),
        ),
        "torch SGD momentum": (
            "PyTorch",
            20,
            torch_update(lambda p: SGD(p, lr=0.1, momentum=0.9), numel),
        ),
        "AdamW without clipping": ("fzero, fp32", 28, torch_like(adamw, numel)),
        "AdamW": ("fzero, fp32", 28, transform_update(adamw, numel)),
        "Adagrad": ("fzero, fp32", 20, transform_update(fzero.optim.adagrad(1e-2), numel)),
        "SGD momentum": ("fzero, fp32", 20, transform_update(fzero.sgd(0.1, momentum=0.9), numel)),
        "Lion": ("fzero, fp32", 20, transform_update(fzero.optim.lion(1e-4), numel)),
        "LAMB": (
            "fzero, fp32",
            28,
            transform_update(fzero.optim.lamb(1e-3, contents=whole), numel, tiles=False),
        ),
        "Adafactor": (
            "fzero, fp32",
            12,
            transform_update(fzero.optim.adafactor(1e-2, contents=whole), numel, tiles=False),
        ),
        "Muon": (
            "fzero, fp32",
            20,
            transform_update(fzero.optim.muon(1e-2, contents=whole), numel, tiles=False),
        ),
        "AdamW, bf16, fp32 master": (
            "fzero, 16 bits",
            28,
            transform_update(adamw, numel, param="bfloat16", has_master=True),
        ),
        "AdamW, fp16, fp32 master": (
            "fzero, 16 bits",
            28,
            transform_update(adamw, numel, param="float16", has_master=True),
        ),
        "AdamW, bf16, fp32 moments": (
            "fzero, 16 bits",
            22,
            transform_update(adamw, numel, param="bfloat16"),
        ),
        "AdamW, all bf16": ("fzero, 16 bits", 14, transform_update(adamw, numel, **bf16)),
    }


def torch_like(transform: fzero.Transform, numel: int) -> Update:
    grad, param = torch.randn(numel), torch.randn(numel)
    state = transform.init(param)
    return lambda: transform.update(grad, param, state)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time per parameter of every optimizer.")
    parser.add_argument(
        "--numel",
        type=lambda text: int(float(text)),
        default=20_000_000,
        help="elements of the buffer, about",
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/optimizers"),
        help="folder of the picture and the numbers",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.numel = options.numel // SIDE**2 * SIDE**2
    runs = contenders(options.numel)
    seconds: dict[str, float] = {}
    for round_ in track(range(options.rounds + 1), "rounds"):
        for name, (_, _, update) in runs.items():
            started = time.perf_counter()
            update()
            if round_:  # the first warms up
                seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - started)
    rates = {
        name: nbytes * options.numel / seconds[name] / 1e9 for name, (_, nbytes, _) in runs.items()
    }
    table = Table(
        title=f"one update of {options.numel:,} parameters, one thread, best of {options.rounds}",
        title_justify="left",
    )
    for column in (
        "",
        "ms",
        "ps per parameter",
        "bytes",
        "GB/s",
        "of copy",
        "of in place",
        "time / torch fused AdamW",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for group in GROUPS:
        for name, (of, nbytes, _) in runs.items():
            if of == group:
                table.add_row(
                    name,
                    f"{1e3 * seconds[name]:.1f}",
                    f"{1e12 * seconds[name] / options.numel:.0f}",
                    str(nbytes),
                    f"{rates[name]:.0f}",
                    f"{rates[name] / rates['copy']:.2f}",
                    f"{rates[name] / rates['in-place product']:.2f}",
                    f"{seconds[name] / seconds['torch AdamW fused']:.2f}",
                )
        table.add_section()
    print_report(table)
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = {
        name: {"seconds": seconds[name], "bytes": runs[name][1], "numel": options.numel}
        for name in runs
    }
    (options.out / "optimizers.json").write_text(json.dumps(numbers, indent=1))
    draw(runs, rates, rates["copy"]).savefig(options.out / "optimizers.png", dpi=120)


def draw(runs: dict[str, tuple[str, int, Update]], rates: dict[str, float], copy: float) -> Figure:
    """The rate of each update; a longer bar is a faster update."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    names = list(runs)[::-1]
    for group, colour in GROUPS.items():
        own = [name if runs[name][0] == group else None for name in names]
        places = [place for place, name in enumerate(own) if name]
        axes.barh(places, [rates[name] for name in own if name], color=colour, label=group)
    for place, name in enumerate(names):
        number = f"{rates[name]:.0f}" if rates[name] >= 1 else f"{rates[name]:.1g}"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(number, (rates[name] + 0.6, place), va="center", bbox=behind)
    axes.axvline(copy, color="0.3", linestyle="--", linewidth=1)
    axes.annotate(" a copy", (copy, len(names) - 0.4), color="0.3", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("GB/s of the bytes that the update must read and write:  faster →")
    axes.set_title(
        "Updates beside the bandwidth of memory: a longer bar is a faster update",
        loc="left",
        pad=16,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    return figure


if __name__ == "__main__":
    main()
