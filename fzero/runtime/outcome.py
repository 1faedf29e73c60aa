"""The errors at the end of a step, with their causes, and the note for a rank that has
no memory left.

`fzero.runtime.finish` finds that a step may not go on, and raises them.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import CollectiveError
from fzero.comms.records import Label
from fzero.plans.plan import Plan
from fzero.plans.report import memory_lines
from fzero.state import TrainState
from fzero.storage.host_memory import available_memory, process_memory
from fzero.storage.shard_transfer import own_shard

if TYPE_CHECKING:
    from fzero.runtime.finish import Outcome
    from fzero.runtime.step_runtime import StepRuntime

GIB = 2**30


def first_overflow(run: StepRuntime, state: TrainState[Tensor]) -> str | None:
    """The first parameter whose gradient is not finite; see `TrainStep.first_overflow`.
    *Collective.*
    """
    order = {name: index for index, (name, _) in enumerate(run.spec.model.named_parameters())}
    first, mesh = len(order), run.mesh
    trained = [buffer for buffer in run.plan.flat_buffers if buffer.trainable]
    shards = ((b.key, own_shard(state.grads[b.key], b, mesh.shard)) for b in trained)
    for buffer, grad_S in zip(trained, run.offload.transfer(run.scratch).each(shards), strict=True):
        for name, start, stop, offset in map(astuple, buffer.layout.fragments(mesh.shard)):
            if order[name] < first and not grad_S[offset : offset + stop - start].isfinite().all():
                first = order[name]
    found = int(mesh.stack(torch.tensor(first, device=run.device), label=Label("overflow")).min())
    name = dict(zip(order.values(), order, strict=True)).get(found)
    return run.job.first_name(name)


def check_used(run: StepRuntime, used: Collection[str]) -> None:
    """Raises on every rank where a trained parameter got no gradient on some rank.
    *Collective:* a number per parameter.

    Args:
        used: the parameters that got a gradient on this rank, or need none.
    """
    trained = {
        name for buffer in run.plan.flat_buffers if buffer.trainable for name in buffer.layout.names
    }
    names = [name for name, _ in run.spec.model.named_parameters() if name in trained]
    is_unused = torch.tensor([float(name not in used) for name in names], device=run.device)
    unused_WN = collectives.stack(
        is_unused, run.mesh.world, label=Label("other", "of unused parameters", "update")
    )
    lines = [
        f"{name!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for name, of_name in zip(names, unused_WN.T.tolist(), strict=True)
        if (ranks := [rank for rank, number in enumerate(of_name) if number])
    ]
    if lines:
        raise ValueError(
            f"zero_optimization.ignore_unused_parameters: is false, and the loss does not depend "
            f"on {'; '.join(lines)}; compute the loss from all of them, freeze them with "
            f"requires_grad_(False), or leave the key out: then their gradient is 0"
        )


def what_is_not_finite(run: StepRuntime, outcome: Outcome, state: TrainState[Tensor]) -> str:
    """The message about a loss or gradient that is not finite. *Collective.*"""
    name = first_overflow(run, state)
    if run.rules.skips_overflow:
        return (
            f"fp16.min_loss_scale: the gradient overflows with the loss scale at its minimum "
            f"{state.loss_scale.scale.item():g}, first in {name!r}; the state was not updated: "
            f"look at this batch, lower the learning rate, or use bf16"
        )
    losses_AW = outcome.loss_stats[..., 0]
    by_rank = losses_AW.mean(dim=0).tolist()
    ranks = [rank for rank, value in enumerate(by_rank) if not math.isfinite(value)]
    mean = losses_AW.mean().item()
    what = (
        f"loss is not finite on ranks {ranks}"
        if ranks
        else f"loss is {mean:.6g}, its gradient is not finite"
    )
    return (
        f"step {int(state.step)}: {what} (losses {by_rank}, gradient norm {outcome.norm.item():.6g}"
        + (f", first parameter {name!r}" if name else "")
        + (
            "); the state was not updated: lower the learning rate, set gradient_clipping, "
            "or look at this batch"
        )
    )


def differing_passes(numbers_W: Tensor) -> CollectiveError:
    """The error for ranks whose forward-backwards have different numbers
    (`fzero.runtime.finish.number_of`).
    """
    is_update, passes_W = numbers_W == math.inf, numbers_W.abs()
    is_last = (numbers_W > 0) & ~is_update
    if is_update.any() or (passes_W == passes_W[0]).all():
        doing = [
            f"{what} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for what, of_rank in (
                ("an update", is_update),
                ("the last backward before an update", is_last),
                ("a backward before the last", numbers_W < 0),
            )
            if (ranks := of_rank.nonzero().flatten().tolist())
        ]
        return CollectiveError(
            f"gradient accumulation: every rank must call backward and step equally often, and one "
            f"call was {', '.join(doing)}; give all ranks the same number of micro-batches (a "
            f"loader with drop_last=True, say), and start the job again from a checkpoint"
        )
    if (passes_W.floor() == passes_W[0].floor()).all():
        return CollectiveError(
            "requires_grad: must be the same on all ranks for each parameter, and differs; freeze "
            "and unfreeze on every rank, before the same forward"
        )
    return CollectiveError(
        f"the ranks are in different steps: they have run {[int(n) for n in passes_W]} passes. "
        f"Either an error was raised at different places on different ranks, or only some ranks "
        f"called a collective method (trace_comm, evaluate, a further forward or backward); end "
        f"the job, and start it again from a checkpoint"
    )


# --- out of memory --------------------------------------------------------------------------------


@contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """Inside, an error for want of memory gets a note; see `explain`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explain(error, plan)
        raise


def explain(error: BaseException, plan: Plan) -> None:
    """Adds a note to an error for want of memory, once: the plan's numbers, what was
    allocated, and where a snapshot is.
    """
    if any(note.startswith("fzero: planned") for note in getattr(error, "__notes__", ())):
        return
    if isinstance(error, torch.OutOfMemoryError):
        error.add_note(_note(plan, _on_gpu()))
    elif isinstance(error, MemoryError) or any(words in str(error) for words in NO_HOST_MEMORY):
        error.add_note(_note(plan, _on_host()))


NO_HOST_MEMORY = ("can't allocate memory", "not enough memory")
"""Parts of the messages of torch's allocator of host memory, which raises a plain
RuntimeError.
"""


def _note(plan: Plan, measured: str) -> str:
    state = " · ".join(memory_lines(plan.bytes_per_rank, plan.bytes_by_memory))
    gathered = plan.unit_rules.most_gathered()
    return (
        f"fzero: planned, without activations: {state}, and at most {gathered:,} gathered elements "
        f"at a time. {measured} For less: smaller micro-batches, checkpoint=1, a higher stage, or "
        f"offload_optimizer; `fzero plan` compares settings, and counts activations with --batch "
        f"and --sequence or --sample"
    )


def _on_gpu() -> str:
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (
        f"Measured at the peak: {peak / GIB:.3f} GiB allocated, {reserved / GIB:.3f} GiB "
        f"reserved. {_snapshot()}"
    )


def _on_host() -> str:
    limit, free = getrlimit(RLIMIT_AS)[0], available_memory()
    limited = (
        ""
        if limit == RLIM_INFINITY
        else f", of an address space limited to {limit / GIB:.3f} GiB (ulimit -v)"
    )
    peak = process_memory("VmHWM") / GIB
    return (
        f"Measured: {peak:.3f} GiB resident at this process's peak{limited}; {free / GIB:.3f} GiB "
        f"are free on the machine. {_tensors_of_python()}"
    )


def _tensors_of_python(num_shown: int = 5) -> str:
    """The bytes of the tensors in host memory that Python objects hold, and the largest
    of them, by storage.

    PyTorch keeps no list of its allocations in host memory. Tensors that only autograd
    holds are not found.
    """
    found: dict[int, tuple[int, str]] = {}
    try:
        for x in gc.get_objects():
            if (
                type(x) in (Tensor, torch.nn.Parameter)
                and x.device.type == "cpu"
                and x.layout == torch.strided
            ):
                storage = x.untyped_storage()
                if storage.nbytes() > found.get(storage.data_ptr(), (-1, ""))[0]:
                    text = (
                        f"{storage.nbytes():,} bytes of a "
                        f"{str(x.dtype).removeprefix('torch.')} tensor {tuple(x.shape)}"
                    )
                    found[storage.data_ptr()] = storage.nbytes(), text
    except Exception as error:  # the first error counts
        return f"Tensors were not listed: {error}."
    largest = "; ".join(text for _, text in sorted(found.values(), reverse=True)[:num_shown])
    total = sum(nbytes for nbytes, _ in found.values())
    return (
        f"Tensors that Python holds: {total / GIB:.3f} GiB, without those that only autograd "
        f"holds; the largest: {largest}."
    )


def _snapshot() -> str:
    """Writes what is allocated now, for pytorch.org/memory_viz; says where, or why not."""
    path = Path(tempfile.gettempdir()) / f"fzero_out_of_memory_{os.getpid()}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except Exception as error:  # the first error counts
        return f"No snapshot of memory was written: {error}."
    return f"A snapshot of memory is in {path} (pytorch.org/memory_viz shows it)."
