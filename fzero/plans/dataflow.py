"""`BufferDataflow`: how the tensors of one flat buffer flow through a step. The rules of the ZeRO stages, stated once.

1. The shards of the parameters are gathered over `gathers_over`; the model computes with full parameters.
2. Micro-steps collect gradients in full (the last micro-step reduces them), or as a shard (every micro-step reduces its own).
3. A reduction is a reduce-scatter over `scatters_over`, and then an all-reduce over `sums_over`.
4. A rank updates all elements, or its shard.
5. If a rank holds more of the parameters than it updates, the updated shards are all-gathered over `joins_over`.

A rule follows from the specs of the stage, the dtypes and the mesh, never from the number of the stage. The eager and the
captured step, dry runs and `fzero.plans.traffic` read it here.

Shape letters: P padded elements of a flat buffer = F·S, S elements of a shard, F shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeVar

from fzero.optim.precision import Dtypes
from fzero.plans.mesh_axes import num_ranks, replicate_axes, sum_order
from fzero.plans.stages import StageSpecs
from sharding import Mesh, Partition, Replicated, Sharded, Spec


class Named(Protocol):
    """Anything with a name, such as an axis of a job, a simulation or a graph."""

    @property
    def name(self) -> str: ...


AnyAxis = TypeVar("AnyAxis", bound=Named)

Extent = Literal["full", "shard"]
"""All elements of a flat buffer (P), or one rank's shard of the finest division (S)."""


@dataclass(frozen=True, slots=True)
class BufferDataflow:
    """How one flat buffer's parameters, gradients and updates flow between the ranks of a mesh. Lengths count elements.

    Attributes:
        gathers_over: the axes over which parameters are sharded, and gathered before their use; empty if every rank holds all.
        scatters_over: the axes of the gradients' reduce-scatter; empty in stage 0.
        sums_over: the axes of the all-reduce that follows: for shards the replicate axes; in stage 0 all axes, and it covers
            all elements.
        reduces_to: the part of the reduced gradient that a rank gets.
        collects: the part of the gradient that a rank adds up over micro-steps.
        updates: the part of the parameters that a rank updates.
        joins_over: the axes over which updated shards are all-gathered.
        send_dtype: the dtype of a gradient in communication.
        keep_dtype: the dtype in which a gradient is kept and added up over micro-steps.
        param_numel, grad_numel: elements of the parameters and of the gradients that a rank keeps.
        reduced_numel: elements of the reduced gradient that a rank gets.
        updated_numel: elements of the part that a rank updates.

    With node=2, data=2 ranks and a buffer of 8 elements, stages 0 to 3 are:

    >>> from fzero.plans.stages import STAGES
    >>> of_all = Dtypes(*["float32"] * 5), Partition(8, 2), Mesh.of(node=2, data=2), ("data",)
    >>> flows = [BufferDataflow.of(specs, *of_all) for specs in STAGES.values()]
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
    scatters_over: tuple[str, ...]
    sums_over: tuple[str, ...]
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
    def of(cls, specs: StageSpecs, dtypes: Dtypes, partition: Partition, mesh: Mesh, axes: tuple[str, ...]) -> Self:
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
            return padded_numel // num_ranks(mesh, spec.axes) if isinstance(spec, Sharded) else padded_numel

        gathers_over = specs.params.axes if isinstance(specs.params, Sharded) else ()
        sums_all, updates_shard = isinstance(specs.grads, Replicated), isinstance(specs.optimizer, Sharded)
        param_numel, updated_numel = held(specs.params), held(specs.optimizer)
        return cls(
            gathers_over=gathers_over,
            scatters_over=() if sums_all else axes,
            sums_over=sum_order(mesh) if sums_all else replicate_axes(mesh, axes),
            reduces_to="full" if sums_all else "shard",
            collects="full" if held(specs.grads) == padded_numel else "shard",
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

    @property
    def sums_late(self) -> bool:
        """Whether micro-steps only add up shards; the sum over the replicate axes is made once, after the last one."""
        return bool(self.sums_over) and self.collects == "shard"

    @property
    def gathers_once(self) -> bool:
        """Whether a step gathers the parameters once, for all micro-steps and both directions: then gradients are full, too."""
        return bool(self.gathers_over) and self.collects == "full"

    def reduces(self, *, is_last: bool) -> bool:
        """Whether a micro-step reduces its gradients itself, instead of leaving them to the last micro-step of the step."""
        return is_last or self.collects == "shard"

    def adds(self, *, is_first: bool) -> bool:
        """Whether a micro-step adds its reduced shard to that of earlier ones."""
        return self.collects == "shard" and not is_first


def along(axes: Iterable[AnyAxis], names: Collection[str]) -> tuple[AnyAxis, ...]:
    """The axes with these names, in the order of `axes`."""
    return tuple(axis for axis in axes if axis.name in names)
