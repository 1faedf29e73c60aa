"""`together`, `of_rank_0`: collective calls around files, in which an error on one rank
is raised on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fzero.checkpoint.folders import CheckpointError, NoCheckpointError
from fzero.common.arguments import check_kind
from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.records import Label
from fzero.simulation import LockstepRanks
from fzero.step import TrainStep
from fzero.storage.file_tensor import StoreError

T = TypeVar("T")

_RAISED = (ValueError, StoreError, NoCheckpointError)
"""Errors that are raised on all ranks with their own type; all others become a
CheckpointError.
"""


def together(axis: RankAxis, function: Callable[[], T]) -> T:
    """The result of `function`; an error on any rank is raised on all. *Collective:*
    sends some numbers.
    """
    values: list[T] = []
    problem: Exception | None = None
    try:
        values.append(function())
    except (CheckpointError, ValueError, OSError, StoreError) as error:
        problem = error
    index = next((i for i, kind in enumerate(_RAISED) if isinstance(problem, kind)), len(_RAISED))
    world = collectives.exchange((report_of(problem), index), axis, label=Label("save"))
    for rank, (message, index) in enumerate(world):
        if message:
            kind = [*_RAISED, CheckpointError][index]
            raise kind(message if len(world) == 1 else f"{message} (on rank {rank})") from problem
    return values[0]


def check_same_folder(axis: RankAxis, dir: str | Path, call: str) -> None:
    """Raises a ValueError on every rank unless all were given the same folder.
    *Collective:* sends its name.
    """
    folders = collectives.exchange(os.path.abspath(dir), axis, label=Label("save"))
    for rank, folder in enumerate(folders):
        if folder != folders[0]:
            raise ValueError(
                f"{call}: dir must be the same on all ranks, got {folders[0]} on rank 0 and "
                f"{folder} on rank {rank}; pass the same folder on every rank, on a filesystem "
                f"that all of them share"
            )


def of_rank_0(axis: RankAxis, function: Callable[[], T]) -> T:
    """The result of `function`, a plain value, or its error; called on rank 0 only.
    *Collective:* sends it to all ranks.
    """
    value = together(axis, lambda: function() if axis.rank == 0 else None)
    found: T = collectives.exchange(value, axis, label=Label("save"))[0]
    return found


def report_of(problem: Exception | None) -> str | None:
    return None if problem is None else str(problem) or repr(problem)


def check_step(step: object) -> None:
    """Raises a ValueError for anything but a step."""
    fix = "pass what fzero.make_train_step or fzero.simulate(..., by='lockstep') returned"
    check_kind("step", step, TrainStep | LockstepRanks, "a step", fix)
