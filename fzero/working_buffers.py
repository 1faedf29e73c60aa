"""What does a step hold besides the model state? The flat buffers of gathers, reductions and streams, from the plan.

The eager step is followed on paper, on a device with a memory of its own: units in the order of their declaration through the
forward and back. Activations are not among these, nor what a library of collectives allocates (gloo's sums receive into buffers
as large as a full gradient), nor the temporaries of one kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import optree

from fzero.placements import CHECKED_GRAIN
from fzero.plan import BufferPlan, Plan, UnitPlan
from fzero.staging import MOST_LEAVING
from sharding import Sharded, TensorSpec
from sharding.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class WorkingBuffers:
    """The most bytes that a rank holds at once, by what they are for.

    Attributes:
        gathers: gathered parameters: of the unit in use and, where it starts early, of the next; and copies of shards that live
            elsewhere.
        reductions: full gradients that are being filled or reduced, where a rank does not keep them.
        streams: on the device: sub-groups of state that lives in host memory, on their way to the update and back.
        host_pool: in host memory: sub-groups and shards of what lives in files, on their way.
    """

    gathers: int
    reductions: int
    streams: int
    host_pool: int

    @property
    def on_device(self) -> int:
        """All that is on the device; streams begin when gathers and reductions have ended."""
        return max(self.gathers + self.reductions, self.streams)


def working_buffers(plan: Plan) -> WorkingBuffers:
    """The buffers of the eager step of a plan."""
    streams, sub_groups = _streams(plan)
    return WorkingBuffers(_gathers(plan), _reductions(plan), streams, sub_groups + _staged_from_files(plan))


# --- gathers and reductions --------------------------------------------------------------------------------------


def _gathers(plan: Plan) -> int:
    """Of the unit in use, and of its neighbour, whose shards are brought early, and which is gathered if there is room."""
    units = [unit for unit in plan.units if unit.gathered_numel]
    most = max((_gathered_nbytes(unit, plan) for unit in units), default=0)
    for pair in pairwise(units) if plan.prefetch != 0 else ():
        gathered, brought = ([of(unit, plan) for unit in pair] for of in (_gathered_nbytes, _brought_nbytes))
        is_early = sum(unit.gathered_numel for unit in pair) <= plan.max_live
        most = max(most, sum(gathered) if is_early else max(gathered[0] + brought[1], gathered[1] + brought[0]))
    return most


def _gathered_nbytes(unit: UnitPlan, plan: Plan) -> int:
    """Whole flat buffers, where a gather joins shards of several ranks, and copies of the shards."""
    joined = [b for b in unit.buffers if isinstance(b.row.params, Sharded) and _is_cut(b, plan)]
    return sum(b.padded_numel * itemsize(b.dtypes.param) for b in joined) + _brought_nbytes(unit, plan)


def _brought_nbytes(unit: UnitPlan, plan: Plan) -> int:
    """Copies on the device of shards of parameters that live elsewhere."""
    return sum(b.params.local_nbytes(plan.mesh) for b in unit.buffers if b.params.placement.kind != "device")


def _is_cut(buffer: BufferPlan, plan: Plan) -> bool:
    return buffer.params.local_shape(plan.mesh) != (buffer.padded_numel,)


def _reductions(plan: Plan) -> int:
    """The unit that the backward fills, beside those whose reductions are under way (`Plan.max_reducing`)."""
    in_flight: deque[tuple[int, int]] = deque()
    most = 0
    for unit in reversed([unit for unit in plan.units if unit.trainable]):
        trained = [buffer for buffer in unit.buffers if buffer.trainable]
        numel, nbytes = sum(b.padded_numel for b in trained), sum(_full_grad_nbytes(b, plan) for b in trained)
        most = max(most, nbytes + sum(held for _, held in in_flight))
        while in_flight and sum(n for n, _ in in_flight) + numel > plan.max_reducing:
            in_flight.popleft()
        in_flight.append((numel, nbytes))
    return most


def _full_grad_nbytes(buffer: BufferPlan, plan: Plan) -> int:
    """Of a full gradient beside what the state holds: none where it is filled and reduced in its place."""
    sent = buffer.dtypes.reduce if plan.world_size > 1 else buffer.dtypes.grad
    stays = buffer.grads.local_shape(plan.mesh) == (buffer.padded_numel,) and buffer.grads.placement.kind == "device"
    return 0 if stays and sent == buffer.dtypes.grad else buffer.padded_numel * itemsize(sent)


# --- what streams ------------------------------------------------------------------------------------------------


def _streams(plan: Plan) -> tuple[int, int]:
    """Of sub-groups: on the device, and in host memory."""
    trained = [buffer for buffer in plan.flat_buffers if buffer.trainable]
    longest = max((_share(buffer, plan) for buffer in trained), default=0)
    most = min(plan.streaming.sub_group_numel, max(-(-longest // CHECKED_GRAIN), 1) * CHECKED_GRAIN)
    on_device, num_in_files, width, further = 0, 0, 0, 0
    for buffer in trained:
        away = list(_updated(buffer, plan))
        in_host = sum(itemsize(spec.dtype) for spec in away if spec.placement.kind == "host")
        on_device = max(on_device, min(most, _share(buffer, plan)) * in_host)
        widths = [itemsize(spec.dtype) for spec in away if spec.placement.kind == "nvme"]
        num_in_files = max(num_in_files, len(widths))
        # New parameters beside the master from which they are made.
        beside = buffer.has_master and buffer.params.placement.kind == "nvme"
        further, width = max(further, int(beside)), max([width, *widths, itemsize(buffer.dtypes.param) * beside])
    num_alive = 1 + sum(plan.streaming.ahead(num_in_files).values())
    return num_alive * on_device, num_alive * (num_in_files + further) * most * width


def _share(buffer: BufferPlan, plan: Plan) -> int:
    """Elements that a rank updates."""
    return buffer.master.local_shape(plan.mesh)[0]


def _updated(buffer: BufferPlan, plan: Plan) -> Iterator[TensorSpec]:
    """The specs of what an update reads and writes: what is updated, the gradient, and the optimizer's long tensors."""
    yield buffer.master if buffer.has_master else buffer.params
    yield buffer.grads
    for spec in optree.tree_leaves(plan.optimizer[buffer.key]):
        if spec.shape == (buffer.padded_numel,):
            yield spec


def _staged_from_files(plan: Plan) -> int:
    """Shards of parameters of two units that are read, and shards of gradients that are written, beside a pass."""

    def in_file(spec: TensorSpec) -> int:
        return spec.local_nbytes(plan.mesh) if spec.placement.kind == "nvme" else 0

    params = [sum(in_file(buffer.params) for buffer in unit.buffers) for unit in plan.units]
    grads = [in_file(buffer.grads) for buffer in plan.flat_buffers if buffer.trainable]
    return 2 * max(params) + MOST_LEAVING * max(grads, default=0)
