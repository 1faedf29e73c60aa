"""Starts ranks on one machine or many, watches them, and ends the job when one fails.

May import: common, comms, config. Begin with `fzero.launch.cli`.
"""

__all__ = [
    "agent", "cli", "environment", "feed", "hostfile", "launchers", "preflight", "reaper", "rendezvous", "supervise",
]  # fmt: skip
