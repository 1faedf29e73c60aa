"""Timers under DeepSpeed's names, for scripts that time themselves by `engine.timers`
and `engine.tput_timer`.

On CUDA the host does not wait for the device: these are times of the host.
`wall_clock_breakdown` waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any


class Timer:
    """Adds up the milliseconds between `start` and `stop`."""

    def __init__(self, name: str = "", is_on: bool = True) -> None:
        self.name_, self.started_, self._is_on = name, False, is_on
        self._began, self._records = 0.0, list[float]()

    def start(self) -> None:
        self.started_, self._began = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if self.started_ and self._is_on:
            self._records.append(1000 * (time.perf_counter() - self._began))
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far; a running timer goes on."""
        is_running = self.started_
        self.stop()
        total = sum(self._records)
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of one `start` to `stop`, on average."""
        return sum(self._records) / len(self._records) if self._records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`.

    >>> timers = SynchronizedWallClockTimer()
    >>> timers("forward").start()
    >>> timers("forward").stop()
    >>> timers("forward").elapsed() > 0, timers("forward").elapsed()
    (True, 0)
    """

    _is_on = True

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self.timers: dict[str, Timer] = {}
        self._say = say

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name, self._is_on))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Any = None,
    ) -> None:
        """Prints the milliseconds of some timers."""
        known = [name for name in names if name in self.timers]
        parts = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known
        ]
        if parts and self._is_on:
            self._say(" | ".join(["time (ms)", *parts]))

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """The milliseconds of one run of some timers."""
        return {
            name: self.timers[name].mean() / normalizer for name in names if name in self.timers
        }


class NoopTimer(SynchronizedWallClockTimer):
    """Timers that measure nothing: those of an engine without `wall_clock_breakdown`."""

    _is_on = False


class ThroughputTimer:
    """Samples per second over the updates since the first `start_step` ones, which warm
    up.

    Attributes:
        global_step_count, micro_step_count, epoch_count: updates, micro-steps of this
            epoch, and epochs so far.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.batch_size, self.start_step = batch_size or 1, start_step
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time, self.started, self._began = 0.0, False, 0.0

    def update_epoch_count(self) -> None:
        self.epoch_count, self.micro_step_count = self.epoch_count + 1, 0

    def start(self) -> None:
        """Begins a micro-step, unless one has begun."""
        if not self.started:
            self.started, self._began = True, time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends a micro-step; with `global_step` also an update."""
        if not self.started:
            return
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._began
        self.started, self.micro_step_count = False, self.micro_step_count + 1
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Minus infinity before the first update that counts."""
        counted = self.global_step_count - self.start_step
        return self.batch_size * counted / self.total_elapsed_time if counted > 0 else float("-inf")
