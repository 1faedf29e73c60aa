"""`Export`, `SafetensorsFile`: write safetensors files tensor by tensor, and read them
range by range.

A file is the length of a header (8 bytes), the header (JSON: dtype, shape and offsets
of each tensor), and the tensors. Names, shapes and dtypes are known before the values,
so the headers are written first, and the tensors at their offsets in any order. Large
models are several files and an index, named as `from_pretrained` expects them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from fzero.checkpoint.folders import CheckpointError, flushed, write_whole
from fzero.checkpoint.layout import Stored
from fzero.common.pickles import load_tensors
from fzero.common.safe_files import create
from sharding.dtypes import itemsize
from sharding.views import dtype_name, torch_dtype

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtypes by their names in the header."""
LENGTH = 8
"""Bytes before the header, which hold its length."""


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its name, and the tensors in it.

    >>> FilePlan(
    ...     "model.safetensors", {"w": Stored((2,), "float32"), "b": Stored((), "bfloat16")}
    ... ).nbytes
    10
    """

    name: str
    tensors: Mapping[str, Stored]

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(like) for like in self.tensors.values())

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """The length of the header, and the header, padded to a multiple of 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        names = {dtype: name for name, dtype in DTYPES.items()}
        for name, start in self.starts.items():
            like = self.tensors[name]
            stop = start + nbytes_of(like)
            entries[name] = {
                "dtype": names[like.dtype],
                "shape": like.shape,
                "data_offsets": [start, stop],
            }
        content = json.dumps(entries).encode()
        content += b" " * (-len(content) % LENGTH)
        return len(content).to_bytes(LENGTH, "little") + content

    @property
    def starts(self) -> dict[str, int]:
        """The offset of each tensor after the header, those of wider elements first, so
        that each is aligned.
        """
        names = sorted(self.tensors, key=lambda name: -itemsize(self.tensors[name].dtype))
        return dict(
            zip(names, accumulate((nbytes_of(self.tensors[name]) for name in names), initial=0))
        )


def nbytes_of(like: Stored) -> int:
    return torch.Size(like.shape).numel() * itemsize(like.dtype)


def exported_dtype(dtype: str, wanted: str | None) -> str:
    """The dtype in which a parameter is exported: the one wanted, else its own if that
    has 16 bits, else bfloat16.

    >>> [exported_dtype(dtype, None) for dtype in ("float32", "float16", "int64")]
    ['bfloat16', 'float16', 'int64']
    """
    if not torch_dtype(dtype).is_floating_point:
        return dtype
    return wanted or (dtype if itemsize(dtype) == 2 else "bfloat16")


def plan_files(tensors: Mapping[str, Stored], max_nbytes: int) -> list[FilePlan]:
    """Divides tensors, in the given order, into files of at most `max_nbytes`; a larger
    tensor gets its own file.

    >>> like = Stored((4,), "float32")
    >>> [
    ...     (file.name, list(file.tensors))
    ...     for file in plan_files({"a": like, "b": like, "c": like}, max_nbytes=40)
    ... ]
    [('model-00001-of-00002.safetensors', ['a', 'b']), ('model-00002-of-00002.safetensors', ['c'])]
    >>> [file.name for file in plan_files({"a": like}, max_nbytes=40)]
    ['model.safetensors']
    """
    if max_nbytes < 1:
        raise ValueError(
            f"max_file_nbytes: must be at least 1, got {max_nbytes}; pass how large a file may be"
        )
    groups: list[dict[str, Stored]] = [{}]
    nbytes = 0
    for name, like in tensors.items():
        if like.dtype not in DTYPES.values():
            raise ValueError(
                f"export: {name!r} must be of a dtype that safetensors has, got {like.dtype}; "
                f"leave it out"
            )
        if groups[-1] and nbytes + nbytes_of(like) > max_nbytes:
            groups.append({})
            nbytes = 0
        groups[-1][name] = like
        nbytes += nbytes_of(like)
    if len(groups) == 1:
        return [FilePlan("model.safetensors", groups[0])]
    return [
        FilePlan(f"model-{i:05}-of-{len(groups):05}.safetensors", group)
        for i, group in enumerate(groups, 1)
    ]


@dataclass(slots=True)
class Export:
    """Files that are being written, under temporary names until all tensors are
    written. Use as a context.

    Args:
        folder: is made.
        tensors: shape and stored dtype of every tensor; `write` takes them in any
            order.
        max_nbytes: the largest number of bytes of a file.
        aliases: the other names of tied tensors, each with the first name, under which
            the tensor is stored.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    max_nbytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    _places: dict[str, tuple[BinaryIO, int]] = field(init=False, default_factory=dict)
    _files: list[tuple[FilePlan, BinaryIO]] = field(init=False, default_factory=list)

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def _make(self) -> None:
        """Makes the files in their full length, so that a full disk raises before
        anything is gathered.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for plan in plan_files(self.tensors, self.max_nbytes):
            header = plan.header({"format": "pt", **self.aliases})
            file = create(self._beside(plan.name))
            self._files.append((plan, file))
            file.write(header)
            os.posix_fallocate(file.fileno(), 0, len(header) + plan.nbytes)
            self._places |= {
                name: (file, len(header) + start) for name, start in plan.starts.items()
            }

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a full tensor, cast to its stored dtype."""
        file, start = self._places.pop(name)
        like = self.tensors[name]
        values = tensor.detach().to("cpu", torch_dtype(like.dtype)).contiguous()
        file.seek(start)
        if values.numel():
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for plan, opened in self._files:
            with opened:
                os.fsync(opened.fileno())
            if kind is not None:
                self._beside(plan.name).unlink()
        if kind is not None:
            return
        assert not self._places, f"{list(self._places)} were not written"
        with flushed(self.folder):
            # from an earlier export
            for old in (*self.folder.glob("model*.safetensors"), self.folder / INDEX):
                old.unlink(missing_ok=True)
            for plan, _ in self._files:
                self._beside(plan.name).rename(self.folder / plan.name)
            if len(self._files) > 1:
                weight_map = {name: plan.name for plan, _ in self._files for name in plan.tensors}
                index = {
                    "metadata": {"total_size": sum(p.nbytes for p, _ in self._files)},
                    "weight_map": weight_map,
                }
                write_whole(self.folder / INDEX, json.dumps(index, indent=2).encode())

    def _beside(self, name: str) -> Path:
        return self.folder / f".{name}.new"


# --- reading --------------------------------------------------------------------------------------


class SafetensorsFile:
    """Reads ranges of the tensors of one file; `stored` has the shape and dtype of
    each, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH), "little")
                if length > path.stat().st_size:
                    raise ValueError(
                        f"a header of {length} bytes in a file of {path.stat().st_size}"
                    )
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self.stored = {
                name: Stored(tuple(of["shape"]), DTYPES[of["dtype"]]) for name, of in header.items()
            }
            self._starts = {
                name: LENGTH + length + of["data_offsets"][0] for name, of in header.items()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"load: {path} must be a safetensors file, got {error!r}; take another file"
            ) from error

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened tensor."""
        like = self.stored[name]
        itemsize_, flat = (
            itemsize(like.dtype),
            torch.empty(stop - start, dtype=torch_dtype(like.dtype)),
        )
        with self.path.open("rb") as file:
            file.seek(self._starts[name] + start * itemsize_)
            if (
                flat.numel()
                and file.readinto(flat.view(torch.uint8).numpy().data) < flat.numel() * itemsize_
            ):
                raise CheckpointError(
                    f"load: {self.path} must hold all of {name!r}, and ends before; take another "
                    f"file"
                )
        return flat


class TorchFile:
    """As `SafetensorsFile`, for a state dict that torch.save wrote, which is
    memory-mapped.
    """

    def __init__(self, path: Path) -> None:
        try:
            tensors = load_tensors(path, mmap=True)
            for key in ("model", "state_dict", "module"):
                tensors = tensors[key] if isinstance(tensors.get(key), Mapping) else tensors
        except (ValueError, AttributeError) as error:
            found = (
                f"and {error}" if isinstance(error, ValueError) else f"got {type(tensors).__name__}"
            )
            raise CheckpointError(
                f"load: {path} must be a state dict that torch.save wrote, {found}; take another "
                f"file"
            ) from error
        self._tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
        self.stored = {
            name: Stored(tuple(x.shape), dtype_name(x.dtype)) for name, x in self._tensors.items()
        }

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened tensor."""
        return self._tensors[name].detach().reshape(-1)[start:stop]  # it may be a parameter
