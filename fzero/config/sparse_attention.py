"""The block `sparse_attention`: from it the model's code makes a pattern, or
DeepSpeed's `SparsityConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from fzero.attention.patterns import PATTERNS
from fzero.config.fields import Block, Count, Elements

if TYPE_CHECKING:
    from fzero.attention.patterns import Pattern

KEYS: dict[str, str] = {
    "dense": "",
    "fixed": "different_layout_per_head num_local_blocks num_global_blocks attention "
    "horizontal_global_attention "
    "num_different_global_patterns",
    "variable": "different_layout_per_head num_random_blocks local_window_blocks "
    "global_block_indices "
    "global_block_end_indices attention horizontal_global_attention",
    "bigbird": (
        "different_layout_per_head num_random_blocks num_sliding_window_blocks num_global_blocks"
    ),
    "bslongformer": (
        "different_layout_per_head num_sliding_window_blocks global_block_indices "
        "global_block_end_indices"
    ),
}
"""The options that DeepSpeed reads in each mode, besides `block`."""


class SparseAttention(Block):
    """DeepSpeed key `sparse_attention`: the options of a layout. As in DeepSpeed, the
    model's code asks for them (docs/attention.md); a model without sparse attention
    trains as without the block, with a warning. Options of other modes than the given
    one have no effect, with a warning."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = "fixed"
    """The pattern."""
    block: Count = 16
    """Tokens of a block."""
    different_layout_per_head: bool = False
    """Whether every head has its own layout."""
    num_local_blocks: Count = 4
    """fixed: blocks of a window."""
    num_global_blocks: Elements = 1
    """fixed: blocks of a window that every row attends to; bigbird: first blocks that
    are global.
    """
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    """fixed, variable: whether rows attend to later blocks. DeepSpeed reads it in these
    two modes only.
    """
    horizontal_global_attention: bool = False
    """fixed, variable: whether the rows of global blocks attend to everything."""
    num_different_global_patterns: Count = 1
    """fixed: patterns with which heads take turns."""
    num_random_blocks: Elements = 0
    """variable, bigbird: random blocks of a row."""
    local_window_blocks: tuple[int, ...] = (4,)
    """variable: blocks of each window; the last number is repeated."""
    global_block_indices: tuple[int, ...] = (0,)
    """variable, bslongformer: the global blocks, or the starts of their ranges."""
    global_block_end_indices: tuple[int, ...] | None = None
    """variable, bslongformer: the ends of the ranges, exclusive."""
    num_sliding_window_blocks: Count = 3
    """bigbird, bslongformer: blocks of the window."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        try:
            assert self.pattern is not None
        except ValueError as error:
            raise ValueError(f"sparse_attention.{str(error).partition('.')[2]}") from None
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of the mode, without `mode` and `block`."""
        return {key: getattr(self, key) for key in KEYS[self.mode].split()}

    @property
    def pattern(self) -> Pattern:
        """The pattern, which makes layouts of any length."""
        return PATTERNS[self.mode](**self.options)

    def as_read(self) -> dict[str, Any]:
        """The mode, the block and the mode's options, as DeepSpeed's reader returns
        them.
        """
        options = {name: list(x) if isinstance(x, tuple) else x for name, x in self.options.items()}
        return {"mode": self.mode, "block": self.block, **options}
