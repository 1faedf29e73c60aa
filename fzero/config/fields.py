"""The types of a configuration's values: numbers, dtypes, and blocks of keys. They are
checked when they are read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails


# DeepSpeed asserts much of this, and its scripts catch that
class ConfigError(ValueError, AssertionError):
    """The error for a configuration that fzero does not run; its message names the
    field, the rule, the value and the fix.
    """


def number(value: object) -> object:
    """An integral float as an int, also one in a string ("5e8"), anything else
    unchanged; raises a ValueError for a bool.
    """
    if isinstance(value, bool):
        raise ValueError("must be a number")
    if isinstance(value, str) and "e" in value.lower():  # YAML reads 5e8 as a string
        with suppress(ValueError):
            value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def only(holds: Callable[[Any], bool], rule: str) -> AfterValidator:
    """A check of a value: the error is `rule`."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


Count = Annotated[
    int, BeforeValidator(number), only(lambda value: value >= 1, "must be at least 1")
]
"""A positive integer; an integral float such as 5e8 is one."""
Elements = Annotated[int, BeforeValidator(number), Field(ge=0)]
"""A number of elements, 0 included."""
Number = Annotated[float, BeforeValidator(number)]
Rate = Annotated[Number, Field(ge=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


FolderOrFile = Annotated[
    str, AfterValidator(lambda path: str(Path(path).expanduser()) if path.startswith("~") else path)
]
"""A path, in which a leading `~` is the home directory."""


def off_at(*off: int) -> BeforeValidator:
    """A validator that reads the numbers `off`, with which DeepSpeed switches a key
    off, as None.
    """
    return BeforeValidator(lambda value: None if number(value) in off else value)


class PerRank:
    """The mark of a key that a rank may have for itself; see `compared`."""


PER_RANK = PerRank()
"""In the type of a field: the key, or every key of the block, changes no number and no
collective, so that ranks need not have the same value (a script prints, measures or
writes logs on rank 0)."""


LOWER = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
"""For names in any case, such as `"SUM"`."""


class Block(BaseModel):
    """An object of the configuration: frozen, without unknown keys; docstrings of its
    fields are their descriptions.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_auto(cls, data: Any) -> Any:
        """Drops values `"auto"`, which a program is to fill in, and null for a block;
        unknown keys are kept, to be refused.
        """
        if not isinstance(data, Mapping):
            return data
        fields = dict(cls.model_fields)
        fields |= {x.alias: x for x in fields.values() if x.alias is not None}

        def is_left_out(key: str, value: object) -> bool:
            if key not in fields:
                return False
            return value == "auto" or (value is None and isinstance(fields[key].default, Block))

        return {key: value for key, value in data.items() if not is_left_out(key, value)}


def compared(block: Block) -> dict[str, str]:
    """The values that must be the same on all ranks, as text, by dotted name: all but
    those marked `PER_RANK`.

    >>> class Logs(Block):
    ...     folder: Annotated[str, PER_RANK] = "logs"
    ...     every: int = 1
    >>> compared(Logs())
    {'every': '1'}
    """
    fields = type(block).model_fields
    return _dotted({name: value for name, value in block if PER_RANK not in fields[name].metadata})


def _dotted(values: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Block | Mapping):
            inner = compared(value) if isinstance(value, Block) else _dotted(value)
            found |= {f"{name}.{key}": text for key, text in inner.items()}
        else:
            found[name] = str(value)
    return found


@dataclass(frozen=True, slots=True)
class Later:
    """A block that few configurations have: its module, in this room, is loaded when
    one does.
    """

    module: str
    name: str

    def load(self) -> Any:
        """The block, or the union of blocks."""
        return getattr(importlib.import_module(f"fzero.config.{self.module}"), self.name)

    def read(self, value: object) -> Any:
        """The value as that block; raises as pydantic does."""
        return _adapter(self).validate_python(value)


@cache
def _adapter(block: Later) -> TypeAdapter[Any]:
    return TypeAdapter(block.load())


def later(module: str, name: str) -> Any:
    """The type of a field that holds a block of another module.

    >>> later("zero", "LoCo").__metadata__[0].read({"err_beta": 0.5}).err_beta
    0.5
    """
    block = Later(module, name)
    return Annotated[Any, block, PlainValidator(block.read)]


def block_of(annotation: Any) -> type[Block] | None:
    """The block that a field holds, always or when it is not null; None for any other
    field.

    >>> (
    ...     block_of(Block | None).__name__,
    ...     block_of(int),
    ...     block_of(later("zero", "LoCo") | None).__name__,
    ... )
    ('Block', None, 'LoCo')
    """
    kinds = [annotation, *get_args(annotation)]
    kinds += [
        mark.load()
        for kind in kinds
        for mark in getattr(kind, "__metadata__", ())
        if isinstance(mark, Later)
    ]
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Block)), None
    )


def names_in(block: type[Block], prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys in a block, also of those in its blocks."""
    for name, field in block.model_fields.items():
        yield f"{prefix}{name}"
        if (inner := block_of(field.annotation)) is not None:
            yield from names_in(inner, f"{prefix}{name}.")


_DTYPES = {
    "float": "float32",
    "half": "float16",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}


def _dtype(value: object) -> object:
    name = str(value).lower().removeprefix("torch.")
    return _DTYPES.get(name, name if name in _DTYPES.values() else value)


Dtype = Annotated[Literal["float32", "float16", "bfloat16"], BeforeValidator(_dtype)]
"""A dtype by torch's name, with or without `torch.`, or DeepSpeed's (`fp32`, `fp16`,
`bf16`, `half`, `float`).
"""


def problems_of(error: ValidationError, *within: str) -> list[str]:
    """A line for each wrong value: its dotted name, which begins with `within`, the
    message, and the value.
    """
    lines = (
        (".".join([*within, *map(str, e["loc"])]), message_of(e), e["input"])
        for e in error.errors()
    )
    return [f"{name}: {message}, got {value!r}" for name, message, value in lines]


def message_of(detail: ErrorDetails) -> str:
    """Pydantic's message about a wrong value, in one line and in the words used here."""
    if detail["type"] == "missing":
        return 'is required; give a value ("auto" counts as left out)'
    if detail["type"] in ("model_type", "model_attributes_type"):
        return "must be an object"
    if detail["type"] == "extra_forbidden":
        return "unknown key"
    return " ".join(
        detail["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .split("\n")
    )
