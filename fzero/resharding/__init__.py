"""State moved between steps: another stage, world size, layout or placement; single full parameters.

May import: step, simulation and below. Begin with `fzero.resharding.reshard`.
"""

__all__ = ["parameters", "place", "plan", "reshard"]
