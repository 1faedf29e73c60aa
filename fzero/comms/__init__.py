"""Axes of ranks and the collectives along them, comm hooks and codecs, process groups, hang reports: the only door to
torch.distributed.

May import: sharding, common. Begin with `fzero.comms.collectives`.
"""

__all__ = [
    "codecs",
    "collectives",
    "comm_hooks",
    "lockstep",
    "meeting",
    "mesh",
    "mesh_in_graph",
    "records",
    "rendezvous",
    "stacked",
    "thread_dumps",
    "watchdog",
]
