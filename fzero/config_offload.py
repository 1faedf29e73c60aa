"""Which part of the state lives off the device, and how does it move? The blocks of a configuration that say so."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fzero.config_fields import Block, Count, Number


class OffloadOptimizer(Block):
    """DeepSpeed key `zero_optimization.offload_optimizer`: masters and optimizer state live in host memory or in files."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """`cpu` is host memory, `nvme` a file for each flat tensor. Where the model is on the CPU, host memory is where the state
    is in any case."""
    nvme_path: str | None = None
    """The folder of the files, on a local disk; required with `nvme`. Each rank has a folder of its own in it."""
    pin_memory: bool = True
    """Page-locked host memory, from which copies run beside the update; of no effect where the model is on the CPU."""
    buffer_count: Count | None = None
    """The most tensors of a sub-group in host memory on their way from and to files: with fewer than the neighbours need,
    fewer neighbours move meanwhile. None is as many as are needed."""
    pipeline_read: bool = True
    """The next sub-group is read while one is updated. (DeepSpeed's default is false.)"""
    pipeline_write: bool = True
    """The last sub-group is written while one is updated. (DeepSpeed's default is false.)"""
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """The share of the elements that is moved off the device: flat buffers in their order, until that many have been."""
    checksums: bool = False
    """fzero's own key: bytes read from files are compared with what was written."""
    leftover: Literal["refuse", "clean"] = "refuse"
    """fzero's own key: what to do with the files of a run that was killed."""

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("nvme_path is required where device is 'nvme', got none; name a folder on a local disk")
        return self


def if_somewhere(block: OffloadOptimizer | None) -> OffloadOptimizer | None:
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
