"""Features as transformations of a model, for `make_train_step(model, cfg, transforms=[…])`.

May import: graph and below. Begin with `fzero.model.transforms`, which has the protocol; `configured` makes the list of a step.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.model.transforms import (
        Call as Call,
        Changes as Changes,
        ModelTransform as ModelTransform,
        ParamView as ParamView,
        Pulled as Pulled,
        PulledGrad as PulledGrad,
        pulled_by_autograd as pulled_by_autograd,
    )
    from fzero.transforms.checkpointing import Checkpointing as Checkpointing
    from fzero.transforms.layer_drop import LayerDrop as LayerDrop
    from fzero.transforms.token_dropping import DroppedTokens as DroppedTokens
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "checkpointing": "Checkpointing",
            "layer_drop": "LayerDrop",
            "token_dropping": "DroppedTokens",
            ".model.transforms": "Call Changes ModelTransform ParamView Pulled PulledGrad pulled_by_autograd",
        },
    )
