"""`deepspeed.compression`: quantization, pruning and layer reduction under DeepSpeed's
names; see docs/compression.md.
"""

from __future__ import annotations

from fzero.deepspeed.compression import basic_layer, compress, helper, scheduler
from fzero.deepspeed.compression.compress import init_compression, redundancy_clean
from fzero.deepspeed.compression.helper import convert_conv1d_to_linear
from fzero.deepspeed.compression.scheduler import compression_scheduler

__all__ = [
    "basic_layer",
    "compress",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "helper",
    "init_compression",
    "redundancy_clean",
    "scheduler",
]
