"""`deepspeed.runtime.zero`: DeepSpeed's estimates of memory."""

from fzero.deepspeed.runtime.zero import stage3 as stage3, stage_1_and_2 as stage_1_and_2
