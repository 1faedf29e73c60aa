"""`StepMetrics`: loss and gradient norm of a step over all ranks, and the checks before an update.

`fzero.runtime.loss` holds the rules; this module exchanges their inputs between ranks. On the CPU, an error names the first
parameter whose gradient is not finite. On a device the host does not wait; a device-side assertion ends the process.
Shape letters: A micro-steps, W ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.comms.axes import Bound, CollectiveError
from fzero.comms.mesh import RankMesh
from fzero.comms.records import Label
from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.plans.plan import Plan
from fzero.runtime.loss import LossRules, check_rows, mean_of
from fzero.runtime.offload import Offload
from fzero.runtime.step_spec import MismatchError, check_same
from fzero.state import Metrics, TrainState
from fzero.storage.shard_io import BufferPool, ShardTransfer, own_shard

Named = Callable[[], dict[str, dict[str, str]]]
"""Values as text, by subject and name."""


class Outcome(NamedTuple):
    """The results of one compiled step that the host reads."""

    loss_stats: Tensor
    """Per micro-step and rank: loss, weight or -1, number of the forward-backward, checksum of the hyper-parameters (A, W, 4)."""
    loss: Tensor
    norm: Tensor
    overflow: Tensor
    ok: Tensor
    """Whether the step updated, or skipped an overflow that may be skipped; if not, only `state.grads` was written."""
    loss_scale: LossScale[Tensor]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The rules of a step, on one rank.

    Attributes:
        skips_overflow: whether a step with an overflow is skipped; if not, it raises.
        model: the source of parameter names for errors.
    """

    plan: Plan
    mesh: RankMesh
    offload: Offload
    scratch: BufferPool
    measure: LossRules
    scaling: LossScaling
    skips_overflow: bool
    model: nn.Module

    def metrics(
        self, losses: Tensor, state: TrainState[Tensor], *, is_sum: bool, rate: float, transfer: ShardTransfer
    ) -> tuple[Metrics, Tensor | None]:
        """The metrics, and the factor that the gradients still need (None for 1). *Collective* where they are sharded.

        Args:
            losses: per micro-step and rank, (loss, weight), shape (A, W, 2).
            state: holds the gradients.
            is_sum: whether each loss is a sum, to be divided by the sum of the weights.
            rate: the learning rate.
            transfer: the backward's transfer, which may have measured a gradient's contribution to the norm.
        """
        check_rows(losses.flatten(0, 1), is_sum=is_sum)
        mean_loss, weight = mean_of(losses.flatten(0, 1), is_sum=is_sum)
        multiple = self.measure.multiple(weight, state.loss_scale.scale)
        norm = self._norm(state, transfer) / multiple
        overflow = ~(norm + mean_loss).isfinite()
        if self.skips_overflow:
            self._check_loss_scale(state, overflow)
        elif overflow.device.type != "cpu":
            torch._assert_async((mean_loss + norm).isfinite(), "fzero: the loss or the gradient norm is not finite")
        elif not math.isfinite(mean_loss) or not math.isfinite(norm):
            raise FloatingPointError(self._what_is_not_finite(losses, state, norm))
        lr = torch.full((), rate, device=self.offload.device)  # a fill does not wait for the device
        factor = self.measure.factor(norm, multiple, overflow, weight)
        scale = state.loss_scale.scale.clone()
        return Metrics(mean_loss.float(), norm.float(), lr, overflow, scale), factor

    def _norm(self, state: TrainState[Any], transfer: ShardTransfer) -> Tensor:
        """The global norm of the collected gradients (0-d float64), from the same numbers in the same order in all stages."""
        mesh = self.mesh
        held = [shard for shard in range(mesh.num_shards) if self.plan.stage == 0 or shard == mesh.shard]
        cut = [b for b in self.plan.flat_buffers if b.trainable and b.shard_numel]

        def numbers(shard: int) -> Iterator[Tensor]:
            homes = [(f"{b.key}/grads", own_shard(state.grads[b.key], b, shard)) for b in cut]
            known = [transfer.known(*named) for named in homes]
            unknown = [named for named, number in zip(homes, known, strict=True) if number is None]
            rest = map(self.measure.of_shard, transfer.each(unknown))
            return (next(rest) if number is None else number for number in known)

        parts = [self.measure.joined(numbers(shard), self.offload.device) for shard in held]
        if len(held) < mesh.num_shards:
            return self.measure.norm(mesh.stack(parts[0], label=Label("norm", phase="update")))
        return self.measure.norm(torch.stack(parts))

    def first_overflow(self, state: TrainState[Tensor]) -> str | None:
        """The first parameter whose gradient is not finite; see `TrainStep.first_overflow`. *Collective.*"""
        order = {name: index for index, (name, _) in enumerate(self.model.named_parameters())}
        first, mesh = len(order), self.mesh
        trained = [buffer for buffer in self.plan.flat_buffers if buffer.trainable]
        shards = ((b.key, own_shard(state.grads[b.key], b, mesh.shard)) for b in trained)
        for buffer, grad_S in zip(trained, self.offload.transfer(self.scratch).each(shards), strict=True):
            for name, start, stop, offset in map(astuple, buffer.layout.fragments(mesh.shard)):
                if order[name] < first and not grad_S[offset : offset + stop - start].isfinite().all():
                    first = order[name]
        found = int(mesh.stack(torch.tensor(first, device=self.offload.device), label=Label("overflow")).min())
        return dict(zip(order.values(), order, strict=True)).get(found)

    def check_outcome(self, outcome: Outcome, state: TrainState[Tensor], hyper: Named, *, is_sum: bool) -> None:
        """Raises on every rank for an error that a graph detected; `hyper` as in `check_alike`."""
        if outcome.ok.device.type != "cpu":
            torch._assert_async(outcome.ok, "fzero: the loss or the gradient norm is not finite, or the ranks differ")
        elif not outcome.ok:
            check_alike(outcome.loss_stats[..., 2:].flatten(0, 1), self.mesh.world, hyper)
            check_rows(outcome.loss_stats[..., :2].flatten(0, 1), is_sum=is_sum)
            if self.skips_overflow:
                self._check_loss_scale(state, outcome.overflow)
            raise FloatingPointError(self._what_is_not_finite(outcome.loss_stats[..., :2], state, outcome.norm))

    def _check_loss_scale(self, state: TrainState[Tensor], overflow: Tensor) -> None:
        """Raises on every rank when the loss scale would have to shrink below its minimum."""
        exhausted = self.scaling.is_exhausted(state.loss_scale, overflow)
        if exhausted.device.type != "cpu":
            torch._assert_async(~exhausted, "fzero: an overflow with the loss scale at its minimum")
        elif exhausted:
            raise FloatingPointError(
                f"fp16.min_loss_scale: the gradient overflows with the loss scale at its minimum "
                f"{state.loss_scale.scale.item():g}, first in {self.first_overflow(state)!r}; the state was not updated: "
                f"look at this batch, lower the learning rate, or use bf16"
            )

    def _what_is_not_finite(self, losses: Tensor, state: TrainState[Tensor], norm: Tensor) -> str:
        by_rank = losses[..., 0].mean(dim=0).tolist()
        ranks = [rank for rank, value in enumerate(by_rank) if not math.isfinite(value)]
        mean = losses[..., 0].mean().item()
        what = f"loss is not finite on ranks {ranks}" if ranks else f"loss is {mean:.6g}, its gradient is not finite"
        name = self.first_overflow(state)
        return (
            f"step {int(state.step)}: {what} (losses {by_rank}, gradient norm {norm.item():.6g}"
            + (f", first parameter {name!r}" if name else "")
            + "); the state was not updated: lower the learning rate, set gradient_clipping, or look at this batch"
        )


def check_alike(numbers_M2: Tensor, world: Bound, hyper: Named) -> None:
    """Raises on every rank when the number of the forward-backward or the hyper-parameters differ between ranks.

    Only on the CPU, where reading is free; on a device `assert_alike` and the graph check.

    Args:
        numbers_M2: number of the forward-backward and checksum of the hyper-parameters, from every rank at least once.
        world: the ranks.
        hyper: this rank's hyper-parameters as text, by subject and name.

    Raises:
        CollectiveError: the ranks are in different steps.
        MismatchError: their hyper-parameters differ.
    """
    if numbers_M2.device.type != "cpu" or (numbers_M2 == numbers_M2[0]).all():
        return
    check_passes(numbers_M2[:, 0])
    check_same(
        world, hyper(),
        fix="compute it from what is the same on all ranks (metrics.loss is the mean over them), or on rank 0 for all",
    )  # fmt: skip
    raise MismatchError(
        "hyper-parameters: must be the same on all ranks, and differ; compute them from the same numbers"
    )


def assert_alike(told_AWN: Tensor) -> None:
    """`check_alike` for all backwards of a step, where the host must not wait for the device."""
    numbers = told_AWN[..., 3:]
    torch._assert_async(
        (numbers == numbers[:, :1]).all(), "fzero: the ranks are in different steps, or have other learning rates"
    )


@lru_cache(maxsize=16)
def mark_of(names: frozenset[str]) -> float:
    """A checksum in [0, 1) of a set of parameter names, to be added to the number of a forward-backward; 0 for no names."""
    return zlib.crc32(" ".join(sorted(names)).encode()) / 2**32 if names else 0.0


def check_passes(numbers_W: Tensor) -> None:
    """Raises on every rank when the numbers of the ranks' forward-backwards differ. On a device it does nothing."""
    if numbers_W.device.type == "cpu" and (numbers_W != numbers_W[0]).any():
        if (numbers_W.floor() == numbers_W[0].floor()).all():
            raise CollectiveError(
                "requires_grad: must be the same on all ranks for each parameter, and differs; freeze and unfreeze on every "
                "rank, before the same forward"
            )
        raise CollectiveError(
            f"the ranks are in different steps: they have run {[int(n) for n in numbers_W]} passes. Either an error was raised "
            f"at different places on different ranks, or only some ranks called a collective method (trace_comm, evaluate); "
            f"end the job, and start it again from a checkpoint"
        )
