"""Tensors cut and joined by a layout.

`flatten` copies a tree of parameters into one flat buffer. After that everything is a
view: `take_shard` gives the shard of a rank, `unflatten` the parameters of the model.
One `torch.split` makes all of the leaves, so that its backward is one concatenation. No
function here depends on processes.

Shape letters: N elements, P padded = W * S, S shard, W ranks.
"""

from collections.abc import Mapping
from functools import cache

import torch
from einops import rearrange
from torch import Tensor

from sharding.layout import FlatLayout
from sharding.partition import Partition


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in specs.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


@cache  # a step asks for it several times per unit
def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name, the inverse of `dtype_name`.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"torch_dtype: {name!r} is not the name of a torch dtype; pass one such as 'float32'"
        )
    return dtype


def pad(x_N: Tensor, partition: Partition) -> Tensor:
    """Append the zeros of the padding.

    Args:
        x_N: (N,), any dtype.
        partition: a partition of N elements.

    Returns:
        (P,); `x_N` itself if the padding is 0.

    >>> pad(torch.tensor([1, 2, 3]), Partition(numel=3, world_size=2))
    tensor([1, 2, 3, 0])
    """
    if x_N.shape != (partition.numel,):
        raise _wrong_length("pad", x_N, partition.numel)
    if partition.padding == 0:
        return x_N
    return torch.cat([x_N, x_N.new_zeros(partition.padding)])


def flatten(tensors: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """Copy the tensors into one new flat buffer, in the order of the layout, with zeros
    in the padding.

    Args:
        tensors: exactly the parameters of the layout, in any order, of one dtype and on
            one device.
        layout: the positions of the parameters.

    Returns:
        (P,), of that dtype and on that device.

    Raises:
        ValueError: a tensor is missing or unknown, or has another shape, dtype or
            device; or the layout has no parameters.

    >>> layout = FlatLayout(("w", "b"), ((2, 2), ()), world_size=2)
    >>> flatten({"b": torch.tensor(5), "w": torch.tensor([[1, 2], [3, 4]])}, layout)
    tensor([1, 2, 3, 4, 5, 0])
    """
    if not layout.names:
        raise ValueError(
            "flatten: the layout holds no parameters, so that its buffer has no dtype; skip empty "
            "layouts"
        )
    layout.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    first = tensors[layout.names[0]]
    for name in layout.names:
        if tensors[name].dtype != first.dtype or tensors[name].device != first.device:
            raise ValueError(
                f"flatten: parameter {name!r} is {_kind(tensors[name])} but {layout.names[0]!r} is "
                f"{_kind(first)}; "
                "a flat buffer has one dtype and one device, so make a layout for each"
            )
    leaves = [tensors[name].reshape(-1) for name in layout.names]
    return torch.cat([*leaves, first.new_zeros(layout.partition.padding)])


def unflatten(flat: Tensor, layout: FlatLayout) -> dict[str, Tensor]:
    """The parameters as views of a flat buffer, the inverse of `flatten`.

    Args:
        flat: (N,) or (P,), any dtype.
        layout: the positions of the parameters.

    Returns:
        The parameters by name, in the order of the layout.

    >>> layout = FlatLayout(("w", "b"), ((2, 2), ()), world_size=2)
    >>> unflatten(torch.tensor([1, 2, 3, 4, 5, 0]), layout)["w"]
    tensor([[1, 2],
            [3, 4]])
    """
    if flat.dim() != 1 or flat.numel() not in (layout.numel, layout.partition.padded_numel):
        raise _wrong_length("unflatten", flat, layout.numel, layout.partition.padded_numel)
    padding = flat.numel() - layout.numel
    leaves = flat.split_with_sizes([*layout.numels, padding] if padding else layout.numels)
    return {
        name: leaf if len(shape) == 1 else leaf.view(shape)
        for name, shape, leaf in zip(layout.names, layout.shapes, leaves)
    }


def take_shard(flat_P: Tensor, partition: Partition, rank: int) -> Tensor:
    """The shard of `rank`, as a view of the padded buffer.

    Args:
        flat_P: (P,), any dtype.
        partition: the division of the buffer.
        rank: the rank of the shard.

    Returns:
        (S,), a view.

    >>> take_shard(torch.arange(6), Partition(numel=5, world_size=3), rank=1)
    tensor([2, 3])
    """
    if flat_P.shape != (partition.padded_numel,):
        raise _wrong_length("take_shard", flat_P, partition.padded_numel)
    start, stop = partition.bounds(rank)
    return flat_P[start:stop]


def join(shards_WS: Tensor, partition: Partition) -> Tensor:
    """Join the stacked shards of all ranks and drop the padding.

    Args:
        shards_WS: (W, S), any dtype.
        partition: the division of the buffer.

    Returns:
        (N,), a view if the shards are contiguous.

    >>> join(torch.tensor([[1, 2], [3, 4], [5, 0]]), Partition(numel=5, world_size=3))
    tensor([1, 2, 3, 4, 5])
    """
    if tuple(shards_WS.shape) != (partition.world_size, partition.shard_numel):
        raise ValueError(
            f"join: the stacked shards have shape {tuple(shards_WS.shape)} but the partition's are "
            f"{(partition.world_size, partition.shard_numel)}; stack one shard for each rank"
        )
    joined_P: Tensor = rearrange(shards_WS, "rank shard -> (rank shard)")
    return joined_P[: partition.numel]


def _kind(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} on {tensor.device}"


def _wrong_length(owner: str, flat: Tensor, *allowed: int) -> ValueError:
    lengths = " or ".join(str(length) for length in dict.fromkeys(allowed))
    return ValueError(
        f"{owner}: the buffer must have one dim of {lengths} elements, got shape "
        f"{tuple(flat.shape)}; "
        "pass the buffer that this layout or partition was made for"
    )
