"""`deepspeed.runtime.config_utils`: reading a dict of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


class DeepSpeedConfigModel(BaseModel):
    """The base of a script's own blocks of a configuration."""

    model_config = ConfigDict(
        validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True, extra="forbid",
        arbitrary_types_allowed=True, protected_namespaces=(),
    )  # fmt: skip

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = (
            data
            if strict
            else {key: value for key, value in data.items() if value != "auto" or key == "replace_method"}
        )
        super().__init__(**given)


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs, for `json.load(object_pairs_hook=…)`; raises a ValueError for a key that occurs twice."""
    found = dict(ordered_pairs)
    if len(found) != len(ordered_pairs):
        keys = [key for key, _ in ordered_pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"config: must hold each key once in an object, got {twice} more often; remove the others")
    return found
