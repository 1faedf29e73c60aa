"""The traffic of a collective: its messages, records of it, and labels with its
purpose. An axis's `observe` gets the records.

A label holds the purpose of a collective and the flat buffer that it moves. So the
traffic can be added up by unit, axis or purpose (`fzero.profiling.comm_trace`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

Purpose = Literal[
    "gather",
    "reduce",
    "all_gather_params",
    "loss_stats",
    "norm",
    "optimizer",
    "owners",
    "buffers",
    "agree",
    "negotiate",
    "overflow",
    "init",
    "compare",
    "reshard",
    "files",
    "save",
    "stages",
    "heads",
    "other",
]
Phase = Literal["", "forward", "boundary", "backward", "update"]

PURPOSES: dict[Purpose, str] = {
    "gather": "gather",
    "reduce": "reduce",
    "all_gather_params": "all-gather of parameters",
    "loss_stats": "losses of all ranks",
    "norm": "gradient norm",
    "optimizer": "sums of the optimizer",
    "owners": "exchange with the owners of matrices",
    "buffers": "module buffers",
    "agree": "names of changed module buffers",
    "negotiate": "negotiation of the next unit",
    "overflow": "first overflow",
    "init": "init",
    "compare": "comparison of the arguments of all ranks",
    "reshard": "reshard",
    "files": "check of the files of all ranks",
    "save": "save or load",
    "stages": "message between pipeline stages",
    "heads": "exchange of tokens and heads",
    "other": "collective",
}
"""The names of the purposes in error messages and tables."""


@dataclass(frozen=True, slots=True)
class Label:
    """The purpose of a collective.

    Args:
        purpose: one of `PURPOSES`.
        buffer: the key of the flat buffer that it moves, or another name of its
            contents; "" for none.
        phase: the phase of the step; "boundary" is between forward and backward, ""
            outside of a step.

    >>> print(Label("gather", "blocks.0/float32", "forward"))
    gather blocks.0/float32
    """

    purpose: Purpose
    buffer: str = ""
    phase: Phase = ""

    def __str__(self) -> str:
        return f"{PURPOSES[self.purpose]} {self.buffer}".rstrip()


@cache  # a step asks for it several times per unit
def label_of(purpose: Purpose, buffer: str, phase: Phase) -> Label:
    """The label of a flat buffer's collective."""
    return Label(purpose, buffer, phase)


class CommRecord(NamedTuple):
    """The traffic of one collective, as the `observe` of an axis gets it.

    Attributes:
        num_elements: elements that this rank sends to all others together:
            `(W-1)/W · P` for a gather or a reduce-scatter of P elements. If a comm hook
            encodes them, they are counted before encoding.
        nbytes: bytes that this rank sends.
        axis: the mesh axis; "world" for numbers that go to all ranks of a mesh of
            several axes.
        is_joined: whether one call moves other flat buffers, too.
    """

    collective: str
    axis: str
    label: Label
    num_elements: int
    nbytes: int
    is_joined: bool = False


class AxisMessages(NamedTuple):
    """The messages of one rank in a collective along one axis: the elements of each,
    and to how many ranks.
    """

    numel: int
    num_others: int


def messages(numel: int, sizes: Iterable[int]) -> Iterator[AxisMessages]:
    """The messages of a reduce-scatter of `numel` elements along axes of these sizes,
    one axis after the other.

    Its transpose, the all-gather that ends with `numel` elements, has the same messages
    in the opposite order. Primitives, plans and dry runs read them here.

    >>> [*messages(24, [3, 2])]
    [AxisMessages(numel=8, num_others=2), AxisMessages(numel=4, num_others=1)]
    """
    for size in sizes:
        numel //= size
        yield AxisMessages(numel, size - 1)
