"""Optimizers as transforms of flat buffers, mixed precision, learning-rate schedules, the loss scale.

May import: sharding, common. Begin with `fzero.optim.transforms`.
"""

__all__ = ["fragments", "loss_scale", "lr_schedules", "matrix", "mixed_precision", "torch_optim", "transforms"]
