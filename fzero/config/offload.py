"""The blocks for state that lives off the device: `offload_optimizer`, `offload_param`
and `aio`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from fzero.config.fields import Block, Count, Elements, FolderOrFile, Number, off_at


class Offloaded(Block):
    """The keys that both offload blocks have."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`cpu` is host memory, `nvme` a file for each flat tensor. Where the model is on
    the CPU, its state always is in host memory."""
    nvme_path: FolderOrFile | None = None
    """The folder for the files, on a local disk; required with `nvme`. Each rank has
    its own folder in it.
    """
    pin_memory: bool = True
    """Whether host memory is page-locked, so that copies overlap with the device's
    compute; no effect where the model is on the CPU."""
    checksums: bool = False
    """fzero's own key: bytes that are read are compared with those that were written.
    True in either block is for all files.
    """
    leftover: Literal["refuse", "clean"] = "refuse"
    """fzero's own key: whether files that a killed run left under `nvme_path` are an
    error (`refuse`) or removed (`clean`), also those of more ranks or states than there
    are now. `clean` in either block is for all files."""

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError(
                "nvme_path is required where device is 'nvme', got none; name a folder on a local "
                "disk"
            )
        return self


class OffloadParam(Offloaded):
    """DeepSpeed key `zero_optimization.offload_param`: in stage 3 the shards of
    parameters live in host memory or in files.
    """

    buffer_count: Annotated[Count | None, off_at(0)] = None
    """Most shards of flat buffers in host memory at once between file and device: those
    of the unit that is gathered, and of prefetched units. With fewer than two units
    have, no unit is prefetched. None or 0 is as many as are needed (DeepSpeed's default
    is 5)."""
    buffer_size: Annotated[Count | None, off_at(0)] = None
    """Most elements of one such shard: a longer one is an error. None or 0 is the
    length of the longest (DeepSpeed's default is 100000000)."""
    max_in_cpu: Elements = 1_000_000_000
    """With `nvme`: so many elements of a rank's shards, those of the first flat
    buffers, live in host memory and are neither read nor written. As each forward and
    backward uses all units, this is as good as a cache. 0 leaves all in files."""


class OffloadOptimizer(Offloaded):
    """DeepSpeed key `zero_optimization.offload_optimizer`: masters and optimizer state
    live in host memory or in files, and so do, in stages 2 and 3, the shards of
    gradients."""

    buffer_count: Annotated[Count | None, off_at(0)] = None
    """Most tensors of sub-groups in host memory that are read, updated or written (for
    Adam a sub-group has the gradient, two moments, and the master or the parameter).
    With fewer than three sub-groups need, fewer are read and written during an update.
    None or 0 is as many as are needed (DeepSpeed's default is 4). Additional ones hold
    sub-groups that are read during the backward, so that the update does not wait for
    them."""
    pipeline_read: bool = True
    """Whether the next sub-group is read while one is updated. (DeepSpeed's default is
    false.)
    """
    pipeline_write: bool = True
    """Whether the last sub-group is written while one is updated. (DeepSpeed's default
    is false.)
    """
    async_update: bool = False
    """fzero's own key: whether the update runs in a thread of its own, under the next
    step's forward, where nothing is all-gathered after it: in stage 3, and on one rank.
    Refused with a pipeline, and where the model is not on the CPU.
    The numbers are the same, bit for bit. Off, because its gain is not measured yet.
    docs/concepts/placements.md says what is updated at once all the same."""
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """The fraction of the elements that lives off the device: flat buffers in their
    order, until it is reached.
    """


AnyOffloaded = TypeVar("AnyOffloaded", bound=Offloaded)


def if_somewhere(block: AnyOffloaded | None) -> AnyOffloaded | None:
    """The block, or None where its device is `none`."""
    return None if block is None or block.device == "none" else block


class AIO(Block):
    """DeepSpeed key `aio`: how files are read and written, by threads that each move
    one block at a time.
    """

    block_size: Count = 1 << 20
    """Most bytes that one system call moves."""
    queue_depth: Count = 8
    """Times `intra_op_parallelism`: the number of blocks that move at once, at most 64.
    """
    intra_op_parallelism: Count = 1
    """See `queue_depth`."""
