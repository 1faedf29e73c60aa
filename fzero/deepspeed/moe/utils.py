"""`deepspeed.moe.utils`: answers for models without experts of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): no module is of DeepSpeed's experts."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Whether a script marks the parameter as an expert's, whose gradient is not
    reduced over all ranks.
    """
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Sequence[nn.Parameter],
) -> tuple[list[Any], list[Any]]:
    """(The parameters of all ranks, those of experts)."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as they are.

    Raises:
        ValueError: a parameter is marked as an expert's.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        if any(map(is_moe_param, group["params"])):
            raise ValueError(
                "split_params_into_different_moe_groups_for_optimizer: parameters must not be "
                "experts' (`allreduce = False`), because every gradient is reduced over all ranks; "
                "leave the mark out"
            )
    return groups


configure_moe_param_groups = list
