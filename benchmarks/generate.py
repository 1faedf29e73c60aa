"""How fast does a sharded model generate? Gathered once, gathered for each token, and a
plain model, in one run.

    python benchmarks/generate.py
        2 ranks, stage 3; about a minute on two cores
    python benchmarks/generate.py --tokens 8 --rounds 1 # does it run?

Two gloo ranks, one thread each, a GPT-2 of transformers with random weights. The
contenders take turns; the time is that of rank 0's fastest round, of one round for the
slow one. The plain model runs in the same processes, without fzero. Prints a table, and
the milliseconds of the one gather, which do not depend on the number of tokens. "By
processor time" compares rank 0's own seconds, in which another load on the machine
counts little.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, multiprocessing
from transformers import GPT2Config, GPT2LMHeadModel

import fzero
from fzero.common import print_report
from fzero.comms import CommRecord

PROMPT, ROWS = 32, 4
ZERO_3 = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make_model(width: int, num_layers: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048,
        n_positions=512,
        n_embd=width,
        n_layer=num_layers,
        n_head=width // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def run_rank(rank: int, world_size: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    plain, sent = make_model(options.width, options.layers), list[CommRecord]()
    made = fzero.make_train_step(
        make_model(options.width, options.layers),
        fzero.Config.load(ZERO_3),
        loss_fn=lambda m, x: m(x),
    )
    step, state = made.observed(sent.append), made.init()
    prompts = torch.randint(0, 2048, (ROWS, PROMPT))

    def generate(model: GPT2LMHeadModel) -> Tensor:
        tokens: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=options.tokens,
            min_new_tokens=options.tokens,
            pad_token_id=0,
        )
        return tokens

    def sharded(by: str) -> Tensor:
        with fzero.generating(step, state, by=by) as model:  # type: ignore[arg-type]
            return generate(model)  # type: ignore[arg-type]

    contenders: dict[str, Callable[[], Tensor]] = {
        "a plain model": lambda: generate(plain),
        "gathered once": lambda: sharded("copy"),
        "gathered for each token": lambda: sharded("unit"),
    }
    entering, worked = float("inf"), dict.fromkeys(contenders, float("inf"))
    best, num_sent, expected = (
        dict.fromkeys(contenders, float("inf")),
        dict.fromkeys(contenders, 0),
        generate(plain),
    )
    for index in range(options.rounds + 1):  # the first warms up
        dist.barrier()
        began = time.perf_counter()
        with fzero.generating(step, state):
            entering = min(entering, time.perf_counter() - began)
        for name, run in contenders.items():
            if name == "gathered for each token" and index > 1:
                continue
            sent.clear()
            dist.barrier()
            began, before = time.perf_counter(), time.process_time()
            tokens = run()
            worked[name] = min(worked[name], time.process_time() - before)
            best[name] = min(best[name], time.perf_counter() - began)
            num_sent[name] = sum(record.nbytes for record in sent)
            assert torch.equal(tokens, expected), name
    if rank == 0:
        show(best, worked, num_sent, options)
        print(
            f"The one gather takes {1000 * entering:.1f} ms of {1000 * best['gathered once']:.0f}."
        )
    dist.destroy_process_group()


def show(
    best: dict[str, float],
    worked: dict[str, float],
    num_sent: dict[str, int],
    options: argparse.Namespace,
) -> None:
    table = Table(
        title=(
            f"{options.tokens} tokens of {ROWS} answers, GPT-2 of width {options.width}, "
            f"{options.layers} blocks, 2 ranks"
        )
    )
    for column in (
        "contender",
        "tokens / s",
        "of the plain model",
        "by processor time",
        "MB sent by a rank",
    ):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, seconds in best.items():
        by_work = f"{worked['a plain model'] / worked[name]:.3f}"
        speed = ROWS * options.tokens / seconds
        table.add_row(
            name,
            f"{speed:.1f}",
            f"{best['a plain model'] / seconds:.3f}",
            by_work,
            f"{num_sent[name] / 1e6:.1f}",
        )
    print_report(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (2, f"{folder}/store", options), nprocs=2)


if __name__ == "__main__":
    main()
