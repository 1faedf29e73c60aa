"""The tensors that techniques add to modules: registered in them, with their first
values.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fzero.compression.plan import CompressionPlan, Extra


def registered(plan: CompressionPlan, model: nn.Module) -> None:
    """Registers the scores, masks and ranges of a plan in the modules, unless they are
    there. Values are set by `init`.

    Scores are ordinary parameters of their module from then on. A mask without any True
    stands for one to be made from the weights of the first state.
    """
    for extra in plan.extras:
        module = model.get_submodule(extra.module)
        there = module._parameters.get(extra.key, module._buffers.get(extra.key))
        if there is not None:
            if tuple(there.shape) != extra.shape:
                raise ValueError(
                    f"compression_training: {extra.name!r} must have the shape {extra.shape} in "
                    f"this plan, got {tuple(there.shape)} in the model; pass a model that another "
                    f"plan has not prepared"
                )
            continue
        own = next(module.parameters(recurse=False))
        value = first_value(
            extra, plan.seed, own.dtype if extra.kind == "scores" else torch.float32
        ).to(own.device)
        if extra.kind == "scores":
            module.register_parameter(extra.key, nn.Parameter(value))
        else:
            module.register_buffer(extra.key, value)


def first_value(extra: Extra, seed: int, dtype: torch.dtype) -> Tensor:
    """The first value of an added tensor, on the CPU: drawn scores, a mask that is
    still to be made, an empty range.
    """
    if extra.kind == "mask":
        return torch.zeros(extra.shape, dtype=torch.bool)
    if extra.kind == "range":
        return torch.zeros(extra.shape)
    scores = torch.empty(extra.shape)
    nn.init.kaiming_uniform_(
        scores, a=5**0.5, generator=torch.Generator().manual_seed(salt_of(seed, extra.name))
    )
    return scores.to(dtype)


def salt_of(seed: int, name: str) -> int:
    """A number that makes the random numbers of each tensor differ from those of
    others.
    """
    return zlib.crc32(f"{seed}/{name}".encode())
