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
from sharding import Mesh
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
    *,
    hooks: CommHooks,
    num_micro_steps: int,
    size: Size,
) -> dict[str, dict[str, int]]:
    """The total size that one rank sends in a step, by axis of the mesh and collective.

    Args:
        units: in the order in which the forward uses them.
        mesh: the ranks.
        hooks: the comm hooks by axis.
        num_micro_steps: micro-batches in one step.
        size: of one message.
    """
    traffic = _Traffic(mesh, hooks, num_micro_steps, size, {name: dict.fromkeys(COLLECTIVES, 0) for name in mesh.names})
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
    hooks: CommHooks
    num_micro_steps: int
    size: Size
    sent: dict[str, dict[str, int]]

    def add_gathers(self, buffer: FlatParamPlan, *, in_backward: bool) -> None:
        """The gathers of sharded parameters, in the forward and the backward of every micro-step."""
        hooks, flow = self.hooks.gather if buffer.trainable else self.hooks.frozen, buffer.flow
        phases: tuple[Collective, ...] = ("all_gather in the forward", "all_gather in the backward")
        for collective in phases[: 1 + in_backward]:
            self._add(
                collective, buffer.padded_numel, flow.gathers_over, buffer.dtypes.param, self.num_micro_steps, hooks
            )

    def add_reductions(self, buffer: FlatParamPlan) -> None:
        """The sum of gradients: once a step where a rank keeps full gradients, else once a micro-step.

        The finest shards are then added up along the replicate axes, once a step.
        """
        flow, hooks = buffer.flow, self.hooks.reduce
        times = self.num_micro_steps if flow.reduces(is_last=False) else 1
        summed: Collective = "all_reduce of gradients"
        self._add("reduce_scatter of gradients", buffer.padded_numel, flow.scatters_over, flow.send_dtype, times, hooks)
        # A reduce-scatter through the comm hooks, and an all-gather of the sums, which are sent as they are.
        self._add(summed, flow.reduced_numel, flow.sums_over, flow.send_dtype, hooks=hooks)
        self._add(summed, flow.reduced_numel, flow.sums_over, flow.send_dtype)

    def add_update(self, buffer: FlatParamPlan) -> None:
        """The gather of updated shards where a rank holds more than it updates, and Muon's gather of cut matrices."""
        flow = buffer.flow
        self._add("all_gather of updated parameters", flow.param_numel, flow.joins_over, buffer.dtypes.param)
        if flow.updates == "shard" and buffer.rule == "muon" and is_cut(buffer.layout):
            wide = "float64" if buffer.dtypes.master == "float64" else "float32"  # the dtype in which Muon computes
            self._add("all_gather of momentum", buffer.padded_numel, flow.scatters_over, wide)

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
