"""`deepspeed.runtime.checkpoint_engine`: the class of `engine.checkpoint_engine`."""

from fzero.deepspeed.engine.own_files import CheckpointCommitInfo, TorchCheckpointEngine

__all__ = ["CheckpointCommitInfo", "TorchCheckpointEngine"]
