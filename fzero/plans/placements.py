"""In which memory does each tensor of the model state live, and how does state stream from there and back?

A placement is given for the master (`"master"`) of a flat buffer, for each tensor of the optimizer's state (`"optimizer"`) that
is as long as it, and for what a rank holds no more than a shard of: parameters (`"params"`) in stage 3 and gradients (`"grads"`)
in stages 2 and 3. What every rank holds whole, and counters, stay on the device. It follows from the configuration
(`offload_optimizer`, `offload_param`), or is given directly, tensor by tensor. It stands beside the tensor's spec in the plan;
what a step does about it is in `fzero.runtime.offload` and `fzero.storage.shard_io`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from fzero.common.arguments import check_callable
from fzero.config.config import Config, ConfigError
from fzero.config.offload import AIO, OffloadOptimizer, OffloadParam
from sharding.dtypes import itemsize
from sharding.specs import DEVICE, Placement

GivenPlacements = Callable[[str, str, str], Placement | None] | Mapping[str, Placement] | None
"""A function of quantity (`"params"`, `"master"`, `"grads"` or `"optimizer"`), key of the flat buffer and leaf (`"exp_avg"`; `""`
of all but the optimizer's state), where None is as the configuration says; or placements by pattern of `quantity/key/leaf`
(`"optimizer/*/exp_avg"`, `"params/*"`), of which the first that matches counts. None is as the configuration says everywhere."""

Quantity = Literal["params", "master", "grads", "optimizer"]

SUB_GROUP = 1 << 20
"""Elements of a sub-group where the configuration names none."""

GRAIN, CHECKED_GRAIN = 1 << 11, 1 << 15
"""Elements of which sub-groups are multiples, without and with checksums: 4096 and 65536 bytes of 16-bit numbers, or more."""

MOST_THREADS = 64


@dataclass(frozen=True, slots=True)
class Streaming:
    """How state moves between where it lives and where it is updated. Counts of elements, buffers, sub-groups and threads.

    Attributes:
        sub_group_numel: elements of a flat tensor that are updated at a time.
        read_ahead, write_behind: sub-groups that are read before, and written after, the one that is updated.
        num_buffers: most tensors of sub-groups that are in host memory; None is as many as that needs. What is more than that
            holds what the next update asks for first, which is read beside the backward.
        num_staged: most shards of parameters that are in host memory on their way from files; None is as many as that needs.
        num_threads, block_nbytes: blocks of a file that move at once, and their bytes.
        checksums: whether what is read is compared with what was written.
        leftover: what to do with files that killed runs left under a path.
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

    @classmethod
    def of(
        cls, offload: OffloadOptimizer | None, of_params: OffloadParam | None, aio: AIO, sub_group_size: int | None
    ) -> Streaming:
        """What the keys of a configuration come to.

        >>> Streaming.of(None, None, AIO(), 5000).sub_group_numel
        6144
        """
        offload, of_params = offload or OffloadOptimizer(), of_params or OffloadParam()
        checksums = offload.checksums or of_params.checksums
        grain = CHECKED_GRAIN if checksums else GRAIN
        return cls(
            sub_group_numel=-(-(sub_group_size or SUB_GROUP) // grain) * grain,
            read_ahead=int(offload.pipeline_read),
            write_behind=int(offload.pipeline_write),
            num_buffers=offload.buffer_count,
            num_staged=of_params.buffer_count,
            num_threads=min(aio.queue_depth * aio.intra_op_parallelism, MOST_THREADS),
            block_nbytes=aio.block_size,
            checksums=checksums,
            leftover="clean" if "clean" in (offload.leftover, of_params.leftover) else "refuse",
        )

    def sub_group(self, longest: int, dtypes: Iterable[str]) -> int:
        """Elements of a sub-group: no more than the longest tensor needs, and a multiple of what files move of these dtypes.

        >>> Streaming(6144).sub_group(10**5, ["float32"]), Streaming(6144).sub_group(10**5, ["float32", "int8"])
        (6144, 8192)
        """
        twice = 2 if 1 in map(itemsize, dtypes) else 1  # a grain is of 16-bit numbers
        grain, most = twice * (CHECKED_GRAIN if self.checksums else GRAIN), twice * CHECKED_GRAIN
        return min(-(-self.sub_group_numel // grain) * grain, max(-(-longest // most), 1) * most)

    def ahead(self, num_tensors: int) -> dict[str, int]:
        """`read_ahead` and `write_behind` for sub-groups of at most so many tensors in files, as the buffers allow.

        >>> Streaming(num_buffers=5).ahead(2)
        {'read_ahead': 1, 'write_behind': 0}
        """
        most = 1 + self.read_ahead + self.write_behind
        if self.num_buffers is not None and num_tensors:
            most = min(most, self.num_buffers // num_tensors)
        if most < 1:
            raise ConfigError(
                f"zero_optimization.offload_optimizer.buffer_count: must hold the tensors of one sub-group, which are "
                f"{num_tensors} in files, got {self.num_buffers}; raise it, or leave it out"
            )
        read_ahead = min(self.read_ahead, most - 1)
        return {"read_ahead": read_ahead, "write_behind": min(self.write_behind, most - 1 - read_ahead)}

    def num_pooled(self, num_tensors: int, further: int = 0) -> int:
        """How many buffers there are for sub-groups of at most so many tensors in files, and at most so many `further` ones.

        >>> Streaming().num_pooled(3), Streaming(num_buffers=4).num_pooled(3), Streaming(num_buffers=64).num_pooled(3)
        (9, 4, 64)
        """
        needed = (num_tensors + further) * (1 + sum(self.ahead(num_tensors).values()))
        return max(needed, self.num_buffers or 0) if num_tensors else needed


@dataclass(slots=True)
class Chooser:
    """Chooses the placement of one tensor after the other.

    Args:
        cfg: says where what is not given lives.
        given: see `GivenPlacements`.
        shares: elements that a rank updates of each flat buffer that is trained, in order.
        shards: elements that a rank holds of each flat buffer of parameters that may live elsewhere, in order.
    """

    cfg: Config
    given: GivenPlacements
    shares: Mapping[str, int]
    shards: Mapping[str, int]
    _matched: set[str] = field(default_factory=set)
    _moved: frozenset[str] = field(init=False)
    _kept: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        offload, of_params = self.cfg.zero_optimization.offload_optimizer, self.cfg.zero_optimization.offload_param
        wanted = offload.ratio * sum(self.shares.values()) if offload else 0
        before = accumulate(self.shares.values(), initial=0)
        self._moved = frozenset(key for key, done in zip(self.shares, before, strict=False) if done < wanted)
        room = of_params.max_in_cpu if of_params else 0
        after = accumulate(self.shards.values())
        self._kept = frozenset(key for key, numel in zip(self.shards, after, strict=True) if numel <= room)

    def of(self, quantity: Quantity, key: str, leaf: str = "") -> Placement:
        """Where a tensor lives.

        Raises:
            ConfigError: what was given is no placement.
        """
        name, found = f"{quantity}/{key}/{leaf}".rstrip("/"), None
        if isinstance(self.given, Mapping):
            # "optimizer/*" also of a key with slashes in it, and "master/*/" is not asked for.
            pattern = next((pattern for pattern in self.given if fnmatch.fnmatchcase(name, pattern)), None)
            if pattern is not None:
                self._matched.add(pattern)
                found = self.given[pattern]
        elif self.given is not None:
            check_callable("placements", self.given, "a mapping of patterns to fzero.Placement, or a function")
            found = self.given(quantity, key, leaf)
        if found is None:
            return self._configured(quantity, key)
        if not isinstance(found, Placement):
            raise ConfigError(
                f"placements: must give a sharding.Placement for {name!r}, or None for what the configuration says, got {found!r}"
            )
        return found

    def _configured(self, quantity: Quantity, key: str) -> Placement:
        zero = self.cfg.zero_optimization
        offload = zero.offload_param if quantity == "params" else zero.offload_optimizer
        if offload is None or (quantity != "params" and key not in self._moved):
            return DEVICE
        if offload.device == "cpu" or (quantity == "params" and key in self._kept):
            return Placement("host", pinned=offload.pin_memory)
        return Placement("nvme", path=offload.nvme_path)

    def check_all_used(self, names: list[str]) -> None:
        """Raises a ConfigError if a pattern matched nothing of what was asked for."""
        unused: Any = [p for p in self.given if p not in self._matched] if isinstance(self.given, Mapping) else []
        if unused:
            raise ConfigError(
                f"placements: {unused[0]!r} must be the first to match a tensor that may live elsewhere (a master or a tensor of "
                f"the optimizer's state; in stages 2 and 3 a shard of gradients, in stage 3 of parameters), and matches none; "
                f"names look like {', '.join(names[:3]) or 'none, for nothing is trained beside parameters'}"
            )
