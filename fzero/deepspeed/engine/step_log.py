"""`StepLog`, `CommsLog`: an engine's reports on the time, memory, modules and
collectives of its steps.

They serve the keys `wall_clock_breakdown`, `memory_breakdown`, `flops_profiler` and
`comms_logger`; without these keys nothing is measured. On CUDA the host waits for the
device at the end of each part, so that the times are those of the device.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from rich.console import RenderableType

from fzero.comms import collectives
from fzero.comms.records import PURPOSES, CommRecord
from fzero.deepspeed.engine.config_keys import CommsLoggerKeys, EngineKeys
from fzero.profiling.module_timer import ModuleTimer
from fzero.profiling.profiler import dtype_of, matrix_rate
from fzero.profiling.reports import (
    MemoryRow,
    Profile,
    comms_table,
    memory_table,
    waits_table,
    wall_clock_table,
)
from fzero.step import TrainStep
from fzero.storage.host_memory import process_memory

Part = Literal["forward", "backward", "update"]


class StepLog:
    """The parts of a step, on rank 0 (`is_on`), from its first forward to its update.

    Attributes:
        profile: the report of the profiled step, once it is over.
    """

    def __init__(self, keys: EngineKeys, step: TrainStep, *, is_on: bool) -> None:
        self._keys, self._model, self._device = keys, step.spec.model, step.device
        self._dtype = dtype_of(step.plan, step.runtime.autocast)
        wanted = keys.wall_clock_breakdown or keys.memory_breakdown or keys.flops_profiler.enabled
        self._is_on = is_on and bool(wanted)
        self.profile: Profile | None = None
        self._forget()

    def _forget(self) -> None:
        self._seconds: defaultdict[Part, float] = defaultdict(float)
        self._waited: Counter[tuple[Part, str]] = Counter()
        self._memory: list[MemoryRow] = []
        self._modules: ModuleTimer | None = None

    @contextmanager
    def of(self, part: Part, step: int, *, trains: bool = True) -> Iterator[None]:
        """Measures a part of the step after `step` updates; an error drops the
        measurements of the step.

        Args:
            trains: whether a backward may follow; other forwards, such as an
                evaluation, are not measured.
        """
        if not self._is_on or not trains:
            yield
            return
        if self._device.type == "cuda" and self._keys.memory_breakdown:
            torch.cuda.reset_peak_memory_stats(self._device)
        waited, began = collectives.waited(), self._now()
        profiler = self._keys.flops_profiler
        try:
            with (
                self._profiling(part)
                if profiler.enabled and profiler.profile_step == step
                else nullcontext()
            ):
                yield
        except BaseException:
            self._forget()
            raise
        self._seconds[part] += self._now() - began
        for purpose, seconds in collectives.waited().items():
            self._waited[part, purpose] += seconds - waited.get(purpose, 0.0)  # type: ignore[assignment]
        if self._keys.memory_breakdown:
            self._memory.append(_memory(part, self._device))

    def report(self, step: int) -> list[RenderableType]:
        """The tables of the step after `step` updates, once it is over."""
        found: list[RenderableType] = []
        if self._is_on:
            if self._keys.wall_clock_breakdown:
                found.append(wall_clock_table(self._parts(), step=step + 1))
            if self._keys.memory_breakdown:
                found.append(memory_table(self._memory, step=step + 1))
            if self._modules is not None:
                found += self._profiled(self._modules)
        self._forget()
        return found

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def _profiling(self, part: Part) -> Iterator[None]:
        if self._modules is None:
            self._modules = ModuleTimer(self._model, self._now, counts=True)
        how = {"forward": self._modules.forward, "backward": self._modules.backward}.get(
            part, nullcontext
        )
        with how():
            yield

    def _parts(self) -> dict[str, float]:
        """Seconds of each part without its waits, and of each wait."""
        found: dict[str, float] = {}
        for part, seconds in self._seconds.items():
            waits = {p: s for (where, p), s in self._waited.items() if where == part and s}
            found[part] = seconds - sum(waits.values())
            for purpose, waited in waits.items():
                found[f"  wait: {_said(purpose)} ({part})"] = waited
        return found

    def _profiled(self, modules: ModuleTimer) -> Sequence[RenderableType]:
        """The report of the profile, or nothing where it was written to a file."""
        keys, waited = self._keys.flops_profiler, Counter[str]()
        for (_, purpose), seconds in self._waited.items():
            waited[_said(purpose)] += seconds  # type: ignore[assignment]
        found = self.profile = Profile(
            modules.profiles(),
            self._seconds["forward"],
            self._seconds["backward"],
            self._seconds["update"],
            matrix_rate(self._device, self._dtype),
            {name: seconds for name, seconds in waited.items() if seconds},
        )
        how: dict[str, Any] = {
            "module_depth": keys.module_depth,
            "top_modules": keys.top_modules,
            "detailed": keys.detailed,
        }
        if keys.output_file is None:
            return [found.report(**how)]
        try:
            found.show(output_file=keys.output_file, **how)
        except OSError as error:  # must not raise here: the other ranks go on
            warnings.warn(
                f"flops_profiler.output_file: must be a file that can be written, got "
                f"{keys.output_file!r} ({error}); it is printed instead",
                stacklevel=2,
            )
            return [found.report(**how)]
        return []


def _memory(part: str, device: torch.device) -> MemoryRow:
    host = process_memory("VmRSS")
    if device.type != "cuda":
        return MemoryRow(part, host, None, None)
    return MemoryRow(
        part, host, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    )


def _said(purpose: str) -> str:
    return PURPOSES.get(purpose, purpose)  # type: ignore[call-overload, no-any-return]


# --- collectives ----------------------------------------------------------------------------------


class CommsLog:
    """Counts the collectives of this rank since the engine was made, for
    `comms_logger`.

    Args:
        keys: select the collectives.
        say: prints a line; None prints none.
    """

    def __init__(self, keys: CommsLoggerKeys, say: Callable[[str], None] | None) -> None:
        self.keys, self._say = keys, say if keys.verbose else None
        self.counts: Counter[tuple[str, str, int]] = Counter()
        self._waited_before = collectives.waited()

    def __call__(self, sent: CommRecord) -> None:
        if not sent.num_elements or (self.keys.only and sent.collective not in self.keys.only):
            return
        name = f"{sent.collective} ({sent.label})" if self.keys.debug else sent.collective
        self.counts[name, sent.axis, sent.nbytes] += 1
        if self._say is not None:
            self._say(
                f"comm: {sent.collective} along {sent.axis}: {sent.label}, {sent.nbytes:,} bytes"
            )

    @property
    def waited(self) -> dict[str, float]:
        """Seconds that the host has waited for collectives since then, by their
        purpose.
        """
        before = self._waited_before
        return {
            _said(p): s - before.get(p, 0.0)
            for p, s in collectives.waited().items()
            if s > before.get(p, 0.0)
        }

    def tables(self, waited: Sequence[Mapping[str, float]] = ()) -> list[RenderableType]:
        """The tables of collectives and of waits.

        Args:
            waited: seconds by purpose, per rank; an empty sequence takes this rank's.
        """
        return [comms_table(self.counts), waits_table(waited or [self.waited])]

    def as_dict(self) -> dict[str, Any]:
        """Counts by collective and bytes per message, in DeepSpeed's structure, for
        programs.
        """
        summary: defaultdict[str, dict[int, dict[str, int]]] = defaultdict(dict)
        for (name, _, nbytes), count in self.counts.items():
            row = summary[name].setdefault(nbytes, {"count": 0, "msg_size_bytes": nbytes})
            row["count"] += count
        return {"summary": dict(summary), "waited_seconds": self.waited}


def merged(logs: Sequence[CommsLog]) -> CommsLog:
    """The logs as one, which begins with the first of them."""
    found = CommsLog(CommsLoggerKeys(), None)
    for log in logs:
        found.counts.update(log.counts)
        found._waited_before = min(
            found._waited_before, log._waited_before, key=lambda waited: sum(waited.values())
        )
    return found
