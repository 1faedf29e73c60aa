"""The end of a step: from the losses and gradients of all ranks to loss, norm,
overflow, factor, and the next state.

Functions of tensors, which do not wait for a device: the eager step calls `finish` on
tensors, a captured step inside its graph, and a simulated step of all ranks under
`torch.vmap`, so that all do the same arithmetic. Only the `check_*` functions make the
host wait for the device, or raise for a value (`fzero.runtime.outcome` has the messages
with their causes). On the CPU, an error names the first parameter whose gradient is not
finite. On a GPU the host does not wait for the result; a device-side assertion ends the
process instead.

Shape letters: A micro-steps, W ranks, M = A·W rows, F shards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import optree
import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.records import Label
from fzero.config.config import Config
from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.runtime.outcome import differing_passes, what_is_not_finite
from fzero.runtime.reductions import GradNorms
from fzero.runtime.step_spec import MismatchError, check_same
from fzero.runtime.update import UpdateNumbers
from fzero.state import Metrics, TrainState
from fzero.storage.shard_transfer import ShardTransfer

if TYPE_CHECKING:
    from fzero.runtime.step_runtime import StepRuntime

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LossRules:
    """The rules by which losses and gradients of all ranks and micro-steps become a
    mean.

    Args:
        world_size: ranks W.
        predivide: the divisor of gradients before they are summed over the ranks.
        is_mean: whether the gradient is the mean over the ranks, not the sum.
        clip: the largest gradient norm; 0 does not clip.
        is_inf: whether the norm is the largest absolute value, not the 2-norm.
        scales_loss: whether the loss is multiplied by a scale.
    """

    world_size: int
    predivide: float
    is_mean: bool
    clip: float
    is_inf: bool
    scales_loss: bool

    def multiple(self, weight: Tensor | None, scale: Tensor) -> Tensor:
        """The ratio of the collected gradient to the true one (0-d float64)."""
        multiple = torch.full(
            (), self._over(weight) / self.predivide, dtype=torch.float64, device=scale.device
        )
        multiple = multiple if weight is None else multiple * weight
        return multiple * scale if self.scales_loss else multiple

    def factor(
        self, norm: Tensor, multiple: Tensor, overflow: Tensor, weight: Tensor | None
    ) -> Tensor | None:
        """The factor that the collected gradients still need; None is 1."""
        if (
            not self.clip
            and weight is None
            and not self.scales_loss
            and self._over(weight) == self.predivide
        ):
            return None
        factor = (
            (self.clip / (norm + 1e-6)).clamp(max=1.0) / multiple if self.clip else 1 / multiple
        )
        # `first_overflow` reads the unscaled gradients
        return torch.where(overflow, torch.ones_like(factor), factor)

    def _over(self, weight: Tensor | None) -> int:
        return self.world_size if self.is_mean and weight is None else 1

    def of_shard(self, grad_S: Tensor) -> Tensor:
        """The norm of one flat shard (0-d)."""
        if self.is_inf:
            return grad_S.abs().max()
        wide = torch.promote_types(grad_S.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(
            grad_S, dtype=None if wide == grad_S.dtype else wide
        )
        return norm

    def norm(self, parts_F: Tensor) -> Tensor:
        """The global norm of the collected gradients, from the parts of all shards."""
        return parts_F.max() if self.is_inf else (mean_in_rank_order(parts_F) * len(parts_F)).sqrt()


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules by which a step ends.

    Attributes:
        loss: the rules of loss, norm and clipping.
        scaling: the rules of the loss scale.
        skips_overflow: whether a step with an overflow makes no update; if not, it is
            an error.
    """

    loss: LossRules
    scaling: LossScaling
    skips_overflow: bool

    @classmethod
    def of(cls, cfg: Config, world_size: int) -> Self:
        """The rules of a configuration for `world_size` ranks."""
        is_mean = cfg.gradient_allreduce_op == "mean"
        predivide = None if cfg.prescale_gradients else cfg.gradient_predivide_factor
        loss = LossRules(
            world_size=world_size,
            predivide=predivide or (world_size if is_mean else 1),
            is_mean=is_mean,
            clip=cfg.gradient_clipping,
            is_inf=cfg.gradient_norm_type == "inf",
            scales_loss=cfg.scales_loss,
        )
        return cls(loss, cfg.loss_scaling(), cfg.skips_overflow)


class Outcome(NamedTuple):
    """The results of a step that the host reads."""

    loss_stats: Tensor
    """Per micro-step and rank: loss, weight or -1, number of the forward-backward,
    checksum of the hyper-parameters (A, W, 4).
    """
    loss: Tensor
    norm: Tensor
    overflow: Tensor
    ok: Tensor
    """Whether the step is valid. A valid step updates, or skips an overflow where that
    is allowed. An invalid one only writes `state.grads`."""
    loss_scale: LossScale[Tensor]
    """The loss scale of the next step."""


class Finished(NamedTuple):
    """The outcome of a step, and how the update uses the gradients."""

    outcome: Outcome
    skip: Tensor | None = None
    """Whether the update is skipped; None if a graph has made the update."""
    factor: Tensor | None = None
    """The factor that the gradients still need; None is 1."""


class Collected(NamedTuple):
    """A step after its forwards and backwards: the gradients are in `state.grads`, and
    nothing else is written.
    """

    state: TrainState[Tensor]
    loss_stats: Tensor
    """See `Outcome`."""
    is_sum: bool
    """Whether losses are sums."""
    buffers: dict[str, Tensor]
    """The module buffers of the next state; `rng` and `hook_states` likewise."""
    rng: dict[str, Tensor]
    hook_states: dict[str, dict[str, Any]]
    hyper: UpdateNumbers
    transfer: ShardTransfer | None = None
    """The transfer of the backward."""
    norms: GradNorms | None = None
    """The norms that its reductions have measured."""
    skipped: Collection[str] = ()
    """The keys of flat buffers that are not updated."""
    outcome: Outcome | None = None
    """The outcome, if a graph has also finished the step and updated the state."""


def finish(
    rules: StepRules,
    stats_AW4: Tensor,
    norm_parts_F: Tensor,
    loss_scale: LossScale[Tensor],
    *,
    is_sum: bool,
) -> Finished:
    """The outcome of a step, from what all ranks have collected.

    Args:
        stats_AW4: see `Outcome.loss_stats`.
        norm_parts_F: see `norm_parts`.
        loss_scale: the factor by which the losses were multiplied.
        is_sum: whether each loss is a sum, to be divided by the sum of the weights.
    """
    rows_M2 = stats_AW4.flatten(0, 1)[:, :2]
    loss, weight = mean_of(rows_M2, is_sum=is_sum)
    multiple = rules.loss.multiple(weight, loss_scale.scale)
    norm = rules.loss.norm(norm_parts_F) / multiple
    overflow = ~(norm + loss).isfinite()
    ok = is_agreed(rows_M2, is_sum=is_sum) & (stats_AW4[..., 2:] == stats_AW4[:, :1, 2:]).all()
    if is_sum:
        ok = ok & (rows_M2[:, 1] > 0).any()
    if rules.skips_overflow:
        skip, next_scale = overflow | ~ok, rules.scaling.update(loss_scale, overflow)
        ok = ok & ~rules.scaling.is_exhausted(loss_scale, overflow)
    else:
        ok = ok & ~overflow
        skip, next_scale = ~ok, loss_scale
    factor = rules.loss.factor(norm, multiple, overflow, weight)
    return Finished(
        Outcome(stats_AW4, loss.float(), norm.float(), overflow, ok, next_scale), skip, factor
    )


def norm_parts(
    rules: LossRules,
    measured: Iterable[Tensor],
    *,
    stack: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Tensor:
    """The parts (F,) of the norm of the collected gradients: the same numbers, added in
    the same order, in all stages.

    *Collective* unless there is one shard: sends one number. In stage 0 a rank has the
    gradients of all shards, but to read them would take longer than the number does.

    Args:
        measured: the norms of the flat gradients of this rank's shard
            (`LossRules.of_shard`), in the order of the plan.
        stack: a collective: from the number of this rank's shard to the numbers of all
            shards (F,).
    """
    numbers = list(measured)
    norms = (
        torch.stack(numbers).double()
        if numbers
        else torch.zeros(1, dtype=torch.float64, device=device)
    )
    part = norms.max() if rules.is_inf else norms.square().sum()
    return stack(part)


def next_state(
    rules: StepRules, collected: Collected, state: TrainState[Tensor], outcome: Outcome
) -> tuple[TrainState[Tensor], Metrics]:
    """The state after an update, and the metrics. A skipped update keeps step, module
    buffers, random state and hook states.

    Args:
        state: the updated state. Its counter is written in place, because the step has
            taken the state. If all ranks are simulated at once, it has a leading
            dimension of ranks.
        outcome: the outcome on one rank. If all ranks are simulated at once, only its
            loss scale has the dimension of ranks.
    """
    overflow, scale = outcome.overflow, state.loss_scale.scale
    buffers, rng, hook_states = collected.buffers, collected.rng, collected.hook_states
    num_updates = state.step.add_(1)
    if rules.skips_overflow:
        num_updates.sub_(overflow.to(num_updates.dtype))
        buffers = _chosen(overflow, state.buffers, buffers)
        if overflow.device.type == "cpu":  # elsewhere the host would have to wait for the overflow
            rng = _chosen(overflow, state.rng, rng)
        hook_states = _chosen(overflow, state.hook_states, hook_states)
    if rules.loss.scales_loss:  # errors that comm hooks feed back are multiples of the loss scale
        ratio = outcome.loss_scale.scale / scale
        hook_states = optree.tree_map(
            lambda x: _times_each(x, ratio) if x.is_floating_point() else x, hook_states
        )
    # a fill need not wait for the device
    lr = torch.full((), collected.hyper.rates[0], device=overflow.device)
    metrics = Metrics(outcome.loss, outcome.norm, lr, overflow, scale.reshape(-1)[0].clone())
    new = state._replace(
        step=num_updates,
        buffers=buffers,
        loss_scale=outcome.loss_scale,
        rng=rng,
        hook_states=hook_states,
    )
    return new, metrics


def _times_each(x: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a number; for simulated ranks, each rank's row times its own
    number.
    """
    return x * factor.to(x.dtype).reshape(factor.shape + (1,) * (x.dim() - factor.dim()))


def _chosen(skip: Tensor, before: dict[str, T], after: dict[str, T]) -> dict[str, T]:
    """The tree `before` where `skip` is true, else `after`."""
    chosen: dict[str, T] = optree.tree_map(
        lambda old, new: torch.where(skip, old, new), before, after
    )
    return chosen


# --- the losses of all ranks ----------------------------------------------------------------------


def loss_row(loss: Tensor, weight: Tensor | None, *numbers: float) -> Tensor:
    """The row that a rank sends the others for one loss (float64): the loss, its weight
    or -1, and the numbers.
    """
    if loss.device.type == "cpu":
        return torch.tensor(
            [loss.item(), -1.0 if weight is None else weight.item(), *numbers], dtype=torch.float64
        )
    # A fill does not wait for the device, as a copy of a number does.
    fill = partial(torch.full, (), dtype=torch.float64, device=loss.device)
    rest = [fill(-1.0) if weight is None else weight.to(loss.device), *map(fill, numbers)]
    return torch.stack([x.double() for x in (loss.detach(), *rest)])


def mean_of(rows_M2: Tensor, *, is_sum: bool) -> tuple[Tensor, Tensor | None]:
    """The mean of losses with their weights, and the sum of the weights if the losses
    are sums.
    """
    mean, weight = mean_in_rank_order(rows_M2).unbind()
    return (mean / weight, weight * rows_M2.shape[0]) if is_sum else (mean, None)


def is_agreed(rows_M2: Tensor, *, is_sum: bool) -> Tensor:
    """Whether all losses are sums with weights, or all are means, as `is_sum` says (0-d
    bool).
    """
    return ((rows_M2[:, 1] >= 0) == is_sum).all()


def check_rows(rows_M2: Tensor, *, is_sum: bool) -> None:
    """Raises ValueError when some losses are sums and others means, or all weights
    are 0.
    """
    agreed = is_agreed(rows_M2, is_sum=is_sum)
    message = (
        "loss_fn: must give a mean always or a (sum, weight) always, got both; give the same "
        "on all ranks"
    )
    if rows_M2.device.type != "cpu":
        torch._assert_async(agreed, message)
    elif not agreed:
        raise ValueError(message)
    elif is_sum and (rows_M2[:, 1] == 0).all():
        raise ValueError(
            "loss_fn: its weights must not all be 0 in a step, and were on every rank; leave out "
            "such a batch"
        )


def mean_in_rank_order(rows: Tensor) -> Tensor:
    """The mean of the rows, which are added in order."""
    first, *others = rows.unbind()
    return sum(others, start=first) * (1 / rows.shape[0])


# --- checks on every rank -------------------------------------------------------------------------


NamedHyper = Callable[[], dict[str, dict[str, str]]]
"""Values as text, by subject and name."""


def check_outcome(
    run: StepRuntime,
    outcome: Outcome,
    state: TrainState[Tensor],
    named: NamedHyper,
    *,
    is_sum: bool,
) -> None:
    """Raises on every rank unless the step may go on: an update, or an overflow that is
    skipped.

    Args:
        state: holds the gradients of the step.
        named: as in `check_alike`.
        is_sum: whether each loss is a sum.

    Raises:
        CollectiveError, MismatchError: see `check_alike`.
        ValueError: see `check_rows`.
        FloatingPointError: the loss or the gradient is not finite, or the loss scale
            would shrink below its minimum.
    """
    stats_AW4, skips = outcome.loss_stats, run.rules.skips_overflow
    if outcome.ok.device.type != "cpu":
        is_alike = (stats_AW4[..., 2:] == stats_AW4[:, :1, 2:]).all()
        torch._assert_async(
            is_alike, "fzero: the ranks are in different steps, or have other learning rates"
        )
        check_rows(stats_AW4[..., :2].flatten(0, 1), is_sum=is_sum)
        found = (
            "an overflow with the loss scale at its minimum"
            if skips
            else "the loss or the gradient norm is not finite"
        )
        torch._assert_async(outcome.ok, f"fzero: {found}")
    elif not outcome.ok:
        for rows_W4 in stats_AW4:
            check_alike(rows_W4[:, 2:], run.mesh.world, named)
        check_rows(stats_AW4[..., :2].flatten(0, 1), is_sum=is_sum)
        raise FloatingPointError(what_is_not_finite(run, outcome, state))


def check_alike(numbers_M2: Tensor, world: RankAxis, hyper: NamedHyper) -> None:
    """Raises on every rank when the number of the forward-backward or the
    hyper-parameters differ between ranks.

    This is for the CPU, where reading costs nothing. For other devices `check_outcome`
    makes the check.

    Args:
        numbers_M2: rows of (number of the forward-backward, checksum of the
            hyper-parameters), at least one row of each rank.
        world: the ranks.
        hyper: this rank's hyper-parameters as text, by subject and name.

    Raises:
        CollectiveError: the ranks are in different steps.
        MismatchError: their hyper-parameters differ.
    """
    if (
        len(numbers_M2) == 1
        or numbers_M2.device.type != "cpu"
        or (numbers_M2 == numbers_M2[0]).all()
    ):
        return
    check_passes(numbers_M2[:, 0])
    check_same(
        world,
        hyper(),
        fix=(
            "compute it from what is the same on all ranks (metrics.loss is the mean over "
            "them), or on rank 0 for all"
        ),
    )
    raise MismatchError(
        "hyper-parameters: must be the same on all ranks, and differ; compute them from the same "
        "numbers"
    )


@lru_cache(maxsize=16)
def mark_of(names: frozenset[str]) -> float:
    """A checksum in [0, 1) of a set of parameter names, to be added to the number of a
    forward-backward; 0 for no names.
    """
    return zlib.crc32(" ".join(sorted(names)).encode()) / 2**32 if names else 0.0


UPDATING = math.inf
"""The number that a rank sends in an update; a rank in a backward sends another one."""


def number_of(num_passes: int, no_grad_names: frozenset[str], *, is_last: bool) -> float:
    """The number by which ranks compare a backward: from the number of passes so far,
    the parameters without gradients, and whether it is the last."""
    number = num_passes + mark_of(no_grad_names)
    return number if is_last else -number


def check_updating(world: RankAxis) -> None:
    """Raises CollectiveError if another rank is in a backward: its row arrives here,
    and shows that. *Collective.*
    """
    row = loss_row(torch.zeros(()), None, UPDATING, 0.0, 0.0)
    check_passes(collectives.stack(row, world, label=Label("loss_stats", phase="update"))[:, 2])


def check_passes(numbers_W: Tensor) -> None:
    """Raises on every rank when the numbers of the ranks' forward-backwards differ. On
    a device it does nothing.
    """
    if numbers_W.device.type != "cpu" or (numbers_W == numbers_W[0]).all():
        return
    raise differing_passes(numbers_W)
