"""`explained`: the plan and the measured numbers beside the error of a GPU, or of a rank on the CPU, that has no memory left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fzero.plans.plan import Plan
from fzero.storage.host_memory import available_memory, process_memory

GIB = 2**30


@contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """Adds the plan to an error for want of memory inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            _explain(error, plan, _on_gpu)
        elif isinstance(error, MemoryError) or any(words in str(error) for words in NO_HOST_MEMORY):
            _explain(error, plan, _on_host)
        raise


NO_HOST_MEMORY = ("can't allocate memory", "not enough memory")
"""Of the messages of torch's allocator of host memory, whose error has no class of its own."""


def _explain(error: Exception, plan: Plan, measured: Callable[[], str]) -> None:
    """Adds a note, once: what the plan expects, what was allocated, and where a snapshot is."""
    if not any(note.startswith("fzero: planned") for note in getattr(error, "__notes__", ())):
        error.add_note(_note(plan, measured()))


def _note(plan: Plan, measured: str) -> str:
    from fzero.plans.report import memory_lines  # a step that fits does not load it

    state = " · ".join(memory_lines(plan.bytes_per_rank, plan.bytes_by_memory))
    gathered = plan.unit_rules.most_gathered()
    return (
        f"fzero: planned, without activations: {state}, and at most {gathered:,} gathered elements at a time. {measured} For "
        f"less: smaller micro-batches, checkpoint=1, a higher stage, or offload_optimizer; `fzero plan` compares settings"
    )


def _on_gpu() -> str:
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return f"Measured at the peak: {peak / GIB:.3f} GiB allocated, {reserved / GIB:.3f} GiB reserved. {_snapshot()}"


def _on_host() -> str:
    from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

    limit, free = getrlimit(RLIMIT_AS)[0], available_memory()
    limited = "" if limit == RLIM_INFINITY else f", of an address space limited to {limit / GIB:.3f} GiB (ulimit -v)"
    peak = process_memory("VmHWM") / GIB
    return f"Measured: {peak:.3f} GiB resident at this process's peak{limited}; {free / GIB:.3f} GiB are free on the machine."


def _snapshot() -> str:
    """Writes what is allocated now, for pytorch.org/memory_viz; says where, or why not."""
    path = Path(tempfile.gettempdir()) / f"fzero_out_of_memory_{os.getpid()}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except Exception as error:  # the first error counts
        return f"No snapshot of memory was written: {error}."
    return f"A snapshot of memory is in {path} (pytorch.org/memory_viz shows it)."
