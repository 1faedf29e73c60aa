"""The values that a train step takes and returns: `TrainState` and `Metrics`.

Both are NamedTuples of tensors and nothing else. `TrainState` is a pytree:
`optree.tree_map(f, state)` visits every tensor that this rank holds.

Shape letters: P padded elements of a flat buffer, S elements of a shard.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import optree
from rich.table import Table
from torch import Tensor

from fzero.common.notebooks import as_html
from fzero.optim.loss_scale import LossScale
from fzero.optim.transforms import Leaf

QUANTITIES = ("params", "grads", "master", "optimizer")
"""The parts of a state that are kept by flat buffer."""


class TrainState(NamedTuple, Generic[Leaf]):
    """This rank's part of the model state between two steps.

    A dict key such as `"h.3/float32"` names a flat buffer: the unit, then its dtype
    (and that of its master, where it has one). `step.specs` has the same structure,
    with a `sharding.TensorSpec` for every tensor.
    """

    step: Leaf
    """Number of updates so far; skipped ones (overflow) do not count. 0-d int64, on the
    CPU unless a step may be skipped.
    """
    params: dict[str, Leaf]
    """Flat parameters that the model computes with: full (P) in stages 0–2, this rank's
    shard (S) in stage 3.
    """
    master: dict[str, Leaf]
    """Flat tensors that the optimizer updates, if these are not `params` themselves:
    full (P) in stage 0, this rank's shard (S) in stages 1–3."""
    grads: dict[str, Leaf]
    """Memory in which every step accumulates its flat gradients from zero: full (P) in
    stages 0–1 (stage 1 reduces only this rank's shard), this rank's shard (S) in stages
    2–3. Between steps its contents are left over from the update."""
    optimizer: dict[str, Any]
    """The state of the transform, by trainable flat buffer: full in stage 0, this
    rank's shard in stages 1–3.
    """
    buffers: dict[str, Leaf]
    """The module's own buffers (BatchNorm's running statistics, rotary tables) by name;
    the same on every rank.
    """
    loss_scale: LossScale[Leaf]
    """The factor that the loss is multiplied by, and the counters that decide when it
    changes; 1 where no loss is scaled.
    """
    rng: dict[str, Leaf]
    """The states of the random generators by device type; every rank has its own."""
    hook_states: dict[str, dict[str, Any]]
    """The states of the reductions' comm hooks (the error so far:
    `fzero.comms.comm_hooks`), by flat buffer and mesh axis; every rank has its own.
    Empty where no comm hook has a state."""

    def _repr_html_(self) -> str:
        return as_html(table_of(self))


def table_of(state: TrainState[Any]) -> Table:
    """The tensors of a state, or the specs of `step.specs`: the part that each belongs
    to, its shape, dtype, device and bytes.

    >>> from fzero.common.text_tables import as_text
    >>> import torch
    >>> scale = LossScale(*[torch.tensor(1.0)] * 3)
    >>> state = TrainState(
    ...     torch.tensor(3), {"a/float32": torch.zeros(4)}, {}, {}, {}, {}, scale, {}, {}
    ... )
    >>> print(as_text(table_of(state)).splitlines()[3].split())
    ['params', 'a/float32', '(4,)', 'float32', 'cpu', '16']
    """
    table = Table(
        "part",
        "tensor",
        "shape",
        "dtype",
        "device",
        title="train state",
        title_justify="left",
        box=None,
    )
    table.add_column("bytes", justify="right")
    parts = list(TrainState.__annotations__)
    paths, leaves, _ = optree.tree_flatten_with_path(state)  # type: ignore[var-annotated]
    for path, leaf in zip(paths, leaves, strict=True):
        part, name = parts[path[0]], " ".join(map(str, path[1:]))
        if isinstance(leaf, Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            table.add_row(
                part, name, str((*leaf.shape,)), dtype, str(leaf.device), f"{leaf.nbytes:,}"
            )
        else:
            table.add_row(part, name, str(leaf))
    return table


class Metrics(NamedTuple):
    """The report of one step: 0-d tensors, the same on every rank. Reading one with
    `.item()` waits for the device.
    """

    loss: Tensor
    """Mean over ranks, without the loss scale."""
    grad_norm: Tensor
    """Global norm of the mean gradient (`gradient_norm_type`), before clipping, without
    the loss scale.
    """
    lr: Tensor
    """The learning rate of this step."""
    overflow: Tensor
    """Whether a gradient on any rank was not finite, so that the update was skipped
    (0-d bool).
    """
    loss_scale: Tensor
    """The factor that this step's loss was multiplied by."""
