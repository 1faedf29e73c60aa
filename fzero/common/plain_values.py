"""Values that ranks exchange, as bytes: numbers, strings, bytes and containers of
these.

A pickle may name any function and call it. `unpack` looks up no name, so a pickle from
another rank runs no code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn


class UnsafePickleError(ValueError):
    """A pickle needs a class or function that it must not name; the message names it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"needs the class {name!r} to be read, which might run code")


class _Packer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> NoReturn:
        raise TypeError(
            f"exchange: values must be numbers, strings, bytes and containers of these, got "
            f"{type(obj).__name__}; send plain ones"
        )


class _Unpacker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnsafePickleError(f"{module}.{name}")


def pack(value: Any) -> bytes:
    """The bytes of a value made of None, numbers, strings, bytes, and tuples, lists,
    dicts and sets of these.

    >>> unpack(pack({"names": ("a", "b"), "rate": 0.5}))
    {'names': ('a', 'b'), 'rate': 0.5}
    """
    packed = io.BytesIO()
    _Packer(packed).dump(value)
    return packed.getvalue()


def unpack(content: bytes) -> Any:
    """The value that was given to `pack`.

    Raises:
        UnsafePickleError: the bytes name a class or a function.
    """
    return _Unpacker(io.BytesIO(content)).load()
