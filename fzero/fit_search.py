"""Which configurations may fit, what does each need, and in which order are they tried? See `fzero.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from torch import nn

from fzero.config import ConfigError
from fzero.config_files import changed
from fzero.planner import Column, Keys, column, quietly
from fzero.timeline import Machine
from fzero.traced_activations import Activations
from sharding.dtypes import itemsize

SMALL_BUCKET = 1 << 22
"""Elements of full gradients that wait for their reduction, where memory is short."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What may differ between the configurations that are tried."""

    stage: int
    optimizer: str = "device"
    params: str = "device"
    checkpoints: bool = False
    small: bool = False

    def keys(self, nvme_path: str | None) -> Keys:
        """The keys that say so; what is on the device has none."""
        zero: dict[str, Any] = {"stage": self.stage, "offload_optimizer": _block(self.optimizer, nvme_path)}
        zero["offload_param"] = _block(self.params, nvme_path)
        if self.small:
            zero |= {"reduce_bucket_size": SMALL_BUCKET}
        if self.small and self.stage == 3:
            zero |= {"stage3_prefetch_bucket_size": 0}
        checkpointing = {"activation_checkpointing": {"every": 1}} if self.checkpoints else {}
        return {"zero_optimization": zero, **checkpointing}


def _block(kind: str, nvme_path: str | None) -> Keys | None:
    return {"device": None, "host": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": nvme_path}}[kind]


@dataclass(frozen=True, slots=True)
class Rung:
    """One configuration, and what it needs.

    Attributes:
        name: what it changes.
        choice: the configuration, in short.
        column: the same, planned.
        activations: bytes of activations, 0 where they are not counted.
        seconds: see the top of this file.
    """

    name: str
    choice: Choice
    column: Column = field(repr=False)
    activations: int
    seconds: float

    @property
    def device_nbytes(self) -> int:
        """All bytes on the device that are counted."""
        return self.column.nbytes("device") + self.activations


class Search:
    """Plans choices, each once."""

    def __init__(
        self, model: nn.Module, keys: Keys, world_size: int, machine: Machine, nvme_path: str | None, batch: Any
    ) -> None:
        self.model, self.keys, self.world_size, self.machine = model, keys, world_size, machine
        cfg = quietly(keys)
        zero = cfg.zero_optimization
        blocks = [getattr(zero, name, None) for name in ("offload_optimizer", "offload_param")]
        paths = [block.nvme_path for block in blocks if block is not None and block.nvme_path]
        self.nvme_path = nvme_path or next(iter(paths), None)
        optimizer, params = (
            "device" if block is None else {"cpu": "host"}.get(block.device, block.device) for block in blocks
        )
        self.start = Choice(zero.stage, optimizer, params, cfg.activation_checkpointing.every is not None)
        self.activations = Activations(model, keys, batch) if batch is not None else None
        self._found: dict[Choice, tuple[Column, int, float] | None] = {}
        self.refused: dict[str, None] = {}

    def choices(self) -> Iterator[Choice]:
        """All that are tried, those with fewer changes first."""
        kinds = ["device", "host", *(["nvme"] if self.nvme_path else [])]
        checkpoints = [True] if self.start.checkpoints or self.activations is None else [False, True]
        for values in product(range(self.start.stage, 4), kinds, kinds, checkpoints, [False, True]):
            choice = Choice(*values)
            if self.activations is None:
                choice = replace(choice, checkpoints=self.start.checkpoints)
            if choice.stage == 3 or choice.params == "device":
                yield choice

    def ladder(self) -> Iterator[Rung]:
        """One change after the other, without those that change nothing."""
        steps: list[tuple[str, dict[str, Any]]] = [
            ("as it is", {}),
            ("activation checkpointing", {"checkpoints": True} if self.activations is not None else {}),
            ("stage 2", {"stage": max(self.start.stage, 2)}),
            ("optimizer state in host memory", {"optimizer": "host"} if self.start.optimizer == "device" else {}),
            ("stage 3", {"stage": 3}),
            ("parameters in host memory", {"params": "host"} if self.start.params == "device" else {}),
            ("optimizer state in files", {"optimizer": "nvme"} if self.nvme_path else {}),
            ("parameters in files", {"params": "nvme"} if self.nvme_path else {}),
            ("smaller bucket, nothing early", {"small": True}),
        ]
        choice, seen = self.start, set()
        for name, changes in steps:
            following = replace(choice, **changes)
            rung = None if following in seen else self.rung(name, following)
            if rung is not None:
                choice = following
                seen.add(following)
                yield rung

    def rung(self, name: str, choice: Choice) -> Rung | None:
        """The choice, planned; None if it is not possible, or an error if it is the configuration as it is."""
        if choice not in self._found:
            try:
                self._found[choice] = self._planned(choice)
            except ConfigError as error:
                if choice == self.start:
                    raise
                self._found[choice] = None
                self.refused[str(error).splitlines()[0]] = None
        found = self._found[choice]
        return None if found is None else Rung(name, choice, *found)

    def _planned(self, choice: Choice) -> tuple[Column, int, float]:
        keys = self.keys if choice == self.start else changed(self.keys, choice.keys(self.nvme_path))
        found = column(self.model, "", keys, self.world_size)
        activations = 0 if self.activations is None else self.activations.of(checkpoints=choice.checkpoints).nbytes
        return found, activations, self._seconds(found, choice)

    def _seconds(self, found: Column, choice: Choice) -> float:
        micro_steps, machine = found.plan.num_micro_steps, self.machine
        sent = sum(found.sent_by_axis.values())
        host, disk = (_streamed(found, kind, micro_steps) for kind in ("host", "nvme"))
        # What lives in files is updated on the host: gradients go there, and new parameters come back.
        shards = sum(b.shard_numel * itemsize(b.dtypes.param) for b in found.plan.flat_buffers if b.trainable)
        crossing = 2 * shards if disk else 0
        flops = 0.0
        if self.activations is not None:
            flops = self.activations.of(checkpoints=choice.checkpoints).flops * micro_steps
        rates = ((sent, machine.network), (host + crossing, machine.host), (disk, machine.disk), (flops, machine.flops))
        return sum(amount / rate for amount, rate in rates)

    def notes(self) -> Iterator[str]:
        """What was not tried or not counted."""
        if self.activations is None:
            yield "Activations are not counted: give a batch (--batch and --sequence), or leave room for them."
        if self.nvme_path is None:
            yield "Files were not tried: give a folder (--nvme PATH)."
        yield from (f"Not possible: {reason}" for reason in self.refused)


def _streamed(found: Column, kind: str, micro_steps: int) -> int:
    """Bytes that cross to and from a memory in a step: state once each way, parameters for every gather besides."""
    held = found.memory.get(kind, {})
    state = sum(held.get(name, 0) for name in ("master", "optimizer", "gradients"))
    return 2 * state + (2 * micro_steps + 1) * held.get("parameters", 0)
