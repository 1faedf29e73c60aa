"""Checkpoints: saved, loaded and exported; DeepSpeed's are `fzero.deepspeed.formats`.

May import: resharding, step and below. Begin with `fzero.checkpoint.saving`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.checkpoint.folders import (
        CheckpointError as CheckpointError,
        NoCheckpointError as NoCheckpointError,
    )
    from fzero.checkpoint.loading import Loaded as Loaded, load as load, starts as starts
    from fzero.checkpoint.saving import Saving as Saving, save as save, start_save as start_save
    from fzero.checkpoint.weights import (
        export as export,
        load_weights as load_weights,
        save_16bit_model as save_16bit_model,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "folders": "CheckpointError NoCheckpointError",
            "loading": "Loaded load starts",
            "saving": "Saving save start_save",
            "weights": "export load_weights save_16bit_model",
        },
    )
