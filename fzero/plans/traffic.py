"""The traffic of a step: how much one rank sends, by mesh axis and collective.

A reduce-scatter of n elements and the all-gather whose result has n elements send the
same messages, those of the primitive (`fzero.comms.records.messages`); an all-reduce
consists of both. The size of a message is in elements or in bytes, as the caller
chooses (`Size`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from fzero.comms.comm_hooks import CommHook
from fzero.comms.records import messages
from fzero.plans.dataflow import CommHooks
from fzero.plans.flat_params import FlatParamPlan, UnitPlan
from sharding import Mesh
from sharding.dtypes import itemsize

Size = Callable[[int, str, CommHook | None], int]
"""The size of one message, given its elements, their dtype, and the comm hook that it
goes through.
"""

Collective = Literal[
    "all_reduce of gradients",
    "reduce_scatter of gradients",
    "all_gather of updated parameters",
    "all_to_all of matrices to owners",
    "all_to_all of results to shards",
    "all_gather in the forward",
    "all_gather in the backward",
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class ActivationSend(NamedTuple):
    """A collective of activations in the forward or backward of one micro-step.

    Attributes:
        collective: its name.
        axis: the mesh axis of its ranks.
        numel: the elements that this rank sends to all others together.
        dtype: their dtype.
    """

    collective: str
    axis: str
    numel: int
    dtype: str


def with_activations(
    sent: dict[str, dict[str, int]],
    sends: Sequence[ActivationSend],
    *,
    num_micro_steps: int,
    size: Size,
) -> dict[str, dict[str, int]]:
    """The traffic by axis, with the collectives of activations."""
    found = {axis: dict(of_axis) for axis, of_axis in sent.items()}
    for one in sends:
        of_axis, name = found.setdefault(one.axis, {}), f"{one.collective} of activations"
        of_axis[name] = of_axis.get(name, 0) + num_micro_steps * size(one.numel, one.dtype, None)
    return found


def in_elements(numel: int, dtype: str, hook: CommHook | None) -> int:
    """A `Size` in elements."""
    return numel


def in_bytes(numel: int, dtype: str, hook: CommHook | None) -> int:
    """A `Size` in bytes, after the comm hook's compression."""
    return numel * itemsize(dtype) if hook is None else hook.nbytes(numel, itemsize(dtype))


def sent_by_axis(
    units: Sequence[UnitPlan], mesh: Mesh, *, hooks: CommHooks, num_micro_steps: int, size: Size
) -> dict[str, dict[str, int]]:
    """The total size that one rank sends in a step, by axis of the mesh and collective.

    Args:
        units: in the order in which the forward uses them.
        size: the function that gives the size of one message.
    """
    sent: dict[str, dict[str, int]] = {name: dict.fromkeys(COLLECTIVES, 0) for name in mesh.names}
    gathered = [unit for unit in units if unit.gathered_numel]
    # the backward begins with them, before their release
    last = gathered[-1].buffers if gathered else ()
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        of_buffer = _sent(buffer, hooks, num_micro_steps, in_backward=buffer not in last)
        for collective, numel, axes, dtype, times, by_axis in of_buffer:
            for name, message in zip(axes, messages(numel, map(mesh.axis_size, axes)), strict=True):
                sent[name][collective] += (
                    times * size(message.numel, dtype, by_axis.get(name)) * message.num_others
                )
    return sent


def totals(by_axis: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The sums over all axes, by collective."""
    total: Counter[str] = Counter()
    for sent in by_axis.values():
        total.update(sent)
    return dict(total)


class _Sent(NamedTuple):
    """A reduce-scatter of `numel` elements along `axes`, or an all-gather whose result
    has so many, `times` times in a step.
    """

    collective: Collective
    numel: int
    axes: tuple[str, ...]
    dtype: str
    times: int = 1
    hooks: Mapping[str, CommHook] = {}


def _sent(
    buffer: FlatParamPlan, hooks: CommHooks, num_micro_steps: int, *, in_backward: bool
) -> Iterator[_Sent]:
    """The collectives of one flat buffer in a step."""
    flow, numel, param, grad = (
        buffer.flow,
        buffer.padded_numel,
        buffer.dtypes.param,
        buffer.flow.send_dtype,
    )
    gather = hooks.of_gathers(param, trained=buffer.trainable)
    phases: tuple[Collective, ...] = ("all_gather in the forward", "all_gather in the backward")
    times = 1 if flow.gathers_once else num_micro_steps
    for phase in phases[: 1 + (in_backward and not flow.gathers_once)]:
        yield _Sent(phase, numel, flow.gathers_over, param, times, gather)
    if not buffer.trainable:
        return
    times = num_micro_steps if flow.collects == "shard" else 1
    yield _Sent("reduce_scatter of gradients", numel, flow.scatters_over, grad, times, hooks.reduce)
    # An all-reduce is a reduce-scatter through the comm hooks, and an all-gather of the sums, which
    # are sent as they are.
    for half in (hooks.reduce, {}):
        yield _Sent("all_reduce of gradients", flow.reduced_numel, flow.sums_over, grad, hooks=half)
    yield _Sent("all_gather of updated parameters", flow.param_numel, flow.joins_over, param)
