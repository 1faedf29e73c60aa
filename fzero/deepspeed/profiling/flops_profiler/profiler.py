"""`FlopsProfiler`, `get_model_profile`: operations, multiply-accumulates and parameters
of a model's forward.

Counted are matrix products, convolutions and attention, with torch's formulas.
(DeepSpeed also counts activations and norms, which take less than a percent of a
transformer.) `fzero.profiling.profile` measures backward and update, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fzero.profiling.module_timer import ModuleTimer
from fzero.profiling.profiler import matrix_rate
from fzero.profiling.reports import ModuleProfile, Profile

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


class FlopsProfiler:
    """Counts the forwards of a model between `start_profile` and `stop_profile`.

    Args:
        model: any module.
        ds_engine, recompute_fwd_factor: ignored.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        self.model, self.started = model, False
        self._stack, self._profiles = ExitStack(), tuple[ModuleProfile, ...]()
        self._timer: ModuleTimer | None = None

    def start_profile(self, ignore_list: Any = None) -> None:
        """Begins to count; `ignore_list` is ignored."""
        self.stop_profile()
        self._timer = ModuleTimer(self.model, self._now, counts=True)
        self._stack.enter_context(self._timer.forward())
        self.started = True

    def stop_profile(self) -> None:
        """Ends counting; the numbers can be read."""
        self._stack.close()
        if self._timer is not None and self.started:
            self._profiles = self._timer.profiles()
        self.started = False

    def reset_profile(self) -> None:
        """Forgets what was counted, and counts anew where it was counting."""
        was_on, self._profiles = self.started, ()
        self.end_profile()
        if was_on:
            self.start_profile()

    def end_profile(self) -> None:
        """Ends counting, and forgets the numbers."""
        self.stop_profile()
        self._profiles, self._timer = (), None

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _whole(self) -> ModuleProfile | None:
        if self.started and self._timer is not None:
            self._profiles = self._timer.profiles()
        return self._profiles[0] if self._profiles else None

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating point operations of the forwards."""
        total = getattr(self._whole(), "forward_flops", 0)
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates of the forwards."""
        total = getattr(self._whole(), "macs", 0)
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of the forwards."""
        total = getattr(self._whole(), "forward", 0.0)
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters, tied ones once."""
        total = sum(param.numel() for param in self.model.parameters())
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the tree of modules, or writes it to a file."""
        if (whole := self._whole()) is not None:
            param = next(self.model.parameters(), torch.empty(()))
            rate = matrix_rate(param.device, param.dtype)
            found = Profile(self._profiles, whole.forward, 0.0, 0.0, rate)
            found.show(
                module_depth=module_depth,
                top_modules=top_modules,
                detailed=detailed,
                output_file=output_file,
            )

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the classes of modules with the most operations."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(Operations, multiply-accumulates, parameters) of one forward in evaluation mode,
    as text or as numbers.

    Args:
        input_shape: the shape of the only input; else `args` and `kwargs` are the
            inputs.
        print_profile: whether the tree of modules is printed, or written to
            `output_file`.
        warm_up: the number of forwards before.
        mode: "forward", or "generate" to call that method.
    """
    if input_shape is not None:
        param = next(model.parameters(), torch.empty(()))
        args = [torch.ones(input_shape, dtype=param.dtype, device=param.device)]
    if not args and not kwargs:
        raise ValueError(
            "get_model_profile: needs an input, got none; pass input_shape, args or kwargs"
        )
    model.eval()
    call = model if mode == "forward" else getattr(model, mode)
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_modules)
    call(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
    profiler.end_profile()
    if not as_string:
        return found
    return number_to_string(found[0]), macs_to_string(found[1]), params_to_string(found[2])


def number_to_string(num: Any, units: str | None = None, precision: int = 2) -> str:
    """A number with a prefix.

    >>> number_to_string(1_234_000), number_to_string(1_234_000, units="G"), number_to_string(12)
    ('1.23 M', '0 G', '12 ')
    """
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if num >= size), "u" if num else "")
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: Any, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: Any, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: Any, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: Any, units: str | None = None, precision: int = 2) -> str:
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: Any, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(duration, units, precision)}s"
