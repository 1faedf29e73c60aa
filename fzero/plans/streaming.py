"""`Streaming`: how state in host memory or in files is streamed through its update:
sub-groups, buffers, threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fzero.config.config import ConfigError
from fzero.config.offload import AIO, OffloadOptimizer, OffloadParam
from sharding.dtypes import itemsize

SUB_GROUP = 1 << 20
"""Elements of a sub-group where the configuration names none."""

GRAIN, CHECKED_GRAIN = 1 << 11, 1 << 15
"""Sub-groups are multiples of so many elements: 4096 bytes of 16-bit numbers, or 65536
bytes with checksums.
"""

MOST_THREADS = 64


@dataclass(frozen=True, slots=True)
class Streaming:
    """The sizes in which state moves between its memory and the update. Counts of
    elements, buffers, sub-groups and threads.

    Attributes:
        sub_group_numel: elements of a flat tensor that are updated at a time.
        read_ahead, write_behind: the numbers of sub-groups that are being read, and
            written, while another one is updated.
        num_buffers: the largest number of tensors of sub-groups in host memory; None
            takes as many as `read_ahead` and `write_behind` need. Buffers beyond these
            hold the first sub-groups of the next update, which are read during the
            backward.
        num_staged: the largest number of shards of parameters in host memory between
            file and device; None takes as many as the prefetch needs.
        num_threads, block_nbytes: the number of blocks of a file that move at once, and
            the bytes of a block.
        checksums: whether checksums verify that the bytes read are the bytes written.
        leftover: whether files of killed runs under a path raise an error, or are
            removed.
        async_update: whether the update of state in host memory or in files runs under
            the next forward.
    """

    sub_group_numel: int = SUB_GROUP
    read_ahead: int = 1
    write_behind: int = 1
    num_buffers: int | None = None
    num_staged: int | None = None
    num_threads: int = 8
    block_nbytes: int = 1 << 20
    checksums: bool = False
    leftover: Literal["refuse", "clean"] = "refuse"
    async_update: bool = False

    @classmethod
    def of(
        cls,
        offload: OffloadOptimizer | None,
        of_params: OffloadParam | None,
        aio: AIO,
        sub_group_size: int | None,
    ) -> Streaming:
        """The sizes that the keys of a configuration set.

        >>> Streaming.of(None, None, AIO(), 5000).sub_group_numel
        6144
        """
        offload, of_params = offload or OffloadOptimizer(), of_params or OffloadParam()
        checksums = offload.checksums or of_params.checksums
        grain = CHECKED_GRAIN if checksums else GRAIN
        return cls(
            sub_group_numel=-(-(sub_group_size or SUB_GROUP) // grain) * grain,
            checksums=checksums,
            read_ahead=int(offload.pipeline_read),
            write_behind=int(offload.pipeline_write),
            num_buffers=offload.buffer_count,
            num_staged=of_params.buffer_count,
            num_threads=min(aio.queue_depth * aio.intra_op_parallelism, MOST_THREADS),
            block_nbytes=aio.block_size,
            leftover="clean" if "clean" in (offload.leftover, of_params.leftover) else "refuse",
            async_update=offload.async_update,
        )

    def sub_group(self, longest: int, dtypes: Iterable[str]) -> int:
        """Elements of a sub-group: at most what the longest tensor needs, and a
        multiple of the grain of these dtypes.

        >>> (
        ...     Streaming(6144).sub_group(10**5, ["float32"]),
        ...     Streaming(6144).sub_group(10**5, ["float32", "int8"]),
        ... )
        (6144, 8192)
        """
        twice = 2 if 1 in map(itemsize, dtypes) else 1  # GRAIN counts 16-bit numbers
        grain, most = twice * (CHECKED_GRAIN if self.checksums else GRAIN), twice * CHECKED_GRAIN
        return min(-(-self.sub_group_numel // grain) * grain, max(-(-longest // most), 1) * most)

    def ahead(self, num_tensors: int) -> dict[str, int]:
        """The `read_ahead` and `write_behind` that the buffers allow, for sub-groups of
        at most `num_tensors` tensors in files.

        >>> Streaming(num_buffers=5).ahead(2)
        {'read_ahead': 1, 'write_behind': 0}
        """
        most = 1 + self.read_ahead + self.write_behind
        if self.num_buffers is not None and num_tensors:
            most = min(most, self.num_buffers // num_tensors)
        if most < 1:
            raise ConfigError(
                f"zero_optimization.offload_optimizer.buffer_count: must be at least the number of "
                f"tensors in files of one sub-group, {num_tensors}, got {self.num_buffers}; raise "
                f"it, or leave it out"
            )
        read_ahead = min(self.read_ahead, most - 1)
        return {
            "read_ahead": read_ahead,
            "write_behind": min(self.write_behind, most - 1 - read_ahead),
        }

    def num_pooled(self, num_tensors: int, others: int = 0) -> int:
        """The number of buffers, for sub-groups with at most `num_tensors` tensors in
        files and at most `others` other tensors.

        >>> (
        ...     Streaming().num_pooled(3),
        ...     Streaming(num_buffers=4).num_pooled(3),
        ...     Streaming(num_buffers=64).num_pooled(3),
        ... )
        (9, 4, 64)
        """
        needed = (num_tensors + others) * (1 + sum(self.ahead(num_tensors).values()))
        return max(needed, self.num_buffers or 0) if num_tensors else needed
