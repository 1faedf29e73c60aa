"""`load_tensors`: reads a file of torch.save, which is a pickle. It runs no code.

A pickle may name any function and call it. PyTorch's restricted loader accepts a fixed
set of names; an error names the class that the file needs. No other module reads
pickles, besides `fzero.common.plain_values` and `fzero.checkpoint.dcp_metadata`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from zipfile import is_zipfile

import torch

from fzero.common.plain_values import UnsafePickleError


def load_tensors(
    source: Path | IO[bytes],
    *,
    mmap: bool = False,
    known: Mapping[str, type] | None = None,
    map_location: Any = "cpu",
) -> Any:
    """The content of a file of torch.save: tensors, numbers, strings and containers of
    these.

    Args:
        source: a path, or an open file.
        mmap: whether tensors are mapped into memory; only for files in the newer,
            zipped format.
        map_location: where tensors go, as for torch.load; None is the device that they
            were on.
        known: more classes that the file may name, each with the class that replaces
            it.

    Raises:
        UnsafePickleError: the file needs another class or function.
        ValueError: the file is missing, or not a complete file of torch.save; the
            message says which.
    """
    replaced: list[Any] = [(stand_in, name) for name, stand_in in (known or {}).items()]
    try:
        with torch.serialization.safe_globals(replaced):
            is_mapped = mmap and isinstance(source, Path) and is_zipfile(source)
            return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)
    except FileNotFoundError as error:
        raise ValueError("is missing") from error
    except Exception as error:
        # PyTorch's message recommends to read the file without the restriction, which would be
        # unsafe.
        found = re.search(r"(?:GLOBAL|class|function|global):? ([\w.]+\.[\w.]+)", str(error))
        if found:
            raise UnsafePickleError(found[1]) from None
        reason = (
            "it is damaged, or of another format"
            if isinstance(error, pickle.UnpicklingError)
            else _line(error)
        )
        raise ValueError(f"cannot be read: {reason}") from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
