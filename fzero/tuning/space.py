"""`Trial`: a configuration that `fzero tune` considers, its plan and its measurement.
`candidates` are all of them; `Planner` makes their plans.

Candidates differ in stage, micro-batch, activation checkpointing and, on request, in
bucket size and placement. The model and the batch are the script's, so this code runs
in one of its ranks (`fzero.tuning.probe`), which sends the results as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal, Self

from torch import nn

from fzero.config.autotuning import Autotuning
from fzero.config.config import ConfigError
from fzero.config.files import changed
from fzero.estimation.compare import Choices, Keys, quietly
from fzero.estimation.fit_search import Limits, Search
from fzero.estimation.ledger import Device
from fzero.plans.machine_model import MachineModel

OffloadTarget = Literal["device", "host", "nvme"]
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    key: str  # identifies the configuration and the command
    name: str  # the configuration in words
    seconds: float | None = None  # time of a step; None if the run failed
    samples: int = 0  # samples of all ranks in a step; 0 if unknown
    nbytes: int = 0  # the peak of a rank since the step was made
    error: str = ""  # why it failed, in a few words
    out_of_memory: bool = False
    timed_out: bool = False
    time_limit: float = 0.0  # limit of the run, in seconds
    took: float = 0.0  # seconds of the full run
    config: Keys | None = None

    def as_dict(self) -> dict[str, Any]:
        """The content of a line of the file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration that may be measured; once it is planned, its plan in numbers;
    once it has run, its measurement.
    """

    choices: Choices
    micro: int | None  # samples of a rank in a micro-step; None if the configuration sets no batch
    num_micro_steps: int
    keys: Keys  # the configuration, as in a file
    is_given: bool = False  # whether it is the script's own configuration
    nbytes: int = 0  # planned, of one rank's device; on the CPU, of its host memory
    predicted: float = 0.0  # planned seconds of a step
    flops: int = 0  # operations of a step on one rank, without recomputation; 0 if not counted
    refused: str = ""  # why it is not possible or does not fit; then it is not measured
    result: Result | None = None
    # the number of candidates measured before it; None if it was not measured
    number: int | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """From its `dataclasses.asdict`, before it has run."""
        return cls(**record | {"choices": Choices(**record["choices"])})

    @property
    def name(self) -> str:
        """Its choices, in words."""
        size = "" if self.micro is None else f", micro-batch {self.micro}"
        steps = f" × {self.num_micro_steps}" if self.num_micro_steps > 1 else ""
        return f"{self.choices}{size}{steps}"

    @property
    def seconds(self) -> float | None:
        """Measured seconds of a step."""
        return self.result.seconds if self.result else None

    @property
    def reason(self) -> str:
        """Why it is not possible, or why its run failed."""
        return self.refused or (self.result.error if self.result else "")

    def samples(self, world_size: int) -> int:
        """Samples of all ranks in a step; 1 if unknown."""
        planned = (self.micro or 0) * self.num_micro_steps * world_size
        return planned or (self.result.samples if self.result else 0) or 1

    @property
    def features(self) -> tuple[float, ...]:
        """Numbers for the search (`fzero.tuning.search.Point`)."""
        choices = self.choices
        parts = [choices.stage >= stage for stage in (1, 2, 3)]
        parts += [choices.checkpoints, choices.small]
        parts += [
            getattr(choices, name) == kind
            for name in ("optimizer", "params")
            for kind in ("host", "nvme")
        ]
        return (*(float(part) - 0.5 for part in parts), math.log2(self.micro or 1))


def candidates(
    keys: Keys,
    settings: Autotuning,
    world_size: int,
    *,
    stages: Sequence[int] = STAGES,
    offload: Sequence[OffloadTarget] = ("device",),
    nvme_path: str | None = None,
) -> list[Trial]:
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
    given = Trial(Choices.of(cfg), own_micro, own_steps, keys, is_given=True)
    every = cfg.activation_checkpointing.every
    sizes = list(micro_batches(keys, settings, world_size))
    buckets = [False] if settings.fast else [False, True]
    space = [given]
    choices = product(stages, sizes, [False, True], offload, offload, buckets)
    for stage, (micro, steps), has, opt, params, small in choices:
        choice = Choices(stage, opt, params, has, small, given.choices.inputs)
        is_possible = (params == "device" or (stage == 3 and opt != "device")) and (
            opt == "device" or stage > 0
        )
        if is_possible and (choice, micro, steps) != (given.choices, own_micro, own_steps):
            changes = {**choice.keys(nvme_path, every), **batch_keys(keys, micro, steps)}
            changes.setdefault("activation_checkpointing", {"every": None})
            space.append(Trial(choice, micro, steps, changed(keys, changes)))
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

    def planned(self, trial: Trial, limits: Limits) -> Trial:
        """A trial with its plan; if the model, the configuration or the memory does not
        allow it, `refused` has the reason.
        """
        try:
            search = self._search(trial.micro, trial.num_micro_steps)
            found = search.rung("", trial.choices)
            reason = "" if found else next(reversed(search.refused), "not possible")
        except (ConfigError, ValueError) as error:
            found, reason = None, str(error).splitlines()[0]
        if found is None:
            return replace(trial, refused=reason)
        flops = search.activations.of(checkpoints=False).flops if search.activations else 0
        nbytes = found.nbytes("device")
        too_large = f"does not fit: {nbytes / 1e9:.3g} GB of {limits.device / 1e9:.3g}"
        return replace(
            trial,
            nbytes=nbytes,
            predicted=found.seconds,
            flops=flops * trial.num_micro_steps,
            refused="" if limits.hold(found) else too_large,
        )
