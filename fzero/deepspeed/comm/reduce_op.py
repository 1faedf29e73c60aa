"""`deepspeed.comm.reduce_op`: torch's reductions."""

from fzero.deepspeed.comm.comm import ReduceOp

__all__ = ["ReduceOp"]
