"""Features as transformations of a model, for
`make_train_step(model, cfg, transforms=[…])`.

May import: graph and below. Begin with `fzero.model.transforms`, which has the
protocol; `configured` makes the list of a step.
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
    from fzero.transforms.adapters import (
        load_adapter as load_adapter,
        merged as merged,
        save_adapter as save_adapter,
        unmerged as unmerged,
    )
    from fzero.transforms.checkpointing import Checkpointing as Checkpointing
    from fzero.transforms.fake_quantization import quantization_aware as quantization_aware
    from fzero.transforms.layer_drop import LayerDrop as LayerDrop
    from fzero.transforms.low_rank import lora as lora
    from fzero.transforms.packing import packed as packed
    from fzero.transforms.token_dropping import DroppedTokens as DroppedTokens
    from fzero.transforms.views import FunctionView as FunctionView
    from fzero.transforms.weight_lengths import weight_norm as weight_norm
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "adapters": "load_adapter merged save_adapter unmerged",
            "checkpointing": "Checkpointing",
            "layer_drop": "LayerDrop",
            "low_rank": "lora",
            "packing": "packed",
            "fake_quantization": "quantization_aware",
            "token_dropping": "DroppedTokens",
            "views": "FunctionView",
            "weight_lengths": "weight_norm",
            ".model.transforms": (
                "Call Changes ModelTransform ParamView Pulled PulledGrad pulled_by_autograd"
            ),
        },
    )
