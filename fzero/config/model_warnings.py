"""Blocks of the configuration that have no effect in a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fzero.config.sparse_attention import KEYS, SparseAttention


def unused_sparse_attention(block: SparseAttention, model: nn.Module) -> Iterator[str]:
    """A line for the options that the mode lacks, and one where no module of the model
    asks for the block.
    """
    lacks = sorted({*block.model_fields_set} - {"mode", "block", *KEYS[block.mode].split()})
    if lacks:
        yield (
            f"sparse_attention: mode {block.mode!r} has no option {', '.join(lacks)}, which "
            f"DeepSpeed does not read there either; leave it out, or give it to the SparsityConfig"
        )
    if not any(hasattr(module, "sparsity_config") for module in model.modules()):
        yield (
            "sparse_attention: no module of the model is a SparseSelfAttention, so that attention "
            "is what the model's code makes it; build one from "
            "SparsityConfig.of(cfg.sparse_attention, num_heads) (docs/attention.md), or leave the "
            "block out"
        )
