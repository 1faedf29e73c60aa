"""`CommHooks`: for each axis of a step's mesh, the hook that gathers use and the hook that reductions use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.comms.comm_hooks import CommHook
from sharding.views import torch_dtype

ByAxis = Mapping[str, CommHook]
GivenHook = CommHook | ByAxis | None
"""A comm hook for all axes, or comm hooks by axis; None takes those of the configuration."""


@dataclass(frozen=True, slots=True)
class CommHooks:
    """The comm hooks by axis; along an axis that is not named, numbers are sent exactly.

    Attributes:
        gather: for gathers of trained parameters, in the forward and the backward of stage 3.
        frozen: for gathers of frozen parameters.
        reduce: for reductions of gradients.
    """

    gather: ByAxis = field(default_factory=dict)
    frozen: ByAxis = field(default_factory=dict)
    reduce: ByAxis = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.gather or self.frozen or self.reduce)

    def of_gathers(self, dtype: str, *, trained: bool) -> ByAxis:
        """Those for gathers of parameters; codes (packed weights) are no numbers to round, and are sent exactly."""
        return (self.gather if trained else self.frozen) if torch_dtype(dtype).is_floating_point else {}

    def __str__(self) -> str:
        parts = {"gathers": self.gather, "gathers of frozen parameters": self.frozen, "reductions": self.reduce}
        return ", ".join(
            f"{name} along {axis} through {hook.name}"
            for name, hooks in parts.items()
            for axis, hook in hooks.items()
            if not (hooks is self.frozen and self.frozen == self.gather)
        )


def state_like(hook: CommHook, numel: int, dtype: torch.dtype) -> Any:
    """The state of a comm hook for `numel` elements, on the device `meta`."""
    return hook.init(torch.empty(numel, dtype=dtype, device="meta"))
