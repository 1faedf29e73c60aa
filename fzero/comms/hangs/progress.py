"""`PROGRESS`: the collectives of this process so far, and those that it waits for now.

Reports of hangs read it (`fzero.comms.hangs.watchdog`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from fzero.comms.records import Label


class LoneCallError(RuntimeError):
    """Some ranks made a call that every rank must make, and the other ranks will not
    make it; the message names these.
    """


@dataclass(slots=True)
class Progress:
    """The collectives of this process so far."""

    num_steps: int = 0
    number: int = 0
    """Collectives started in this step."""
    label: Label | None = None
    """The label of the last one."""
    waits: dict[int, Label | str] = field(default_factory=dict)
    """The collective or call that each thread waits for."""
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the host has waited for collectives since the process began, by
    their purpose.
    """
    call: str | None = None
    """The meeting in which this rank waits for the others to make the same call
    (`fzero.comms.hangs.meeting`).
    """
    places: dict[int, str] = field(default_factory=dict)
    """The place of each rank of the job in words, where a step has named it ("pipeline
    stage 1").
    """

    def name_of(self, rank: int) -> str:
        """A rank, with its place.

        >>> Progress(places={3: "pipeline stage 1"}).name_of(3), Progress().name_of(3)
        ('rank 3 of pipeline stage 1', 'rank 3')
        """
        return f"rank {rank} of {self.places[rank]}" if rank in self.places else f"rank {rank}"


PROGRESS = Progress()
