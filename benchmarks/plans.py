"""Is a plan right? Planned bytes and seconds beside those of real steps, over models,
stages, dtypes and variants.

    python benchmarks/plans.py memory
        an hour; other work on the machine does not matter
    python benchmarks/plans.py time
        half an hour on a quiet machine
    python benchmarks/plans.py time --models GPT,Llama --stages 0,3 --variants plain
        three minutes
    python benchmarks/plans.py memory --models GPT --stages 0,3 --variants plain,files
    --out out/mine

Variants: as it is, with activation checkpointing, with two micro-steps, and with the
optimizer's state in host memory or files.

Each case is a job of two ranks with one thread each, on gloo, in fresh processes,
planned by `fzero.estimation.compare_plans` with `device="cpu"`. Of four numbers for
each case the plan is compared with what was measured: bytes of *model state* (resident
when only the state is left, beyond what there was before `init`), of the *rest* between
steps (with the working buffers that a step keeps on a CPU), at the *peak* of a step,
and of the *activations*: the peak beyond the rest. glibc gives memory back at once, so
that what is resident is what is held; a small model of the same kind has run before, so
that libraries are loaded. Seconds are the median of steps of processes that keep their
memory, planned at the mean of the rates that the same processes measure at once before,
between and after these steps: a machine drifts in minutes. On a busy machine
`--processor-time` takes seconds of the processor for both, without those in which a
process waits or others run; files have none.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Size
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import fzero
from fzero.common import print_report
from fzero.profiling.machine import NAMES, MeasuredRates, disk_rates, mean_rates, rates_of_rank

NUM_RANKS, CONTEXT = 2, 128
NUM_ROWS = {"memory": 4, "time": 2}
GIVES_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
BARS = {"state": 0.05, "rest": 0.1, "peak": 0.1, "activations": 0.05}


def gpt(blocks: int) -> nn.Module:
    return GPT(Size(width=512, num_blocks=blocks, num_heads=8, context=CONTEXT, num_rows=4))


def llama(blocks: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8000,
            hidden_size=512,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            intermediate_size=1376,
            use_cache=False,
            tie_word_embeddings=False,
        )
    )


def bert(blocks: int) -> nn.Module:
    """Whose head is tied to its embedding."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=8000,
            hidden_size=512,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            intermediate_size=2048,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        convs = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.inner = nn.Sequential(
            convs[0], nn.BatchNorm2d(width), nn.ReLU(), convs[1], nn.BatchNorm2d(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.inner(x)).relu()


class ConvNet(nn.Module):
    """A residual network on images of 32 × 32."""

    def __init__(self, blocks: int, width: int = 128) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "GPT": gpt,
    "Llama": llama,
    "BERT": bert,
    "convnet": ConvNet,
}
NUM_BLOCKS = {"GPT": 8, "Llama": 6, "BERT": 6, "convnet": 12}
RETURNS_LOSS = ("GPT", "convnet")
"""The models that take a tuple and return their loss."""


def built(name: str, blocks: int) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name](blocks)
    return model.train()


def batch_of(name: str, rows: int, *, of_step: int = 1) -> Any:
    """One micro-batch, or those of a step together."""
    rows *= of_step
    if name == "convnet":
        images = torch.arange(rows * 3 * 32 * 32, dtype=torch.float32).view(rows, 3, 32, 32)
        return images.sin(), torch.arange(rows) % 1000
    tokens = torch.arange(rows * CONTEXT).view(rows, CONTEXT) % 256
    return (tokens, tokens) if name in RETURNS_LOSS else {"input_ids": tokens, "labels": tokens}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch) if isinstance(batch, tuple) else model(**batch).loss
    return loss


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"activation_checkpointing": {"every": 1}},
    "accumulated": {"gradient_accumulation_steps": 2},
    "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "files": {
        "zero_optimization": {
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/fzero-plans"}
        }
    },
}
"""The keys that each variant sets. (Host memory is the device's on a CPU: offload to it
moves nothing.)
"""


def keys_of(name: str, stage: int, precision: str, variant: str, rows: int) -> dict[str, Any]:
    own = VARIANTS[variant]
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 10_000,
        **own.get("zero_optimization", {}),
    }
    is_low = precision == "bf16"
    sizes = {"train_micro_batch_size_per_gpu": rows}
    keys = {
        **own,
        **sizes,
        "bf16": {"enabled": is_low, "auto_cast": is_low},
        "zero_optimization": zero,
    }
    if name == "convnet" and is_low:
        keys["data_types"] = {
            "buffer_dtype": "bfloat16"
        }  # a batch norm on a CPU takes statistics of its own dtype only
    return keys


# --- measured -------------------------------------------------------------------------------------


def fill(module: nn.Module) -> None:
    for x in module.parameters(recurse=False):
        x.normal_(std=0.02)
    for name, x in module.named_buffers(recurse=False):
        _ = x.copy_(torch.arange(x.shape[-1])) if name == "position_ids" else x.zero_()


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


NUM_WARM = 2
"""Steps that do not count: what is learned and kept is there after them."""


def train(
    name: str,
    blocks: int,
    keys: dict[str, Any],
    num_steps: int,
    rows: int,
    measure: Callable[[], object] = tuple,
) -> dict[str, float]:
    """Steps of a model, with what is resident at their peak, between them, and when
    only the state is left.

    `measure` runs before, in the middle of and after the steps that count.
    """
    torch.manual_seed(0)
    step = fzero.make_train_step(built(name, blocks), keys, loss_fn=loss_of)
    with torch.no_grad():
        state, batch = (
            step.init(init_fn=fill),
            batch_of(name, rows, of_step=step.plan.num_micro_steps),
        )
    seconds = []
    for index in range(num_steps):
        if index == NUM_WARM:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        if index in (NUM_WARM, (NUM_WARM + num_steps) // 2):
            measure()
        began = time.perf_counter()
        state, _ = step(state, batch)
        seconds.append(time.perf_counter() - began)
    counted = seconds[NUM_WARM:] or seconds
    found = {
        "peak": status("VmHWM"),
        "rest": status("VmRSS"),
        "seconds": statistics.median(counted),
    }
    measure()
    found["activations"] = found["peak"] - found["rest"]
    del step, batch
    gc.collect()
    return found | {"state": status("VmRSS")}


def run_rank(
    name: str,
    keys: dict[str, Any],
    num_steps: int,
    what: str,
    clock: str,
    rank: int,
    port: int,
    pipe: Any,
) -> None:
    time.perf_counter = getattr(time, clock)  # of steps and of rates
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    axis, rates, rows = fzero.join(), list[MeasuredRates](), NUM_ROWS[what]
    train(name, 1, keys, NUM_WARM, rows)
    gc.collect()
    before = status("VmRSS")

    def measure() -> None:
        if what == "time":
            rates.append(rates_of_rank(axis, torch.device("cpu")))

    found = train(name, NUM_BLOCKS[name], keys, num_steps, rows, measure)
    pipe.send(
        (
            {
                key: value - before * (key not in ("seconds", "activations"))
                for key, value in found.items()
            },
            rates,
        )
    )
    fzero.shutdown()


def measured(
    name: str, keys: dict[str, Any], num_steps: int, what: str, clock: str
) -> tuple[dict[str, float], list[MeasuredRates]]:
    """The mean of the ranks, and for times the rates at each moment."""
    fresh = get_context("forkserver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = []
    for rank in range(NUM_RANKS):
        ours, theirs = fresh.Pipe()
        jobs.append(
            (
                fresh.Process(
                    target=run_rank, args=(name, keys, num_steps, what, clock, rank, port, theirs)
                ),
                ours,
            )
        )
        jobs[-1][0].start()
        theirs.close()
    found = [pipe.recv() for _, pipe in jobs]
    for process, _ in jobs:
        process.join()
    mean = {key: statistics.fmean(one[key] for one, _ in found) for key in found[0][0]}
    return mean, [mean_rates(moment) for moment in zip(*(rates for _, rates in found), strict=True)]


# --- planned --------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return loss_of(self.model, batch)


def planned(
    name: str, keys: dict[str, Any], machine: fzero.graph.MachineModel, rows: int
) -> fzero.estimation.Candidate:
    batch, model = batch_of(name, rows), built(name, NUM_BLOCKS[name])
    model = model if name in RETURNS_LOSS else Wrapped(model)
    compared = fzero.estimation.compare_plans(
        model, keys, world_size=NUM_RANKS, batch=batch, machine=machine, device="cpu"
    )
    return compared[compared.given]


# --- the tables -----------------------------------------------------------------------------------


def run(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    stages, models = map(int, args.stages.split(",")), args.models.split(",")
    num_steps, rows = args.steps if args.what == "time" else 4, NUM_ROWS[args.what]
    dtypes, variants = args.dtypes.split(","), args.variants.split(",")
    for name, precision, variant, stage in product(models, dtypes, variants, list(stages)):
        if variant == "files" and stage == 0:
            continue  # every rank would write all of it
        keys = keys_of(name, stage, precision, variant, rows)
        both = disk_rates(Path("/tmp")) if args.what == "time" and variant == "files" else ()
        # the ranks share the disk
        write, read = [rate / NUM_RANKS for rate in both] or (None, None)
        found, rates = measured(
            name,
            keys,
            num_steps,
            args.what,
            "process_time" if args.processor_time else "perf_counter",
        )
        rates = [replace(one, disk_write=write, disk_read=read) for one in rates]
        rate = mean_rates(rates) if rates else None
        plan = planned(name, keys, rate.machine if rate else fzero.graph.MachineModel(), rows)
        of_plan = {
            "state": sum(plan.step.state.values()),
            "rest": plan.step.at_rest,
            "peak": plan.step.nbytes,
        }
        # 0 unless state is in files
        of_plan = {what: nbytes + plan.step.host_pool for what, nbytes in of_plan.items()}
        of_plan["activations"] = of_plan["peak"] - of_plan["rest"]
        case = {"model": name, "precision": precision, "variant": variant, "stage": stage}
        yield case | {
            "measured": found,
            "planned": of_plan | {"seconds": plan.seconds},
            "description": plan.step.description,
            "rates": [asdict(one) for one in rates],
        }
        if args.verbose:
            console.print(
                case, found, of_plan, plan.seconds, plan.step.description, rate, soft_wrap=True
            )


def table_of(cases: list[dict[str, Any]], names: tuple[str, ...], scale: float, unit: str) -> Table:
    table = Table(title=f"planned / measured, {unit} on a rank", title_justify="left")
    for column in ("model", "dtype", "variant", "stage"):
        table.add_column(column)
    for name in names:
        table.add_column(f"{name}\nplanned, measured, ratio", justify="right")
    for case in cases:
        row = [case["model"], case["precision"], case["variant"], str(case["stage"])]
        for name in names:
            a, b = case["planned"][name], case["measured"][name]
            row.append(f"{a / scale:.3g}  {b / scale:.3g}  {a / b:.2f}")
        table.add_row(*row)
    return table


def errors(cases: list[dict[str, Any]], name: str) -> list[float]:
    return [case["planned"][name] / case["measured"][name] - 1 for case in cases]


def ranking(
    cases: list[dict[str, Any]], *, by: tuple[str, ...], margin: float = 0.03
) -> tuple[int, int]:
    """Of pairs of cases that differ in nothing but `by`, and in time by more than the
    margin: how many the plan ranks right.
    """
    fields = ("model", "precision", "variant", "stage")
    right = total = 0
    for index, a in enumerate(cases):
        for b in cases[:index]:
            if any(a[field] != b[field] for field in fields if field not in by):
                continue
            of_a, of_b = a["measured"]["seconds"], b["measured"]["seconds"]
            if abs(of_a / of_b - 1) > margin:
                total += 1
                right += (of_a > of_b) == (a["planned"]["seconds"] > b["planned"]["seconds"])
    return right, total


def print_rates(cases: list[dict[str, Any]], console: Console) -> None:
    """Each rate over all cases, and how far apart the same case's are."""
    console.print("rates: median of all, and the largest over the least of a case (median, worst)")
    for name, (what, unit) in NAMES.items():
        of_cases = [[one[name] for one in case["rates"]] for case in cases]
        if unit and None not in chain(*of_cases):
            drifts = [max(rates) / min(rates) for rates in of_cases]
            scale = 1e-6 if unit == "μs" else 1e9
            console.print(
                f"{what}: {statistics.median(chain(*of_cases)) / scale:.3g} {unit}, "
                f"{statistics.median(drifts):.2f}, {max(drifts):.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("memory", "time"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument(
        "--steps", type=int, default=8, help="of each case, for times; two do not count"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="of steps and rates, for a busy machine"
    )
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/plans"))
    args = parser.parse_args()
    if args.processor_time and "files" in args.variants.split(","):
        parser.error("--processor-time: the disk takes none; leave files out of --variants")
    if args.what == "memory" and any(
        os.environ.get(name) != value for name, value in GIVES_BACK.items()
    ):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | GIVES_BACK)
    console = Console(highlight=False, width=120)
    get_context("forkserver").set_forkserver_preload(["plans"])
    cases = list(run(args, console))
    if args.what == "memory":
        print_report(table_of(cases, tuple(BARS), 1e6, "MB"))
        for name, bar in BARS.items():
            found = errors(cases, name)
            missed = sum(abs(error) > bar for error in found)
            console.print(
                f"{name}: from {min(found):+.1%} to {max(found):+.1%}, {missed} of {len(found)} "
                f"off by more than {bar:.0%}"
            )
    else:
        print_report(table_of(cases, ("seconds",), 1.0, "s"))
        found = errors(cases, "seconds")
        console.print(
            f"error: median {statistics.median(map(abs, found)):.0%}, worst "
            f"{max(found, key=abs):+.0%}"
        )
        for by in (("stage",), ("variant",), ("stage", "variant"), ("precision",)):
            right, total = ranking(cases, by=by)
            console.print(
                f"of pairs that differ in {' or '.join(by)} by more than 3 %: {right} of {total} "
                f"are ranked right"
            )
        print_rates(cases, console)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.what}.json").write_text(json.dumps({"cases": cases}, indent=1))


if __name__ == "__main__":
    main()
