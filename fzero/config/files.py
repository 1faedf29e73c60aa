"""Reading a configuration from a file, or from a string of base64.

The text is read as JSON, and else as Hjson: comments, keys without quotes, trailing
commas. A key may occur once in an object.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import hjson

from fzero.config.fields import ConfigError


class _Repeated(NamedTuple):
    """The value of a key that occurs more than once in an object."""

    times: int


def read(source: str | PathLike[str]) -> Mapping[str, Any]:
    """The mapping in a JSON or Hjson file, or in a urlsafe-base64 string of JSON.

    Raises:
        ConfigError: the file cannot be read or parsed, holds no object, or a key occurs
            twice in an object.
    """
    text = _from_base64(source) if isinstance(source, str) else None
    name = repr(fspath(source)) if text is None else "the base64 string"
    try:
        data = _parse(Path(source).read_text("utf-8") if text is None else text)
    except OSError as error:
        raise ConfigError(
            f"Config.load: cannot read {name}: {error.strerror}; give a mapping or the path of a "
            f"JSON file"
        ) from None
    except (ValueError, IndexError, ArithmeticError, RecursionError) as error:
        # hjson raises all of them
        raise ConfigError(
            f"Config.load: {name} is not JSON or Hjson: {error}; mend the file"
        ) from None
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"Config.load: {name} must hold a JSON object, got {type(data).__name__}; mend the file"
        )
    if lines := list(_repeated(data)):
        raise ConfigError("\n".join(lines))
    return data


def _from_base64(source: str) -> str | None:
    try:
        text = base64.urlsafe_b64decode(source).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_mark_repeated)
    except json.JSONDecodeError:
        if not text.strip():  # Hjson reads it as an object without braces and keys
            raise
        return hjson.loads(text, object_pairs_hook=_mark_repeated)


def _mark_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict, with `_Repeated` for a key that occurs more than once."""
    keys = [key for key, _ in pairs]
    return {
        key: value if keys.count(key) == 1 else _Repeated(keys.count(key)) for key, value in pairs
    }


def _repeated(data: Any, prefix: str = "") -> Iterator[str]:
    """The line of the error message for each repeated key."""
    if isinstance(data, _Repeated):
        yield (
            f"{prefix[:-1]}: a key may stand once in an object, found {data.times}; remove "
            f"all but one"
        )
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _repeated(value, f"{prefix}{key}.")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _repeated(value, f"{prefix}{index}.")


def changed(keys: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with these changes, block by block; None removes a key.

    >>> changed(
    ...     {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5}},
    ...     {"zero_optimization": {"stage": 2, "reduce_bucket_size": None}},
    ... )
    {'bf16': {'enabled': True}, 'zero_optimization': {'stage': 2}}
    """
    made = dict(keys)
    for key, value in changes.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, Mapping):
            before = made.get(key)
            made[key] = changed(before if isinstance(before, Mapping) else {}, value)
        else:
            made[key] = value
    return made
