"""LoRA layers as one matrix (arXiv:2106.09685): the product of the small ones is added
to a copy of the large one.

Two kinds are known by their attributes: those of DeepSpeed-Chat (`lora_right_weight`,
`lora_left_weight`, `lora_scaling`, `fuse_lora`) and peft's (`merge`, `merged_adapters`,
`get_base_layer`), whose own `merge` computes the sum, with all its variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fzero.model.binding import bound

CHAT = ("lora_left_weight", "lora_right_weight", "lora_scaling", "fuse_lora")
PEFT = ("merge", "merged_adapters", "get_base_layer", "active_adapters", "disable_adapters")
"""The attributes of the two kinds of layers."""


def has_lora(model: nn.Module) -> bool:
    """Whether a model has LoRA layers that `fuse_lora` knows.

    >>> has_lora(nn.Linear(2, 2))
    False
    """
    return any(True for _ in _layers(model))


def lora_params(model: nn.Module) -> list[list[Any]]:
    """[right matrix, left matrix, scale, weight] of each LoRA layer with the attributes
    of DeepSpeed-Chat's.
    """
    found: list[Any] = [
        module for module in model.modules() if all(hasattr(module, which) for which in CHAT)
    ]
    return [
        [layer.lora_right_weight, layer.lora_left_weight, layer.lora_scaling, layer.weight]
        for layer in found
    ]


@torch.no_grad()
def fuse_lora(model: nn.Module, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters with `W + scale · (left · right)` instead of the `W` of each LoRA
    layer, rounded once to its dtype.

    Pure: neither `params` nor the model's own are changed. The small matrices stay as
    they are; the model must not add them again (`merged`). Sends nothing.

    Args:
        model: has the LoRA layers.
        params: full parameters by the model's names; tied ones need only the first of
            theirs.

    Raises:
        ValueError: a LoRA layer shares its matrix with another module, which must not
            get the sum.
    """
    found, layers = dict(params), list(_layers(model))
    aliases = _aliases(model) if layers else {}
    for name, layer in layers:
        if hasattr(layer, "lora_left_weight"):
            key = f"{name}.weight".lstrip(".")
            left, right = (
                found[f"{name}.{which}".lstrip(".")]
                for which in ("lora_left_weight", "lora_right_weight")
            )
            delta = layer.lora_scaling * (right.float() @ left.float()).T
            found[_own(key, aliases)] = (found[key].float() + delta).to(found[key].dtype)
        else:
            found |= _merged_by_peft(model, name, layer, found, aliases)
    return found


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Inside, LoRA layers compute with their one matrix alone: for parameters of
    `fuse_lora`.
    """
    before: list[tuple[Any, str, Any]] = []
    for _, layer in _layers(model):
        attribute = "fuse_lora" if hasattr(layer, "lora_left_weight") else "merged_adapters"
        before.append((layer, attribute, getattr(layer, attribute)))
        setattr(layer, attribute, True if attribute == "fuse_lora" else list(layer.active_adapters))
    try:
        yield
    finally:
        for layer, attribute, value in before:
            setattr(layer, attribute, value)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The LoRA layers, by name; those whose adapters are merged or switched off already
    compute without them.
    """
    for name, module in model.named_modules():
        is_chat = all(hasattr(module, which) for which in CHAT) and not module.fuse_lora
        is_peft = all(hasattr(module, which) for which in PEFT) and not (
            module.merged_adapters or module.disable_adapters
        )
        if is_chat or is_peft:
            yield name, module


def _merged_by_peft(
    model: nn.Module,
    name: str,
    layer: Any,
    params: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> dict[str, Tensor]:
    """The parameters of one peft layer's base after `merge`, which writes to copies."""
    base = next(
        prefix for prefix, module in layer.named_modules() if module is layer.get_base_layer()
    )
    keys = [
        f"{name}.{base}.{key}".lstrip(".")
        for key, _ in layer.get_base_layer().named_parameters(recurse=False)
    ]
    copies = {_own(key, aliases): params[key].clone() for key in keys}
    seen = {
        key: nn.Parameter(value, requires_grad=False)
        for key, value in (dict(params) | copies).items()
    }
    buffers = dict(model.named_buffers())
    with bound(model, dict(aliases), seen.__getitem__, buffers):
        layer.merge()
    layer.merged_adapters = []
    return {key: seen[key].data for key in copies}


def _aliases(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters, each with the first one."""
    first: dict[int, str] = {}
    return {
        name: first[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(param), name) != name
    }


def _own(key: str, aliases: Mapping[str, str]) -> str:
    others = {name for pair in aliases.items() if key in pair for name in pair} - {key}
    if others:
        raise ValueError(
            f"fuse_lora: the LoRA layer's {key!r} must be its own, and is tied to "
            f"{sorted(others)[0]!r}, which would get the sum, too; pass fuse=False"
        )
    return key
