"""Optimizers as transforms of flat buffers, mixed precision, learning-rate schedules,
the loss scale.

May import: sharding, common. Begin with `fzero.optim.transforms`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.optim import (
        elementwise as elementwise,
        lr_schedules as lr_schedules,
        matrix as matrix,
        torch_optim as torch_optim,
    )
    from fzero.optim.adam_kernels import adam as adam, adamw as adamw
    from fzero.optim.elementwise import check_elementwise as check_elementwise
    from fzero.optim.fragments import ShardContents as ShardContents
    from fzero.optim.loss_scale import LossScale as LossScale, LossScaling as LossScaling
    from fzero.optim.matrix import adafactor as adafactor, lamb as lamb, muon as muon
    from fzero.optim.optimizers import adagrad as adagrad, lion as lion, scale as scale, sgd as sgd
    from fzero.optim.precision import Precision as Precision
    from fzero.optim.preconditioned import (
        normuon as normuon,
        shampoo as shampoo,
        soap as soap,
    )
    from fzero.optim.torch_optim import torch_optimizer as torch_optimizer
    from fzero.optim.transforms import (
        Transform as Transform,
        chain as chain,
        mixed_precision as mixed_precision,
        skip_if as skip_if,
    )
    from fzero.optim.whole_matrices import (
        MatrixTransform as MatrixTransform,
        matrix_transform as matrix_transform,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "adam_kernels": "adam adamw",
            "elementwise": "check_elementwise",
            "fragments": "ShardContents",
            "loss_scale": "LossScale LossScaling",
            "matrix": "adafactor lamb muon",
            "precision": "Precision",
            "preconditioned": "normuon shampoo soap",
            "torch_optim": "torch_optimizer",
            "": "elementwise lr_schedules matrix torch_optim",
            "optimizers": "adagrad lion scale sgd",
            "transforms": "Transform chain mixed_precision skip_if",
            "whole_matrices": "MatrixTransform matrix_transform",
        },
    )
