"""Long sequences in little memory: token-wise functions tile by tile, and losses
without logits.

May import: transforms and below. Begin with `fzero.tiling.tiles`; `cross_entropy` has
the loss, `transforms` makes both of a model that stays as it is, and `proposals` says
which of them the planner tries.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.tiling.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from fzero.tiling.proposals import proposed_tiles as proposed_tiles
    from fzero.tiling.tiles import tiled as tiled
    from fzero.tiling.transforms import tiled_head as tiled_head, tiled_mlp as tiled_mlp
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "cross_entropy": "linear_cross_entropy",
            "proposals": "proposed_tiles",
            "tiles": "tiled",
            "transforms": "tiled_head tiled_mlp",
        },
    )
