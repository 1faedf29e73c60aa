"""`deepspeed.profiling`."""

from __future__ import annotations

from fzero.deepspeed.profiling import flops_profiler

__all__ = ["flops_profiler"]
