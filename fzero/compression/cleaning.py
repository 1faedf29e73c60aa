"""`clean` and `shrunk`: compression made permanent in a state dict, and the module for
matrices that have become smaller.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fzero.compression.plan import CompressionPlan, is_added
from fzero.compression.techniques import Quantize, Technique

HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "nhead")
"""Attributes that hold a number of heads."""
WIDTHS = ("all_head_size", "inner_dim", "embed_dim")
"""Attributes of modules with heads that hold the width of all heads."""


def clean(
    weights: Mapping[str, Tensor], plan: CompressionPlan | None, *, num_updates: int | None = None
) -> dict[str, Tensor]:
    """The weights as modules see them, without the tensors that techniques added;
    related modules get smaller matrices.

    Loaded into a plain model of the same kind, or into `shrunk`, they compute what the
    compressed model did: for masks bit for bit, for dimensions that are cut to
    rounding. Inputs are not quantized there, except inside `quantized_inputs`.

    Args:
        weights: a full state dict, such as `step.gather(state)`.
        plan: the plan of the step; None, that of a step without compression, leaves the
            weights as they are.
        num_updates: the number of updates behind the weights: techniques whose offset
            lies beyond are left out, and falling bits are those of that moment. None
            takes all of them, with their last bits.

    Raises:
        ValueError: the state dict lacks a tensor of the plan.
    """
    plan = plan or CompressionPlan()
    final = (
        plan
        if num_updates is not None
        else replace(plan, params={k: _last(v) for k, v in plan.params.items()})
    )
    n = (
        max((x.offset for of in plan.params.values() for x in of), default=0)
        if num_updates is None
        else num_updates
    )
    for name in (*plan.params, *sorted(plan.needs(plan.params))):
        if name not in weights:
            raise ValueError(
                f"clean: weights must have {name!r}, which the plan uses, and lack it; pass "
                f"step.gather(state) of the step with this plan, before it was cleaned"
            )
    added = {extra.name for extra in plan.extras}
    with torch.no_grad():
        found = {
            key: value for key, value in weights.items() if plan.aliases.get(key, key) not in added
        }
        for name in plan.params:
            found[name] = final.seen(name, weights[name], n, weights)
        found = _cut(found, weights, plan, n)
        return found | {
            alias: found[owner] for alias, owner in plan.aliases.items() if alias in found
        }


def _last(techniques: tuple[Technique, ...]) -> tuple[Technique, ...]:
    """The techniques with the bits that they have at the end, and without a share of
    the unquantized weight.
    """
    return tuple(
        replace(x, start_bits=x.target_bits, change_ratio=None) if isinstance(x, Quantize) else x
        for x in techniques
    )


def _cut(
    found: dict[str, Tensor], weights: Mapping[str, Tensor], plan: CompressionPlan, n: int
) -> dict[str, Tensor]:
    """The tensors without the elements that shrinking drops."""
    kept: dict[tuple[str, int], Tensor] = {}
    for shrink in plan.shrinks:
        if n < shrink.mask.offset:
            continue
        mask = shrink.mask.mask(weights).reshape(-1)
        for name, dim in shrink.cut:
            size = found[name].shape[dim]
            of_each = mask.repeat_interleave(size // mask.numel())
            kept[name, dim] = kept.get((name, dim), torch.ones_like(of_each)) & of_each
    for (name, dim), keeps in kept.items():
        found[name] = found[name].index_select(
            dim, keeps.nonzero().reshape(-1).to(found[name].device)
        )
    return found


def shrunk(
    model: nn.Module, weights: Mapping[str, Tensor], *, num_heads: Mapping[str, int] | None = None
) -> nn.Module:
    """A copy of a model with these weights, whose Linears, convolutions and norms have
    the sizes that the weights have.

    Args:
        model: the model that was compressed, or a plain one of the same kind; it is not
            changed.
        weights: from `clean`.
        num_heads: the number of heads of a module, by name, where it does not follow.
            It follows for a module with an attribute such as `num_heads` and Linears of
            its own that all have lost the same share of rows.

    Raises:
        ValueError: a weight is missing, or has a shape that its module cannot have, or
            a number of heads does not follow.
    """
    small = copy.deepcopy(model)
    small.__dict__.pop("compression_plan", None)
    heads = dict(num_heads or {})
    for name, module in small.named_modules():
        dot = f"{name}." if name else ""
        for key in [key for key in (*module._parameters, *module._buffers) if is_added(key)]:
            (module._parameters if key in module._parameters else module._buffers).pop(key)
        _set_heads(name, module, weights, heads.pop(name, None))
        for slots in (module._parameters, module._buffers):
            for key, own in slots.items():
                if own is None or (
                    dot + key not in weights and key in module._non_persistent_buffers_set
                ):
                    continue
                if dot + key not in weights:
                    raise ValueError(
                        f"shrunk: weights must have {dot + key!r}, and lack it; pass what "
                        f"clean(...) returned"
                    )
                slots[key] = _resized(dot + key, module, own, weights[dot + key])  # type: ignore[assignment]
        _set_sizes(module)
    if heads:
        raise ValueError(
            f"num_heads: must name modules of the model, got {min(heads)!r}; correct the name"
        )
    return _tied_again(model, small)


def _resized(name: str, module: nn.Module, own: Tensor, value: Tensor) -> Tensor:
    can_shrink = isinstance(module, nn.Linear | nn.Conv2d | nn.modules.batchnorm._BatchNorm)
    fits = value.dim() == own.dim() and all(
        new <= old for new, old in zip(value.shape, own.shape, strict=True)
    )
    if value.shape != own.shape and not (can_shrink and fits):
        raise ValueError(
            f"shrunk: {name!r} must have the shape {tuple(own.shape)} in a "
            f"{type(module).__name__}, got {tuple(value.shape)}; shrink Linear, Conv2d and "
            f"BatchNorm only"
        )
    value = (
        value.detach()
        .to(own.device if own.device.type != "meta" else value.device, own.dtype)
        .clone()
    )
    return nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value


def _set_sizes(module: nn.Module) -> None:
    """Sets the attributes of a module that describe its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv2d):
        module.out_channels = module.weight.shape[0]
        module.in_channels = module.weight.shape[1] * module.groups
    elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
        module.num_features = module.running_mean.shape[0]


def _set_heads(
    name: str, module: nn.Module, weights: Mapping[str, Tensor], given: int | None
) -> None:
    """Sets the number of heads of a module whose own Linears lost rows."""
    keys = [key for key in HEADS if isinstance(getattr(module, key, None), int)]
    if not keys:
        return
    shares = {
        (weights[full].shape[0], child.out_features)
        for key, child in module.named_children()
        if isinstance(child, nn.Linear)
        and (full := f"{name}.{key}.weight".removeprefix(".")) in weights
        if weights[full].shape[0] != child.out_features
    }
    if given is None and len({new / old for new, old in shares}) > 1:
        raise ValueError(
            f"num_heads: must be given for {name!r}, whose Linears lost different shares of their "
            f"rows; pass num_heads={{{name!r}: ...}}"
        )
    for key in keys:
        before = getattr(module, key)
        new, old = next(iter(shares), (1, 1))
        if given is None and before * new % old:
            continue
        setattr(module, key, given or before * new // old)
    for key in WIDTHS:
        if shares and getattr(module, key, None) == next(iter(shares))[1]:
            setattr(module, key, next(iter(shares))[0])


def _tied_again(model: nn.Module, small: nn.Module) -> nn.Module:
    """The copy with the ties of the model."""
    owners = {id(param): name for name, param in model.named_parameters()}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = owners[id(param)]
        if name != owner and not is_added(name):
            prefix, _, key = name.rpartition(".")
            small.get_submodule(prefix)._parameters[key] = small.get_parameter(owner)
    return small
