"""The laws of `fzero.testing.conformance`: fzero keeps all of them, and each of many
faults breaks the law that names it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fzero.testing.conformance import (
    LAWS,
    SYSTEMS,
    Lab,
    Setup,
    System,
    Trainer,
    check_system,
    try_laws,
)
from fzero.testing.conformance.jobs import held_nbytes, nbytes_sent
from fzero.testing.conformance.own_systems import by_simulation
from fzero.testing.conformance.ranks import try_here
from fzero.testing.conformance.reproducers import REPRODUCERS, Reproducer

WORLD_SIZE = 2
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "laws.md").read_text()
COLUMNS = [
    ("fzero", 3),
    ("fzero", 0),
    ("fzero", 1),
    ("fzero", 2),
    ("fzero-engine", 3),
    ("fzero-engine", 1),
    ("fzero-captured", 3),
    ("fzero-captured", 2),
    ("fzero-simulated", 3),
    ("fzero-simulated", 1),
]
BRANCHES = (
    "a_block_that_is_skipped_in_some_updates",
    "experts_unused_on_some_ranks",
    "experts_with_adamw_and_clipping",
)
"""Laws whose models branch on data, which one graph cannot."""
REFUSED = {
    ("fzero-captured", 2): BRANCHES,
    ("fzero-captured", 3): BRANCHES,
}
"""Laws that a system refuses in a stage: a branch on data in one graph."""
ON_NEW_RANKS = [name for name, one in LAWS.items() if one.then or one.num_lost]


def marks_here(
    system: str, stage: int, laws: list[str], world_size: int, folder: Path
) -> list[tuple[str, str, str]]:
    """The laws that do not hold on this rank, each with its mark and what was found."""
    found = []
    rank = torch.distributed.get_rank()
    for name in laws:
        own = folder / name
        own.mkdir(exist_ok=True)
        lab = Lab(SYSTEMS[system], stage, rank, world_size, own)
        mark, note = try_here(name, lab)
        is_refused = name in REFUSED.get((system, stage), ())
        if is_refused and mark == "refused":
            continue
        if is_refused:
            mark, note = "refused", f"must be refused, or leave the list; is {mark}: {note}"
        if is_refused or mark not in ("right", "-"):
            found.append((name, mark, note))
            break  # the ranks may be out of step
    return found


OF_ONE_CALL = [name for name in LAWS if name not in ON_NEW_RANKS]
PARTS = 10


@pytest.mark.covering(1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("system", "stage"), COLUMNS, ids=lambda value: str(value))
def test_fzero_keeps_the_laws_of_training(
    ranks: RankPool, tmp_path: Path, system: str, stage: int, part: int
) -> None:
    laws = OF_ONE_CALL[part::PARTS]
    is_one_process = SYSTEMS[system].in_one_process
    if is_one_process:
        laws = [name for name in laws if not LAWS[name].needs_processes]
    num = 1 if is_one_process else WORLD_SIZE
    found = ranks(num, marks_here, system, stage, laws, WORLD_SIZE, tmp_path)
    assert [broken for of_rank in found for broken in of_rank] == []


@pytest.mark.long
@pytest.mark.parametrize("system", ["fzero", "fzero-engine"])
def test_fzero_keeps_the_laws_that_need_new_ranks(system: str) -> None:
    check_system(SYSTEMS[system], [LAWS[name] for name in ON_NEW_RANKS])


def test_tensors_that_a_capture_has_left_have_no_memory() -> None:
    with FakeTensorMode() as mode:
        left = mode.from_tensor(torch.ones(1000))
    before = held_nbytes()
    real = torch.ones(1000)
    assert held_nbytes() - before == real.nbytes and isinstance(left, FakeTensor)


def test_counting_the_bytes_sent_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        nbytes_sent()
    assert len(os.listdir("/proc/self/fd")) == before


# --- faults ---------------------------------------------------------------------------------------


class Wrapper:
    """A trainer that does as another; a fault below changes one call."""

    def __init__(self, inner: Trainer, setup: Setup) -> None:
        self.inner, self.setup = inner, setup

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class OneRankOnly(Wrapper):
    def step(self, batches: Any, *, update: bool = True) -> float:
        return self.inner.step([batches[0]] * len(batches), update=update)


class LastMicroStepOnly(Wrapper):
    def step(self, batches: Any, *, update: bool = True) -> float:
        return self.inner.step([[own[-1]] * len(own) for own in batches], update=update)


class NormAfterClipping(Wrapper):
    def norm(self) -> Any:
        found = self.inner.norm()
        return found._replace(grad_norm=min(found.grad_norm, self.setup.clip or found.grad_norm))


class UpdatesOnOverflow(Wrapper):
    def step(self, batches: Any, *, update: bool = True) -> float:
        for own in batches:
            for batch in own:
                batch[batch > 1e20] = 1.0
        return self.inner.step(batches, update=update)


class LoadsWeightsOnly(Wrapper):
    """New moments, rates and random numbers after a load."""

    def load(self, folder: Path) -> int:
        made = self.inner.load(folder)
        weights = self.inner.weights()
        state = self.inner._step.init(dict(weights))  # type: ignore[attr-defined]
        self.inner._state = state  # type: ignore[attr-defined]
        return made


class LoadsAnotherCount(Wrapper):
    def load(self, folder: Path) -> int:
        return self.inner.load(folder) + 1


class TrainsWhileItSaves(Wrapper):
    def save(self, folder: Path) -> None:
        self.inner.save(folder)
        self.inner.step([[torch.ones(4, 5)]] * 2)


class EvaluationDrawsNumbers(Wrapper):
    def step(self, batches: Any, *, update: bool = True) -> float:
        return self.inner.step(batches)


class RoundedWeights(Wrapper):
    def step(self, batches: Any, *, update: bool = True) -> float:
        loss = self.inner.step(batches, update=update)
        weights = {name: x.bfloat16().float() for name, x in self.inner.weights().items()}
        self.inner._state = self.inner._step.init(weights)  # type: ignore[attr-defined]
        return loss


HELD = []


class HoldsItsStates(Wrapper):
    def step(self, batches: Any, *, update: bool = True) -> float:
        HELD.append(self.inner.weights())
        return self.inner.step(batches, update=update)


def changed(**changes: Any) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, **changes)


def mean_of_means(setup: Setup) -> Setup:
    loss = setup.loss

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) / batch[1].sum().clamp(min=1)

    return replace(setup, loss=mean, count=None)


def next_rate(setup: Setup) -> Setup:
    rates = setup.rates
    return setup if rates is None else replace(setup, rates=lambda n: rates(n + 1))


def all_trained(setup: Setup) -> Setup:
    return replace(setup, model=lambda: setup.model().requires_grad_(True))


def untied(setup: Setup) -> Setup:
    def model() -> nn.Module:
        made = setup.model()
        made.head.weight = nn.Parameter(made.embed.weight.detach().clone())  # type: ignore[union-attr]
        return made

    return replace(setup, model=model)


FAULTS: dict[str, tuple[str, Callable[[Setup], Setup] | type[Wrapper]]] = {
    "ranks but the first are ignored": ("one_process", OneRankOnly),
    "micro-steps but the last are ignored": ("accumulation", LastMicroStepOnly),
    "a mean of means": ("unequal_tokens", mean_of_means),
    "a mean of means over micro-steps": ("unequal_tokens_of_micro_steps", mean_of_means),
    "no clipping": ("clipped_by_the_global_norm", changed(clip=0.0)),
    "always clips": ("a_small_gradient_is_not_clipped", changed(clip=0.01)),
    "the norm after clipping": ("reported_norm_of_a_clipped_gradient", NormAfterClipping),
    "the rate of the next update": ("rate_of_update_n", next_rate),
    "no rates": ("rates_of_groups", changed(rates=None)),
    "groups are ignored": ("parameter_groups", changed(groups=())),
    "frozen parameters are trained": ("frozen_parameters", all_trained),
    "tied weights come apart": ("tied_weights", untied),
    "no master copy": ("small_updates_add_up", RoundedWeights),
    "no loss scale": ("loss_scaling_keeps_small_gradients", changed(scale_power=0)),
    "an overflow is an update": ("overflow_leaves_every_bit", UpdatesOnOverflow),
    "the loss scale never grows": ("history_of_the_loss_scale", changed(scale_window=1000)),
    "moments are lost": ("resumed_is_unbroken", LoadsWeightsOnly),
    "momentum is lost": ("resumed_momentum", LoadsWeightsOnly),
    "the random state is lost": ("resumed_random_state", LoadsWeightsOnly),
    "another position": ("loaded_weights_are_the_saved_ones", LoadsAnotherCount),
    "a save trains": ("saving_leaves_no_trace", TrainsWhileItSaves),
    "an evaluation trains": ("evaluation_leaves_no_trace", EvaluationDrawsNumbers),
    "an evaluation drops out": ("evaluation_gives_the_mean_loss", EvaluationDrawsNumbers),
    "states are held": ("memory_returns", HoldsItsStates),
}


def broken(fault: Callable[[Setup], Setup] | type[Wrapper]) -> System:
    """The simulated ranks with a fault."""

    def make(setup: Setup, rank: int, world_size: int) -> Trainer:
        if isinstance(fault, type):
            return fault(by_simulation(setup, rank, world_size), setup)  # type: ignore[return-value]
        return by_simulation(fault(setup), rank, world_size)

    return System("broken", make, (0, 3), str, in_one_process=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_the_law_that_names_it(tmp_path: Path, fault: str) -> None:
    law, change = FAULTS[fault]
    mark, note = try_here(law, Lab(broken(change), 3, 0, WORLD_SIZE, tmp_path))
    assert mark == "wrong", note
    HELD.clear()


# --- reproducers ----------------------------------------------------------------------------------


def distinct() -> dict[str, Reproducer]:
    """Each program once, under its first system and law."""
    found = {one.program: (" ".join(key), one) for key, one in reversed(REPRODUCERS.items())}
    return dict(reversed(found.values()))


def run_on_two_ranks(program: Path) -> tuple[list[int | None], str]:
    """Exit codes (None: it hangs), and all that was printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    ends, codes, texts = time.monotonic() + 100, list[int | None](), ""
    for process in started:
        try:
            texts += process.communicate(timeout=max(1.0, ends - time.monotonic()))[0]
            codes.append(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            texts += process.communicate()[0]
            codes.append(None)
    return codes, texts


@pytest.mark.long
@pytest.mark.parametrize("name", distinct())
def test_a_reproducer_still_shows_the_fault(tmp_path: Path, name: str) -> None:
    found = distinct()[name]
    program = tmp_path / "reproducer.py"
    program.write_text(found.program)
    codes, texts = run_on_two_ranks(program)
    if found.fault:
        assert found.fault in texts and any(code != 0 for code in codes), texts[-2000:]
    else:  # aborted, or hanging
        assert any(code is None or code < 0 for code in codes), texts[-2000:]


def wrong_on_the_page() -> dict[str, list[str]]:
    """The laws that the page marks as broken, by system."""
    header, *rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    systems = [cell.strip() for cell in header.split("|")[2:-3]]
    wrong: dict[str, list[str]] = {system: [] for system in systems}
    for row in rows[: len(LAWS) + 1]:
        law, *marks = [cell.strip() for cell in row.split("|")[1:-3]]
        for system, mark in zip(systems, marks):
            if mark.startswith("○"):
                wrong[system].append(law.replace(" ", "_"))
    return wrong


def test_reproducers_are_short_and_fzero_breaks_no_law_of_the_page() -> None:
    for name, one in distinct().items():
        assert one.program.count("\n") <= 20, name
    wrong = wrong_on_the_page()
    assert not [law for system, laws in wrong.items() if system.startswith("fzero") for law in laws]
    for system, law in REPRODUCERS:
        assert law in wrong.get(system, [law]), (system, law)


@pytest.mark.nightly
@pytest.mark.parametrize("system", ["ddp", "zero-optimizer", "fsdp2", "deepspeed"])
def test_laws_without_a_program_are_still_broken(system: str) -> None:
    laws = [law for law in wrong_on_the_page().get(system, []) if (system, law) not in REPRODUCERS]
    for result in try_laws(SYSTEMS[system], [LAWS[law] for law in laws]):
        assert result.mark == "wrong", result
