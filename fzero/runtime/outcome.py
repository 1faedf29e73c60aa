"""The host's part in the end of a step: it raises the errors that `fzero.runtime.finish` found.

On the CPU, an error names the first parameter whose gradient is not finite. On a GPU the host does not wait for the result; a
device-side assertion ends the process instead. Shape letters: A micro-steps, W ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.axes import RankAxis
from fzero.comms.records import Label
from fzero.runtime.finish import Outcome
from fzero.runtime.loss import check_rows, loss_row
from fzero.runtime.step_runtime import StepRuntime
from fzero.runtime.step_spec import MismatchError, check_same
from fzero.state import TrainState

NamedHyper = Callable[[], dict[str, dict[str, str]]]
"""Values as text, by subject and name."""


def check_outcome(
    run: StepRuntime, outcome: Outcome, state: TrainState[Tensor], named: NamedHyper, *, is_sum: bool
) -> None:
    """Raises on every rank unless the step may go on: an update, or an overflow that is skipped.

    Args:
        state: holds the gradients of the step.
        named: as in `check_alike`.
        is_sum: whether each loss is a sum.

    Raises:
        CollectiveError, MismatchError: see `check_alike`.
        ValueError: see `check_rows`.
        FloatingPointError: the loss or the gradient is not finite, or the loss scale would shrink below its minimum.
    """
    stats_AW4, skips = outcome.loss_stats, run.rules.skips_overflow
    if outcome.ok.device.type != "cpu":
        is_alike = (stats_AW4[..., 2:] == stats_AW4[:, :1, 2:]).all()
        torch._assert_async(is_alike, "fzero: the ranks are in different steps, or have other learning rates")
        check_rows(stats_AW4[..., :2].flatten(0, 1), is_sum=is_sum)
        found = (
            "an overflow with the loss scale at its minimum" if skips else "the loss or the gradient norm is not finite"
        )
        torch._assert_async(outcome.ok, f"fzero: {found}")
    elif not outcome.ok:
        for rows_W4 in stats_AW4:
            check_alike(rows_W4[:, 2:], run.mesh.world, named)
        check_rows(stats_AW4[..., :2].flatten(0, 1), is_sum=is_sum)
        from fzero.runtime.faults import what_is_not_finite  # for the error alone

        raise FloatingPointError(what_is_not_finite(run, outcome, state))


def check_alike(numbers_M2: Tensor, world: RankAxis, hyper: NamedHyper) -> None:
    """Raises on every rank when the number of the forward-backward or the hyper-parameters differ between ranks.

    This is for the CPU, where reading costs nothing. For other devices `check_outcome` makes the check.

    Args:
        numbers_M2: rows of (number of the forward-backward, checksum of the hyper-parameters), at least one row of each rank.
        world: the ranks.
        hyper: this rank's hyper-parameters as text, by subject and name.

    Raises:
        CollectiveError: the ranks are in different steps.
        MismatchError: their hyper-parameters differ.
    """
    if len(numbers_M2) == 1 or numbers_M2.device.type != "cpu" or (numbers_M2 == numbers_M2[0]).all():
        return
    check_passes(numbers_M2[:, 0])
    check_same(
        world, hyper(),
        fix="compute it from what is the same on all ranks (metrics.loss is the mean over them), or on rank 0 for all",
    )  # fmt: skip
    raise MismatchError(
        "hyper-parameters: must be the same on all ranks, and differ; compute them from the same numbers"
    )


@lru_cache(maxsize=16)
def mark_of(names: frozenset[str]) -> float:
    """A checksum in [0, 1) of a set of parameter names, to be added to the number of a forward-backward; 0 for no names."""
    return zlib.crc32(" ".join(sorted(names)).encode()) / 2**32 if names else 0.0


UPDATING = math.inf
"""The number that a rank sends in an update; a rank in a backward sends another one."""


def number_of(num_passes: int, still: frozenset[str], *, is_last: bool) -> float:
    """The number by which ranks compare a backward: from the number of passes so far, the parameters without gradients, and
    whether it is the last."""
    number = num_passes + mark_of(still)
    return number if is_last else -number


def check_updating(world: RankAxis) -> None:
    """Raises CollectiveError if another rank is in a backward: its row arrives here, and shows that. *Collective.*"""
    row = loss_row(torch.zeros(()), None, UPDATING, 0.0, 0.0)
    check_passes(collectives.stack(row, world, label=Label("loss_stats", phase="update"))[:, 2])


def check_passes(numbers_W: Tensor) -> None:
    """Raises on every rank when the numbers of the ranks' forward-backwards differ. On a device it does nothing."""
    if numbers_W.device.type != "cpu" or (numbers_W == numbers_W[0]).all():
        return
    from fzero.runtime.faults import differing_passes  # for the error alone

    raise differing_passes(numbers_W)
