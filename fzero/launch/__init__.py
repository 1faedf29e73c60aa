"""Starting ranks on one machine and many, and what happens when one ends.

May import: common, comms, config. Begin with `fzero.launch.cli`.
"""

__all__ = [
    "agent",
    "cli",
    "environment",
    "feed",
    "hostfile",
    "launchers",
    "preflight",
    "reaper",
    "rendezvous",
    "supervise",
]
