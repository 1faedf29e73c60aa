"""DeepSpeed's JSON as frozen values that check themselves.

May import: optim and below. Begin with `fzero.config.config`.
"""

__all__ = [
    "autotuning",
    "config",
    "conflicts",
    "deepspeed_keys",
    "elastic_batch",
    "elasticity",
    "fields",
    "files",
    "offload",
    "optimizers",
    "precision",
    "schedulers",
    "table",
    "unused_keys",
]
