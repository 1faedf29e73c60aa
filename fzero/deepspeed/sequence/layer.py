"""`deepspeed.sequence.layer`: `DistributedAttention`, for models that exchange tokens and
heads themselves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fzero.comms.axes import ProcessAxis
from fzero.comms.mesh import SEQ
from fzero.sequence.exchange import to_heads, to_tokens


class DistributedAttention(nn.Module):
    """Attention of one's own over the tokens of all ranks of a group.

    Args:
        local_attention: called with queries, keys and values of all tokens and H/S
            heads; returns a tensor of their shape.
        sequence_process_group: the ranks that share sequences.
        scatter_idx, gather_idx: the dimensions of heads and of tokens; (2, 0) or (2, 1).
        sp_stream: must be None.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"DistributedAttention: scatter_idx must be 2 and gather_idx 0 or 1, got "
                f"{scatter_idx} and {gather_idx}; give tensors (tokens, samples, heads, width) or "
                f"(samples, tokens, heads, width)"
            )
        if sp_stream is not None:
            raise ValueError(
                "DistributedAttention: sp_stream must be None, because an exchange does not "
                "overlap compute, got a stream; leave it out"
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention for this rank's tokens. *Collective:* every rank of the group.

        Args:
            query, key, value: (T, B, H, D), or (B, T, H, D) with `batch_dim_idx` 0.
        """
        size, rank = self.spg.size(), self.spg.rank()
        axis = ProcessAxis(SEQ, size, rank, self.spg)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.shape[2] % size:
                raise ValueError(
                    f"DistributedAttention: {size} ranks must divide the heads of {name}, got "
                    f"{x.shape[2]}; repeat them first"
                )

        def moved(x: Tensor) -> Tensor:  # to (B, H, T, D)
            return x.transpose(1, 2) if batch_dim_idx == 0 else x.permute(1, 2, 0, 3)

        def back(x: Tensor) -> Tensor:
            return x.transpose(1, 2) if batch_dim_idx == 0 else x.permute(2, 0, 1, 3)

        whole = to_heads((moved(query), moved(key), moved(value)), axis)
        out = self.local_attn(*map(back, whole), *args, **kwargs)
        return back(to_tokens(moved(out), axis)).contiguous()
