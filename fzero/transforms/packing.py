"""`packed`: frozen weights stored in 8 or 4 bits, as bytes with a scale for each group;
modules see the numbers.

Numbers are those of `fzero.compression.formulas.quantize` (symmetric), so that stage 3
shards and gathers a quarter or an eighth of the bytes of fp32, and a module computes as
with the rounded weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from fzero.compression.formulas import quantize
from fzero.model.binding import is_bound
from fzero.model.transforms import (
    Changes,
    Number,
    Pulled,
    PulledGrad,
    Size,
    Tensors,
    TransformedStep,
    added_to,
)
from fzero.transforms.matching import (
    Patterns,
    add_param,
    patterns_of,
    shape_of,
    weight_of,
    weights_of,
)


def groups_of(shape: tuple[int, ...], group: int) -> tuple[int, int]:
    """The shape of the scales: rows, and groups of a row; a row that `group` does not
    divide is one group.
    """
    columns = math.prod(shape[1:])
    return shape[0], 1 if columns % group else columns // group


def pack(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """A weight's bytes (two numbers each, for 4 bits), and the scales of its groups."""
    rows, groups = groups_of(tuple(weight.shape), group)
    wide = weight.detach().float().reshape(rows, groups, -1)
    scale = wide.abs().amax(-1) * (2 / 2**bits)
    steps = quantize(wide, bits, rows * groups, symmetric=True) / scale.masked_fill(
        scale == 0, 1
    ).unsqueeze(-1)
    codes = (steps.round() + 2 ** (bits - 1)).to(torch.uint8).flatten()
    return (codes if bits == 8 else codes[::2] | codes[1::2] << 4), scale.to(weight.dtype)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The view of packed bytes as the numbers (see `ParamView`)."""

    scale: str
    shape: tuple[int, ...]
    bits: int
    offset: int = 0
    trains: tuple[str, ...] = ()
    needs_input: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """See `ParamView`."""
        return (self.scale,)

    def shared(self, x: Tensor, tensors: Tensors) -> Tensors:
        """See `ParamView`."""
        return {}

    def value(self, x: Tensor, tensors: Tensors, n: Number) -> Tensor:
        """See `ParamView`."""
        if x.dtype != torch.uint8:
            raise ValueError(
                f"packed: must come before other transforms of {self.scale!r}'s weight; move it to "
                f"the front"
            )
        scale = tensors[self.scale]
        codes = x if self.bits == 8 else torch.stack([x & 15, x >> 4], -1)
        numbers: Tensor = codes.reshape(*scale.shape, -1).to(scale.dtype) - 2 ** (self.bits - 1)
        return (numbers * scale.unsqueeze(-1)).reshape(self.shape)

    def pulled(self, grad: PulledGrad, x: Tensor | None, tensors: Tensors, n: Number) -> Pulled:
        """See `ParamView`: nothing trains bytes."""
        return Pulled(grad)


def _check_is_in_step(module: nn.Module, args: object) -> None:
    """Raises where a module would compute with bytes, its own or those of a module in
    it.
    """
    for part in () if is_bound(module) else module.modules():
        weight = part._parameters.get("weight")
        if weight is not None and weight.dtype == torch.uint8 and "weight" in added_to(part):
            raise ValueError(
                f"packed: a {type(part).__name__} with packed weights must run in a step, which "
                f"makes numbers of its bytes, and was called outside; call it in "
                f"step.inspect(state, …), or load fzero.transforms.merged(…) into a plain model"
            )


def _check_calls(model: nn.Module, weight: str) -> None:
    """Checks the calls of all modules that a weight is in: any may read it."""
    for name in ("", *accumulate(weight.split(".")[:-1], "{}.{}".format)):
        module = model.get_submodule(name)
        if _check_is_in_step not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_check_is_in_step)


@dataclass(frozen=True)
class Packed:
    """The transform of `packed`."""

    patterns: tuple[str, ...]
    bits: Literal[8, 4]
    group: int

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`. It replaces each weight by its bytes, once, and adds
        `weight_scale`.
        """
        views: dict[str, tuple[Unpacked]] = {}
        for name, modules in weights_of(spec.model, "packed", self.patterns).items():
            weight, shape, scale = weight_of(modules[0]), shape_of(modules[0]), f"{name}_scale"
            if weight.is_meta or (math.prod(shape) * self.bits) % 8:
                why = "its values" if weight.is_meta else "an even number of elements"
                raise ValueError(
                    f"packed: {name!r} must have {why}, got {weight.device}, {shape}; leave it "
                    f"out, or load weights"
                )
            if weight.dtype != torch.uint8:
                codes, scales = pack(weight, self.bits, self.group)
                add_param(modules[0], "weight_scale", scales, field="packed", trained=False)
                replaced = nn.Parameter(codes, requires_grad=False)
                for module in modules:
                    module._parameters["weight"] = replaced
                    added_to(module)["weight"] = shape
            elif (weight.numel() * 8, modules[0].weight_scale.shape) != (
                math.prod(shape) * self.bits, groups_of(shape, self.group),
            ):  # fmt: skip
                raise ValueError(
                    f"packed: {name!r} must be packed once, got bits={self.bits}, "
                    f"group={self.group} after others; build it anew"
                )
            views[name] = (Unpacked(scale, shape, self.bits),)
        of_bytes = {id(spec.model.get_parameter(name)) for name in views}
        for user, param in spec.model.named_parameters(remove_duplicate=False):
            if id(param) in of_bytes:
                _check_calls(spec.model, user)
        sizes = {name: Size(math.prod(view.shape), view.scale) for name, (view,) in views.items()}
        added = frozenset(view.scale for (view,) in views.values())
        return Changes(name="packed", text=str(self), views=views, sizes=sizes, added=added)


def packed(pattern: Patterns, *, bits: Literal[8, 4] = 8, group: int = 64) -> Packed:
    """Stores weights in few bits and freezes them. The model then needs a step to
    compute; `merged` gives its weights back.

    Args:
        pattern: names of modules with a `weight`, with `*` for any part.
        group: the elements of a row that share a scale.
    """
    if bits not in (8, 4):
        raise ValueError(f"packed: bits must be 8 or 4, got {bits!r}; pass one of these")
    if type(group) is not int or group < 1:
        raise ValueError(f"packed: group must be a positive integer, got {group!r}; pass 64, say")
    return Packed(patterns_of("packed", pattern), bits, group)
