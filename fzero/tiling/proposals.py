"""`proposed_tiles`: the tiles that the planner tries for a model and a length."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from fzero.plans.units import blocks_of
from fzero.tiling.transforms import TiledHead, TiledMLP, tiled_head, tiled_mlp

MLP_NAMES = frozenset({"mlp", "feed_forward", "ffn", "ff"})
"""Names under which models have a token-wise module in each block."""
FEWEST_TOKENS = 1024
"""Of a tile: products of so many rows are as fast as any."""
MOST_TILES = 16
"""With so many the inside of a perceptron is smaller than its input, which stays whole."""


def proposed_tiles(model: nn.Module, num_tokens: int) -> tuple[TiledHead | TiledMLP, ...]:
    """`tiled_head` of a linear layer with a class for each row of an embedding, and
    `tiled_mlp` of the blocks' modules that are named as perceptrons are.

    A tile has at least `FEWEST_TOKENS` tokens, and as many as the hidden states are
    wide: with fewer, sums of gradients in fp32 take what tiles save. None is proposed
    for a sequence of less than two tiles.

    Args:
        num_tokens: the length of one sequence.

    >>> from fzero.estimation.models import PlainGPT
    >>> for one in proposed_tiles(PlainGPT(2, 64, vocabulary=96), 8192):
    ...     print(one)
    fzero.tiled_head('head')
    fzero.tiled_mlp('blocks.*.mlp', 8)
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tile = max(FEWEST_TOKENS, *(table.embedding_dim for table in tables), 0)
    if num_tokens < 2 * tile:
        return ()
    heads = [tiled_head(name) for name in _heads(model, {table.num_embeddings for table in tables})]
    most = min(num_tokens // tile, MOST_TILES)
    shards = next(n for n in range(most, 0, -1) if num_tokens % n == 0)
    inside = {
        re.sub(r"\.\d+(?=\.)", ".*", name)
        for block in blocks_of(model)
        for name, module in model.get_submodule(block).named_modules(prefix=block)
        if name.rpartition(".")[2] in MLP_NAMES and type(module).forward is not nn.Module.forward
    }
    mlps = [tiled_mlp(pattern, shards) for pattern in sorted(inside)] if shards > 1 else []
    return (*heads, *mlps)


def _heads(model: nn.Module, num_classes: set[int]) -> Iterator[str]:
    """The names of linear layers that turn hidden states into logits of a vocabulary."""
    for name, module in model.named_modules():
        is_plain = type(module).forward is nn.Linear.forward
        if is_plain and isinstance(module, nn.Linear) and module.out_features in num_classes:
            yield name
