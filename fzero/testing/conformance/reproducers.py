"""Programs that show where a system of others breaks a law, without fzero: run on two ranks
(`torchrun --nproc-per-node 2 FILE`), each fails on some rank. The tests run them.
"""

from __future__ import annotations

from typing import NamedTuple


class Reproducer(NamedTuple):
    """A program of at most 20 lines.

    Attributes:
        tried: how the documentation recommends to do it, and what was tried.
        fault: a piece of what it prints; "" where the process is aborted, or hangs.
    """

    tried: str
    fault: str
    program: str


REPRODUCERS: dict[tuple[str, str], Reproducer] = {}
"""By system and law."""


def _enter(systems: str, laws: str, tried: str, fault: str, program: str) -> None:
    for system in systems.split():
        for law in laws.split():
            REPRODUCERS[system, law] = Reproducer(tried, fault, program.lstrip("\n"))


_enter(
    "ddp zero-optimizer fsdp2",
    "a_rank_that_dies_is_named",
    "`monitored_barrier` is the call that names a rank which does not respond; it was called after the error, and raises "
    "the same. "
    "(Where torchrun started the ranks, its report names the rank.)",
    "AssertionError",
    """
import os
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    os._exit(9)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    found = str(error)
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=5))
    except RuntimeError as error:
        found += str(error)
    assert "rank 1" in found.lower(), found
""",
)

_SENT = """
def sent():
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name))).getsockopt(6, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", found, 120)[0]
        except OSError:
            pass
    return total
"""

_enter(
    "zero-optimizer",
    "bytes_sent_are_those_of_the_paper",
    "As its page shows it, around DDP: gradients are all-reduced (2Ψ), and updated weights are broadcast (Ψ).",
    "AssertionError",
    f"""
import os, socket, struct, torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
{_SENT.strip()}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
before = sent()
model(torch.ones(1, 256)).sum().backward()
optimizer.step()
dist.barrier()
assert sent() - before < 2.2 * 2**20 / 2, (sent() - before) / 2**19
""",
)

_enter(
    "fsdp2",
    "bytes_sent_are_those_of_the_paper",
    "FSDP2 asks for one gather and one reduce-scatter, 2Ψ in stage 2; the gloo backend of PyTorch sends an all-reduce for a "
    "reduce-scatter, so that 3Ψ are sent. With NCCL it does not.",
    "AssertionError",
    f"""
import os, socket, struct, torch
import torch.distributed as dist
{_SENT.strip()}
dist.init_process_group("gloo")
before = sent()
dist.reduce_scatter_tensor(torch.zeros(2**17), torch.ones(2**18))
dist.barrier()
assert sent() - before < 1.1 * 2**20 / 2, (sent() - before) / 2**19  # bytes of the tensor, halved
""",
)

_enter(
    "fsdp2",
    "experts_unused_on_some_ranks experts_with_adamw_and_clipping",
    "`fully_shard` of each block and of the root, as its page says; its page has no option for modules that a rank does not "
    "use. `fully_shard` of the root alone was tried, too, with the same end: ranks reduce gradients of other sizes.",
    "",
    """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts[: 1 + dist.get_rank()])

model = Experts()
for module in (*model.experts, model):
    fully_shard(module, mesh=mesh)
model(torch.ones(2, 3)).sum().backward()  # rank 0 does not use the second expert
""",
)

_enter(
    "fsdp2",
    "another_model_on_one_rank_is_refused",
    "`fully_shard` has no check of shapes between ranks (DDP has one); the process is aborted in the first collective.",
    "",
    """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
model = nn.Linear(6, 4, bias=dist.get_rank() == 0)
fully_shard(model, mesh=mesh)
model(torch.ones(2, 6)).sum().backward()
""",
)

_enter(
    "fsdp2",
    "buffers_equal_on_all_ranks",
    "`fully_shard` shards parameters only, and its page says nothing of buffers; `SyncBatchNorm`, which DDP's page recommends, "
    "has no kernel for CPUs.",
    "AssertionError",
    """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
model = nn.BatchNorm1d(3)
fully_shard(model, mesh=mesh)
model(torch.randn(4, 3) + dist.get_rank())
both = [torch.empty(3) for _ in range(2)]
dist.all_gather(both, model.running_mean)
assert torch.equal(*both), both
""",
)
