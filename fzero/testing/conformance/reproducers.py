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
    "ddp zero-optimizer fsdp2 deepspeed",
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
    "`fully_shard` has no check of shapes between ranks (DDP has one); the process is aborted in "
    "the first collective.",
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

_ENGINE = """
import torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or every run compiles it
deepspeed.init_distributed("gloo")
def engine_of(model, **config):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keys = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    keys |= {"gradient_clipping": 0.0, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=keys)[0]"""

_enter(
    "deepspeed",
    "reported_norm reported_norm_of_a_clipped_gradient reported_norm_of_micro_steps "
    "reported_norm_of_tied_weights reported_norm_of_tokens",
    "`get_global_grad_norm` is the documented call; stages 1 to 3 report the norm.",
    "get_global_grad_norm() is None",
    f"""{_ENGINE}
engine = engine_of(torch.nn.Linear(3, 1), zero_optimization={{"stage": 0}})
engine.backward(engine(torch.ones(1, 3)).sum())
engine.step()
assert engine.get_global_grad_norm() is not None, "get_global_grad_norm() is None"
""",
)

_enter(
    "deepspeed",
    "a_nan_on_one_rank_reaches_no_weight",
    "With `gradient_clipping`; no key asks for a check in fp32 (`check_grad_overflow` is one of bf16).",
    "AssertionError: after a NaN",
    f"""{_ENGINE}
engine = engine_of(torch.nn.Linear(3, 1), gradient_clipping=1.0)
engine.backward(engine(torch.ones(1, 3) * (float("nan") if deepspeed.comm.get_rank() else 1.0)).sum())
engine.step()
assert engine.module.weight.isfinite().all(), f"after a NaN: {{engine.module.weight}}"
""",
)

_enter(
    "deepspeed",
    "buffers_equal_on_all_ranks",
    "No key concerns buffers; the engine broadcasts them once, when it is made.",
    "AssertionError: the ranks' means",
    f"""{_ENGINE}
engine = engine_of(torch.nn.BatchNorm1d(3))
engine.backward(engine(torch.randn(4, 3) + deepspeed.comm.get_rank()).sum())
engine.step()
engine(torch.randn(4, 3))
both = [torch.empty(3) for _ in range(2)]
torch.distributed.all_gather(both, engine.module.running_mean)
assert torch.equal(*both), f"the deepspeed.comm.get_rank()s' means are {{both}}"
""",
)

_enter(
    "deepspeed",
    "loss_scaling_keeps_small_gradients training_after_an_overflow overflow_keeps_the_rate "
    "clipping_under_a_loss_scale history_of_the_loss_scale",
    "fp16 in stage 0: gradients are divided by the loss scale, and neither `engine.backward` nor "
    "`engine.scale` multiplies the loss by it. Stages 1 to 3 multiply.",
    "AssertionError: 1 - a gradient",
    f"""{_ENGINE}
type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True  # of a CPU
model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.ones_(model.weight)
engine = engine_of(model, fp16={{"enabled": True, "loss_scale": 4.0}}, zero_optimization={{"stage": 0}})
engine.backward(engine(torch.ones(1, 3).half()).sum())
engine.step()
assert model.weight.eq(0.0).all(), f"1 - a gradient of 1 gives {{model.weight}}"
""",
)

_enter(
    "deepspeed",
    "the_scale_does_not_change_the_update",
    "In the update that doubles the loss scale, gradients are divided by the new one. A fixed `loss_scale` helps.",
    "AssertionError: 1 - 2 gradients",
    f"""{_ENGINE}
type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True  # of a CPU
model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.ones_(model.weight)
fp16 = {{"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}}
engine = engine_of(model, fp16=fp16, zero_optimization={{"stage": 1}})
for _ in range(2):
    engine.backward(engine(torch.ones(1, 3).half()).sum())
    engine.step()
assert model.weight.eq(-1.0).all(), f"1 - 2 gradients of 1 gives {{model.weight}}"
""",
)

_enter(
    "deepspeed",
    "a_block_that_is_skipped_in_some_updates",
    "In stage 3 an unused parameter gets the gradient of the last update that used it. "
    "`ignore_unused_parameters` is a key of stage 2.",
    "AssertionError: the unused bias moves",
    f"""{_ENGINE}
class Net(torch.nn.Sequential):
    def forward(self, x, num):
        return (self[1](self[0](x)) if num == 2 else self[0](x)).sum()
engine = engine_of(Net(*[torch.nn.Linear(3, 3) for _ in range(2)]), zero_optimization={{"stage": 3}})
def biases_after(num):
    engine.backward(engine(torch.ones(1, 3), num))
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [layer.bias.sum().item() for layer in engine.module]
found = [biases_after(num) for num in (2, 1)]
assert found[0][1] == found[1][1], f"the unused bias moves: {{found}}"
""",
)

_enter(
    "deepspeed",
    "experts_unused_on_some_ranks experts_with_adamw_and_clipping",
    "`ignore_unused_parameters` is true by default; ranks reduce gradients of other sizes. Stage 0 is right.",
    "",
    f"""{_ENGINE}
model = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
model.forward = lambda x: sum(expert(x) for expert in model[: 1 + deepspeed.comm.get_rank()]).sum()
engine = engine_of(model, zero_optimization={{"stage": 1}})
engine.backward(engine(torch.ones(2, 3)))  # deepspeed.comm.get_rank() 0 does not use the second expert
engine.step()
""",
)

_enter(
    "deepspeed",
    "another_model_on_one_rank_is_refused",
    "`deepspeed.initialize` has no check of shapes between ranks (DDP has one): they hang in the first collective.",
    "",
    f"""{_ENGINE}
engine = engine_of(torch.nn.Linear(6, 4, bias=deepspeed.comm.get_rank() == 0))
engine.backward(engine(torch.ones(2, 6)).sum())
engine.step()
""",
)

_enter(
    "deepspeed",
    "mixed_dtypes",
    "In stage 1 parameters of fp32 become fp64 beside one of fp64; stages 2 and 3 refuse.",
    "AssertionError: the weight's dtype",
    f"""{_ENGINE}
model = torch.nn.Linear(3, 1)
model.extra = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
engine = engine_of(model, zero_optimization={{"stage": 1}})
out = engine(torch.ones(1, 3, dtype=model.weight.dtype))
engine.backward(out.sum() + model.extra.sum())
engine.step()
found = model.weight.dtype, model.extra.item()
assert found == (torch.float32, -1.0), f"the weight's dtype, and 0 - a gradient of 1: {{found}}"
""",
)

_enter(
    "deepspeed",
    "accumulation_in_fp32",
    "`data_types.grad_accum_dtype` is the documented key; stage 1 follows it, and stage 2 adds up in bf16.",
    "AssertionError: the mean of 100",
    f"""{_ENGINE}
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
more = {{"bf16": {{"enabled": True}}, "data_types": {{"grad_accum_dtype": "fp32"}}}}
engine = engine_of(model, gradient_accumulation_steps=8, zero_optimization={{"stage": 2}}, **more)
for x in [100.0] + [0.25] * 7:
    engine.backward(engine(torch.full((1, 1), x).bfloat16()).sum())
    engine.step()
mean = -deepspeed.utils.safe_get_full_fp32_param(model.weight).item()
assert abs(mean - (100 + 7 * 0.25) / 8) < 1e-3, f"the mean of 100 and 7 times 0.25 is {{mean}}"
""",
)

_enter(
    "deepspeed",
    "loaded_in_another_stage",
    "As the tutorial of universal checkpoints says; the error has no message. Between stages 1 and 2 it works.",
    "assert len(self.ckpt_list) > 0",
    """
import sys
import torch, deepspeed
from deepspeed.checkpoint import ds_to_universal
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or every run compiles it
deepspeed.init_distributed("gloo")
def engine(stage, **more):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **more}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
first = engine(3)
first.backward(first(torch.ones(1, 3)).sum())
first.step()
first.save_checkpoint("saved", tag="a")
if torch.distributed.get_rank() == 0:
    sys.argv = "- --input_folder saved/a --output_folder saved/b --inject_missing_state".split()
    ds_to_universal.main(ds_to_universal.parse_arguments())
torch.distributed.barrier()
engine(1, checkpoint={"load_universal": True}).load_checkpoint("saved", tag="b")
""",
)

_enter(
    "deepspeed",
    "memory_returns",
    "`engine.destroy()` is the documented call; it was called.",
    "bytes are held",
    """
import gc, torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or every run compiles it
deepspeed.init_distributed("gloo")
def held():
    gc.collect()
    return sum(x.nbytes for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
def train():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.Adam(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 256)).sum())
    engine.step()
    engine.destroy()
train()
before = held()
train()
assert held() - before < 2**20, f"{held() - before} bytes are held"
""",
)

_enter(
    "deepspeed",
    "bytes_sent_are_those_of_the_paper",
    "`use_multi_rank_bucket_allreduce=False` was tried: gradients are then reduced to their owners, which gloo does by sending "
    "more than the sum. By default they are all-reduced, and 3Ψ are sent.",
    "times the parameters are sent",
    f"""
import os, socket, struct, torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or every run compiles it
deepspeed.init_distributed("gloo")
{_SENT.strip()}
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
config = {{"zero_optimization": {{"stage": 1, "use_multi_rank_bucket_allreduce": False}}}}
optimizer = torch.optim.Adam(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config | {{"train_batch_size": 2}})
before = sent()
engine.backward(engine(torch.ones(1, 256)).sum()), engine.step()
now = torch.distributed.barrier() or sent()
assert now - before < 2.2 * 2**20 / 2, f"{{(now - before) / 2**19}} times the parameters are sent"
""",
)
