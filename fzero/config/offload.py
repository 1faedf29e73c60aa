"""Which part of the state lives off the device, and how does it move? The blocks of a configuration that say so."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from fzero.config.fields import Block, Count, Elements, Number


class Offloaded(Block):
    """What both blocks have."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`cpu` is host memory, `nvme` a file for each flat tensor. Where the model is on the CPU, host memory is where the state
    is in any case."""
    nvme_path: str | None = None
    """The folder of the files, on a local disk; required with `nvme`. Each rank has a folder of its own in it."""
    pin_memory: bool = True
    """Page-locked host memory, from which copies run beside what the device computes; of no effect where the model is on the
    CPU."""
    checksums: bool = False
    """fzero's own key: bytes read from files are compared with what was written. True in either block is for all files."""
    leftover: Literal["refuse", "clean"] = "refuse"
    """fzero's own key: what to do with files that a killed run left under `nvme_path`, also of more ranks or states than
    there are now. `clean` in either block is for all files."""

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("nvme_path is required where device is 'nvme', got none; name a folder on a local disk")
        return self


class OffloadParam(Offloaded):
    """DeepSpeed key `zero_optimization.offload_param`: in stage 3 the shards of parameters live in host memory or in files."""

    buffer_count: Count | None = None
    """The most shards of flat buffers that are in host memory at once on their way from files: those of the unit that is
    gathered and of those read ahead. With fewer than two units have, none is read ahead. None is as many as that needs
    (DeepSpeed's default is 5)."""
    buffer_size: Count | None = None
    """The most elements of one such shard: a longer one is an error. None is as many as the longest has (DeepSpeed's default
    is 100000000)."""
    max_in_cpu: Elements = 1_000_000_000
    """With `nvme`: so many elements of a rank's shards stay in host memory, those of the first flat buffers, and are neither
    read nor written. As each pass goes through all units, that is as good as a cache of them. 0 leaves all in files."""


class OffloadOptimizer(Offloaded):
    """DeepSpeed key `zero_optimization.offload_optimizer`: masters and optimizer state live in host memory or in files, and
    so do, in stages 2 and 3, the shards of gradients."""

    buffer_count: Count | None = None
    """The most tensors of a sub-group in host memory on their way from and to files (for Adam: gradient, two moments, and the
    master or the parameter): with fewer than the neighbours need, fewer neighbours move meanwhile. None is as many as are
    needed (DeepSpeed's default is 4). Where there are more, they hold what is read beside the backward, so that the update need
    not wait for it."""
    pipeline_read: bool = True
    """The next sub-group is read while one is updated. (DeepSpeed's default is false.)"""
    pipeline_write: bool = True
    """The last sub-group is written while one is updated. (DeepSpeed's default is false.)"""
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """The share of the elements that is moved off the device: flat buffers in their order, until that many have been."""


AnyOffloaded = TypeVar("AnyOffloaded", bound=Offloaded)


def if_somewhere(block: AnyOffloaded | None) -> AnyOffloaded | None:
    """The block, unless it says that nothing is moved."""
    return None if block is None or block.device == "none" else block


class AIO(Block):
    """DeepSpeed key `aio`: how files are read and written, by threads that each move one block at a time."""

    block_size: Count = 1 << 20
    """The most bytes that one call to the system moves."""
    queue_depth: Count = 8
    """Blocks that move at once, times `intra_op_parallelism`; more than 64 count as 64."""
    intra_op_parallelism: Count = 1
    """See `queue_depth`."""
