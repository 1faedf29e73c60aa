"""Checkpoints: saved, loaded, exported, and DeepSpeed's (`deepspeed`).

May import: resharding, step and below. Begin with `fzero.checkpoint.saving`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.checkpoint.deepspeed.export import export_deepspeed as export_deepspeed
    from fzero.checkpoint.deepspeed.load import (
        convert_deepspeed as convert_deepspeed,
        import_deepspeed as import_deepspeed,
    )
    from fzero.checkpoint.folders import CheckpointError as CheckpointError, NoCheckpointError as NoCheckpointError
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
            "deepspeed.export": "export_deepspeed",
            "deepspeed.load": "convert_deepspeed import_deepspeed",
            "folders": "CheckpointError NoCheckpointError",
            "loading": "Loaded load starts",
            "saving": "Saving save start_save",
            "weights": "export load_weights save_16bit_model",
        },
    )
