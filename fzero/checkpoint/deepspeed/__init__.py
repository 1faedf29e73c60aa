"""DeepSpeed's checkpoints: read, converted and written. Begin with `fzero.checkpoint.deepspeed.load`."""

__all__ = ["export", "files", "flat", "load", "source", "universal"]
