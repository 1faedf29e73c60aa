"""`Search`: the configurations that `fzero.estimation.fit` tries, in which order, and
the needs of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Self

from torch import nn

from fzero.config.config import Config, ConfigError
from fzero.config.files import changed
from fzero.estimation.activation_trace import Activations
from fzero.estimation.compare import Candidate, Keys, column, placed, quietly
from fzero.estimation.ledger import Device
from fzero.plans.machine_model import MachineModel
from fzero.runtime.batches import LossFn

SMALL_BUCKET = 1 << 22
"""The `reduce_bucket_size` that is tried where memory is short: elements of full
gradients that await their reduction.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """The choices in which the tried configurations differ."""

    stage: int
    optimizer: str = "device"
    params: str = "device"
    checkpoints: bool = False
    small: bool = False
    # where the inputs of checkpointed modules are kept; no effect without checkpointing
    inputs: str = "device"

    @classmethod
    def of(cls, cfg: Config) -> Self:
        """The choices of a configuration."""
        zero = cfg.zero_optimization
        optimizer, params = (
            "device" if block is None else {"cpu": "host"}.get(block.device, block.device)
            for block in (zero.offload_optimizer, zero.offload_param)
        )
        checkpointing, is_small = (
            cfg.activation_checkpointing,
            zero.reduce_bucket_size == SMALL_BUCKET,
        )
        inputs = "host" if checkpointing.cpu_checkpointing else "device"
        return cls(
            zero.row.number, optimizer, params, checkpointing.every is not None, is_small, inputs
        )

    def keys(self, nvme_path: str | None, every: int | None = None) -> Keys:
        """The configuration keys of these choices; the device is the default. `every`
        n-th unit is checkpointed, None: all.
        """
        zero = placed(self.stage, self.optimizer, self.params, nvme_path)
        if self.small:
            zero |= {"reduce_bucket_size": SMALL_BUCKET} | (
                {"stage3_prefetch_bucket_size": 0} if self.stage == 3 else {}
            )
        if not self.checkpoints:
            return {"zero_optimization": zero}
        block = {"every": every or 1} | (
            {"cpu_checkpointing": True} if self.inputs == "host" else {}
        )
        return {"zero_optimization": zero, "activation_checkpointing": block}


@dataclass(frozen=True, slots=True)
class Rung:
    """One configuration, and its needs."""

    name: str  # its change from the rung before
    choice: Setting
    column: Candidate = field(repr=False)  # its plan and dry run

    @property
    def seconds(self) -> float:
        """The duration of a step; without a batch, of its communication, streams and
        updates alone.
        """
        return self.column.seconds

    @property
    def activations(self) -> int:
        """Bytes of activations at the peak; 0 if they are not counted."""
        return self.column.memory["device"].get("activations", 0)

    @property
    def device_nbytes(self) -> int:
        """All counted bytes on the device, at the peak."""
        return self.column.nbytes("device")


class Search:
    """Plans settings, each once."""

    def __init__(
        self,
        model: nn.Module,
        keys: Keys,
        world_size: int,
        machine: MachineModel,
        nvme_path: str | None,
        batch: Any,
        device: Device = "cuda",
        loss_fn: LossFn | None = None,
        cache: int | None = None,
    ) -> None:
        self.model, self.keys, self.device, self.machine = model, keys, device, machine
        self._column = partial(
            column, model, "", world_size=world_size, machine=machine, device=device, cache=cache
        )
        cfg = quietly(keys)
        zero = cfg.zero_optimization
        paths = [
            block.nvme_path
            for block in (zero.offload_optimizer, zero.offload_param)
            if block and block.nvme_path
        ]
        self.nvme_path = nvme_path or next(iter(paths), None)
        self.start = Setting.of(cfg)
        self.every = cfg.activation_checkpointing.every
        self.activations = (
            Activations(model, keys, batch, loss_fn, device) if batch is not None else None
        )
        self._planned_by: dict[Setting, Candidate | None] = {}
        self.refused: dict[str, None] = {}

    @property
    def _adds_checkpoints(self) -> bool:
        return (
            self.activations is not None
            and self.activations.has_units
            and not self.start.checkpoints
        )

    @property
    def _moves_inputs(self) -> bool:
        """Whether moving checkpointed inputs to host memory would be a change."""
        can_checkpoint = self.activations is not None and (
            self.start.checkpoints or self.activations.has_units
        )
        return can_checkpoint and self.device == "cuda" and self.start.inputs == "device"

    def choices(self) -> Iterator[Setting]:
        """All settings to try, those with fewer changes first."""
        kinds = ["device", "host", *(["nvme"] if self.nvme_path else [])]
        checkpoints = [False, True] if self._adds_checkpoints else [self.start.checkpoints]
        inputs = ["device", "host"] if self._moves_inputs else [self.start.inputs]
        for values in product(
            range(self.start.stage, 4), kinds, kinds, checkpoints, [False, True], inputs
        ):
            choice = Setting(*values)
            is_new = choice.checkpoints or choice.inputs == self.start.inputs
            if is_new and (choice.stage == 3 or choice.params == "device"):
                yield choice

    def ladder(self) -> Iterator[Rung]:
        """One change after the other, without those that have no effect."""
        steps: list[tuple[str, dict[str, Any]]] = [
            ("as it is", {}),
            ("activation checkpointing", {"checkpoints": True} if self._adds_checkpoints else {}),
            ("stage 2", {"stage": max(self.start.stage, 2)}),
            (
                "checkpointed inputs in host memory",
                {"inputs": "host"} if self._moves_inputs else {},
            ),
            (
                "optimizer state in host memory",
                {"optimizer": "host"} if self.start.optimizer == "device" else {},
            ),
            ("stage 3", {"stage": 3}),
            (
                "parameters in host memory",
                {"params": "host"} if self.start.params == "device" else {},
            ),
            ("optimizer state in files", {"optimizer": "nvme"} if self.nvme_path else {}),
            ("parameters in files", {"params": "nvme"} if self.nvme_path else {}),
            ("smaller bucket, nothing early", {"small": True}),
        ]
        choice, seen = self.start, set[Setting]()
        for name, changes in steps:
            following = replace(choice, **changes)
            if following not in seen and (rung := self.rung(name, following)):
                choice = following
                seen.add(following)
                yield rung

    def rung(self, name: str, choice: Setting) -> Rung | None:
        """The planned setting; None if it is impossible. An impossible initial
        configuration raises ConfigError.
        """
        if choice not in self._planned_by:
            try:
                self._planned_by[choice] = self._planned(choice)
            except ConfigError as error:
                if choice == self.start:
                    raise
                self._planned_by[choice] = None
                self.refused[str(error).splitlines()[0]] = None
        candidate = self._planned_by[choice]
        return None if candidate is None else Rung(name, choice, candidate)

    def _planned(self, choice: Setting) -> Candidate:
        keys = (
            self.keys
            if choice == self.start
            else changed(self.keys, choice.keys(self.nvme_path, self.every))
        )
        trace = None
        if self.activations is not None:
            trace = self.activations.of(
                checkpoints=choice.checkpoints, on_host=choice.inputs == "host"
            )
        return self._column(keys=keys, trace=trace)

    def notes(self) -> Iterator[str]:
        """Notes on what the search did not try or count."""
        if self.activations is None:
            yield (
                "Activations are not counted: pass a batch (--batch and --sequence), or "
                "leave room for them."
            )
        elif not self.activations.has_units:
            yield (
                f"Activation checkpointing was not tried: {type(self.model).__name__} has no "
                f"repeated blocks."
            )
        if self.nvme_path is None:
            yield "Files were not tried: pass a folder (--nvme PATH)."
        yield from (f"Not possible: {reason}" for reason in self.refused)
