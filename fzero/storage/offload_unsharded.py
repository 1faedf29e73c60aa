"""`update_unsharded`: updates flat buffers that live off the device and cannot be
updated by sub-groups.

Such a buffer's optimizer needs full parameters, or its updated shards are all-gathered
into memory off the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fzero.common.profiler_ranges import profiler_range
from fzero.plans.plan import FlatParamPlan
from fzero.storage.offload_leaves import Leaves, tensors_of, with_long
from fzero.storage.shard_io import MovingTransfer
from fzero.storage.shard_transfer import own_shard

if TYPE_CHECKING:
    from fzero.storage.state_memory import Update


def update_unsharded(
    updates: Sequence[Update],
    leaves_of: Mapping[str, Leaves],
    transfer: MovingTransfer,
    shard: int,
    *,
    joins: Callable[[FlatParamPlan], bool],
) -> None:
    """Updates one buffer after the other, while the next buffer's tensors are loaded
    and the previous one's are written back.

    A file error does not raise here. The rank continues with zeros, because the others
    wait for its part of the sums.

    *Collective* where there are such buffers: every rank.

    Args:
        leaves_of: the tensors of each flat buffer, by its key.
        shard: the number of this rank's shard.
        joins: whether the updated shards of a buffer are all-gathered.
    """
    rest, scratch = deque(updates), transfer.scratch
    while rest:
        update = rest.popleft()
        buffer, leaves = update.buffer, leaves_of[update.buffer.key]
        homes = tensors_of(update, leaves)
        here = {
            name: transfer.fresh(x) if _is_made(buffer, leaves, name) else transfer.load(name, x)
            for name, x in homes.items()
        }
        if rest:
            after = leaves_of[rest[0].buffer.key]
            for name, x in tensors_of(rest[0], after).items():
                if not _is_made(rest[0].buffer, after, name):
                    transfer.prefetch(name, x)
        param, grad = here[leaves.param], here[leaves.grad]
        own = own_shard(param, buffer, shard) if joins(buffer) else param
        transform = update.transform_at(0, leaves.numel, own if buffer.has_master else None)
        updated = here[leaves.updated] if buffer.has_master else own
        with profiler_range("update", buffer.key):
            transform.update(grad, updated, with_long(update.state, leaves, here))
        if joins(buffer):
            update.join(own, out=param).wait()
        del param, grad, own, updated, transform  # so that `scratch` can reuse the memory
        for name in [name for name in here if here[name] is not homes[name]]:
            if name != leaves.grad:
                transfer.write_back(name, homes[name], here[name], adds=False)
            scratch.give(here.pop(name))
    transfer.settle()


def _is_made(buffer: FlatParamPlan, leaves: Leaves, name: str) -> bool:
    """Whether the update overwrites this tensor without reading it. It does so for
    parameters that are cast from a master.
    """
    return buffer.has_master and name == leaves.param
