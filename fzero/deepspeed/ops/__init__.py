"""`deepspeed.ops`: optimizers under DeepSpeed's names."""

from fzero.deepspeed.ops import adam as adam
