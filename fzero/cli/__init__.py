"""Command lines that belong to no other room.

May import: the public names and below. Begin with `fzero.cli.plan_profile`.
"""

__all__ = ["laws", "plan_profile", "works_here"]
