"""Generation between updates: the model on full parameters, LoRA merged on copies of
them, and weights for an inference server.

Generation is a function of parameters that were gathered once; nothing is written back.
May import: resharding, step and below. Begin with `fzero.generation.generating`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.generation.gathered_model import copy_nbytes as copy_nbytes, generating as generating
    from fzero.generation.lora import fuse_lora as fuse_lora, has_lora as has_lora
    from fzero.generation.serving import server_weights as server_weights
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "gathered_model": "copy_nbytes generating",
            "lora": "fuse_lora has_lora",
            "serving": "server_weights",
        },
    )
