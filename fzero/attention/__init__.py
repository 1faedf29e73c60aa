"""Sparse attention: patterns make layouts, which are values; attention over the blocks
that a layout keeps.

Patterns and layouts are integers alone. A kernel is chosen for a layout, with the same
result. `SparseSelfAttention` and the configurations under DeepSpeed's names are
`fzero.deepspeed.ops.sparse_attention`. May import: common. Begin with
`fzero.attention.layouts`, then `fzero.attention.attend`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.attention.attend import (
        choose_backend as choose_backend,
        sparse_attention as sparse_attention,
    )
    from fzero.attention.layouts import Layout as Layout, density as density
    from fzero.attention.masks import (
        dense_mask as dense_mask,
        from_tensor as from_tensor,
        mask_mod as mask_mod,
        to_tensor as to_tensor,
    )
    from fzero.attention.patterns import (
        PATTERNS as PATTERNS,
        BigBird as BigBird,
        BSLongformer as BSLongformer,
        Dense as Dense,
        Fixed as Fixed,
        Local as Local,
        Pattern as Pattern,
        Variable as Variable,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "attend": "choose_backend sparse_attention",
            "layouts": "Layout density",
            "masks": "dense_mask from_tensor mask_mod to_tensor",
            "patterns": "PATTERNS BSLongformer BigBird Dense Fixed Local Pattern Variable",
        },
    )
