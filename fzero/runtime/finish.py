"""`finish` and `next_state`: from the losses and gradients of all ranks to loss, norm, overflow, factor, and the next state.

Functions of tensors, which do not wait for a device. The eager step calls `finish` on tensors, a captured step inside its graph,
and a simulated step of all ranks under `torch.vmap`. `fzero.runtime.outcome` raises the errors that it found.

Shape letters: A micro-steps, W ranks, M = A·W rows, F shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.runtime.loss import LossRules, is_agreed, mean_of
from fzero.runtime.update import Hyper
from fzero.state import Metrics, TrainState
from fzero.storage.shard_transfer import ShardTransfer

if TYPE_CHECKING:
    from fzero.storage.file_tensor import StoredTensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules by which a step ends.

    Attributes:
        loss: the rules of loss, norm and clipping.
        scaling: the rules of the loss scale.
        skips_overflow: whether a step with an overflow makes no update; if not, it is an error.
    """

    loss: LossRules
    scaling: LossScaling
    skips_overflow: bool


class Outcome(NamedTuple):
    """The results of a step that the host reads."""

    loss_stats: Tensor
    """Per micro-step and rank: loss, weight or -1, number of the forward-backward, checksum of the hyper-parameters (A, W, 4)."""
    loss: Tensor
    norm: Tensor
    overflow: Tensor
    ok: Tensor
    """Whether the step is valid. A valid step updates, or skips an overflow where that is allowed. An invalid one only writes
    `state.grads`."""
    loss_scale: LossScale[Tensor]
    """The loss scale of the next step."""


class Finished(NamedTuple):
    """The outcome of a step, and how the update uses the gradients."""

    outcome: Outcome
    skip: Tensor | None = None
    """Whether the update is skipped; None if a graph has made the update."""
    factor: Tensor | None = None
    """The factor that the gradients still need; None is 1."""


class GradNorms:
    """The norms of reduced gradients, by flat buffer, measured when a reduction ends: then its result is in the caches.

    Args:
        measure: `LossRules.of_shard`.
        in_memory: whether gradients in memory are measured, too; allowed only where PyTorch counts every change to them.
    """

    def __init__(self, measure: Callable[[Tensor], Tensor], *, in_memory: bool) -> None:
        self._measure, self._in_memory = measure, in_memory
        self._found: dict[str, tuple[Tensor, StoredTensor, int]] = {}

    def reduced(self, key: str, home: StoredTensor, result: Tensor, device: torch.device, *, is_final: bool) -> None:
        """A reduction has ended.

        Args:
            home: the gradient in the state.
            result: this rank's shard of it, in memory (S).
            device: the device of the number.
            is_final: whether no other reduction follows.
        """
        self._found.pop(key, None)
        if is_final and result.numel() and (self._in_memory or not isinstance(home, Tensor)):
            number = self._measure(result if result.dtype == home.dtype else result.to(home.dtype))
            self._found[key] = number.to(device), home, _version(home)

    def of(self, key: str, home: StoredTensor) -> Tensor | None:
        """The norm of a gradient, if it was measured and, as far as PyTorch counts, has not changed since."""
        number, measured, version = self._found.get(key, (None, None, 0))
        return number if measured is home and _version(home) == version else None


def _version(x: StoredTensor) -> int:
    """PyTorch's count of changes to a tensor in memory; 0 for a file, which only reductions change."""
    return x._version if isinstance(x, Tensor) else 0


class Collected(NamedTuple):
    """A step after its forwards and backwards: the gradients are in `state.grads`, and nothing else is written."""

    state: TrainState[Tensor]
    loss_stats: Tensor
    """See `Outcome`."""
    is_sum: bool
    """Whether losses are sums."""
    buffers: dict[str, Tensor]
    """The module buffers of the next state; `rng` and `hook_states` likewise."""
    rng: dict[str, Tensor]
    hook_states: dict[str, dict[str, Any]]
    hyper: Hyper
    transfer: ShardTransfer | None = None
    """The transfer of the backward."""
    norms: GradNorms | None = None
    """The norms that its reductions have measured."""
    still: Collection[str] = ()
    """The keys of flat buffers that are not updated."""
    outcome: Outcome | None = None
    """The outcome, if a graph has also finished the step and updated the state."""


def finish(
    rules: StepRules, stats_AW4: Tensor, norm_parts_F: Tensor, loss_scale: LossScale[Tensor], *, is_sum: bool
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
    return Finished(Outcome(stats_AW4, loss.float(), norm.float(), overflow, ok, next_scale), skip, factor)


def norm_parts(
    rules: LossRules,
    measured: Iterable[Tensor],
    num_shards: int,
    *,
    stack: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Tensor:
    """The parts (F,) of the norm of the collected gradients: the same numbers, added in the same order, in all stages.

    *Collective* unless there is one shard: sends one number. In stage 0 a rank has the gradients of all shards, but to read them
    would take longer than the number does.

    Args:
        measured: the norms of the flat gradients of this rank's shard (`LossRules.of_shard`), in the order of the plan.
        stack: a collective: from the number of this rank's shard to the numbers of all shards (F,).
    """
    part = rules.joined(measured, device)
    return stack(part) if num_shards > 1 else part[None]


def next_state(
    rules: StepRules, collected: Collected, state: TrainState[Tensor], outcome: Outcome
) -> tuple[TrainState[Tensor], Metrics]:
    """The state after an update, and the metrics. A skipped update keeps step, module buffers, random state and hook states.

    Args:
        state: the updated state. Its counter is written in place, because the step has taken the state. If all ranks are
            simulated at once, it has a leading dimension of ranks.
        outcome: the outcome on one rank. If all ranks are simulated at once, only its loss scale has the dimension of ranks.
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
        hook_states = optree.tree_map(lambda x: _times_each(x, ratio) if x.is_floating_point() else x, hook_states)
    lr = torch.full((), collected.hyper.rates[0], device=overflow.device)  # a fill need not wait for the device
    metrics = Metrics(outcome.loss, outcome.norm, lr, overflow, scale.reshape(-1)[0].clone())
    new = state._replace(
        step=num_updates, buffers=buffers, loss_scale=outcome.loss_scale, rng=rng, hook_states=hook_states
    )
    return new, metrics


def _times_each(x: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a number; for simulated ranks, each rank's row times its own number."""
    return x * factor.to(x.dtype).reshape(factor.shape + (1,) * (x.dim() - factor.dim()))


def _chosen(skip: Tensor, before: dict[str, T], after: dict[str, T]) -> dict[str, T]:
    """The tree `before` where `skip` is true, else `after`."""
    chosen: dict[str, T] = optree.tree_map(lambda old, new: torch.where(skip, old, new), before, after)
    return chosen
