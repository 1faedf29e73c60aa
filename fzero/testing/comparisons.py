"""Comparisons of states, tensors and numbers, for `fzero.testing.training_machine`.
Each describes a difference in words.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from fzero.optim.transforms import same_bits
from fzero.state import TrainState
from fzero.storage.file_tensor import in_memory
from sharding import Sharded, TensorSpec


def raise_first(law: str, *faults: str | None) -> None:
    """Raises an AssertionError with the law and the first fault, if there is one."""
    for fault in faults:
        if fault:
            raise AssertionError(f"{law}. Found that {fault}")


def full(x_W: Tensor, spec: TensorSpec) -> Tensor:
    """A flat tensor (P,) from the parts of all ranks."""
    return x_W.reshape(-1) if isinstance(spec.spec, Sharded) else x_W[0]


def copied(state: TrainState[Tensor]) -> TrainState[Tensor]:
    """A copy of a state, in memory."""
    copy: TrainState[Tensor] = optree.tree_map(torch.clone, in_memory(state))
    return copy


def changed(
    before: TrainState[Tensor], after: TrainState[Tensor], *, but: tuple[str, ...] = ()
) -> str | None:
    """The first tensor with other bits; the fields `but` are ignored."""
    nothing: dict[str, Any] = {field: {} for field in but}
    before, after = in_memory(before)._replace(**nothing), in_memory(after)._replace(**nothing)
    for name, x, y in zip(
        names_of(before), optree.tree_leaves(before), optree.tree_leaves(after), strict=True
    ):
        if not same_bits(x, y):
            return f"{name} changed"
    return None


def near(found: float, expected: float, rounding: float = 1e-5) -> bool:
    """Whether two numbers are equal up to rounding, or both NaN."""
    if expected != expected:
        return found != found
    return found == expected or abs(found - expected) <= rounding * max(abs(found), abs(expected))


def differs(found: Tensor, expected: Tensor, rounding: float, norm: float, name: str) -> str | None:
    """How a tensor differs from the expected one, or None.

    Args:
        rounding: the allowed difference as a fraction of the gradient's norm, plus a
            little of their own; 0 for equal bits.
        norm: the norm of the gradient.
    """
    if found.shape != expected.shape:
        return f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    found, expected = found.double(), expected.double()
    if torch.equal(found, expected):
        return None
    gap = (found - expected).abs().max().item()
    allowed = rounding * max(norm, norm**2) + (
        2.0**-18 * expected.abs().max().item() if rounding else 0.0
    )
    if gap <= allowed:
        return None
    return (
        f"{name} is {found.tolist()}, not {expected.tolist()}: {gap:.3g} apart where "
        f"{allowed:.3g} is rounding"
    )


def names_of(state: TrainState[Any]) -> list[str]:
    """The paths of a state's tensors."""
    return [accessor.codify("state") for accessor in optree.tree_accessors(state)]
