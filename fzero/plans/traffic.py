"""The traffic of a step: how much one rank sends, by mesh axis and collective.

Along one axis of n ranks a reduce-scatter of N elements sends (n-1)/n · N, and so does the all-gather that ends with N
elements; an all-reduce sends twice that. Along several axes each collective is made axis by axis, with N/n elements left for
the next. The size of a message is in elements or in bytes, as the caller chooses (`Size`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fzero.comms.comm_hooks import CommHook
from fzero.optim.matrix import is_cut
from fzero.plans.comm_hooks import CommHooks
from fzero.plans.flat_params import FlatParamPlan, UnitPlan
from fzero.plans.mesh_axes import num_ranks, replicate_axes, sum_order
from sharding import Mesh, Replicated, Sharded
from sharding.dtypes import itemsize

Size = Callable[[int, str, CommHook | None], int]
"""The size of one message, given its elements, their dtype, and the comm hook that it goes through."""

Collective = Literal[
    "all_reduce of gradients",
    "reduce_scatter of gradients",
    "all_gather of updated parameters",
    "all_gather of momentum",
    "all_gather in the forward",
    "all_gather in the backward",
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

_EXACT: Mapping[str, CommHook] = {}


def in_elements(numel: int, dtype: str, hook: CommHook | None) -> int:
    """A `Size` in elements."""
    return numel


def in_bytes(numel: int, dtype: str, hook: CommHook | None) -> int:
    """A `Size` in bytes, after the comm hook's compression."""
    return numel * itemsize(dtype) if hook is None else hook.nbytes(numel, itemsize(dtype))


def sent_by_axis(
    units: Sequence[UnitPlan],
    mesh: Mesh,
    axes: tuple[str, ...],
    *,
    hooks: CommHooks,
    num_micro_steps: int,
    size: Size,
) -> dict[str, dict[str, int]]:
    """The total size that one rank sends in a step, by axis of the mesh and collective.

    Args:
        units: in the order in which the forward uses them.
        mesh: the ranks.
        axes: the axes over which the finest shards lie, major first.
        hooks: the comm hooks by axis.
        num_micro_steps: micro-batches in one step.
        size: of one message.
    """
    traffic = _Traffic(
        mesh, axes, hooks, num_micro_steps, size, {name: dict.fromkeys(COLLECTIVES, 0) for name in mesh.names}
    )
    gathered = [unit for unit in units if unit.gathered_numel]
    last = gathered[-1].buffers if gathered else ()  # the backward begins with them, before their release
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        traffic.add_gathers(buffer, in_backward=buffer not in last)
        if buffer.trainable:
            traffic.add_reductions(buffer)
            traffic.add_update(buffer)
    return traffic.sent


def totals(by_axis: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The sums over all axes, by collective."""
    total: Counter[str] = Counter()
    for sent in by_axis.values():
        for collective, size in sent.items():
            total[collective] += size
    return dict(total)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Adds the collectives of one flat buffer after the other to `sent`."""

    mesh: Mesh
    axes: tuple[str, ...]
    hooks: CommHooks
    num_micro_steps: int
    size: Size
    sent: dict[str, dict[str, int]]

    def add_gathers(self, buffer: FlatParamPlan, *, in_backward: bool) -> None:
        """The gathers of sharded parameters, in the forward and the backward of every micro-step."""
        hooks = self.hooks.gather if buffer.trainable else self.hooks.frozen
        phases: tuple[Collective, ...] = ("all_gather in the forward", "all_gather in the backward")
        for collective in phases[: 1 + in_backward]:
            self._add(
                collective, buffer.padded_numel, _param_axes(buffer), buffer.dtypes.param, self.num_micro_steps, hooks
            )

    def add_reductions(self, buffer: FlatParamPlan) -> None:
        """The sum of gradients: once a step where a rank keeps full gradients, else once a micro-step.

        The finest shards are then added up along the replicate axes, once a step.
        """
        numel, dtype, grads = buffer.padded_numel, buffer.dtypes.reduce, buffer.row.grads
        if isinstance(grads, Replicated):
            self._add_all_reduce(numel, sum_order(self.mesh), dtype)
            return
        is_every_time = isinstance(grads, Sharded) and num_ranks(self.mesh, self.axes) > 1
        times = self.num_micro_steps if is_every_time else 1
        self._add("reduce_scatter of gradients", numel, self.axes, dtype, times, self.hooks.reduce)
        self._add_all_reduce(buffer.shard_numel, replicate_axes(self.mesh, self.axes), dtype)

    def add_update(self, buffer: FlatParamPlan) -> None:
        """The gather of updated shards where a rank holds more than it updates, and Muon's gather of cut matrices."""
        if isinstance(buffer.row.grads, Replicated):
            return  # every rank updates everything
        held_numel = buffer.params.local_shape(self.mesh)[0]
        update_axes = self.axes[len(_param_axes(buffer)) :]
        self._add("all_gather of updated parameters", held_numel, update_axes, buffer.dtypes.param)
        if buffer.rule == "muon" and is_cut(buffer.layout):
            wide = "float64" if buffer.dtypes.master == "float64" else "float32"  # the dtype in which Muon computes
            self._add("all_gather of momentum", buffer.padded_numel, self.axes, wide)

    def _add_all_reduce(self, numel: int, axes: Sequence[str], dtype: str) -> None:
        """A reduce-scatter through the comm hooks, and an all-gather of the sums, which are sent as they are."""
        self._add("all_reduce of gradients", numel, axes, dtype, hooks=self.hooks.reduce)
        self._add("all_reduce of gradients", numel, axes, dtype)

    def _add(
        self,
        collective: Collective,
        numel: int,
        axes: Sequence[str],
        dtype: str,
        times: int = 1,
        hooks: Mapping[str, CommHook] = _EXACT,
    ) -> None:
        """A reduce-scatter of `numel` elements along `axes`, or the all-gather that ends with them.

        Along each axis a rank sends one message to each of the others; the next axis has so many times fewer elements.
        """
        for name in axes:
            num_ranks_ = self.mesh.axis_size(name)
            numel //= num_ranks_
            self.sent[name][collective] += times * self.size(numel, dtype, hooks.get(name)) * (num_ranks_ - 1)


def _param_axes(buffer: FlatParamPlan) -> tuple[str, ...]:
    """The axes over which the parameters are sharded."""
    return buffer.row.params.axes if isinstance(buffer.row.params, Sharded) else ()
