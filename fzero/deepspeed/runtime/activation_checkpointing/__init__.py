"""`deepspeed.runtime.activation_checkpointing`."""

from fzero.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
