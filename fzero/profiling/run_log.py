"""`log`: the instruments of a training loop of one's own.

    with fzero.log(step, to=["jsonl", "tensorboard"]) as log:
        for batch in log.batches(loader):
            state, metrics = step(state, batch)
            log(metrics)

`log.batches` measures how long the loop waits for data, and counts the tokens of a
batch. `log(metrics)` ends a step: every rank appends a JSON line, and rank 0 also
writes to the other targets and shows a live line. No call communicates. Without
`log.batches` no tokens, no waiting and no operations are written. All that the loop
does between two steps counts in `seconds`.

The model's operations are those of a forward and a backward on the first batch, counted
once on tensors without memory, times the batches that were taken; recomputed forwards
do not count. MFU (model FLOP/s utilisation) is their rate over the rate that a matrix
product reaches here.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fzero.common.arguments import check_callable, check_kind, check_path, check_whole, shown
from fzero.common.optional import package
from fzero.estimation.activation_trace import trace_activations
from fzero.estimation.compare import tokens_of
from fzero.profiling import writers
from fzero.profiling.profiler import dtype_of, matrix_rate
from fzero.profiling.reports import short
from fzero.profiling.writers import Writer
from fzero.state import Metrics
from fzero.step import TrainStep
from fzero.storage.host_memory import process_memory

Batch = TypeVar("Batch")

PACKAGES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": None,
    "trackio": None,
    "mlflow": None,
}
"""The targets that need a package of their name, and the module to import, if not the
package itself.
"""

TARGETS = ("jsonl", "csv", *PACKAGES)

SECONDS_PER_LINE = 10.0
"""Between two lines on a stderr that is no terminal."""


def log(
    step: TrainStep,
    to: Sequence[str] = ("jsonl",),
    *,
    folder: str | Path = "log",
    project: str = "fzero",
    every: int = 1,
    start: int = 0,
    tokens: Callable[[Any], int] | None = None,
    flops: float | None = None,
    peak: float | None = None,
    live: bool = True,
) -> RunLog:
    """The log of a training loop; a context manager. *Every* rank makes one; nothing is
    sent.

    Files and runs begin where the block begins, and end with it. A run of wandb or
    MLflow that the script began is used, and stays open.

    Args:
        step: the step of the loop.
        to: any of `"jsonl"` (`folder/rank0.jsonl`, one file per rank), `"csv"`,
            `"tensorboard"` (both in `folder`), `"wandb"`, `"trackio"`, `"mlflow"`. The
            last four need packages of these names. Only `"jsonl"` is written by every
            rank.
        folder: where files go; they are appended to. One log at a time may write JSON
            lines there.
        project: the project of wandb and trackio, the experiment of MLflow.
        every: write every so many steps; times are means over these. Reading metrics
            waits for the device.
        start: the number of steps before this loop: `int(state.step)` after a
            checkpoint was loaded.
        tokens: counts the tokens of this rank's batch; None takes the elements of its
            first integer tensor.
        flops: the model's operations of one step on this rank; None counts those of the
            first batch.
        peak: the operations per second of this rank's device, such as its data sheet's,
            that MFU is a fraction of; None measures a matrix product in the model's
            dtype.
        live: whether rank 0 shows the last values on stderr: on a terminal as one line
            that changes, else every ten seconds.

    Raises:
        ValueError: an argument is wrong.
        MissingPackageError: a target's package cannot be imported; on every rank,
            before anything is written.
        OSError: at the begin of the block, the folder cannot be written.
    """
    if not isinstance(step, TrainStep):
        raise ValueError(
            f"log: step must be a step of make_train_step, got {type(step).__name__}; pass that "
            f"step, or engine.train_step"
        )
    is_list = isinstance(to, Iterable) and not isinstance(to, str)
    unknown = [name for name in to if name not in TARGETS] if is_list else [to]
    if unknown:
        raise ValueError(
            f"log: to must be a list of {', '.join(TARGETS)}, got {unknown[0]!r}; pass names of "
            f"this list"
        )
    check_path("folder", folder)
    check_kind("project", project, str, "a name", "pass a string")
    check_whole("every", every, 1)
    check_whole("start", start, 0)
    check_kind("live", live, bool, "True or False", "pass one of these")
    check_callable(
        "tokens", tokens, "a function of a batch that returns its number of tokens", optional=True
    )
    for name, number in (("flops", flops), ("peak", peak)):
        if number is not None and not (isinstance(number, int | float) and 0 < number < math.inf):
            raise ValueError(
                f"log: {name} must be a positive number or None, got {number!r}; pass None to "
                f"measure it"
            )
    for name in to:
        if name in PACKAGES:
            package(
                name, needed_by=f"log: to={name!r}", module=PACKAGES[name], instead='use "jsonl"'
            )
    rates = _Rates(step, tokens, flops, peak)
    makers = _makers(step.rank, to, Path(folder), project)
    return RunLog(rates, makers, every, start, live and step.rank == 0)


def _makers(rank: int, to: Sequence[str], folder: Path, project: str) -> list[Callable[[], Writer]]:
    """The function that makes the writers of this rank."""
    of_all: dict[str, Callable[[], Writer]] = {
        "jsonl": lambda: writers.json_lines(folder / f"rank{rank}.jsonl"),
        "csv": lambda: writers.csv_files(folder),
        "tensorboard": lambda: writers.tensorboard(folder, needed_by="log"),
        "wandb": lambda: writers.wandb(needed_by="log", project=project),
        "trackio": lambda: writers.trackio(needed_by="log", project=project),
        "mlflow": lambda: writers.mlflow(needed_by="log", project=project),
    }
    return [make for name, make in of_all.items() if name in to and (rank == 0 or name == "jsonl")]


class RunLog:
    """`log(metrics)` ends a step of the loop, inside a `with` block; made by
    `fzero.log`.

    Attributes:
        last: the values that were written last.
    """

    def __init__(
        self,
        rates: _Rates,
        makers: Sequence[Callable[[], Writer]],
        every: int,
        start: int,
        shows: bool,
    ) -> None:
        self._rates, self._makers, self._every, self._num_steps = rates, makers, every, start
        self._writers: list[Writer] | None = None  # None: outside of the block
        self._at_exit = ExitStack()
        self._since = _Since(time.perf_counter(), start)
        self._line = _Line() if shows else None
        self.last: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._writers is not None:
            raise ValueError(
                "log: a log must be entered once at a time, got a block inside its own; make "
                "another one"
            )
        with ExitStack() as stack:
            made: list[Writer] = []
            for make in self._makers:
                try:
                    made.append(make())
                except OSError as error:
                    if error.filename is not None:
                        error.add_note(
                            "log: folder must be one that this process may write; pass another "
                            "folder="
                        )
                    raise
                stack.callback(made[-1].close)
            if self._line is not None:
                self._line.open()
                stack.callback(self._line.close)
            self._at_exit, self._writers = stack.pop_all(), made
        self._since = _Since(time.perf_counter(), self._num_steps)
        return self

    def __exit__(self, *error: object) -> None:
        self._writers = None
        self._at_exit.close()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader; the time until one is there is `data_seconds`."""
        source = iter(loader)
        while True:
            began = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._since.data = (self._since.data or 0.0) + time.perf_counter() - began
            paused = self._rates.see(batch)
            self._since.tokens += int(self._rates.tokens_of(batch))
            self._since.batches += 1
            self._since.began += paused
            yield batch

    def __call__(self, metrics: Metrics, **more: float) -> None:
        """Ends a step.

        Args:
            metrics: the metrics of the step.
            more: other numbers to write, by name.
        """
        if self._writers is None:
            raise ValueError(
                "log: must be called inside its block, got a call outside; write `with "
                "fzero.log(step) as log:` around the loop"
            )
        check_kind(
            "metrics",
            metrics,
            Metrics,
            "what a step returned",
            "call log(metrics), or log(engine.metrics)",
        )
        self._num_steps += 1
        if self._num_steps % self._every:
            return
        # waits for the device, so that the seconds are those of whole steps
        loss = metrics.loss.item()
        now, since = time.perf_counter(), self._since
        num_steps = self._num_steps - since.step
        values = {
            "loss": loss, "grad_norm": metrics.grad_norm.item(), "lr": metrics.lr.item(),
            "loss_scale": metrics.loss_scale.item(), "overflow": float(metrics.overflow.item()),
            "seconds": (now - since.began) / num_steps,
        }  # fmt: skip
        if since.data is not None:
            values["data_seconds"] = since.data / num_steps
        values |= self._rates.of(
            since.tokens / num_steps, since.batches / num_steps, values["seconds"]
        )
        self.last = values | _numbers(more, values)
        for writer in self._writers:
            writer.write(self.last, self._num_steps)
        if self._line is not None:
            self._line.show(self._num_steps, self.last)
        self._since = _Since(time.perf_counter(), self._num_steps)


def _numbers(more: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """The loop's own numbers, checked."""
    numbers: dict[str, float] = {}
    for name, value in more.items():
        if name == "step" or name in values:
            raise ValueError(
                f"log: {name} must not be given, because the log writes its own {name}; use "
                f"another name"
            )
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"log: {name} must be a number, got {shown(value)}; pass one, such as x.item()"
            ) from None
    return numbers


@dataclass(slots=True)
class _Since:
    """The sums since the last write."""

    began: float
    step: int
    data: float | None = None  # None: the loop does not use `batches`
    tokens: int = 0
    batches: int = 0


class _Rates:
    """Rates and memory of a step, from its tokens and seconds."""

    def __init__(
        self,
        step: TrainStep,
        tokens: Callable[[Any], int] | None,
        flops: float | None,
        peak: float | None,
    ) -> None:
        self._step, self.tokens_of = step, tokens or tokens_of
        self._flops_of_step = flops
        self._flops_of_batch: float | None = None
        self._peak, self._counts = peak, flops is None
        if flops is not None:
            self._measure_peak()

    def see(self, batch: Any) -> float:
        """Counts the operations of the first batch; the seconds that this and the
        measurement of the peak took.
        """
        if not self._counts:
            return 0.0
        began = time.perf_counter()
        self._counts, self._flops_of_batch = False, self._flops_of(batch)
        if self._flops_of_batch is not None:
            self._measure_peak()
        return time.perf_counter() - began

    def _measure_peak(self) -> None:
        if self._peak is None:
            dtype = dtype_of(self._step.plan, self._step.runtime.autocast)
            self._peak = matrix_rate(self._step.device, dtype)

    def _flops_of(self, batch: Any) -> float | None:
        spec = self._step.spec
        try:
            if spec.is_part:
                raise ValueError("a rank of a pipeline runs a part of the model")
            how: dict[str, Any] = {
                "loss_fn": spec.loss_fn,
                "checkpoint": False,
                "changes": spec.changes,
                "seq_size": self._step.plan.seq_size,
            }
            return trace_activations(spec.model, spec.cfg, batch, **how).flops
        except Exception as error:
            # the model cannot run without values, so its operations stay uncounted
            if self._step.rank == 0:
                warnings.warn(
                    f"log: the operations of a step cannot be counted ({error}), so TFLOP/s and "
                    f"MFU are not written; pass flops=",
                    stacklevel=4,
                )
            return None

    def of(self, tokens: float, num_batches: float, seconds: float) -> dict[str, float]:
        """Tokens per second of all ranks, operations per second of this one, MFU, and
        memory in bytes.

        Args:
            tokens, num_batches, seconds: means per step.
        """
        found: dict[str, float] = {}
        if tokens:
            found |= {
                "tokens": tokens,
                "tokens_per_second": tokens * self._step.data_world_size / seconds,
            }
        flops = self._flops_of_step
        if self._flops_of_batch is not None:
            flops = self._flops_of_batch * num_batches
        if flops is not None and self._peak is not None:
            rate = flops / seconds
            found |= {"tflops_per_second": rate / 1e12, "mfu": rate / self._peak}
        found["memory_bytes"] = process_memory("VmRSS")
        if self._step.device.type == "cuda":
            found["device_memory_bytes"] = torch.cuda.memory_allocated(self._step.device)
            found["device_peak_bytes"] = torch.cuda.max_memory_allocated(self._step.device)
        return found


class _Line:
    """The live line of rank 0."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._live: Live | None = None
        self._last = float("-inf")

    def open(self) -> None:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        line, now = line_of(step, values), time.perf_counter()
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now - self._last >= SECONDS_PER_LINE:
            self._console.print(line, soft_wrap=True)
            self._last = now

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def line_of(step: int, values: Mapping[str, float]) -> str:
    """The live line.

    >>> line_of(
    ...     7,
    ...     {
    ...         "loss": 2.5,
    ...         "lr": 1e-3,
    ...         "tokens_per_second": 81234.0,
    ...         "mfu": 0.4,
    ...         "seconds": 0.2,
    ...         "data_seconds": 0.05,
    ...     },
    ... )
    'step 7: loss 2.5000, lr 0.001, 81.2 K tokens/s, MFU 40%, 0.2 s, data 25%'
    """
    shows: dict[str, Callable[[float], str]] = {
        "loss": lambda x: f"loss {x:.4f}",
        "grad_norm": lambda x: f"norm {x:.3g}",
        "lr": lambda x: f"lr {x:.3g}",
        "tokens_per_second": lambda x: f"{short(x)} tokens/s",
        "tflops_per_second": lambda x: f"{x:.3g} TFLOP/s",
        "mfu": lambda x: f"MFU {x:.0%}",
        "device_peak_bytes": lambda x: f"peak {x / 1e9:.2f} GB",
        "memory_bytes": lambda x: f"host {x / 1e9:.2f} GB",
        "seconds": lambda x: f"{x:.3g} s",
        "data_seconds": lambda x: f"data {x / values['seconds']:.0%}",
    }
    return f"step {step}: " + ", ".join(
        show(values[name]) for name, show in shows.items() if name in values
    )
