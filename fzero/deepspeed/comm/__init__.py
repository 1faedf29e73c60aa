"""`deepspeed.comm`: torch.distributed, and DeepSpeed's additions to it."""

from fzero.deepspeed.comm import comm as comm, reduce_op as reduce_op
from fzero.deepspeed.comm.comm import *  # noqa: F403 - as DeepSpeed's package, all public names of its module

# its own: through the module it would ask the alias
from fzero.deepspeed.comm.comm import __getattr__ as __getattr__
