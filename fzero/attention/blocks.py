"""Attention over kept blocks alone, on any device: time falls with the density of the
layout, and memory is that of the inputs.

1. Rows of blocks that keep equally many columns form a chunk, as many as fit
  `CHUNK_SCORES`.
2. A chunk gathers its blocks of keys and values, and is an ordinary attention of small
  matrices.
3. The forward saves its inputs and result. The backward computes the probabilities of a
   chunk again, as FlashAttention does (Dao et al. 2022, arXiv:2205.14135), so that no
   more scores exist at a time than a chunk's.

Shapes: B batch; H heads, or 1 where every head has its own layout; M rows of blocks, N
for each layout, one after the other; R rows of a chunk; T tokens of a block; S tokens
of the kept blocks of a row; D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.attention.layouts import Layout, columns_of

CHUNK_SCORES = {"cpu": 2**19, "cuda": 2**26}
"""Scores of a chunk, batch and heads together: what a core's cache holds, or what fills
a GPU.
"""


class Chunk(NamedTuple):
    """Rows that are computed together, and the kept columns of each, equally many."""

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    ends_on_diagonal: bool

    @property
    def rows_are_a_slice(self) -> bool:
        return self.rows[-1] - self.rows[0] == len(self.rows) - 1

    @property
    def columns_are_a_slice(self) -> bool:
        """One row without gaps, as a global one: its keys are not copied."""
        first = self.columns[0]
        return len(self.rows) == 1 and first[-1] - first[0] == len(first) - 1


@dataclass(frozen=True, slots=True)
class Spec:
    """What is computed: the layout, its causal form where tokens must not attend to
    later ones, and the size of chunks.
    """

    layout: Layout
    causal: bool
    chunks: tuple[Chunk, ...]

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks


@lru_cache(maxsize=64)
def spec_of(layout: Layout, causal: bool, most: int) -> Spec:
    """The chunks of a layout, of at most `most` kept blocks where a row has not more."""
    layout = layout.lower_triangle() if causal else layout
    alike: dict[tuple[int, bool], list[tuple[int, tuple[int, ...]]]] = {}
    size = layout.num_blocks
    for head, bits_of_rows in enumerate(layout.rows):
        for row, bits in enumerate(bits_of_rows):
            columns = columns_of(bits)
            place = head * size
            moved = tuple(place + column for column in columns)
            alike.setdefault((len(columns), columns[-1] == row), []).append((place + row, moved))
    chunks = []
    for (count, on_diagonal), found in sorted(alike.items()):
        step = max(most // count, 1)
        for start in range(0, len(found), step):
            rows, columns_of_rows = zip(*found[start : start + step], strict=True)
            chunks.append(Chunk(rows, columns_of_rows, on_diagonal))
    return Spec(layout, causal, tuple(chunks))


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    causal: bool,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """Attention over the kept blocks, (B, H, L, D), differentiable any number of times.

    Args:
        query, key, value: (B, H, L, D); the query is scaled already.
        layout: every row keeps a block, also without the blocks above the diagonal
            where `causal`.
        biases: added to the scores, each (B or 1, H or 1, L or 1, L); they get no
            gradient.
    """
    batch, heads, length, width = query.shape
    block = length // layout.num_blocks
    shared = layout.num_heads == 1
    scores_of_block = batch * (heads if shared else 1) * block * block
    spec = spec_of(
        layout, causal, max(CHUNK_SCORES.get(query.device.type, 2**26) // scores_of_block, 1)
    )
    blocks = (batch, heads, -1, block, width) if shared else (batch, 1, -1, block, width)
    attended = _attend(*(x.reshape(blocks) for x in (query, key, value)), spec, *biases)
    return attended.reshape(query.shape)


class BlockAttention(torch.autograd.Function):
    """Attention of blocks, each (B, H, M, T, D), over the columns that `spec` keeps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *biases: Tensor) -> Tensor:
        parts = []
        for chunk in spec.chunks:
            index = _column_index(chunk, k)
            probs = _probs(_rows_of(q, chunk), _columns_of(k, chunk, index), spec, chunk, biases)
            parts.append(probs @ _columns_of(v, chunk, index))
        return _in_order(parts, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, k, v, ctx.spec, *biases = inputs
        ctx.save_for_backward(q, k, v, output, *biases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *biases = ctx.saved_tensors
        spec: Spec = ctx.spec
        grad_k, grad_v, parts = torch.zeros_like(k), torch.zeros_like(v), []
        delta = (grads[0] * out).sum(-1, keepdim=True)
        for chunk in spec.chunks:
            index = _column_index(chunk, k)
            q_BHRTD, k_BHRSD = _rows_of(q, chunk), _columns_of(k, chunk, index)
            grad_BHRTD = _rows_of(grads[0], chunk)
            probs = _probs(q_BHRTD, k_BHRSD, spec, chunk, biases)
            _add_to_columns(grad_v, chunk, index, probs.transpose(-1, -2) @ grad_BHRTD)
            of_probs = grad_BHRTD @ _columns_of(v, chunk, index).transpose(-1, -2)
            of_scores = of_probs.sub_(_rows_of(delta, chunk)).mul_(probs)
            _add_to_columns(grad_k, chunk, index, of_scores.transpose(-1, -2) @ q_BHRTD)
            parts.append(of_scores @ k_BHRSD)
        return _in_order(parts, spec), grad_k, grad_v, None, *[None] * len(biases)


_attend: Callable[..., Tensor] = BlockAttention.apply  # type: ignore[assignment]


def _probs(
    q_BHRTD: Tensor, k_BHRSD: Tensor, spec: Spec, chunk: Chunk, biases: Sequence[Tensor]
) -> Tensor:
    """The softmax of a chunk's scores, in the dtype of the inputs; 0 for a query that
    every key is dropped for.
    """
    scores = q_BHRTD @ k_BHRSD.transpose(-1, -2)
    never = float("-inf")
    if spec.causal and chunk.ends_on_diagonal:
        tokens = q_BHRTD.shape[-2]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., -tokens:].masked_fill_(later, never)
    for bias in biases:
        scores += _bias_of(bias, spec, chunk, tokens=q_BHRTD.shape[-2])
    wide = torch.promote_types(scores.dtype, torch.float32)
    if not biases:
        return torch.softmax(scores, -1, dtype=wide).to(scores.dtype)
    dropped = scores.amax(-1, keepdim=True) == never
    probs = torch.softmax(scores.masked_fill_(dropped, 0), -1, dtype=wide)
    return probs.masked_fill(dropped, 0).to(scores.dtype)


def _bias_of(bias: Tensor, spec: Spec, chunk: Chunk, *, tokens: int) -> Tensor:
    """A chunk's part of a bias (B or 1, H or 1, L or 1, L), as (B or 1, H or 1, R, T or
    1, S).
    """
    size = spec.num_blocks
    batch, heads, of_rows = bias.shape[:3]
    shape = (size, tokens) if of_rows > 1 else (1, 1)
    blocks = bias.reshape(batch, heads, *shape, size, tokens)
    rows = torch.tensor(chunk.rows, device=bias.device).unsqueeze(1)  # (R, 1)
    columns = torch.tensor(chunk.columns, device=bias.device) % size
    of_row = rows % size if of_rows > 1 else torch.zeros_like(rows)
    if spec.layout.num_heads == 1:
        picked = blocks.permute(2, 4, 0, 1, 3, 5)[of_row, columns]  # (R, columns, B, H, T, T)
        return picked.permute(2, 3, 0, 4, 1, 5).flatten(-2)
    of_head = rows // size if heads > 1 else torch.zeros_like(rows)
    picked = blocks.permute(1, 2, 4, 0, 3, 5)[of_head, of_row, columns]  # (R, columns, B, T, T)
    return picked.permute(2, 0, 3, 1, 4).flatten(-2).unsqueeze(1)


def _column_index(chunk: Chunk, like: Tensor) -> Tensor | None:
    return (
        None
        if chunk.columns_are_a_slice
        else torch.tensor(chunk.columns, device=like.device).flatten()
    )


def _rows_of(x_BHMTD: Tensor, chunk: Chunk) -> Tensor:
    if chunk.rows_are_a_slice:
        return x_BHMTD[:, :, chunk.rows[0] : chunk.rows[-1] + 1]
    return x_BHMTD.index_select(2, torch.tensor(chunk.rows, device=x_BHMTD.device))


def _columns_of(x_BHMTD: Tensor, chunk: Chunk, index: Tensor | None) -> Tensor:
    """The kept blocks of every row, (B, H, R, S, D)."""
    if index is None:
        x = x_BHMTD[:, :, chunk.columns[0][0] : chunk.columns[0][-1] + 1]
    else:
        x = x_BHMTD.index_select(2, index)
    batch, heads, _, tokens, width = x_BHMTD.shape
    return x.reshape(batch, heads, len(chunk.rows), len(chunk.columns[0]) * tokens, width)


def _add_to_columns(
    into_BHMTD: Tensor, chunk: Chunk, index: Tensor | None, x_BHRSD: Tensor
) -> None:
    batch, heads, _, tokens, width = into_BHMTD.shape
    x_BHCTD = x_BHRSD.reshape(batch, heads, -1, tokens, width)
    if index is None:
        into_BHMTD[:, :, chunk.columns[0][0] : chunk.columns[0][-1] + 1] += x_BHCTD
    else:
        into_BHMTD.index_add_(2, index, x_BHCTD)


def _in_order(parts: Sequence[Tensor], spec: Spec) -> Tensor:
    """The results of all chunks, row after row."""
    rows = [row for chunk in spec.chunks for row in chunk.rows]
    joined = torch.cat(list(parts), 2)
    if rows == sorted(rows):
        return joined
    place = sorted(range(len(rows)), key=rows.__getitem__)
    return joined.index_select(2, torch.tensor(place, device=joined.device))
