"""`deepspeed.comm`: torch.distributed, and DeepSpeed's additions to it."""

from typing import Any

from torch import distributed as dist

from fzero.deepspeed.comm import comm as comm, reduce_op as reduce_op
from fzero.deepspeed.comm.comm import *  # noqa: F403 - as DeepSpeed's package, all public names of its module


# not that of its module, which may be the alias's by now
def __getattr__(name: str) -> Any:
    return getattr(dist, name)
