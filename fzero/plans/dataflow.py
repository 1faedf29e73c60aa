"""`BufferDataflow`: how the tensors of one flat buffer flow through a step. The rules
of the ZeRO stages, stated once.

1. The shards of the parameters are gathered over `gathers_over`; the model computes
  with full parameters.
2. Micro-steps collect gradients in full (the last micro-step reduces them), or as a
  shard (every micro-step reduces its own).
3. A reduction is a reduce-scatter over `scatters_over`, and then an all-reduce over
  `sums_over`.
4. A rank updates all elements, or its shard.
5. If a rank holds more of the parameters than it updates, the updated shards are
  all-gathered over `joins_over`.

A rule follows from the specs of the stage, the dtypes and the mesh, never from the
number of the stage. The eager and the captured step, dry runs and `fzero.plans.traffic`
read it here.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F
shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

from fzero.comms.comm_hooks import CommHook
from fzero.config.stages import StageSpecs
from fzero.optim.precision import Dtypes
from fzero.plans.mesh_axes import num_ranks, replicate_axes, sum_order
from sharding import Mesh, Partition, Replicated, Sharded, Spec
from sharding.views import torch_dtype


class Named(Protocol):
    """Anything with a name, such as an axis of a job, a simulation or a graph."""

    @property
    def name(self) -> str: ...


AnyAxis = TypeVar("AnyAxis", bound=Named)

Extent = Literal["full", "shard"]
"""All elements of a flat buffer (P), or one rank's shard of the finest division (S)."""

Holds = Literal["nothing", "sum", "result"]
"""The content of the tensor in which a rank keeps a gradient: nothing of this step; the
sum of earlier micro-steps; or the result of a reduction in the present backward (or in
the last backward of the step, if another follows)."""


class GradHome(NamedTuple):
    """Where a visit of a unit in a backward collects a flat gradient, and what it is
    added to.

    Its *home* is the tensor of the state: all elements (P), or a shard (S).
    `BufferDataflow.home` makes this value.

    Attributes:
        fills: the memory in which the full gradient is collected: its `home`; a `copy`
            of the home on the device, which is written back; or `scratch` memory.
        dtype: the dtype of this memory.
        adds_to_sum: whether this memory holds the sum of earlier micro-steps, to which
            the gradient is added.
        reduces: whether the gradient is reduced now; if not, the last micro-step
            reduces the sum.
        adds_held: whether the home's shard is added to the reduced one before their sum
            over the replicate axes.
        adds_late: whether the result of the reduction is added to the home.
        is_in_place: whether the reduction may write its result into the home.
        leaves: the content of the home afterwards.
    """

    fills: Literal["home", "copy", "scratch"]
    dtype: str
    adds_to_sum: bool
    reduces: bool
    adds_held: bool
    adds_late: bool
    is_in_place: bool
    leaves: Holds


@dataclass(frozen=True, slots=True)
class BufferDataflow:
    """How one flat buffer's parameters, gradients and updates flow between the ranks of
    a mesh. Lengths count elements.

    Attributes:
        gathers_over: the axes over which parameters are sharded, and gathered before
            their use; empty if every rank holds all.
        gathers_once: whether a step gathers them once, for all micro-steps and both
            directions.
        scatters_over: the axes of the gradients' reduce-scatter; empty in stage 0.
        sums_over: the axes of the all-reduce that follows: for shards the replicate
            axes; in stage 0 all axes, and it covers all elements.
        sums_late: whether micro-steps only add up shards; the sum over the replicate
            axes is made once, after the last one.
        reduces_to: the part of the reduced gradient that a rank gets.
        collects: the part of the gradient that a rank adds up over micro-steps.
        updates: the part of the parameters that a rank updates.
        joins_over: the axes over which updated shards are all-gathered.
        send_dtype: the dtype of a gradient in communication.
        keep_dtype: the dtype in which a gradient is kept and added up over micro-steps.
        param_numel, grad_numel: elements of the parameters and of the gradients that a
            rank keeps.
        reduced_numel: elements of the reduced gradient that a rank gets.
        updated_numel: elements of the part that a rank updates.

    With node=2, data=2 ranks and a buffer of 8 elements, stages 0 to 3 are:

    >>> from fzero.config.stages import STAGES
    >>> of_all = Dtypes(*["float32"] * 5), Partition(8, 2), Mesh.of(node=2, data=2), ("data",)
    >>> flows = [BufferDataflow.of(STAGES[stage], *of_all) for stage in range(4)]
    >>> rules = "gathers_over collects scatters_over sums_over sums_late reduces_to updates joins_over".split()
    >>> for rule in rules:
    ...     print(f"{rule:13}", *(getattr(flow, rule) for flow in flows))
    gathers_over  () () () ('data',)
    collects      full full shard shard
    scatters_over () ('data',) ('data',) ('data',)
    sums_over     ('data', 'node') ('node',) ('node',) ('node',)
    sums_late     False False True True
    reduces_to    full shard shard shard
    updates       full shard shard shard
    joins_over    () ('data',) ('data',) ()
    """

    gathers_over: tuple[str, ...]
    gathers_once: bool
    scatters_over: tuple[str, ...]
    sums_over: tuple[str, ...]
    sums_late: bool
    reduces_to: Extent
    collects: Extent
    updates: Extent
    joins_over: tuple[str, ...]
    send_dtype: str
    keep_dtype: str
    param_numel: int
    grad_numel: int
    reduced_numel: int
    updated_numel: int

    @classmethod
    def of(
        cls,
        specs: StageSpecs,
        dtypes: Dtypes,
        partition: Partition,
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Self:
        """The dataflow of a flat buffer.

        Args:
            specs: how its parameters, gradients and optimizer state are divided.
            dtypes: the dtypes of its tensors.
            partition: the division of the buffer into the finest shards.
            mesh: the ranks.
            axes: the axes over which the finest shards lie, major first (`Plan.axes`).
        """
        padded_numel = partition.padded_numel

        def held(spec: Spec) -> int:
            return (
                padded_numel // num_ranks(mesh, spec.axes)
                if isinstance(spec, Sharded)
                else padded_numel
            )

        gathers_over = specs.params.axes if isinstance(specs.params, Sharded) else ()
        sums_all, updates_shard = (
            isinstance(specs.grads, Replicated),
            isinstance(specs.optimizer, Sharded),
        )
        param_numel, updated_numel = held(specs.params), held(specs.optimizer)
        collects: Extent = "full" if held(specs.grads) == padded_numel else "shard"
        sums_over = sum_order(mesh) if sums_all else replicate_axes(mesh, axes)
        return cls(
            gathers_over=gathers_over,
            gathers_once=specs.gathers == "once",
            scatters_over=() if sums_all else axes,
            sums_over=sums_over,
            sums_late=bool(sums_over) and collects == "shard",
            reduces_to="full" if sums_all else "shard",
            collects=collects,
            updates="shard" if updates_shard else "full",
            joins_over=axes[len(gathers_over) :] if param_numel > updated_numel else (),
            # One rank sends nothing, and so does not round to the dtype of communication.
            send_dtype=dtypes.reduce if mesh.size > 1 else dtypes.grad,
            keep_dtype=dtypes.grad,
            param_numel=param_numel,
            grad_numel=held(specs.grads),
            reduced_numel=padded_numel if sums_all else partition.shard_numel,
            updated_numel=updated_numel,
        )

    def home(self, holds: Holds, *, is_last: bool, is_here: bool = True) -> GradHome:
        """How a visit of the buffer's unit in a backward treats its gradient.

        Args:
            holds: the content of the gradient's home.
            is_last: whether this is the last micro-step before the update.
            is_here: whether the home is memory of the device.

        Two micro-steps, in stage 1 and in stage 2:

        >>> from fzero.config.stages import STAGES
        >>> of_all = Dtypes(*["float32"] * 5), Partition(8, 2), Mesh.of(data=2), ("data",)
        >>> for stage in (1, 2):
        ...     flow, holds = BufferDataflow.of(STAGES[stage], *of_all), "nothing"
        ...     for is_last in (False, True):
        ...         home = flow.home(holds, is_last=is_last)
        ...         print(
        ...             stage,
        ...             home.fills,
        ...             home.adds_to_sum,
        ...             home.reduces,
        ...             home.adds_late,
        ...             home.is_in_place,
        ...         )
        ...         holds = home.leaves
        1 home False False False True
        1 home True True False True
        2 scratch False True False True
        2 scratch False True True False
        """
        is_full, is_cast = self.collects == "full", self.keep_dtype != self.send_dtype
        # The home of a gradient that only one micro-step collects would have to be cast before it
        # is sent.
        keeps = is_full and holds != "result" and not (is_cast and is_last and holds == "nothing")
        adds_to_sum = keeps and holds == "sum"
        adds_held = self.sums_late and holds == "sum" and is_last
        adds_late = holds == "result" or (not is_full and holds == "sum" and not adds_held)
        return GradHome(
            fills="home" if keeps and is_here else "copy" if adds_to_sum else "scratch",
            dtype=self.keep_dtype if keeps else self.send_dtype,
            adds_to_sum=adds_to_sum,
            reduces=is_last or not is_full,
            adds_held=adds_held,
            adds_late=adds_late,
            is_in_place=is_here and not (adds_held or adds_late or is_cast),
            leaves="result" if is_last or not is_full else "sum",
        )


def carried(holds: Holds, *, is_first: bool, was_last: bool) -> Holds:
    """The content of a gradient's home when a backward begins, from that at the end of
    the backward before.

    Args:
        is_first: whether this is the first backward since the last update.
        was_last: whether the backward before was the last one of its step; if another
            one follows, it adds to the result.
    """
    return "nothing" if is_first else holds if was_last and holds == "result" else "sum"


def along(axes: tuple[AnyAxis, ...], names: Collection[str]) -> tuple[AnyAxis, ...]:
    """The axes with these names, in the order of `axes`."""
    if len(axes) == 1 or not names:  # the usual case at once: a step asks several times per unit
        return axes if names and axes[0].name in names else ()
    return tuple(axis for axis in axes if axis.name in names)


ByAxis = Mapping[str, CommHook]


@dataclass(frozen=True, slots=True)
class CommHooks:
    """The comm hooks by axis; along an axis that is not named, numbers are sent
    exactly.

    Attributes:
        gather: for gathers of trained parameters, in the forward and the backward of
            stage 3.
        frozen: for gathers of frozen parameters.
        reduce: for reductions of gradients.
    """

    gather: ByAxis = field(default_factory=dict)
    frozen: ByAxis = field(default_factory=dict)
    reduce: ByAxis = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.gather or self.frozen or self.reduce)

    def of_gathers(self, dtype: str, *, trained: bool) -> ByAxis:
        """Those for gathers of parameters; codes (packed weights) are no numbers to
        round, and are sent exactly.
        """
        return (
            (self.gather if trained else self.frozen)
            if torch_dtype(dtype).is_floating_point
            else {}
        )

    def __str__(self) -> str:
        parts = {
            "gathers": self.gather,
            "gathers of frozen parameters": self.frozen,
            "reductions": self.reduce,
        }
        return ", ".join(
            f"{name} along {axis} through {hook.name}"
            for name, hooks in parts.items()
            for axis, hook in hooks.items()
            if not (hooks is self.frozen and self.frozen == self.gather)
        )
