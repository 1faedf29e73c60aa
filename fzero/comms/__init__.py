"""Axes of ranks and the collectives along them, comm hooks and codecs, process groups,
hang reports: the only door to torch.distributed.

May import: sharding, common. Begin with `fzero.comms.axes` and
`fzero.comms.primitives`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.comms.axes import (
        AbstractAxis as AbstractAxis,
        CollectiveError as CollectiveError,
        ProcessAxis as ProcessAxis,
    )
    from fzero.comms.codecs import Codec as Codec, cast as cast, quantize as quantize
    from fzero.comms.comm_hooks import (
        CommHook as CommHook,
        Sending as Sending,
        completed as completed,
        exact as exact,
    )
    from fzero.comms.compression import (
        compressed as compressed,
        error_feedback as error_feedback,
        reset_every as reset_every,
    )
    from fzero.comms.primitives import (
        Primitive as Primitive,
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        reduce_scatter as reduce_scatter,
    )
    from fzero.comms.process_group import join as join, shutdown as shutdown
    from fzero.comms.records import CommRecord as CommRecord, Label as Label
    from fzero.comms.rendezvous import RankInfo as RankInfo, launched as launched
    from fzero.comms.stacked import (
        Stacked as Stacked,
        StackedAxis as StackedAxis,
        VmapError as VmapError,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "axes": "AbstractAxis CollectiveError ProcessAxis",
            "codecs": "Codec cast quantize",
            "comm_hooks": "CommHook Sending completed exact",
            "compression": "compressed error_feedback reset_every",
            "primitives": "Primitive all_gather all_reduce all_to_all reduce_scatter",
            "process_group": "join shutdown",
            "records": "CommRecord Label",
            "rendezvous": "RankInfo launched",
            "stacked": "Stacked StackedAxis VmapError",
        },
    )
