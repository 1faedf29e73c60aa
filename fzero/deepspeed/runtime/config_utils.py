"""`deepspeed.runtime.config_utils`: reading a dict of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.config.deepspeed_models import DeepSpeedConfigModel, pp_int


def get_config_default(config: type[DeepSpeedConfigModel], field_name: str) -> Any:
    """The default of a field of a block."""
    field = config.model_fields.get(field_name)
    assert field is not None, f"'{field_name}' is not a field in {config}"
    assert not field.is_required(), (
        f"'{field_name}' is a required field and does not have a default value"
    )
    return field.get_default()


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs, for `json.load(object_pairs_hook=…)`; raises a ValueError for a
    key that occurs twice.
    """
    found = dict(ordered_pairs)
    if len(found) != len(ordered_pairs):
        keys = [key for key, _ in ordered_pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(
            f"config: must hold each key once in an object, got {twice} more often; remove the "
            f"others"
        )
    return found


__all__ = [
    "DeepSpeedConfigModel",
    "dict_raise_error_on_duplicate_keys",
    "get_config_default",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
    "pp_int",
]
