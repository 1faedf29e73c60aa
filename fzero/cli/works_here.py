"""`fzero test`: in a minute, whether fzero works in this environment, and what is slow
here.

The command starts ranks as a job would; each runs `CHECKS` in order and appends the
result of each to a file, so that the report also names the check in which a rank ended
or hung. On a machine with GPUs the same checks run on these, too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

import fzero
from fzero.cli.plan_profile import count, parser_of, print_result
from fzero.common.platforms import platform_here, untested_versions
from fzero.comms.axes import ProcessAxis
from fzero.profiling.machine import gather_rate
from sharding import Sharded

WHAT = """tries fzero in this environment, in about a minute: ranks, collectives, stages 0 to 3 beside a plain loop, other
memories, a compiled step, a save and a load, and a GPU if there is one. It says what works and what is slow, and
returns 1 if something fails."""

EXAMPLES = "examples:\n  fzero test\n  fzero test --num_procs 4 --path /fast --json"

TIMEOUT = 120
"""Seconds after which the ranks are ended."""

WIDTH, ROWS, NUM_STEPS = 32, 8, 4


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check on a rank.

    Attributes:
        check: its name.
        device: the device of the ranks.
        outcome: `works`, `fails`, or `not here`.
        seconds: that it took.
        note: a figure, or the error.
        slow: why it is slow and what helps; "" where it is not.
    """

    check: str
    device: str
    outcome: str
    seconds: float
    note: str = ""
    slow: str = ""


class Found(Exception):
    """Ends a check with a note."""

    def __init__(self, note: str, slow: str = "") -> None:
        super().__init__(note)
        self.note, self.slow = note, slow


# --- the checks of a rank -------------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """The values that the checks of a rank share.

    Attributes:
        axis: the axis of all ranks.
        device: the device of the ranks.
        folder: for checkpoints.
        reference: the weights after the plain loop.
        of_stages: the weights after the steps of the stages so far.
    """

    axis: ProcessAxis
    device: torch.device
    folder: Path
    reference: dict[str, Tensor]
    of_stages: dict[int, dict[str, Tensor]]


def model_of(device: torch.device) -> nn.Sequential:
    """The model of the checks, with equal weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), x.flip(-1))


def rows_of(step: int, device: torch.device, num_ranks: int) -> Tensor:
    """The rows of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num_ranks * ROWS, WIDTH, generator=generator).to(device)


def trained(
    job: Job, stage: int, more: dict[str, Any] | None = None, **how: Any
) -> tuple[fzero.TrainStep, Any]:
    """A step and its state after some steps."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | (more or {})
    cfg = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": zero}
    step = fzero.make_train_step(model_of(job.device), cfg, loss_fn=loss_of, **how)
    state = step.init()
    for number in range(NUM_STEPS):
        state, _ = step(
            state, rows_of(number, job.device, job.axis.size).chunk(job.axis.size)[job.axis.rank]
        )
    return step, state


def collectives(job: Job) -> None:
    """Gathers, scatters and means of known numbers."""
    axis, full = job.axis, torch.arange(4.0 * job.axis.size, device=job.device)
    specs = fzero.specs_of(full, Sharded(axis.name))
    shard = fzero.shard(full, specs, axis)
    expected = full.chunk(axis.size)[axis.rank]
    assert torch.equal(shard, expected), f"a shard is {shard.tolist()}, must be {expected.tolist()}"
    gathered = fzero.gather(shard, specs, axis)
    assert torch.equal(gathered, full), (
        f"all-gather gives {gathered.tolist()}, must be {full.tolist()}"
    )
    own = full * (axis.rank + 1)
    mean = fzero.reduce_scatter_grads(own, specs, axis)
    wanted = expected * (axis.size + 1) / 2
    assert torch.allclose(mean, wanted), (
        f"reduce-scatter gives {mean.tolist()}, must be {wanted.tolist()}"
    )
    if axis.size == 1:
        raise Found("one rank: nothing was sent")
    rate, latency = gather_rate(axis, job.device)
    busy = (
        "more ranks than free cores, or a slow network interface (GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME)"
    )
    slow = (
        f"a collective of one element takes {latency * 1e3:.1f} ms: {busy}"
        if latency > 2e-3
        else ""
    )
    slow = slow or (f"gathers move {rate / 1e9:.2f} GB/s: {busy}" if rate < 2e8 else "")
    raise Found(f"all-gather {rate / 1e9:.2f} GB/s, one element {latency * 1e6:.0f} μs", slow)


def plain_loop(job: Job) -> None:
    """torch's own loop over the rows of all ranks."""
    model = model_of(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, rows_of(number, job.device, job.axis.size)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    job.reference = {name: param.detach().clone() for name, param in model.named_parameters()}


def stage(job: Job, number: int) -> None:
    """A stage gives the weights of the plain loop, and those of stage 0 bit for bit."""
    step, state = trained(job, number)
    weights = step.gather(state)
    off = distance(weights, job.reference)
    assert off < 1e-4, (
        f"the weights differ from the plain loop's by {off:.1e} (relative to the largest)"
    )
    job.of_stages[number] = weights
    same = all(torch.equal(weights[name], value) for name, value in job.of_stages[0].items())
    assert same, "the weights are not those of stage 0, bit for bit"
    raise Found(f"plain loop to {off:.0e}" + (", stage 0 bit for bit" if number else ""))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two trees of weights over the largest weight."""
    most = max(value.abs().max().item() for value in other.values())
    return max((one[name] - value).abs().max().item() for name, value in other.items()) / most


def saving(job: Job) -> None:
    """A checkpoint gives back the state, bit for bit."""
    step, state = trained(job, 3)
    before = {name: value.clone() for name, value in step.gather(state).items()}
    began = time.perf_counter()
    fzero.save(state, job.folder / "checkpoints", step=step)
    loaded, _, _ = fzero.load(job.folder / "checkpoints", step=step)
    seconds = time.perf_counter() - began
    after = step.gather(loaded)
    assert all(torch.equal(after[name], value) for name, value in before.items()), (
        "other weights were loaded"
    )
    slow = (
        ""
        if seconds < 5
        else f"a small checkpoint takes {seconds:.1f} s: another disk for --path may be faster"
    )
    raise Found(f"{seconds:.2f} s", slow)


def host_optimizer(job: Job) -> None:
    """Optimizer state in host memory gives the same bits."""
    step, state = trained(job, 3, {"offload_optimizer": {"device": "cpu"}})
    off = distance(step.gather(state), job.of_stages[3])
    assert off < 1e-5, f"the weights differ by {off:.1e} from those of state on the device"


def one_graph(job: Job) -> None:
    """The step as one graph, without generated code."""
    step, state = trained(job, 3, compile="step", compile_backend="aot_eager")
    off = distance(step.gather(state), job.of_stages[3])
    assert off < 1e-4, f"the weights differ by {off:.1e} from those of an eager step"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    raise Found(
        "" if compiler else "no C++ compiler was found: on the CPU pass compile_backend='aot_eager'"
    )


CHECKS: dict[str, Callable[[Job], None]] = {
    "collectives": collectives,
    "plain loop": plain_loop,
    **{f"stage {number}": lambda job, number=number: stage(job, number) for number in range(4)},  # type: ignore[misc]
    "save and load": saving,
    "optimizer in host memory": host_optimizer,
    "step in one graph": one_graph,
}
"""After the ranks have joined."""


def on_rank(folder: Path, device: str, num_ranks: int) -> int:
    """The program of each rank: appends the result of every check to its file.
    *Collective.*
    """
    written = folder / f"{device}.{os.environ.get('RANK', '0')}.jsonl"
    job: Job | None = None

    def join(_: Job | None) -> None:
        nonlocal job
        axis = fzero.join(device)
        assert axis.size == num_ranks, f"{axis.size} ranks have joined, must be {num_ranks}"
        here = (
            torch.device(device, torch.cuda.current_device())
            if device == "cuda"
            else torch.device(device)
        )
        job = Job(axis, here, folder, {}, {})

    for name, check in {"ranks join": join, **CHECKS}.items():
        began, note, slow, outcome = time.perf_counter(), "", "", "works"
        try:
            check(job)  # type: ignore[arg-type]
        except Found as found:
            note, slow = found.note, found.slow
        except Exception as error:  # the report is of all checks
            note, outcome = f"{type(error).__name__}: {error}", "fails"
        result = Result(name, device, outcome, time.perf_counter() - began, note, slow)
        with written.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if outcome == "fails" and not note.startswith("AssertionError"):
            return 1  # the other ranks may wait for this one: the launcher ends them
    return 0


# --- the command ----------------------------------------------------------------------------------


def test(arguments: list[str]) -> int:
    """`fzero test`; 1 when something fails."""
    parser = parser_of("test", WHAT, EXAMPLES)
    parser.add_argument(
        "--num_procs", type=count, default=2, metavar="N", help="ranks on the CPU (default 2)"
    )
    parser.add_argument(
        "--path", help="a folder for a checkpoint of a few kB (default: a temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(arguments)
    results: list[Result] = []

    def make() -> tuple[RenderableType, dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="fzero-test-", dir=given.path) as folder:
            for device, num_ranks in _devices(given.num_procs):
                print(f"trying {num_ranks} rank(s) on {device}", file=sys.stderr, flush=True)
                results.extend(run(Path(folder), device, num_ranks))
        if not torch.cuda.is_available():
            results.append(Result("GPU", "cuda", "not here", 0.0, "torch sees no GPU"))
        return report(results), {"results": [asdict(result) for result in results]}

    return print_result(make, given.json) or int(
        any(result.outcome == "fails" for result in results)
    )


def _devices(num_procs: int) -> Iterator[tuple[str, int]]:
    yield "cpu", num_procs
    if torch.cuda.is_available():
        yield "cuda", min(2, torch.cuda.device_count())


def run(folder: Path, device: str, num_ranks: int) -> list[Result]:
    """Starts the ranks; the results of each check, of the rank that fares worst."""
    program = [
        "--no_python",
        sys.executable,
        "-m",
        "fzero.cli.works_here",
        str(folder),
        device,
        str(num_ranks),
    ]
    command = [
        sys.executable,
        "-m",
        "fzero",
        "run",
        "--timeout",
        "30",
        "--num_procs",
        str(num_ranks),
        *program,
    ]
    with (folder / f"{device}.log").open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False
            ).returncode
            return results_of(folder, device, num_ranks, f"the ranks ended with exit code {code}")
        except subprocess.TimeoutExpired:
            return results_of(folder, device, num_ranks, f"no end after {TIMEOUT} s")


def results_of(folder: Path, device: str, num_ranks: int, end: str) -> list[Result]:
    """The results that ranks have written, up to the check that stopped one of them.

    Args:
        end: how the ranks ended, for a check that has no result.
    """
    lines, found = (
        [_lines(folder / f"{device}.{rank}.jsonl") for rank in range(num_ranks)],
        list[Result](),
    )
    for index, name in enumerate(("ranks join", *CHECKS)):
        of_ranks = [results[index] for results in lines if index < len(results)]
        worst = max(
            of_ranks,
            key=lambda one: (one.outcome == "fails", bool(one.slow), one.seconds),
            default=None,
        )
        is_whole = len(of_ranks) == num_ranks
        if worst is not None and (is_whole or worst.outcome == "fails"):
            found.append(worst)
        elif not any(one.outcome == "fails" for one in found[-1:]):
            last = " | ".join((folder / f"{device}.log").read_text().splitlines()[-3:])
            found.append(Result(name, device, "fails", 0.0, f"{end}: {last}"))
        if not is_whole:
            break
    return found


def _lines(path: Path) -> list[Result]:
    return (
        [Result(**json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def report(results: list[Result]) -> RenderableType:
    """The table of the results, and what to do about them."""
    table = Table("check", "on", "outcome", title="fzero test", title_justify="left", box=None)
    table.add_column("s", justify="right")
    table.add_column("")
    for result in results:
        slow = ", slow" if result.slow else ""
        table.add_row(
            result.check, result.device, result.outcome + slow, f"{result.seconds:.2f}", result.note
        )
    lines = [f"slow: {result.check}: {result.slow}" for result in results if result.slow]
    here = platform_here(has_gpu=torch.cuda.is_available())
    lines.append(f"{here.name}: {here.status} ({here.note})")
    lines += [
        f"no test has run on {what}"
        for what in untested_versions(torch.__version__, platform.python_version())
    ]
    failed = sum(result.outcome == "fails" for result in results)
    lines.append(
        f"{failed} of {len(results)} checks fail; `fzero env` describes this machine"
        if failed
        else "all works"
    )
    return Group(table, "", *lines)


if __name__ == "__main__":
    code = on_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    if code == 0:
        fzero.shutdown()
    sys.exit(code)
