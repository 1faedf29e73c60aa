"""`place`: moves a state between the device, host memory and files.

    away = fzero.make_train_step(model, cfg, placements={"optimizer/*": Placement("nvme", path="/fast")})
    state = fzero.place(state, away)    # and back: fzero.place(state, step)

Nothing is sent, and no bit changes: two steps that differ only in placements can
continue from each other's states. For another stage, number of ranks or layout use
`fzero.reshard`, which ends with `place`.
"""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from fzero.common.arguments import check_kind, check_no_inference
from fzero.simulation import LockstepRanks
from fzero.state import QUANTITIES, TrainState
from fzero.step import TrainStep
from fzero.storage.file_agreement import agree, files_of
from fzero.storage.state_files import StateFiles


def place(state: TrainState[Any], step: TrainStep | LockstepRanks) -> TrainState[Any]:
    """The state with every tensor in the placement of `step`, and the same bits.

    Tensors move one at a time; to and from files they move in sub-groups. A tensor that
    is in place already is shared by both states, so continue with one of them only.
    Files of the old state are removed with its last reference; until then both states'
    files are on the disk.

    *Collective* if tensors move to or from files: every rank; sends a few bytes.

    Args:
        state: the state of a step with the same model, stage, ranks and dtypes.
        step: with other placements.

    Raises:
        ValueError: a tensor has another shape or dtype than in the step; `reshard`
            changes these.
        StoreError, MemoryError: files cannot be made, read or written (on every rank);
            the given state is unchanged.
    """
    fix = "pass place(state, step)"
    check_kind("step", step, TrainStep | LockstepRanks, "a step", fix)
    check_no_inference("place")
    if isinstance(step, LockstepRanks):
        ranks, states = step, step.states_of(state)
        return ranks.joined(ranks.on_each(lambda rank: place(states[rank], ranks.steps[rank])))
    step.runtime.form.check(state)
    old = files_of(state)
    is_served = step.runtime.offload.is_served_by(old)
    return _moved(
        state,
        step,
        old,
        old if is_served else step.runtime.offload.make_files(step.runtime.mesh.world),
    )


def copied(state: TrainState[Any], step: TrainStep | LockstepRanks) -> TrainState[Any]:
    """A copy of a state, with files of its own for tensors in files.

    *Collective* if state is in files: every rank. The new files are removed with the
    copy.

    Raises:
        ValueError: the state is not one of this step.
        StoreError, MemoryError: as `place`.
    """
    if isinstance(step, LockstepRanks):
        ranks, states = step, step.states_of(state)
        return ranks.joined(ranks.on_each(lambda rank: copied(states[rank], ranks.steps[rank])))
    step.runtime.check_state(state)
    in_memory: TrainState[Any] = optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, state
    )
    return _moved(
        in_memory, step, files_of(state), step.runtime.offload.make_files(step.runtime.mesh.world)
    )


def _moved(
    state: TrainState[Any], step: TrainStep, old: StateFiles | None, files: StateFiles | None
) -> TrainState[Any]:
    """The state with every tensor in the placement of `step`, in these files."""
    parts: dict[str, Any] = {name: dict(getattr(state, name)) for name in QUANTITIES}
    error: Exception | None = None
    try:
        for buffer in step.plan.flat_buffers:
            held = {
                name: parts[name][buffer.key] for name in QUANTITIES if buffer.key in parts[name]
            }
            for name, moved in step.runtime.offload.move(buffer, files, held).items():
                parts[name][buffer.key] = moved
    except Exception as raised:
        error = raised
    if old is not None or files is not None:
        agree(files, step.runtime.mesh.world, error=error)
    elif error is not None:
        raise error
    return state._replace(**parts)
