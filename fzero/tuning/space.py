"""`candidates`: the configurations that `fzero tune` considers. `Planner` makes the
plan of each.

Candidates differ in stage, micro-batch, activation checkpointing and, on request, in
bucket size and placement. The model and the batch are the script's, so this code runs
in one of its ranks (`fzero.tuning.probe`), which sends the results as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

from torch import nn

from fzero.config.autotuning import Autotuning
from fzero.config.config import ConfigError
from fzero.config.files import changed
from fzero.estimation.compare import Choices, Keys, quietly
from fzero.estimation.fit_search import Search
from fzero.estimation.ledger import Device
from fzero.plans.machine_model import MachineModel

OffloadTarget = Literal["device", "host", "nvme"]
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class TuningCandidate:
    """One configuration that may be measured."""

    choice: Choices
    micro: int | None  # samples of a rank in a micro-step; None if the configuration sets no batch
    num_micro_steps: int
    keys: Keys  # the configuration, as in a file
    is_given: bool = False  # whether it is the script's own configuration

    @property
    def name(self) -> str:
        """Its choices, in words."""
        choice = self.choice
        words = [
            f"stage {choice.stage}",
            "" if self.micro is None else f"micro-batch {self.micro}",
            f"× {self.num_micro_steps}" if self.num_micro_steps > 1 else "",
            "+ checkpointing" * choice.checkpoints,
            f"+ optimizer on {choice.optimizer}" * (choice.optimizer != "device"),
            f"+ parameters on {choice.params}" * (choice.params != "device"),
            "+ small bucket" * choice.small,
        ]
        return " ".join(filter(None, words))

    @property
    def features(self) -> tuple[float, ...]:
        """Numbers for the search (`fzero.tuning.search.Point`)."""
        choice = self.choice
        parts = [choice.stage >= stage for stage in (1, 2, 3)]
        parts += [choice.checkpoints, choice.small]
        parts += [
            getattr(choice, name) == kind
            for name in ("optimizer", "params")
            for kind in ("host", "nvme")
        ]
        return (*(float(part) - 0.5 for part in parts), math.log2(self.micro or 1))


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a candidate: bytes of one rank by kind of memory, and seconds of a
    step; or why it is not possible.
    """

    candidate: TuningCandidate
    nbytes: dict[str, int]
    seconds: float
    flops: int = 0
    refused: str = ""


def candidates(
    keys: Keys,
    settings: Autotuning,
    world_size: int,
    *,
    stages: Sequence[int] = STAGES,
    offload: Sequence[OffloadTarget] = ("device",),
    nvme_path: str | None = None,
) -> list[TuningCandidate]:
    """The given configuration, then all others.

    Args:
        keys: the given configuration, as in a file.
        settings: bounds of the batch, and whether bucket sizes are tried.
        world_size: number of ranks W.
        stages: the stages to try.
        offload: the kinds of memory that may hold optimizer state and parameters.
        nvme_path: the folder of files.

    Raises:
        ConfigError: the configuration is invalid.
    """
    cfg = quietly(keys)
    _, own_micro, own_steps = cfg.batch_sizes(world_size)
    given = TuningCandidate(Choices.of(cfg), own_micro, own_steps, keys, is_given=True)
    every = cfg.activation_checkpointing.every
    sizes = list(micro_batches(keys, settings, world_size))
    buckets = [False] if settings.fast else [False, True]
    space = [given]
    choices = product(stages, sizes, [False, True], offload, offload, buckets)
    for stage, (micro, steps), has, opt, params, small in choices:
        choice = Choices(stage, opt, params, has, small, given.choice.inputs)
        is_possible = (params == "device" or (stage == 3 and opt != "device")) and (
            opt == "device" or stage > 0
        )
        if is_possible and (choice, micro, steps) != (
            given.choice,
            given.micro,
            given.num_micro_steps,
        ):
            changes = {**choice.keys(nvme_path, every), **batch_keys(keys, micro, steps)}
            changes.setdefault("activation_checkpointing", {"every": None})
            space.append(TuningCandidate(choice, micro, steps, changed(keys, changes)))
    return space


def micro_batches(
    keys: Keys, settings: Autotuning, world_size: int
) -> Iterator[tuple[int | None, int]]:
    """Micro-batch sizes, each with its micro-steps, smallest first; only the given one
    if it cannot be changed.

    >>> list(micro_batches({"train_batch_size": 24}, Autotuning(), 2))
    [(4, 3), (6, 2), (12, 1)]
    >>> list(
    ...     micro_batches(
    ...         {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
    ...         Autotuning(),
    ...         2,
    ...     )
    ... )
    [(4, 2), (8, 2), (16, 2)]
    """
    cfg = quietly(keys)
    _, micro, steps = cfg.batch_sizes(world_size)
    if micro is None or cfg.elasticity.enabled:
        yield micro, steps
        return
    keeps, total = cfg.train_batch_size is not None, micro * steps
    sizes = {size for size in range(1, total + 1) if total % size == 0}
    if not keeps:
        sizes = {int(micro * 2.0**power) for power in range(-10, 11) if micro * 2.0**power >= 1}
    least, most = settings.min_train_batch_size or 0, settings.max_train_batch_size or math.inf
    allowed = [
        size
        for size in sizes
        if settings.min_train_micro_batch_size_per_gpu
        <= size
        <= settings.max_train_micro_batch_size_per_gpu
        and (keeps or least <= size * steps * world_size <= most)
    ]
    nearest = sorted(allowed, key=lambda size: (abs(math.log(size / micro)), -size))
    for size in sorted(nearest[: settings.num_tuning_micro_batch_sizes]):
        yield size, total // size if keeps else steps


def batch_keys(keys: Keys, micro: int | None, steps: int) -> dict[str, Any]:
    """The configuration keys of this batch; none if the configuration sets no batch."""
    if micro is None or quietly(keys).elasticity.enabled:
        return {}
    return {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}


class Planner:
    """Plans candidates of one model, with the script's batch in every size they need."""

    def __init__(
        self,
        model: nn.Module,
        keys: Keys,
        world_size: int,
        machine: MachineModel,
        *,
        device: Device,
        sample: Callable[[int | None], Any] | None,
        nvme_path: str | None = None,
    ) -> None:
        """`sample(n)` makes one rank's batch of n samples (None: the script's own);
        without it, no activations are counted.
        """

        def search(micro: int | None, steps: int) -> Search:
            batch = sample(micro) if sample else None
            batched = changed(keys, batch_keys(keys, micro, steps))
            return Search(model, batched, world_size, machine, nvme_path, batch, device)

        self._search = cache(search)

    def planned(self, candidate: TuningCandidate) -> Planned:
        """The plan of a candidate; if the model or the configuration does not allow it,
        `refused` has the reason.
        """
        try:
            search = self._search(candidate.micro, candidate.num_micro_steps)
            rung = search.rung("", candidate.choice)
            reason = "" if rung else next(reversed(search.refused), "not possible")
        except (ConfigError, ValueError) as error:
            rung, reason = None, str(error).splitlines()[0]
        if rung is None:
            return Planned(candidate, {}, 0.0, refused=reason)
        flops = search.activations.of(checkpoints=False).flops if search.activations else 0
        nbytes = {"device": rung.nbytes("device")} | {
            kind: rung.nbytes(kind) for kind in ("host", "nvme")
        }
        return Planned(candidate, nbytes, rung.seconds, flops * candidate.num_micro_steps)
