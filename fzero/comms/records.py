"""What does one collective send, and what for? The records that an axis' `observe` is told.

A collective is named by what it is for, so that what crosses the network can be added up by unit, axis or purpose
(`fzero.profiling.comm_trace`), and by the flat buffer that it moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Purpose = Literal[
    "gather", "reduce", "all_gather_params", "loss_stats", "norm", "optimizer", "momentum", "buffers", "agree", "negotiate", "overflow",
    "init", "compare", "reshard", "files", "save", "other",
]  # fmt: skip
Phase = Literal["", "forward", "turn", "backward", "update"]

PURPOSES: dict[Purpose, str] = {
    "gather": "gather",
    "reduce": "reduce",
    "all_gather_params": "all-gather of parameters",
    "loss_stats": "losses of all ranks",
    "norm": "gradient norm",
    "optimizer": "sums of the optimizer",
    "momentum": "join momentum",
    "buffers": "module buffers",
    "agree": "names of module buffers that move",
    "negotiate": "negotiate the next unit",
    "overflow": "first overflow",
    "init": "init",
    "compare": "compare what the ranks were given",
    "reshard": "reshard",
    "files": "whether the files of all ranks are whole",
    "save": "save or load",
    "other": "collective",
}
"""What an error message calls each: parameters are gathered, gradients reduced and updated shards joined."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a collective is for.

    Args:
        purpose: one of `PURPOSES`.
        buffer: the key of the flat buffer that it moves (or the name of what it moves else), "" for none.
        phase: of the step; "turn" is between forward and backward, "" outside of a step.

    >>> print(Label("gather", "blocks.0/float32", "forward"))
    gather blocks.0/float32
    """

    purpose: Purpose
    buffer: str = ""
    phase: Phase = ""

    def __str__(self) -> str:
        return f"{PURPOSES[self.purpose]} {self.buffer}".rstrip()


class CommRecord(NamedTuple):
    """What one collective sends, as told to an axis' `observe`.

    `num_elements` counts what this rank sends to all others together, `(W-1)/W · P` for a gather or a reduce-scatter
    of P elements, in a comm hook as they were before they are coded; `nbytes` is what travels, in bytes. `axis` is the mesh axis
    that it crosses: "everyone" where ranks of a mesh of several axes tell all others something. `is_joined` is of what
    shares one call with other flat buffers.
    """

    collective: str
    axis: str
    label: Label
    num_elements: int
    nbytes: int
    is_joined: bool = False
