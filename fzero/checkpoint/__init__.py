"""Checkpoints: saved, loaded, exported, and DeepSpeed's (`deepspeed`).

May import: resharding, step and below. Begin with `fzero.checkpoint.save_load`.
"""

__all__ = ["dcp_format", "deepspeed", "folders", "layout", "safetensors", "save_load", "weights"]
