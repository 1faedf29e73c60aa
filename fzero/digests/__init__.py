"""Digests of what a step computes; `replay`, which compares two runs of one step, and
ranks that hold the same values; `record` and `diff`, which compare runs.

May import: checkpoint, resharding, step and below. Begin with
`fzero.digests.replaying` and `fzero.digests.recorder`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.digests.comparing import Difference as Difference, diff as diff
    from fzero.digests.digest import Digest as Digest
    from fzero.digests.recorder import (
        RecordedModule as RecordedModule,
        RecordedStep as RecordedStep,
        record as record,
        record_module as record_module,
    )
    from fzero.digests.recording import Recording as Recording, RecordingError as RecordingError
    from fzero.digests.replaying import ReplayError as ReplayError, replay as replay
    from fzero.digests.sums import Sums as Sums
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "comparing": "Difference diff",
            "digest": "Digest",
            "recorder": "RecordedModule RecordedStep record record_module",
            "recording": "Recording RecordingError",
            "replaying": "ReplayError replay",
            "sums": "Sums",
        },
    )
