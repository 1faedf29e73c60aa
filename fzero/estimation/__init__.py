"""Steps followed without tensors: memory, bytes on the wire and seconds of a plan, and the plan that fits.

May import: graph, runtime, storage, plans and below; not step. Begin with `fzero.estimation.compare`.
"""

__all__ = [
    "activation_trace",
    "compare",
    "dry_pass",
    "dry_run",
    "dry_update",
    "fit",
    "fit_search",
    "ledger",
    "models",
    "unit_events",
    "zero_formulas",
]
