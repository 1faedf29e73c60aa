"""Long sequences in little memory: token-wise functions tile by tile, and losses
without logits.

May import: transforms and below. Begin with `fzero.tiling.tiles`; `cross_entropy` has
the loss, and `transforms` makes both of a model that stays as it is.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.tiling.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from fzero.tiling.tiles import tiled as tiled
    from fzero.tiling.transforms import tiled_head as tiled_head, tiled_mlp as tiled_mlp
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "cross_entropy": "linear_cross_entropy",
            "tiles": "tiled",
            "transforms": "tiled_head tiled_mlp",
        },
    )
