"""`Search`: the configurations that `fzero.estimation.fit` tries, in which order, and
the needs of each. `Limits`: the memory that they must fit into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from fzero.config.config import ConfigError
from fzero.config.files import changed
from fzero.estimation.activation_trace import Activations
from fzero.estimation.compare import (
    Candidate,
    Choices,
    Keys,
    changes_of,
    column,
    length_of,
    quietly,
)
from fzero.estimation.ledger import Device
from fzero.model.transforms import ModelTransform
from fzero.plans.machine_model import MachineModel
from fzero.plans.mesh_axes import seq_size_of
from fzero.runtime.batches import LossFn
from fzero.tiling import proposed_tiles
from sharding import Mesh


@dataclass(frozen=True, slots=True)
class Limits:
    """The bytes that a rank may hold on its device, in host memory and in files."""

    device: float
    host: float = math.inf
    disk: float = math.inf

    def hold(self, candidate: Candidate) -> bool:
        """Whether a configuration fits, while it trains and while it generates."""
        generating = candidate.generating
        if generating is not None and min(generating.by_copy, generating.by_unit) > self.device:
            return False
        limits = {"device": self.device, "host": self.host, "nvme": self.disk}
        return all(candidate.nbytes(kind) <= most for kind, most in limits.items())


class Search:
    """Plans choices, each once."""

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
        mesh: Mesh | None = None,
        transforms: Sequence[ModelTransform] = (),
    ) -> None:
        self.model, self.keys, self.device, self.machine = model, keys, device, machine
        how: dict[str, Any] = {"world_size": world_size, "mesh": mesh, "cache": cache}
        self._column = partial(column, model, "", machine=machine, device=device, **how)
        cfg = quietly(keys)
        zero = cfg.zero_optimization
        paths = [
            block.nvme_path
            for block in (zero.offload_optimizer, zero.offload_param)
            if block and block.nvme_path
        ]
        self.nvme_path = nvme_path or next(iter(paths), None)
        self.start = Choices.of(cfg)
        self.every = cfg.activation_checkpointing.every
        self.tiles: tuple[ModelTransform, ...] = ()
        seq_size = seq_size_of(mesh)
        self._changes = self._tile_changes = changes_of(model, cfg, transforms, loss_fn)
        if length := length_of(batch):
            is_divided = self._changes.batch_fn(seq_size) is not None
            self.tiles = proposed_tiles(model, -(-length // seq_size) if is_divided else length)
            self._tile_changes = changes_of(model, cfg, (*transforms, *self.tiles), loss_fn)
        both = {"tiles": self._tile_changes, "changes": self._changes}
        self.activations = (
            Activations(model, keys, batch, loss_fn, device, seq_size=seq_size, **both)
            if batch is not None
            else None
        )
        self._planned_by: dict[Choices, Candidate | None] = {}
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

    def choices(self) -> Iterator[Choices]:
        """All choices to try, those with fewer changes first."""
        kinds = ["device", "host", *(["nvme"] if self.nvme_path else [])]
        checkpoints = [False, True] if self._adds_checkpoints else [self.start.checkpoints]
        inputs = ["device", "host"] if self._moves_inputs else [self.start.inputs]
        tiles = [False, True] if self.tiles else [False]
        for values in product(
            range(self.start.stage, 4), kinds, kinds, checkpoints, [False, True], inputs, tiles
        ):
            choice = Choices(*values)
            is_new = choice.checkpoints or choice.inputs == self.start.inputs
            if is_new and (choice.stage == 3 or choice.params == "device"):
                yield choice

    def ladder(self) -> Iterator[Candidate]:
        """One change after the other, without those that have no effect."""
        steps: list[tuple[str, dict[str, Any]]] = [
            ("as it is", {}),
            ("activation checkpointing", {"checkpoints": True} if self._adds_checkpoints else {}),
            ("the head and perceptrons in tiles", {"tiles": True} if self.tiles else {}),
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
        choice, seen = self.start, set[Choices]()
        for name, changes in steps:
            following = replace(choice, **changes)
            if following not in seen and (rung := self.rung(name, following)):
                choice = following
                seen.add(following)
                yield rung

    def rung(self, name: str, choice: Choices) -> Candidate | None:
        """The planned choice; None if it is impossible. An impossible initial
        configuration raises ConfigError.
        """
        if choice not in self._planned_by:
            try:
                self._planned_by[choice] = self._planned(choice)
            except ValueError as error:  # a ConfigError, or a model that has other uses of tiles
                if choice == self.start or not (choice.tiles or isinstance(error, ConfigError)):
                    raise
                self._planned_by[choice] = None
                self.refused[str(error).splitlines()[0]] = None
        candidate = self._planned_by[choice]
        return None if candidate is None else replace(candidate, name=name)

    def _planned(self, choice: Choices) -> Candidate:
        keys = (
            self.keys
            if choice == self.start
            else changed(self.keys, choice.keys(self.nvme_path, self.every))
        )
        trace = None
        if self.activations is not None:
            trace = self.activations.of(
                checkpoints=choice.checkpoints,
                on_host=choice.inputs == "host",
                tiled=choice.tiles,
            )
        if not choice.tiles:
            return self._column(keys=keys, trace=trace, changes=self._changes)
        found = self._column(keys=keys, trace=trace, changes=self._tile_changes)
        return replace(found, choices=choice, tiles=self.tiles)

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
