"""How long? The longest sequence that a small Llama trains on in a given peak, with one
saving after the other.

    python benchmarks/longest.py
        2 GB for each rank; some minutes, needs 5 GB and transformers
    python benchmarks/longest.py --memory 0.8 --vocabulary 16384 --only "plain" "tiled head"

Each row adds a change to those above. Its length is the longest whose planned peak fits
(in multiples of 256 tokens of a rank); then one step of that length runs in
processes of their own, whose largest resident memory is measured from before the model
exists. Checkpointed inputs in host memory are planned only: on the CPU, host memory is
the device's. Prints a table, and writes results.json.
"""

import argparse
import json
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

import fzero
from fzero.common import print_report
from fzero.estimation import compare_plans
from sharding import Mesh

STEP = 256
"""Lengths are multiples of so many tokens of a rank."""
GIVES_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
"""glibc gives memory back at once, so that a peak is what tensors take."""
CHECKPOINTED = {"activation_checkpointing": {"every": 1}}
ON_HOST = {"activation_checkpointing": {"every": 1, "cpu_checkpointing": True}}


class Row(NamedTuple):
    """A contender: its transforms by name, further keys, and its ranks."""

    tiles: tuple[str, ...] = ()
    keys: Mapping[str, Any] = MappingProxyType({})
    num_ranks: int = 1
    is_planned_only: bool = False


ROWS = {
    "plain": Row(),
    "+ tiled head": Row(("head",)),
    "+ tiled MLPs": Row(("head", "mlp")),
    "+ blocks checkpointed": Row(("head", "mlp"), CHECKPOINTED),
    "+ their inputs in host memory": Row(("head", "mlp"), ON_HOST, is_planned_only=True),
    "+ seq=2": Row(("head", "mlp"), CHECKPOINTED, num_ranks=2),
}


def llama(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=1 << 20,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def config(row: Row) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **row.keys,
    }


def mesh_of(row: Row) -> Mesh | None:
    return Mesh.of(data=1, seq=row.num_ranks) if row.num_ranks > 1 else None


def transforms_of(row: Row) -> list[Any]:
    """The tiles of a row, and the division of the sequence."""
    made: list[Any] = [fzero.sequence.ulysses("seq")] if row.num_ranks > 1 else []
    if "head" in row.tiles:
        made.append(fzero.tiled_head(chunk_tokens=256))
    if "mlp" in row.tiles:
        made.append(fzero.tiled_mlp("model.layers.*.mlp", 16))
    return made


def batch_of(num_tokens: int, vocabulary: int, device: str = "cpu") -> dict[str, Tensor]:
    tokens = torch.randint(0, vocabulary, (1, num_tokens)) if device == "cpu" else None
    given = torch.empty((1, num_tokens), dtype=torch.int64, device=device)
    return dict.fromkeys(("input_ids", "labels"), given if tokens is None else tokens)


def planned(args: argparse.Namespace, row: Row, num_own: int) -> int:
    """The planned peak of a rank with `num_own` tokens, in bytes."""
    with torch.device("meta"):
        model = llama(args)
    columns = compare_plans(
        model,
        config(row),
        batch=batch_of(num_own * row.num_ranks, args.vocabulary, "meta"),
        world_size=row.num_ranks,
        mesh=mesh_of(row),
        device="cuda" if row.is_planned_only else "cpu",
        transforms=transforms_of(row),
    )
    return columns[columns.given].nbytes("device")


def longest(args: argparse.Namespace, row: Row) -> tuple[int, int]:
    """The most tokens of a rank whose plan fits, to 1 %, and that peak. A peak is nearly
    linear in the tokens.
    """
    most, low, high = args.memory * 1e9, STEP, 2 * STEP
    low_peak, high_peak = planned(args, row, low), planned(args, row, high)
    if low_peak > most:
        raise SystemExit(f"{STEP} tokens must fit into --memory, and take {low_peak / 1e9:.2f} GB")
    while True:
        slope = max((high_peak - low_peak) / (high - low), 1.0)  # flat where weights decide
        guess = max(int((most - low_peak) / slope + low) // STEP, 1) * STEP
        guess = min(guess, 8 * high)
        peak = planned(args, row, guess)
        if most * 0.99 <= peak <= most or (peak <= most and guess <= high):
            return guess, peak
        low, low_peak, high, high_peak = high, high_peak, guess, peak


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(
    rank: int, port: int, args: argparse.Namespace, name: str, num_own: int, results: Any
) -> None:
    """One step; puts the peak of this rank, and the seconds."""
    row = ROWS[name]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(row.num_ranks)}
    torch.set_num_threads(max(1, args.threads // row.num_ranks))
    small = argparse.Namespace(vocabulary=64, width=64, blocks=1)
    llama(small)(**batch_of(8, 64)).loss.backward()  # the libraries, in memory
    before, num_tokens = resident_nbytes(), num_own * row.num_ranks
    step = fzero.make_train_step(
        llama(args), config(row), mesh=mesh_of(row), transforms=transforms_of(row)
    )
    state = step.init()
    step.runtime.spec.model.to("meta")  # only `init` reads its weights
    start = time.perf_counter()
    state, metrics = step(state, batch_of(num_tokens, args.vocabulary))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    results.put((peak, seconds, metrics.loss.item()))
    fzero.shutdown()


def measured(args: argparse.Namespace, name: str, num_own: int) -> tuple[int, float, float]:
    """The largest peak of a rank, the seconds and the loss."""
    context, num_ranks = multiprocessing.get_context("spawn"), ROWS[name].num_ranks
    os.environ |= GIVES_BACK
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    results = context.Queue()
    processes = [
        context.Process(target=measure, args=(rank, port, args, name, num_own, results))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=3600) for _ in processes]
    for process in processes:
        process.join()
    return max(one[0] for one in found), max(one[1] for one in found), found[0][2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--memory", type=float, default=2.0, help="GB of a rank")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--json", type=Path, default=Path("results.json"))
    args = parser.parse_args()
    table = Table(box=box.SIMPLE)
    for title in ("", "tokens", "× plain", "planned, GB", "measured, GB", "ms a token"):
        table.add_column(title, justify="left" if not title else "right")
    rows: dict[str, dict[str, Any]] = {}
    for name in args.only:
        row = ROWS[name]
        num_own, peak = longest(args, row)
        found = rows[name] = {"tokens": num_own * row.num_ranks, "planned": peak}
        if not row.is_planned_only:
            most, seconds, loss = measured(args, name, num_own)
            found |= {"measured": most, "seconds": seconds, "loss": loss}
        print(f"{name}: {found}", flush=True)
    plain = next(iter(rows.values()))["tokens"]
    for name, found in rows.items():
        is_run = "measured" in found
        table.add_row(
            name,
            f"{found['tokens']:,}",
            f"{found['tokens'] / plain:.1f}",
            f"{found['planned'] / 1e9:.2f}",
            f"{found['measured'] / 1e9:.2f}" if is_run else "",
            f"{found['seconds'] / found['tokens'] * 1e3:.1f}" if is_run else "",
        )
    print_report(table)
    args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
