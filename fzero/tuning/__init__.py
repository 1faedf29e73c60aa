"""The autotuner: candidates, probes in the ranks, the search and its report.

May import: the public names, estimation, profiling, launch and below. Begin with
`fzero.tuning.cli`.
"""

__all__ = ["cli", "probe", "report", "runs", "search", "space"]
