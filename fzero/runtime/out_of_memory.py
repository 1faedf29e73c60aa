"""`explained`: the plan and the allocator's numbers beside the error of a GPU that has no memory left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fzero.plans.plan import Plan

GIB = 2**30


@contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """Adds the plan to an error for want of memory inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        _explain(error, plan)
        raise


def _explain(error: torch.OutOfMemoryError, plan: Plan) -> None:
    """Adds a note, once: what the plan expects, what was allocated, and where a snapshot is."""
    if not any(note.startswith("fzero: planned") for note in getattr(error, "__notes__", ())):
        error.add_note(_note(plan))


def _note(plan: Plan) -> str:
    from fzero.plans.report import memory_lines  # a step that fits does not load it

    state = " · ".join(memory_lines(plan.bytes_per_rank, plan.bytes_by_memory))
    gathered = plan.unit_rules.most_gathered()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (
        f"fzero: planned, without activations: {state}, and at most {gathered:,} gathered elements at a time. Measured at the "
        f"peak: {peak / GIB:.3f} GiB allocated, {reserved / GIB:.3f} GiB reserved. {_snapshot()} For less: smaller "
        f"micro-batches, checkpoint=1, a higher stage, or offload_optimizer; `fzero plan` compares settings"
    )


def _snapshot() -> str:
    """Writes what is allocated now, for pytorch.org/memory_viz; says where, or why not."""
    path = Path(tempfile.gettempdir()) / f"fzero_out_of_memory_{os.getpid()}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except Exception as error:  # the first error counts
        return f"No snapshot of memory was written: {error}."
    return f"A snapshot of memory is in {path} (pytorch.org/memory_viz shows it)."
