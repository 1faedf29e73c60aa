"""`deepspeed.runtime`: some functions in DeepSpeed's places."""

from fzero.deepspeed.runtime import lr_schedules as lr_schedules, utils as utils, zero as zero
