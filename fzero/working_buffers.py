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
from sharding import Sharded, TensorSpec
from sharding.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class WorkingBuffers:
    """The most bytes that a rank holds at once, by what they are for.

    Attributes:
        gathers: gathered parameters: of the unit in use and, where it starts early, of the next.
        reductions: full gradients that are being filled or reduced, where a rank does not keep them.
        streams: on the device: sub-groups of state that lives in host memory, on their way to the update and back.
        host_pool: in host memory: the same of state that lives in files.
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
    streams, host_pool = _streams(plan)
    return WorkingBuffers(_gathers(plan), _reductions(plan), streams, host_pool)


def _gathers(plan: Plan) -> int:
    """Gathers move something where there is another rank: of one unit, and of the next one if that may start early."""
    axes = {b.row.params.axes for b in plan.flat_buffers if isinstance(b.row.params, Sharded)}
    if all(plan.mesh.axis_size(name) == 1 for of_spec in axes for name in of_spec):
        return 0
    units = [unit for unit in plan.units if unit.gathered_numel]
    pairs = [
        _gathered_nbytes(one) + _gathered_nbytes(other)
        for one, other in pairwise(units)
        if plan.prefetch != 0 and one.gathered_numel + other.gathered_numel <= plan.max_live
    ]
    return max([*map(_gathered_nbytes, units), *pairs], default=0)


def _gathered_nbytes(unit: UnitPlan) -> int:
    return sum(b.padded_numel * itemsize(b.dtypes.param) for b in unit.buffers if isinstance(b.row.params, Sharded))


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
    stays = buffer.grads.local_shape(plan.mesh) == (buffer.padded_numel,)
    return 0 if stays and sent == buffer.dtypes.grad else buffer.padded_numel * itemsize(sent)


def _streams(plan: Plan) -> tuple[int, int]:
    """Of sub-groups: on the device, and in host memory."""
    trained = [buffer for buffer in plan.flat_buffers if buffer.trainable]
    longest = max((_share(buffer, plan) for buffer in trained), default=0)
    most = min(plan.streaming.sub_group_numel, max(-(-longest // CHECKED_GRAIN), 1) * CHECKED_GRAIN)
    on_device, num_in_files, width = 0, 0, 0
    for buffer in trained:
        away = list(_updated(buffer, plan))
        in_host = sum(itemsize(spec.dtype) for spec in away if spec.placement.kind == "host")
        on_device = max(on_device, min(most, _share(buffer, plan)) * in_host)
        widths = [itemsize(spec.dtype) for spec in away if spec.placement.kind == "nvme"]
        num_in_files, width = max(num_in_files, len(widths)), max([width, *widths])
    num_alive = 1 + sum(plan.streaming.ahead(num_in_files).values())
    return num_alive * on_device, num_alive * num_in_files * most * width


def _share(buffer: BufferPlan, plan: Plan) -> int:
    """Elements that a rank updates."""
    return buffer.master.local_shape(plan.mesh)[0]


def _updated(buffer: BufferPlan, plan: Plan) -> Iterator[TensorSpec]:
    """The specs of what an update reads and writes: the master and the optimizer's tensors as long as it."""
    if not buffer.trainable:
        return
    if buffer.has_master:
        yield buffer.master
    for spec in optree.tree_leaves(plan.optimizer[buffer.key]):
        if spec.shape == (buffer.padded_numel,):
            yield spec
