"""`deepspeed.runtime.zero.mics`: MiCS is the key `zero_optimization.mics_shard_size`."""

from fzero.deepspeed.engine.optimizer import ZeroOptimizer3 as MiCS_Optimizer
from fzero.deepspeed.runtime.zero.partition_parameters import Init


class MiCS_Init(Init):
    """As `Init`."""


__all__ = ["MiCS_Init", "MiCS_Optimizer"]
