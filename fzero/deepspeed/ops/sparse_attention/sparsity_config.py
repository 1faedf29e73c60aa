"""`SparsityConfig` and its kinds: a pattern, a block size and a number of heads, with
DeepSpeed's names and arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fzero.attention.attend import check_length
from fzero.attention.layouts import Attention, Layout
from fzero.attention.masks import from_tensor, to_tensor
from fzero.attention.patterns import BigBird, BSLongformer, Dense, Fixed, Local, Pattern, Variable
from fzero.common.arguments import passed_on

if TYPE_CHECKING:
    from fzero.config.sparse_attention import SparseAttention


class SparsityConfig:
    """The base of all kinds; it has no layout itself. Options are attributes, and can
    be changed.

    Args:
        num_heads: the heads of the attention.
        block: tokens of a block.
        different_layout_per_head: whether every head has its own layout.
        seed: random blocks depend on it, on the layer and on the head. fzero's own.

    Raises:
        ValueError: an option is wrong.

    >>> config = FixedSparsityConfig(num_heads=2, block=16, attention="unidirectional")
    >>> config.make_layout(64)[0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    pattern_class: ClassVar[type[Pattern] | None] = None

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, value in (("num_heads", num_heads), ("block", block)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}.{name}: must be at least 1, got {value}")
        known = (
            {field.name for field in fields(self.pattern_class)}
            if self.pattern_class
            else set[str]()
        )
        if unknown := sorted({*options} - known):
            raise TypeError(
                f"{type(self).__name__}: has no option {', '.join(unknown)}; it has "
                f"{', '.join(sorted(known))}"
            )
        self.num_heads, self.block, self.seed = num_heads, block, seed
        self.different_layout_per_head = different_layout_per_head
        self.__dict__.update(options)
        if self.pattern_class is not None:
            assert self.pattern is not None  # its rules are checked

    @classmethod
    def of(cls, block: SparseAttention, num_heads: int, *, seed: int = 0) -> SparsityConfig:
        """What the block `sparse_attention` of a configuration describes, for a number
        of heads.

        >>> from fzero import Config
        >>> cfg = Config.load({"sparse_attention": {"mode": "bslongformer", "block": 32}})
        >>> type(SparsityConfig.of(cfg.sparse_attention, num_heads=2)).__name__
        'BSLongformerSparsityConfig'
        """
        return KINDS[block.mode](num_heads, block.block, **block.options, seed=seed)

    @property
    def num_layout_heads(self) -> int:
        """The heads with a layout of their own."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def pattern(self) -> Pattern:
        """The options as a value.

        Raises:
            NotImplementedError: this is no kind that has one.
        """
        if self.pattern_class is None:
            raise NotImplementedError(
                f"{type(self).__name__}: has no layout of its own; use FixedSparsityConfig or "
                f"another kind, or define make_layout"
            )
        given: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(self.pattern_class)
        }
        options: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in given.items()
        }
        return self.pattern_class(**options)

    def layout(self, seq_len: int, *, layer: int = 0) -> Layout:
        """The layout of a sequence of `seq_len` tokens, in the layer of that number.

        Raises:
            ValueError: the block does not divide the length, or the options need a
                longer one.
        """
        check_length(seq_len, self.block)
        return self.pattern.layout(
            seq_len // self.block, heads=self.num_heads, seed=self.seed, layer=layer
        )

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout of layer 0 as DeepSpeed's: int64 (heads, N, N), 1 for a kept
        block.
        """
        return tensor_of(self.layout(seq_len), self.num_heads)

    def setup_layout(self, seq_len: int) -> Tensor:
        """An empty layout, int64 (heads, N, N): where a kind of the user's own begins."""
        check_length(seq_len, self.block)
        return torch.zeros(
            self.num_heads, seq_len // self.block, seq_len // self.block, dtype=torch.int64
        )

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copies head 0's layout to all heads, unless each has its own: where a kind of
        the user's own ends.
        """
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


class DenseSparsityConfig(SparsityConfig):
    """Every block: see `Dense`."""

    pattern_class = Dense


class FixedSparsityConfig(SparsityConfig):
    """Windows and their global blocks: see `Fixed`."""

    pattern_class = Fixed

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: Attention = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(**passed_on(locals()))


class VariableSparsityConfig(SparsityConfig):
    """Windows of several sizes, global and random blocks: see `Variable`."""

    pattern_class = Variable

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Attention = "bidirectional",
        horizontal_global_attention: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(**passed_on(locals()))


class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, a sliding window and the first blocks: see `BigBird`."""

    pattern_class = BigBird

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: Attention = "bidirectional",
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(**passed_on(locals()))


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, global rows and columns: see `BSLongformer`."""

    pattern_class = BSLongformer

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Attention = "bidirectional",
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(**passed_on(locals()))


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone: see `Local`."""

    pattern_class = Local

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: Attention = "unidirectional",
    ) -> None:
        super().__init__(**passed_on(locals()))


KINDS: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig, "fixed": FixedSparsityConfig, "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig, "bslongformer": BSLongformerSparsityConfig,
}  # fmt: skip
"""The kinds by the names of the configuration's `sparse_attention.mode`."""


def tensor_of(layout: Layout, num_heads: int) -> Tensor:
    """A layout as DeepSpeed has it: int64 (heads, N, N)."""
    return to_tensor(layout).long().repeat(num_heads if layout.num_heads == 1 else 1, 1, 1)


def layout_of(config: Any, seq_len: int, *, layer: int = 0) -> Layout:
    """The layout of any object with `block` and `make_layout`, such as a user's own
    kind of `SparsityConfig`.
    """
    is_own = (
        isinstance(config, SparsityConfig)
        and type(config).make_layout is SparsityConfig.make_layout
    )
    if is_own:
        made: Layout = config.layout(seq_len, layer=layer)
        return made
    return from_tensor(config.make_layout(seq_len), getattr(config, "attention", "bidirectional"))
