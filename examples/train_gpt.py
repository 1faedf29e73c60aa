"""The demo: a byte-level GPT learns Python, with its state sharded over the ranks.

    make demo
        stage 3 on two processes, for 90 seconds
    make demo ARGS="--steps 1500"
        longer: some minutes, and better than gzip
    make demo ARGS="--stage 1 --ranks 3"
        another stage, another number of ranks
    make demo ARGS="--dtype bf16"
        parameters in bf16 beside an fp32 master
    make demo ARGS="--optimizer muon"
        Muon for the matrices, each computed by one rank, and AdamW for the rest
    make demo ARGS="--comm-hooks zero++"
        quantized communication, compared with an exact run
    make demo ARGS="--offload nvme"
        optimizer state in files, under --out; the same numbers
    make demo ARGS="--save out/saved"
        saves there every 100 steps, and resumes from there
    make demo ARGS="--pipe 2"
        a pipeline of two stages (examples/pipeline.py)
    make demo ARGS="--config my.json"
        a configuration file, such as DeepSpeed's
    fzero --num_procs 2 examples/train_gpt.py --stage 2
        started like any script, on one machine or on many

Every rank runs `train`. It describes the model without memory and plans the shards;
`learn` initialises this rank's shards and calls `state, metrics = step(state, batch)`
until its `Limit` ends it; `score` evaluates. `report` and `draw` show the results,
`launch` starts the ranks.
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
from pathlib import Path
from typing import Any

import optree
import torch
from gpt import GPT, SIZES
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from text import gzip_bits_per_byte, random_batch, read_text, scoring_batches

import fzero

BATCH_SIZE = 8  # windows per rank and step
SCORING_BATCH_SIZE = 32  # the same without gradients, which take most of the memory
STAGES = (0, 1, 2, 3)
# Model state (ZeRO §3): the first stage that shards it, and bytes per element in 32 bits and in 16.
FORMULA = {
    "parameters": (3, 4, 2),
    "master": (1, 0, 4),
    "optimizer": (1, 8, 8),
    "gradients": (2, 4, 2),
}
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}
ADAMW = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
OPTIMIZERS = ("adamw", "muon")
LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
COMM_HOOKS = {
    "weights": {"zero_quantized_weights": True},  # gathers in 8 bits
    "gradients": {"zero_quantized_gradients": True},  # reductions in 4 bits
    "loco": LOCO,  # the same with error feedback
    "zero++": {"zero_quantized_weights": True, **LOCO},
}
BITS = 1 / math.log(2)  # the loss is in nats per byte, compressors count bits
SECONDS_PER_LINE, SECONDS_PER_SAMPLE, SAMPLE_LENGTH = 2, 15, 70
# held-out bytes that a short training is scored on; a long one gets all
SCORED_AFTER_SECONDS = 100_000


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on the Python standard library with ZeRO."
    )
    parser.add_argument("--stage", type=int, choices=STAGES, help="ZeRO stage (default 3)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the compute (default fp32)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="optimizer (default adamw)")
    parser.add_argument(
        "--comm-hooks",
        choices=COMM_HOOKS,
        help="quantized communication; trains twice, first without it",
    )
    parser.add_argument(
        "--offload",
        choices=("host", "nvme"),
        help="memory of the optimizer state, instead of the device",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a configuration, instead of stage and dtype"
    )
    parser.add_argument(
        "--pipe",
        type=int,
        metavar="STAGES",
        help="train as a pipeline of so many stages, in ZeRO stage 1",
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of processes")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps (default: as many as --seconds allow)"
    )
    parser.add_argument(
        "--seconds", type=float, default=90, help="seconds of training, where --steps is left out"
    )
    parser.add_argument("--size", default="small", choices=SIZES, help="size of the model")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights, the batches and the sample"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder of the picture and the numbers"
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="save there every 100 steps, and resume from there"
    )
    options = parser.parse_args()
    if options.pipe and options.ranks % options.pipe:
        parser.error(
            f"--ranks must be a multiple of the {options.pipe} stages of --pipe, got "
            f"{options.ranks}"
        )
    others = ("stage", "dtype", "optimizer", "comm_hooks", "offload", "config", "save")
    if options.pipe and any(getattr(options, name) is not None for name in others):
        parser.error(
            "--pipe trains in fp32 and ZeRO stage 1; leave out --stage, --dtype and the like"
        )
    own = (options.dtype, options.optimizer, options.comm_hooks, options.offload)
    if options.config and (options.stage is not None or any(own)):
        parser.error(
            "--config FILE says the stage, the dtype, the optimizer, the comm hooks and what is "
            "offloaded; leave out --stage, --dtype, --optimizer, --comm-hooks and --offload"
        )
    if options.steps is None and (options.pipe or options.comm_hooks or options.save):
        # so that two runs, and the runs before and after a save, have the same steps
        options.steps = 1500
    return options


class Limit:
    """The end of training: after a number of steps, or of seconds on which the ranks
    agree, or when a signal asks for it.

    Attributes:
        done: the part of the training that is over, 0 to 1.
    """

    def __init__(self, steps: int | None, seconds: float, stop: threading.Event) -> None:
        self._steps, self._seconds, self._stop, self.done = steps, seconds, stop, 0.0
        self._started = time.perf_counter()

    def begin(self) -> None:
        self._started = time.perf_counter()

    def is_over(self, num_steps: int) -> bool:
        """*Collective:* ranks that ended at different steps would wait for each other."""
        time_done = (time.perf_counter() - self._started) / self._seconds
        is_asked, time_done = mean_of_ranks([float(self._stop.is_set()), time_done])
        self.done = min(1, num_steps / self._steps if self._steps else time_done)
        return is_asked > 0 or self.done >= 1

    def left(self, pace: float, num_steps: int) -> float:
        """The seconds that are left, at `pace` seconds per step."""
        return pace * (self._steps - num_steps) if self._steps else self._seconds * (1 - self.done)


def muon() -> Any:
    """Muon for the matrices of blocks, and AdamW for the rest, at one learning rate."""
    return fzero.optim.mixed_muon(
        adjust_lr_fn="match_rms_adamw",
        weight_decay=0.1,
        takes=lambda name, shape: name.startswith("blocks.") and len(shape) == 2,
        others=lambda lr: fzero.adamw(**ADAMW | {"lr": lr}),
    )


def config(stage: int, dtype: str, **keys: Any) -> fzero.Config:
    # By default stage 3 replicates parameters below 100,000 elements. This model has few others.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **keys}
    settings = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": zero,
    }
    return fzero.Config.load(settings | DTYPES[dtype])  # a file with this JSON works as well


def train(options: argparse.Namespace) -> None:
    """The program of every rank."""
    # a signal only sets a flag: the ranks agree between two steps, and stop together
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    size = SIZES[options.size]
    with torch.device("meta"):
        model = GPT(size)  # names and shapes: during training no rank holds the full model

    limit = Limit(options.steps, options.seconds, stop)

    def smaller_at_the_end(num_updates: int) -> float:
        # the same on all ranks: `done` is what they agreed on
        return 3e-3 if limit.done < 0.75 else 5e-4

    if options.config:
        configs, schedule = {"": fzero.Config.load(options.config)}, None
    else:
        stage, dtype = 3 if options.stage is None else options.stage, options.dtype or "fp32"
        offload: dict[str, Any] = {}
        if options.offload:
            # Remove files that a killed run left.
            files = (
                {"nvme_path": str(options.out / "files"), "leftover": "clean"}
                if options.offload == "nvme"
                else {}
            )
            offload = {
                "offload_optimizer": {
                    "device": {"host": "cpu"}.get(options.offload, "nvme"),
                    **files,
                }
            }
        configs, schedule = {"": config(stage, dtype, **offload)}, smaller_at_the_end
        if options.comm_hooks:
            configs = {
                "exact": configs[""],
                options.comm_hooks: config(
                    stage, dtype, **offload, **COMM_HOOKS[options.comm_hooks]
                ),
            }
    training_text, held_out_text = read_text()
    if options.steps is None:
        held_out_text = held_out_text[:SCORED_AFTER_SECONDS]
    results: dict[str, dict[str, Any]] = {}
    for name, cfg in configs.items():
        step = fzero.make_train_step(
            model,
            cfg,
            lr_schedule=schedule,
            seed=options.seed,
            transform=muon() if options.optimizer == "muon" else None,
        )
        console = Console(quiet=step.rank != 0, highlight=False, soft_wrap=True)
        if step.rank == 0:
            print(step.plan)
        if not results:
            console.print(
                f"{len(training_text):,} bytes of Python to learn from; one file in twenty is held "
                f"out"
            )
        folder = options.save and options.save / name
        state, losses = learn(console, step, cfg, options, training_text, folder, limit)
        where = {"rank": step.rank, "world_size": step.world_size}
        batches, scored = scoring_batches(
            held_out_text, context=size.context, batch_size=SCORING_BATCH_SIZE, **where
        )
        scores = score(console, step, state, batches, stop)
        if agree(stop):
            console.print(f"stopped at step {len(losses)}")
            break
        # in full, in fp32, on rank 0; nothing on the others
        weights = step.gather(state, to="rank0")
        held = (state.params, state.master, state.grads, state.optimizer)
        results[name] = {
            "training_bits_per_byte": losses,
            "validation_bits_per_byte": sum(scores) / len(scores),
            # of the same bytes that the model was scored on
            "gzip_bits_per_byte": gzip_bits_per_byte(scored),
            "num_bytes_scored": len(scored),
            "state_nbytes": sum(x.nbytes for x in optree.tree_leaves(held)),
            "nbytes_by_memory": step.plan.bytes_by_memory,
            "sent_nbytes_per_step": sum(step.plan.sent_nbytes_per_step.values()),
            "world_size": step.world_size,
        }
    else:
        if step.rank == 0:
            report(console, options, cfg, results, model, weights)
    fzero.shutdown()


def learn(
    console: Console,
    step: fzero.TrainStep,
    cfg: fzero.Config,
    options: argparse.Namespace,
    text: torch.Tensor,
    folder: Path | None,
    limit: Limit,
) -> tuple[fzero.TrainState[torch.Tensor], list[float]]:
    """The state at the limit, and the bits per byte of each step."""
    state, losses, context = step.init(), [], SIZES[options.size].context
    if folder and (folder / "latest").exists():
        state, losses, path = fzero.load(folder, step=step)
        console.print(f"goes on from {path}")
    saving: fzero.checkpoint.Saving | None = None
    num_before = len(losses)
    micro_batch, num_micro_steps = cfg.batch_sizes(step.world_size)[1:]
    batch_size = (micro_batch or BATCH_SIZE) * num_micro_steps
    # a terminal has one changing line; a log gets a line every two seconds
    live = console.is_terminal
    limit.begin()
    started = last_line = last_sample = time.perf_counter()
    with Progress(
        TextColumn("{task.description}"), BarColumn(10), console=console, disable=not live
    ) as progress:
        task = progress.add_task("the first step", total=1)
        while not limit.is_over(len(losses)):
            where = {"seed": options.seed, "step": len(losses), "rank": step.rank}
            batch = random_batch(text, context=context, batch_size=batch_size, **where)
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item() * BITS)
            if folder and len(losses) % 100 == 0:  # written while the next steps run
                saving = fzero.start_save(
                    state, folder, step=step, client=list(losses), keep=2, after=saving
                )
            now = time.perf_counter()
            pace = (now - started) / (len(losses) - num_before)
            left = limit.left(pace, len(losses))
            line = describe(
                losses, options.steps, pace, left, num_tokens=batch_size * context * step.world_size
            )
            progress.update(task, completed=limit.done, description=line)
            if not live and (now - last_line > SECONDS_PER_LINE or len(losses) == options.steps):
                console.print(line)
                last_line = now
            # Rank 0 says when, for a sample needs all ranks: stage 3 gathers the parameters for it.
            if (
                mean_of_ranks([float(step.rank == 0 and now - last_sample > SECONDS_PER_SAMPLE)])[0]
                > 0
            ):
                if (weights := step.gather(state, to="rank0")) and step.rank == 0:
                    text_now = sample(
                        SIZES[options.size], weights, options.seed, num_bytes=SAMPLE_LENGTH
                    )
                    console.print(Text(f"  it writes: {text_now!r}", style="green"))
                last_sample = time.perf_counter()
    if saving:
        saving.wait()
    if folder and len(losses) > num_before and len(losses) % 100:
        fzero.save(state, folder, step=step, client=losses, keep=2)
    return state, losses


def score(
    console: Console,
    step: fzero.TrainStep,
    state: fzero.TrainState[torch.Tensor],
    batches: list[Any],
    stop: threading.Event,
) -> list[float]:
    """The bits per byte of held-out batches."""
    scores: list[float] = []
    with console.status("scoring the held-out bytes"):
        while len(scores) < len(batches) and not agree(stop):
            # the mean over the ranks
            scores.append(step.evaluate(state, batches[len(scores)]).item() * BITS)
    return scores


def agree(stop: threading.Event) -> bool:
    """Whether any rank was asked to stop. *Collective*: a rank that stopped alone would
    leave the others waiting.
    """
    return mean_of_ranks([float(stop.is_set())])[0] > 0


def mean_of_ranks(numbers: list[float]) -> list[float]:
    """The means of some numbers over the ranks. *Collective.*"""
    own = torch.tensor(numbers)
    means: list[float] = fzero.reduce_scatter_grads(own, fzero.specs_of(own), fzero.join()).tolist()
    return means


def describe(
    losses: list[float], num_steps: int | None, pace: float, left: float, *, num_tokens: int
) -> str:
    """The progress line; `pace` is in seconds per step, `left` in seconds, `num_tokens`
    per step of all ranks.
    """
    loss = sum(losses[-20:]) / len(losses[-20:])
    minutes, seconds = divmod(round(left), 60)
    count = f"{len(losses)}/{num_steps}" if num_steps else f"{len(losses)}"
    return (
        f"step {count}: {loss:.3f} bits per byte, {num_tokens / pace:,.0f} tokens/s, "
        f"{minutes}:{seconds:02} left"
    )


def sample(size: Any, weights: Any, seed: int, *, num_bytes: int) -> str:
    """What a model with these weights writes after "def "."""
    writer = GPT(size)
    writer.load_state_dict(weights)
    generator = torch.Generator().manual_seed(seed)
    return writer.generate(
        b"def ", num_bytes=num_bytes, temperature=0.8, generator=generator
    ).decode(errors="replace")


def report(
    console: Console,
    options: argparse.Namespace,
    cfg: fzero.Config,
    results: dict[str, dict[str, Any]],
    model: GPT,
    weights: Any,
) -> None:
    """The final report of rank 0: a sample, the score, the picture, and a suggestion."""
    options.out.mkdir(parents=True, exist_ok=True)
    *_, result = results.values()
    (options.out / "demo.json").write_text(
        json.dumps(result | {"runs": results} if len(results) > 1 else result)
    )
    draw(results, model, cfg).savefig(options.out / "demo.png", dpi=120)
    for name, one in results.items() if len(results) > 1 else ():
        console.print(
            f"{name}: "
            f"{sum(one['training_bits_per_byte'][-30:]) / len(one['training_bits_per_byte'][-30:]):.3f} "
            f"bits per byte in the last steps, {one['validation_bits_per_byte']:.3f} on held-out "
            f"bytes; a rank sends {one['sent_nbytes_per_step']:,} bytes in a step"
        )
    text = sample(model.size, weights, options.seed, num_bytes=300)
    console.print(Panel(Text(text), title="Python by this model"))
    console.print(memory(model, cfg, result))
    console.print(
        f"[bold]{result['validation_bits_per_byte']:.3f}[/] bits per byte on "
        f"{result['num_bytes_scored']:,} held-out bytes; gzip -9 needs "
        f"[bold]{result['gzip_bits_per_byte']:.3f}[/] for the same bytes\nsee "
        f"{options.out}/demo.png for the loss and for the memory of each stage, "
        f"{options.out}/demo.json for numbers\n"
        f'longer, until it beats gzip: make demo ARGS="--steps 1500"\n'
        f'another stage: make demo ARGS="--stage {(cfg.zero_optimization.stage + 1) % 4} --ranks 3 --dtype bf16"\n'
        f"how such a step is made of four functions: {Path(sys.executable).parent}/python "
        f"examples/anatomy_of_a_step.py"
    )


def planned(model: GPT, cfg: fzero.Config, stage: int, num_ranks: int) -> dict[str, int]:
    """The bytes of model state that a rank would hold in a stage, by quantity."""
    zero = cfg.zero_optimization.model_copy(update={"stage": stage})
    return fzero.plan(
        model, cfg.model_copy(update={"zero_optimization": zero}), world_size=num_ranks
    ).bytes_per_rank


def memory(model: GPT, cfg: fzero.Config, result: dict[str, Any]) -> Table:
    """What ZeRO did: the model state of a rank in each stage as planned, and as this
    run held it.
    """
    ranks, own = result["world_size"], cfg.zero_optimization.stage
    table = Table(title=f"Model state of each of {ranks} ranks, MB")
    for title in ("stage", *FORMULA, "planned", "measured"):
        table.add_column(title, justify="right")
    for stage in STAGES:
        nbytes = planned(model, cfg, stage, ranks)
        measured = f"{result['state_nbytes'] / 1e6:.2f}" if stage == own else ""
        row = [str(stage), *(f"{nbytes[name] / 1e6:.2f}" for name in FORMULA)]
        table.add_row(
            *row,
            f"{sum(nbytes.values()) / 1e6:.2f}",
            measured,
            style="bold" if stage == own else "",
        )
    return table


def draw(results: dict[str, dict[str, Any]], model: GPT, cfg: fzero.Config) -> Figure:
    """The loss curve, and the bytes of model state per rank in every stage, beside the
    ZeRO paper's formula.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (name, result) in enumerate(results.items()):
        losses = torch.tensor(result["training_bits_per_byte"])
        run = (
            f"{name}, {result['sent_nbytes_per_step'] / 1e6:.2f} MB sent in a step: "
            if name
            else "training, "
        )
        if color == 0:
            left.plot(losses, color="0.85", label="training, each step")
        smooth = losses.unfold(0, min(30, len(losses)), 1).mean(-1)
        left.plot(
            range(len(losses) - len(smooth), len(losses)),
            smooth,
            color=f"C{color}",
            label=f"{run}mean of 30 steps",
        )
        style = {
            "color": f"C{color}" if name else "C3",
            "label": None if color else "held-out files",
        }
        left.plot(len(losses), result["validation_bits_per_byte"], "o", **style)
    left.axhline(
        result["gzip_bits_per_byte"], color="0.3", linestyle="--", label="gzip -9, held-out files"
    )
    left.set(
        xlabel="step",
        ylabel="bits per byte",
        ylim=(1, 6),
        title="A byte-level GPT on Python's standard library",
    )
    left.legend(fontsize="small" if len(results) > 1 else None)
    numel, ranks = sum(parameter.numel() for parameter in model.parameters()), result["world_size"]
    narrow = int(cfg.precision.param_dtype in ("bfloat16", "float16"))
    for stage in STAGES:
        formula = {
            name: widths[narrow] * numel / (ranks if stage >= first else 1)
            for name, (first, *widths) in FORMULA.items()
        }
        for x, nbytes, style in (
            (stage - 0.2, planned(model, cfg, stage, ranks), {}),
            (stage + 0.2, formula, {"alpha": 0.4, "hatch": "//"}),
        ):
            bottom = 0.0
            for color, name in enumerate(FORMULA):
                label = name if x < 0 else None  # once in the legend
                right.bar(
                    x, nbytes[name] / 1e6, 0.38, bottom, color=f"C{color}", label=label, **style
                )
                bottom += nbytes[name] / 1e6
    right.plot(
        cfg.zero_optimization.stage - 0.2,
        result["state_nbytes"] / 1e6,
        "kD",
        label="held by rank 0 in this run",
    )
    right.set(
        xlabel="stage",
        ylabel="MB per rank",
        xticks=STAGES,
        title="Model state: planned, and by formula (hatched)",
    )
    right.legend()
    return figure


def launch(num_ranks: int) -> int:
    """Runs this command line in `num_ranks` processes, as torchrun would; returns the
    exit code.

    Every rank has a session of its own, so Ctrl-C reaches only this process, which asks
    the ranks to stop and waits.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        # Without GPUs: the demo is for every machine, and two ranks cannot share a GPU.
        job = {
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "WORLD_SIZE": str(num_ranks),
        }
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):  # with one thread each by default
            env = (
                {"OMP_NUM_THREADS": "1"}
                | os.environ
                | job
                | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            ranks.append(
                subprocess.Popen([sys.executable, *sys.argv], env=env, start_new_session=True)
            )
        while any(process.poll() is None for process in ranks) and not any(
            process.poll() for process in ranks
        ):
            time.sleep(0.1)
        return int(any(process.poll() for process in ranks))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ask only once
        for process in ranks:
            process.terminate()
        deadline = time.monotonic() + 10
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        return 128 + signal.SIGINT
    finally:
        for process in ranks:
            process.kill()  # no effect on a process that has ended


if __name__ == "__main__":
    options = parse_options()
    if fzero.launched() is None:
        raise SystemExit(launch(options.ranks))
    if options.pipe:
        import pipeline  # which imports this module

        pipeline.train(
            options.pipe, steps=options.steps, size=SIZES[options.size], seed=options.seed
        )
        raise SystemExit
    train(options)  # one of the ranks, started by `launch`, or by fzero, torchrun, mpirun or srun
