"""What a train step takes and gives: tensors in NamedTuples, and nothing else.

`TrainState` is a pytree: `optree.tree_map(f, state)` visits every tensor that this rank holds.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from fzero.optim.loss_scale import LossScale

Leaf = TypeVar("Leaf")


class TrainState(NamedTuple, Generic[Leaf]):
    """This rank's part of the model state between two steps.

    A dict key such as `"h.3/float32"` names a flat buffer: the unit, then its dtype (and that of its master, where it has
    one). `step.specs` has the same structure, with a `sharding.TensorSpec` for every tensor.
    """

    step: Leaf
    """Number of updates made (an overflow makes none); 0-d int64, on the CPU unless a step may be skipped."""
    params: dict[str, Leaf]
    """Flat buffers that the model computes with: whole (P elements) in stages 0–2, this rank's shard (S elements) in
    stage 3."""
    master: dict[str, Leaf]
    """What the optimizer updates, where that is not `params` itself: whole in stage 0, this rank's shard in stages 1–3."""
    grads: dict[str, Leaf]
    """Where a step collects the flat gradients, anew each time: whole in stages 0–1 (in stage 1 only this rank's shard is
    reduced), this rank's shard in stages 2–3. Afterwards they hold what the update left of them."""
    optimizer: dict[str, Any]
    """Per trainable flat buffer the transform's state: whole in stage 0, this rank's shard in stages 1–3."""
    buffers: dict[str, Leaf]
    """The module's own buffers (BatchNorm's running statistics, rotary tables), by name, the same on every rank."""
    loss_scale: LossScale[Leaf]
    """What the loss is multiplied by, and what decides when that changes; 1 where nothing scales the loss."""
    rng: dict[str, Leaf]
    """The state of the random generators by device type; every rank has its own."""
    hook_states: dict[str, dict[str, Any]]
    """What the comm hooks of reductions remember (`fzero.comms.comm_hooks`: what was lost so far), by flat buffer and mesh axis,
    for what is added up along it; every rank has its own. Empty where no comm hook remembers anything."""


def taken(state: TrainState[Tensor]) -> TrainState[Tensor]:
    """The same tensors as a step's own, which writes into them; the state given is donated from now on.

    What marks it is its counter, which is emptied: whatever shares the counter shares memory that the step writes.
    """
    own = state._replace(step=state.step.clone())
    state.step.resize_(0)
    return own


def is_donated(state: TrainState[Tensor]) -> bool:
    """Whether a step took this state, so that its tensors are the next one's."""
    return not state.step.numel()


class Metrics(NamedTuple):
    """What a step reports: 0-d tensors, the same on every rank. Reading one with `.item()` waits for the device."""

    loss: Tensor
    """Mean over ranks, not scaled."""
    grad_norm: Tensor
    """Global norm of the mean gradient (`gradient_norm_type`), before clipping, without the loss scale."""
    lr: Tensor
    """The learning rate that this step used."""
    overflow: Tensor
    """Whether a gradient on any rank was not finite, so that the update was skipped (0-d bool)."""
    loss_scale: Tensor
    """What this step's loss was multiplied by."""
