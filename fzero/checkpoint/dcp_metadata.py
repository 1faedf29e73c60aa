"""`read_metadata`: the `.metadata` of torch.distributed.checkpoint, which is a pickle. It
runs no code.

A pickle may name any function and call it. Here a fixed set of names is accepted. Their
classes become records without behaviour, from which a new metadata is built, with a
check of each field.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fzero.common.plain_values import UnsafePickleError
from fzero.common.safe_files import check_inside
from sharding.views import torch_dtype


class _Record:
    """An object of the metadata: its arguments and its state, without behaviour."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{type(self).__name__} must have {name!r}")
        return self.state[name]


_Metadata, _Tensor, _Properties, _Chunk, _Index, _Place, _Size, _Other = (
    cast(type[_Record], type(f"_{name}", (_Record,), {"__slots__": ()}))
    for name in ("Metadata", "Tensor", "Properties", "Chunk", "Index", "Place", "Size", "Other")
)
"""The kinds of records; `_Other` is an object that is not read."""

_OF_METADATA: dict[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): _Metadata,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _Tensor,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): _Other,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): _Chunk,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): _Other,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _Other,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Place,
    ("torch.serialization", "_get_layout"): _Other,
    ("torch", "Size"): _Size,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): _Other
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}
"""The classes and functions that the metadata may name besides dtypes, and the record
that each becomes.
"""
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _OfMetadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return name
        try:
            return _OF_METADATA[module, name]
        except KeyError:
            raise UnsafePickleError(f"{module}.{name}") from None


def read_metadata(path: Path) -> Any:
    """The metadata in a file: a `torch.distributed.checkpoint.metadata.Metadata` with
    the tensors and where they are stored.

    Objects other than tensors, and the notes of the job's planner, are left out.

    Raises:
        UnsafePickleError: the file names a class or function that metadata does not
            have.
        OSError, ValueError: the file cannot be read, or is not such metadata; the
            message says why.
    """
    content = path.read_bytes()
    try:
        found = _OfMetadata(io.BytesIO(content)).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # bytes that are no pickle may raise any error
        raise ValueError(f"is not a complete pickle: {error!r}") from None
    tensors: dict[str, Any] = {}
    for key, like in _is(_is(found, _Metadata)["state_dict_metadata"], dict).items():
        if isinstance(like, _Tensor):
            chunks = [
                ChunkStorageMetadata(_size(_is(chunk, _Chunk)["offsets"]), _size(chunk["sizes"]))
                for chunk in _is(like["chunks"], list)
            ]
            dtype, *_ = _is(_is(like["properties"], _Properties).state, tuple)
            properties = TensorProperties(dtype=torch_dtype(_is(dtype, str)))
            tensors[_is(key, str)] = TensorStorageMetadata(properties, _size(like["size"]), chunks)
    places: dict[Any, Any] = {}
    for index, place in _is(found["storage_data"], dict).items():
        key = _is(_is(index, _Index)["fqn"], str)
        if key in tensors:  # an object has no offset
            start, length = (_count(_is(place, _Place)[name]) for name in ("offset", "length"))
            name = check_inside(_is(place["relative_path"], str))
            transforms = [
                _is(x, str) for x in _is(place.state, dict).get("transform_descriptors") or ()
            ]
            places[MetadataIndex(key, _size(index["offset"]))] = _StorageInfo(
                name, start, length, transforms or None
            )
    return Metadata({**tensors}, storage_data=places)


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"must have a {kind.__name__.lstrip('_')} where {str(value)[:80]!r} is")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"must have a number of elements or bytes where {str(value)[:80]!r} is")
    return value


def _size(value: Any) -> torch.Size:
    (numbers,) = _is(value, _Size).args or ((),)
    return torch.Size(map(_count, _is(numbers, tuple)))
