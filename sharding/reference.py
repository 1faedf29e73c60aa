"""Reference collectives on stacked ranks.

Dim 0 of every tensor is the rank, so that `x[rank]` is the tensor of that rank. These
functions define the results of the collectives, and tests compare with them. Sums add
in rank order, `((x[0] + x[1]) + x[2]) + ...`, so that their bits are defined; the mean
is that sum times 1 / W.

Shape letters: N elements, P padded = W * S, S shard, W ranks (leading dim).
"""

from functools import reduce
from operator import add
from typing import Literal

import torch
from einops import rearrange, repeat

from sharding.checks import check_index


def all_gather(x_WS: torch.Tensor) -> torch.Tensor:
    """Every rank receives the shards of all ranks, joined in rank order.

    Args:
        x_WS: (W, S), one shard for each rank.

    Returns:
        (W, P), every row the same.

    >>> all_gather(torch.tensor([[1, 2], [3, 4]]))
    tensor([[1, 2, 3, 4],
            [1, 2, 3, 4]])
    """
    _check_stacked("all_gather", x_WS)
    x_WP: torch.Tensor = repeat(x_WS, "source shard -> rank (source shard)", rank=x_WS.shape[0])
    return x_WP


def reduce_scatter(x_WP: torch.Tensor, op: Literal["sum", "mean"] = "mean") -> torch.Tensor:
    """Every rank receives its own shard of the sum or mean over the ranks.

    Args:
        x_WP: (W, P), one full buffer for each rank.
        op: `mean` needs a floating dtype.

    Returns:
        (W, S).

    >>> reduce_scatter(torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]]), op="sum")
    tensor([[11, 22],
            [33, 44]])
    """
    _check_stacked("reduce_scatter", x_WP, divided=True)
    x_WS: torch.Tensor = rearrange(
        _reduce("reduce_scatter", x_WP, op), "(rank shard) -> rank shard", rank=x_WP.shape[0]
    )
    return x_WS


def all_reduce(x_WN: torch.Tensor, op: Literal["sum", "mean"]) -> torch.Tensor:
    """Every rank receives the sum or mean over the ranks.

    >>> all_reduce(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), op="mean")
    tensor([[2., 4.],
            [2., 4.]])
    """
    _check_stacked("all_reduce", x_WN)
    return _to_every_rank(_reduce("all_reduce", x_WN, op), x_WN.shape[0])


def broadcast(x_WN: torch.Tensor, source: int) -> torch.Tensor:
    """Every rank receives the tensor of the rank `source`.

    >>> broadcast(torch.tensor([[1, 2], [3, 4]]), source=1)
    tensor([[3, 4],
            [3, 4]])
    """
    _check_stacked("broadcast", x_WN)
    check_index("broadcast", "source", source, x_WN.shape[0])
    return _to_every_rank(x_WN[source], x_WN.shape[0])


def all_to_all(x_WP: torch.Tensor) -> torch.Tensor:
    """Rank r receives shard r of every rank's buffer, joined in rank order.

    >>> all_to_all(torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]]))
    tensor([[ 1,  2, 10, 20],
            [ 3,  4, 30, 40]])
    """
    _check_stacked("all_to_all", x_WP, divided=True)
    received_WP: torch.Tensor = rearrange(
        x_WP, "source (target shard) -> target (source shard)", target=x_WP.shape[0]
    )
    return received_WP


def _reduce(owner: str, x_WN: torch.Tensor, op: str) -> torch.Tensor:
    if op not in ("sum", "mean"):
        raise ValueError(f"{owner}: op must be 'sum' or 'mean', got {op!r}; pass one of these")
    if op == "mean" and not (x_WN.is_floating_point() or x_WN.is_complex()):
        raise ValueError(
            f"{owner}: op 'mean' needs a floating dtype, got {x_WN.dtype}; cast, or use op 'sum'"
        )
    total_N = reduce(add, x_WN.unbind(0))
    return total_N if op == "sum" else total_N * (1 / x_WN.shape[0])


def _to_every_rank(x_N: torch.Tensor, world_size: int) -> torch.Tensor:
    x_WN: torch.Tensor = repeat(x_N, "n -> rank n", rank=world_size)
    return x_WN


def _check_stacked(owner: str, x: torch.Tensor, *, divided: bool = False) -> None:
    if x.dim() != 2 or x.shape[0] < 1:
        raise ValueError(
            f"{owner}: the ranks must be stacked along the first of two dims, got "
            f"{tuple(x.shape)}; stack flat buffers"
        )
    if divided and x.shape[1] % x.shape[0]:
        raise ValueError(
            f"{owner}: {x.shape[0]} ranks cannot divide {x.shape[1]} elements equally; pad the "
            f"buffer by its Partition"
        )
