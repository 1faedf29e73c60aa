"""Rules of offloaded state, from the plan alone: the device of its update, and the
sizes of the buffers that it moves through.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from fzero.plans.plan import FlatParamPlan, Plan
from sharding import TensorSpec
from sharding.dtypes import itemsize

MOST_LEAVING = 2
"""The most shards of gradients that are written to files at once while the backward
goes on.
"""


class StreamBuffers(NamedTuple):
    """Bytes of tensors in transfer at once.

    Attributes:
        on_device: copies on the device: sub-groups of state in host memory that is
            updated on the device, or two flat buffers that are updated in full.
        on_host: copies in host memory: sub-groups of state on the device that is
            updated on the CPU.
        host_pool: buffers in host memory: sub-groups and shards of state in files.
    """

    on_device: int
    on_host: int
    host_pool: int


def stream_buffers(plan: Plan) -> StreamBuffers:
    """The buffers of a plan, on a device with a memory of its own."""
    trained = [buffer for buffer in plan.flat_buffers if buffer.trainable]
    in_full = [buffer for buffer in trained if buffer.updates_whole]
    wholes = [
        sum(spec.local_nbytes(plan.mesh) for spec in _away(buffer, plan)) for buffer in in_full
    ]
    longest = max((buffer.flow.updated_numel for buffer in trained), default=0)
    specs = chain(
        (buffer.params for buffer in plan.flat_buffers),
        *(updated_specs(buffer, plan) for buffer in trained),
    )
    most = plan.streaming.sub_group(
        longest, (spec.dtype for spec in specs if spec.placement.in_file)
    )
    copied, num_in_files, width, extra = {"device": 0, "host": 0}, 0, 0, 0
    for buffer in [buffer for buffer in trained if not buffer.updates_whole]:
        tensors = [*updated_specs(buffer, plan), *([buffer.params] if buffer.has_master else ())]
        there, elsewhere = (
            ("host", "device") if updates_on_host(buffer, plan) else ("device", "host")
        )
        numel = min(most, buffer.flow.updated_numel)
        copies = [
            numel * itemsize(spec.dtype) for spec in tensors if spec.placement.kind == elsewhere
        ]
        copied[there] = max(
            copied[there], sum(map(pinned_nbytes, copies) if there == "host" else copies)
        )
        widths = [itemsize(spec.dtype) for spec in tensors if spec.placement.in_file]
        # New parameters need a buffer in addition to the master that they are cast from.
        beside = buffer.has_master and buffer.params.placement.in_file
        num_in_files, extra = max(num_in_files, len(widths) - beside), max(extra, int(beside))
        width = max([width, *widths])
    num_alive = 1 + sum(plan.streaming.ahead(num_in_files).values())
    pool = plan.streaming.num_pooled(num_in_files, extra) * most * width
    on_device = max([num_alive * copied["device"], *(2 * nbytes for nbytes in wholes)])
    return StreamBuffers(on_device, num_alive * copied["host"], pool + staged_from_files(plan))


def pinned_gaps(plan: Plan) -> int:
    """Bytes of pinned host memory that PyTorch takes beyond the model state in it; only
    tensors that a step copies are pinned.
    """
    gaps = 0
    for buffer in plan.flat_buffers:
        crossing = [buffer.params]
        if buffer.trainable:
            of_update = list(updated_specs(buffer, plan))[not buffer.has_master :]
            crossing += [buffer.grads] if updates_on_host(buffer, plan) else of_update
        for spec in crossing:
            nbytes = spec.local_nbytes(plan.mesh)
            gaps += pinned_nbytes(nbytes) - nbytes if spec.placement.pinned else 0
    return gaps


def pinned_nbytes(nbytes: int) -> int:
    """Bytes of pinned host memory that PyTorch allocates for `nbytes`: the next power
    of two, which it keeps for reuse.

    >>> pinned_nbytes(5000), pinned_nbytes(4096)
    (8192, 4096)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def updated_specs(buffer: FlatParamPlan, plan: Plan) -> Iterator[TensorSpec]:
    """The specs of the tensors of an update: the updated tensor, the gradient, and the
    optimizer's tensors that are divided like it.
    """
    yield buffer.master if buffer.has_master else buffer.params
    yield buffer.grads
    yield from (
        leaf.spec
        for leaf in plan.leaves(buffer)
        if leaf.is_divided and leaf.quantity == "optimizer"
    )


def updates_on_host(buffer: FlatParamPlan, plan: Plan) -> bool:
    """Whether a buffer is updated on the CPU, by sub-groups, where the device has
    memory of its own: if any of its tensors is in a file, or if its master and
    optimizer state are all off the device."""
    updated, grad, *kept = updated_specs(buffer, plan)
    if buffer.has_master or updated.placement.is_away:
        kept.append(updated)
    in_files = any(spec.placement.in_file for spec in (buffer.params, updated, grad, *kept))
    is_away = bool(kept) and all(spec.placement.is_away for spec in kept)
    return (in_files or is_away) and not buffer.updates_whole


def _away(buffer: FlatParamPlan, plan: Plan) -> list[TensorSpec]:
    """The tensors of a buffer's update that live off the device."""
    made = [buffer.params] if buffer.has_master else []
    return [spec for spec in (*made, *updated_specs(buffer, plan)) if spec.placement.is_away]


def staged_from_files(plan: Plan) -> int:
    """The bytes of full shards in transfer to and from files at once.

    A forward-backward reads the parameters of two units and writes gradients. An update
    holds two flat buffers that are updated in full, and the tensors of them that are
    being written.
    """

    def in_file(spec: TensorSpec) -> int:
        return spec.local_nbytes(plan.mesh) if spec.placement.in_file else 0

    params = [sum(in_file(buffer.params) for buffer in unit.buffers) for unit in plan.units]
    grads = [in_file(buffer.grads) for buffer in plan.flat_buffers if buffer.trainable]
    in_full = [buffer for buffer in plan.flat_buffers if buffer.trainable and buffer.updates_whole]
    wholes = [[in_file(spec) for spec in _away(buffer, plan)] for buffer in in_full]
    leaving = max(chain(grads, *wholes), default=0)
    return 2 * max([*params, *map(sum, wholes)], default=0) + MOST_LEAVING * leaving
