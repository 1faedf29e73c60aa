"""`deepspeed.runtime.zero.tiling`: a linear layer as tiles, which stage 3 gathers one
by one.

Each tile has a weight of its own, so a layer that is larger than the memory of a device
can be trained. The sum over the tiles of a row has another order of additions than one
product, so results differ from `torch.nn.Linear` by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fzero.deepspeed.runtime.zero.partition_parameters import GatheredParameters
from fzero.pipeline.partition import uniform


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """The parts of a tensor along its last dimension, of the given sizes; copies where
    `contiguous_split_chunks`.
    """
    parts = torch.split(tensor, list(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class TiledLinear(nn.Module):
    """`in_splits` × `out_splits` linear layers in the place of one.

    Args:
        input_is_already_split: whether the input of `forward` is a list of `in_splits`
            tensors.
        combine_out_splits: False returns a list of `out_splits` tensors.
        linear_cls: the class of the tiles, made with `bias` and `kwargs`.
        init_linear: a layer whose parameters are copied.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in", in_splits, in_features),
            ("out", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise RuntimeError(
                    f"{name}_splits: must be between 1 and {name}_features, {features}, got "
                    f"{splits}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = (
            input_is_already_split,
            combine_out_splits,
        )
        self.in_parts, self.out_parts = (
            list(uniform(in_features, in_splits)),
            list(uniform(out_features, out_splits)),
        )
        self.linears: Any = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    right - left, below - above, bias=bias and right == in_features, **kwargs
                )
                for left, right in pairwise(self.in_parts)
            )
            for above, below in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs = [input_]
        if self.in_splits > 1:
            sizes = [stop - start for start, stop in pairwise(self.in_parts)]
            inputs = (
                input_ if self.input_is_already_split else self._split_global_input(input_, sizes)
            )
            assert len(inputs) == self.in_splits, (
                f"{len(inputs)} inputs for in_splits={self.in_splits}"
            )
        outputs: list[Any] = []
        for out_id, row in enumerate(self.linears):
            summed: Any = None
            for in_id, (tile, x) in enumerate(zip(row, inputs, strict=True)):
                summed = self._reduce_local_output(
                    in_id=in_id, out_id=out_id, current_out=summed, new_out=tile(x)
                )
            outputs.append(summed)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: Any, split_sizes: Sequence[int]) -> Any:
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copies the parameters of a layer. *Collective* in stage 3: every rank; those
        of rank 0 count.
        """
        assert other.weight.shape == (self.out_features, self.in_features), (
            f"weight of shape {tuple(other.weight.shape)}"
        )
        assert (other.bias is not None) == self.use_bias, (
            f"the layer {'has no' if self.use_bias else 'has a'} bias"
        )
        for row, (above, below) in zip(self.linears, pairwise(self.out_parts), strict=True):
            for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                with GatheredParameters(tile.weight, modifier_rank=0):
                    tile.weight.copy_(other.weight[above:below, left:right])
                if tile.bias is not None:
                    with GatheredParameters(tile.bias, modifier_rank=0):
                        tile.bias.copy_(other.bias[above:below])


class TiledLinearReturnBias(TiledLinear):
    """The same of a class that returns (output, bias)."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, old_bias = (None, None) if current_out is None else current_out
        tensor, bias = new_out
        tensor = super()._reduce_local_output(
            in_id=in_id, out_id=out_id, current_out=before, new_out=tensor
        )
        return tensor, old_bias if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        tensors, biases = [x[0] for x in outputs], [x[1] for x in outputs if x[1] is not None]
        return torch.cat(tensors, dim=-1), torch.cat(biases, dim=-1) if biases else None


__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]
