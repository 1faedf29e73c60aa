"""`Law`, `law`, `Lab`: a law as a row of a table, and what it works with; the plain loop
that most laws compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.testing.conformance.training import Batches, Setup, System, Trainer, Weights

FEATURES, ROWS = 5, 4

ZERO = "Rajbhandari et al., ZeRO, arXiv:1910.02054"
DDP = "torch.nn.parallel.DistributedDataParallel, docs.pytorch.org"
FSDP2 = "torch.distributed.fsdp.fully_shard, docs.pytorch.org"
MIXED = "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740"
DEEPSPEED = "deepspeed.ai, documentation"
TORCH = "docs.pytorch.org"


class Broken(Exception):
    """A law does not hold; the message says what was found."""


class NotApplicable(Exception):
    """A law says nothing of this system; the message says why."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Where a law is tried: a system in one of its stages, on this rank.

    Attributes:
        folder: of this law, the same on all ranks and in all parts of the law.
    """

    system: System
    stage: int
    rank: int
    world_size: int
    folder: Path

    def make(self, setup: Setup, *, stage: int | None = None) -> Trainer:
        """A training whose first weights are those of seed 0."""
        torch.manual_seed(self.rank if setup.differs_by_rank else 0)
        setup = replace(setup, stage=self.stage if stage is None else stage)
        return self.system.make(setup, self.rank, self.world_size)

    def batches(self, index: int, *, micro_steps: int = 1, rows: int = ROWS) -> Batches:
        """The batches of update `index`."""
        return [
            [random_rows(index, rank, micro, rows) for micro in range(micro_steps)]
            for rank in range(self.world_size)
        ]

    def others(self) -> list[int]:
        """The other ranks, once all have come here; none, if ranks are simulated."""
        if self.system.in_one_process:
            return []
        torch.distributed.barrier()
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def trained(self, setup: Setup, updates: Iterable[int], trainer: Trainer | None = None) -> Any:
        """A trainer after the updates of these indices."""
        trainer = trainer or self.make(setup)
        for index in updates:
            trainer.step(self.batches(index, micro_steps=setup.micro_steps))
        return trainer

    def check_plain(self, setup: Setup, num_updates: int = 3) -> Trainer:
        """Raises unless a few updates give the weights of the plain loop; returns the
        trainer.
        """
        trainer = self.trained(setup, range(num_updates))
        plain = Plain(setup)
        for index in range(num_updates):
            plain.step(self.batches(index, micro_steps=setup.micro_steps))
        check_near(trainer.weights(), plain.weights(), "the weights of the plain loop")
        return trainer  # type: ignore[no-any-return]


def random_rows(index: int, rank: int, micro: int = 0, rows: int = ROWS) -> Tensor:
    """A micro-batch (rows, FEATURES)."""
    generator = torch.Generator().manual_seed(1000 * index + 10 * rank + micro)
    return torch.randn(rows, FEATURES, generator=generator)


class Law(NamedTuple):
    """`try_` raises `Broken` where the law does not hold; `then` goes on with one rank
    fewer, on new ranks.
    """

    name: str
    sentence: str
    source: str
    try_: Callable[[Lab], None]
    then: Callable[[Lab], None] | None = None
    needs_processes: bool = False
    num_lost: int = 0


LAWS: dict[str, Law] = {}


def law(
    sentence: str,
    source: str,
    *,
    then: Callable[[Lab], None] | None = None,
    needs_processes: bool = False,
    num_lost: int = 0,
) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """Adds a law under the function's name.

    Args:
        sentence: of a paper or a documentation; with `source` in the table.
        needs_processes: whether simulated ranks cannot show it.
        num_lost: the number of ranks that end while it is tried, the last ones.
    """

    def added(try_: Callable[[Lab], None]) -> Callable[[Lab], None]:
        name = try_.__name__
        LAWS[name] = Law(name, sentence, source, try_, then, needs_processes, num_lost)
        return try_

    return added


# --- the plain loop -------------------------------------------------------------------------------


class Plain:
    """One process that trains on the batches of all ranks, in fp32, with PyTorch alone."""

    def __init__(self, setup: Setup, weights: Weights | None = None) -> None:
        torch.manual_seed(0)
        self.setup, self.model, self.norms = setup, setup.model(), list[float]()
        if weights is not None:
            self.model.load_state_dict(dict(weights), strict=False)
        self.refresh()

    def refresh(self) -> None:
        """A new optimizer, of the parameters that are trained now."""
        self.optimizer = self.setup.make_optimizer(dict(self.model.named_parameters()))
        rates = self.setup.rates or (lambda n: 1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates)

    def step(self, batches: Batches) -> None:
        share = self.setup.share(batches)
        for own in batches:
            for batch in own:
                (self.setup.loss(self.model, batch) * share).backward()  # type: ignore[no-untyped-call]
        params = [p for p in self.model.parameters() if p.grad is not None]
        largest = self.setup.clip or float("inf")
        self.norms.append(nn.utils.clip_grad_norm_(params, largest).item())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


# --- comparisons ----------------------------------------------------------------------------------

ROUNDING = 1e-5
"""A few updates in fp32 that add in another order differ by less, in weights below 1."""


def check_near(found: Weights, expected: Weights, what: str, rounding: float = ROUNDING) -> None:
    """Raises unless the expected tensors were found, up to rounding."""
    for name, value in expected.items():
        if name not in found:
            raise Broken(f"no {name!r}, must be {what}")
        own = found[name].to(value.dtype)
        if own.shape != value.shape:
            raise Broken(f"{name!r} has shape {tuple(own.shape)}, must be {tuple(value.shape)}")
        far = (own - value).abs().max().item() if value.numel() else 0.0
        if not far <= rounding * max(1.0, value.abs().max().item() if value.numel() else 0.0):
            raise Broken(f"{name!r} differs by {far:.2g} from {what}")


def check_bits(found: Weights, expected: Weights, what: str) -> None:
    """Raises unless the expected tensors were found, bit for bit."""
    check_near(found, expected, what, rounding=0.0)


def check_close(
    found: float | None, expected: float, what: str, rounding: float = ROUNDING
) -> None:
    """Raises unless a number is the expected one, up to rounding."""
    if not isinstance(found, float | int) or not abs(found - expected) <= rounding * max(
        1.0, abs(expected)
    ):
        raise Broken(f"{what} is {found!r}, must be {expected:.8g}")


def check_moved(before: Weights, after: Weights, names: Sequence[str] = ()) -> None:
    """Raises unless these tensors (all by default) have changed: a law about weights
    that never move holds in vain.
    """
    for name in names or before:
        if before[name].numel() and torch.equal(before[name], after[name]):
            raise Broken(f"{name!r} has not changed in training")
