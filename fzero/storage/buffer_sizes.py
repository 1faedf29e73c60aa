"""Where is state updated that lives in host memory or in files, and how large are the buffers through which it moves? From the
plan: `updates_on_host` is the rule that a step (`fzero.runtime.offload`) and a step on paper
(`fzero.estimation.dry_update`) follow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import optree

from fzero.plans.plan import FlatParamPlan, Plan
from fzero.storage.shard_io import MOST_LEAVING
from sharding import TensorSpec
from sharding.dtypes import itemsize


class StreamBuffers(NamedTuple):
    """Bytes of what is on its way at once.

    Attributes:
        on_device: sub-groups of state that lives in host memory and is updated on the device, on their way there and back, or two
            flat buffers that are updated as wholes.
        on_host: sub-groups of what lives on the device and is updated by the processor.
        host_pool: in host memory: sub-groups and shards of what lives in files.
    """

    on_device: int
    on_host: int
    host_pool: int


def stream_buffers(plan: Plan) -> StreamBuffers:
    """The buffers of a plan, on a device with a memory of its own."""
    trained = [buffer for buffer in plan.flat_buffers if buffer.trainable]
    wholes = [sum(_away(buffer, plan, "host", "nvme")) for buffer in trained if buffer.updates_whole]
    longest = max((updated_numel(buffer, plan) for buffer in trained), default=0)
    specs = chain((buffer.params for buffer in plan.flat_buffers), *(updated_specs(buffer, plan) for buffer in trained))
    most = plan.streaming.sub_group(longest, (spec.dtype for spec in specs if spec.placement.kind == "nvme"))
    copied, num_in_files, width, further = {"device": 0, "host": 0}, 0, 0, 0
    for buffer in [buffer for buffer in trained if not buffer.updates_whole]:
        tensors = [*updated_specs(buffer, plan), *([buffer.params] if buffer.has_master else ())]
        there, elsewhere = ("host", "device") if updates_on_host(buffer, plan) else ("device", "host")
        numel = min(most, updated_numel(buffer, plan))
        copies = [numel * itemsize(spec.dtype) for spec in tensors if spec.placement.kind == elsewhere]
        copied[there] = max(copied[there], sum(map(pinned_nbytes, copies) if there == "host" else copies))
        widths = [itemsize(spec.dtype) for spec in tensors if spec.placement.kind == "nvme"]
        # New parameters come beside the master from which they are made.
        beside = buffer.has_master and buffer.params.placement.kind == "nvme"
        num_in_files, further = max(num_in_files, len(widths) - beside), max(further, int(beside))
        width = max([width, *widths])
    num_alive = 1 + sum(plan.streaming.ahead(num_in_files).values())
    pool = plan.streaming.num_pooled(num_in_files, further) * most * width
    on_device = max([num_alive * copied["device"], *(2 * nbytes for nbytes in wholes)])
    return StreamBuffers(on_device, num_alive * copied["host"], pool + _staged_from_files(plan))


def pinned_gaps(plan: Plan) -> int:
    """Bytes that PyTorch takes of pinned host memory besides those of the model state there, of which is pinned what crosses."""
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
    """What PyTorch takes of pinned host memory for so many bytes: the next power of two, which is then kept for others.

    >>> pinned_nbytes(5000), pinned_nbytes(4096)
    (8192, 4096)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def updated_numel(buffer: FlatParamPlan, plan: Plan) -> int:
    """Elements that a rank updates."""
    return buffer.master.local_shape(plan.mesh)[0]


def updated_specs(buffer: FlatParamPlan, plan: Plan) -> Iterator[TensorSpec]:
    """The specs of what an update reads and writes: what is updated, the gradient, and the optimizer's long tensors."""
    yield buffer.master if buffer.has_master else buffer.params
    yield buffer.grads
    for spec in optree.tree_leaves(plan.optimizer[buffer.key]):
        if buffer.is_long(spec):
            yield spec


def updates_on_host(buffer: FlatParamPlan, plan: Plan) -> bool:
    """Whether the processor updates a buffer where the device has a memory of its own: by sub-groups, if a part of it is in a
    file, or all of what updates keep, parameters of the model and gradients aside, is off the device."""
    updated, grad, *kept = updated_specs(buffer, plan)
    if buffer.has_master or updated.placement.kind != "device":
        kept.append(updated)
    in_files = any(spec.placement.kind == "nvme" for spec in (buffer.params, updated, grad, *kept))
    is_away = bool(kept) and all(spec.placement.kind != "device" for spec in kept)
    return (in_files or is_away) and not buffer.updates_whole


def _away(buffer: FlatParamPlan, plan: Plan, *kinds: str) -> list[int]:
    """The bytes of each of a buffer's tensors that lives in one of these memories."""
    made = [buffer.params] if buffer.has_master else []
    return [x.local_nbytes(plan.mesh) for x in (*made, *updated_specs(buffer, plan)) if x.placement.kind in kinds]


def _staged_from_files(plan: Plan) -> int:
    """Shards of parameters of two units that are read, and shards of gradients that are written, beside a pass; or what two flat
    buffers have that are updated as wholes, and tensors of such that are written."""

    def in_file(spec: TensorSpec) -> int:
        return spec.local_nbytes(plan.mesh) if spec.placement.kind == "nvme" else 0

    params = [sum(in_file(buffer.params) for buffer in unit.buffers) for unit in plan.units]
    grads = [in_file(buffer.grads) for buffer in plan.flat_buffers if buffer.trainable]
    wholes = [_away(b, plan, "nvme") for b in plan.flat_buffers if b.trainable and b.updates_whole]
    leaving = max(chain(grads, *wholes), default=0)
    return 2 * max([*params, *map(sum, wholes)]) + MOST_LEAVING * leaving
