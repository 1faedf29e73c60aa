"""`write`, `DcpReader`: fragments of flat tensors to and from files of
torch.distributed.checkpoint.

The files are written and read by PyTorch's own `FileSystemWriter` and
`FileSystemReader`, so that any job can load them with
`torch.distributed.checkpoint.load`. A fragment is a flat run of an n-dimensional
tensor; its boxes (`sharding.flat_runs`) are PyTorch's chunks. Nothing here
communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from fzero.checkpoint.dcp_metadata import read_metadata
from fzero.checkpoint.folders import CONTENTS, METADATA, CheckpointError, checksum_of, inside
from fzero.checkpoint.layout import Slice, Stored, StoredSlice
from sharding import boxes
from sharding.views import dtype_name, torch_dtype

Fragment = tuple[StoredSlice, Any]
"""A part, and its elements as a flat tensor, the source of a write or the target of a
read. A source may be any object that returns a tensor for a range (`x[a:b]`), which is
read when it is written."""


# --- writing --------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Elements of a fragment, from `start` on, of shape `sizes`."""

    flat: Any
    start: int
    sizes: tuple[int, ...]


class _Writing(DefaultSavePlanner):
    """Passes the chunks to PyTorch's writer, one after the other."""

    def __init__(self, chunks: Mapping[MetadataIndex, _Chunk]) -> None:
        super().__init__()
        self.chunks = chunks
        self._read: Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        if self._read is not None:
            # the writer keeps every tensor until it has finished
            self._read.untyped_storage().resize_(0)
            self._read = None
        flat, start, sizes = self.chunks[index]
        chunk: Tensor = flat[start : start + math.prod(sizes)]
        if not isinstance(flat, Tensor):
            self._read = chunk
        return chunk.view(sizes)


def write(folder: Path, rank: int, fragments: Iterable[Fragment]) -> list[Slice]:
    """Writes this rank's file, waits until it is on the disk, and returns its chunks."""
    chunks: dict[MetadataIndex, _Chunk] = {}
    parts: dict[MetadataIndex, StoredSlice] = {}
    items = []
    for part, flat in fragments:
        for box in boxes(part.start, part.stop, part.shape):
            index = MetadataIndex(part.key, box.offsets)
            assert index not in chunks, f"{part.key} is written twice"
            chunks[index] = _Chunk(flat, box.start - part.start, box.sizes)
            parts[index] = part
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            like = _no_chunks(part)
            data = TensorWriteData(chunk, like.properties, like.size)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    plan = replace(SavePlan(items), storage_data=_StoragePrefix(f"__{rank}_"))
    is_read = any(not isinstance(chunk.flat, Tensor) for chunk in chunks.values())
    # A chunk that must be read first is written before the next is read, so that memory holds one.
    writer = (
        FileSystemWriter(folder, per_thread_copy_ahead=0) if is_read else FileSystemWriter(folder)
    )
    results = writer.write_data(plan, _Writing(chunks)).wait()
    slices = []
    for result in sorted(results, key=lambda result: int(result.storage_data.offset)):
        where, index, part = result.storage_data, result.index, parts[result.index]
        place = (where.relative_path, where.offset, where.length)
        offsets, checksum = tuple(index.offset or ()), checksum_of(folder / place[0], *place[1:])
        slices.append(
            Slice(part.key, part.shape, part.dtype, offsets, chunks[index].sizes, *place, checksum)
        )
    return slices


def write_metadata(
    folder: Path, slices: Iterable[Slice], stored: Mapping[str, Stored], aliases: Mapping[str, str]
) -> None:
    """Writes PyTorch's metadata file: the chunks of all ranks. An alias of a tensor has
    the chunks of its first name.
    """
    tensors = {key: _no_chunks(like) for key, like in stored.items()}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for s in slices:
        tensors.setdefault(s.key, _no_chunks(Stored(s.shape, s.dtype)))
        tensors[s.key].chunks.append(
            ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes))
        )
        where[MetadataIndex(s.key, s.offsets)] = _StorageInfo(s.file, s.start, s.nbytes)
    for key, tensor in tensors.items():
        num_written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if num_written != tensor.size.numel():
            raise CheckpointError(
                f"save: all {tensor.size.numel()} elements of {key!r} must be written, and "
                f"{num_written} were; this is a defect"
            )
    for key, first in aliases.items():
        tensors[key] = tensors[first]
        for chunk in tensors[first].chunks:
            where[MetadataIndex(key, chunk.offsets)] = where[MetadataIndex(first, chunk.offsets)]
    paths = {key: tuple(key.split(".", 1)) for key in tensors}
    results = [WriteResult(index, info.length, info) for index, info in where.items()]
    FileSystemWriter(folder).finish(Metadata({**tensors}, planner_data=paths), [results])


def _no_chunks(like: Stored | StoredSlice) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(like.dtype)), torch.Size(like.shape), []
    )


# --- reading --------------------------------------------------------------------------------------


class _Reading(DefaultLoadPlanner):
    """Gives PyTorch's reader the target tensor of each chunk."""

    def __init__(self, chunks: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self.chunks = chunks

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.chunks[index]


class DcpReader:
    """Reads the tensors in a folder of torch.distributed.checkpoint, fzero's or another
    job's.

    Args:
        folder: with a `.metadata`.
        checksums: the checksums of the slices, by file and start; empty for other jobs'
            files.

    Attributes:
        stored: shape and dtype of each tensor, by key.
    """

    def __init__(self, folder: Path, checksums: Iterable[Slice] = ()) -> None:
        self.folder, self._checksums = folder, {(s.file, s.start): s for s in checksums}
        self._checked: set[tuple[str, int]] = set()
        for known in self._checksums.values():
            inside(folder, known.file, folder / CONTENTS)
        self._reader = FileSystemReader(folder)
        try:
            # PyTorch's own reader would unpickle it and run code
            self._metadata = read_metadata(folder / METADATA)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"load: {folder / METADATA} must be the metadata of torch.distributed.checkpoint, "
                f"and {error}; take another checkpoint"
            ) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        tensors = self._metadata.state_dict_metadata.items()
        self._tensors = {
            key: like for key, like in tensors if isinstance(like, TensorStorageMetadata)
        }
        self.stored = {
            key: Stored(tuple(t.size), dtype_name(t.properties.dtype))
            for key, t in self._tensors.items()
        }

    def full(self, key: str) -> Tensor:
        """A full tensor in its stored shape and dtype. Raises as `read` does."""
        like = self.stored[key]
        flat = torch.empty(math.prod(like.shape), dtype=torch_dtype(like.dtype))
        self.read([(StoredSlice.whole(key, like), flat)])
        return flat.view(like.shape)

    def read(self, fragments: Iterable[Fragment]) -> None:
        """Reads fragments into their targets, cast to each target's dtype. No two may
        begin with the same element.

        Raises:
            CheckpointError: bytes are missing, or differ from the bytes written; the
                message has the file and the tensor.
        """
        targets: dict[MetadataIndex, Tensor] = {}
        items: list[ReadItem] = []
        for part, flat in fragments:
            chunks = []
            for box in boxes(part.start, part.stop, part.shape):
                index = MetadataIndex(part.key, box.offsets)
                assert index not in targets, f"{part.key} is read twice at once"
                targets[index] = flat[box.start - part.start :][: box.numel].view(box.sizes)
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
            items += create_read_items_for_chunk_list(part.key, self._tensors[part.key], chunks)
        num_wanted, num_found = (
            sum(x.numel() for x in targets.values()),
            sum(item.lengths.numel() for item in items),
        )
        if num_wanted != num_found:
            raise CheckpointError(
                f"load: the chunks in {self.folder / METADATA} must cover each tensor once, and "
                f"hold {num_found} of {num_wanted} elements; take another checkpoint"
            )
        for item in items:
            self._check(item.storage_index)
        try:
            self._reader.read_data(LoadPlan(items), _Reading(targets)).wait()
        except Exception as error:
            keys = sorted({item.storage_index.fqn for item in items})
            raise CheckpointError(
                f"load: {self.folder} cannot be read where {keys[0]!r} is ({len(keys)} such "
                f"tensors), got {error!r}; take another checkpoint"
            ) from error

    def _check(self, index: MetadataIndex) -> None:
        """Raises a CheckpointError unless the bytes of a chunk are those that were
        written.
        """
        info: _StorageInfo | None = self._metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(
                f"load: {self.folder / METADATA} must say where {index.fqn!r} is stored, and does "
                f"not; take another checkpoint"
            )
        known = self._checksums.get((info.relative_path, info.offset))
        if known is None or (known.file, known.start) in self._checked:
            return
        path = self.folder / known.file
        try:
            found = checksum_of(path, known.start, known.nbytes)
        except OSError as error:
            raise CheckpointError(
                f"load: {path} must hold {known.key!r}, got {error}; take another checkpoint"
            ) from error
        if found != known.checksum:
            raise CheckpointError(
                f"load: {path} must hold {known.key!r} in bytes {known.start} to "
                f"{known.start + known.nbytes} with checksum {known.checksum:08x}, got "
                f"{found:08x}: they are not those that were written; take another checkpoint"
            )
        self._checked.add((known.file, known.start))
