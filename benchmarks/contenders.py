"""The contenders: each makes a train step for one rank, and `run_rank` runs it in
blocks when the driver says so.

A step takes a batch and returns what it measured: its time as `step` and that of the
`processor`, in ms, and its `loss`; or the floor's parts.
All train the same GPT from the same seed on the same batches, with the same AdamW and
without clipping; in fp32, or in bf16 with an fp32 master in the way that each offers
(DDP has none but `torch.autocast`). Each can be compiled, in the way that its
documentation recommends.
"""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from gpt import GPT, Size, make_batch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], dict[str, float]]
Mode = Literal["eager", "block", "step"]
"""What is compiled: nothing, the model (where there is a choice, block by block), or
the whole step.
"""

ADAMW = {"lr": 1e-3, "weight_decay": 0.01}


def timed(train: Callable[[Batch], Tensor]) -> Step:
    def step(batch: Batch) -> dict[str, float]:
        start, processor_start = time.perf_counter(), time.process_time()
        loss = train(batch).item()
        processor = 1e3 * (time.process_time() - processor_start)  # of all threads
        return {"step": 1e3 * (time.perf_counter() - start), "processor": processor, "loss": loss}

    return step


def usual_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool = False
) -> Step:
    """The loop body of the peers that live in PyTorch."""

    def train(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(train)


def make_bare(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    """A loop of one process, without a library between it and PyTorch."""
    model = GPT(size)
    if mode != "eager":
        model.compile()
    return usual_step(
        model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), autocast=dtype == "bf16"
    )


def make_floor(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    """What no step of this stage can do without, each part alone, over flat buffers
    that stay where they are.

    Measured beside it, and not part of it: `copies` of the gradients into the flat
    buffer, and in bf16 `casts`, of the gradients to fp32 and of the updated master to
    bf16.

    Both collectives are made of sends and receives, which on gloo beat the collectives
    of their names, all-to-all and broadcasts. Stage 0 takes the faster of that pair and
    an all-reduce; stage 3 gathers twice.
    """
    is_bf16, world_size, rank = dtype == "bf16", dist.get_world_size(), dist.get_rank()
    model = GPT(size).bfloat16() if is_bf16 else GPT(size)
    if mode != "eager":
        model.compile()
    others = [other for other in range(world_size) if other != rank]
    shard_numel = -(-sum(param.numel() for param in model.parameters()) // world_size)
    flat_P = torch.zeros(
        world_size * shard_numel, dtype=torch.bfloat16 if is_bf16 else torch.float32
    )
    shards_WS = flat_P.view(world_size, shard_numel)
    received_WS = torch.zeros_like(shards_WS)
    updated = torch.zeros_like(flat_P if stage == 0 else received_WS[0], dtype=torch.float32)
    updated.grad = torch.zeros_like(updated)
    optimizer = torch.optim.AdamW([updated], fused=True, **ADAMW)
    # gradients and parameters of what this rank updates
    of_updated = flat_P if stage == 0 else received_WS[0]
    params = list(model.parameters())
    numels = [param.numel() for param in params]
    grads = [x.view_as(param) for x, param in zip(flat_P[: sum(numels)].split(numels), params)]

    def copy_grads() -> None:
        torch._foreach_copy_(grads, [param.grad for param in params])

    def cast() -> None:
        updated.grad.copy_(of_updated)
        of_updated.copy_(updated)

    def swap(received: Tensor, sent: Callable[[int], Tensor]) -> None:
        works = [dist.irecv(received[other], other) for other in others]
        works += [dist.isend(sent(other), other) for other in others]
        for work in works:
            work.wait()

    def reduce_scatter() -> None:
        swap(received_WS, lambda other: shards_WS[other])
        for other in others:
            received_WS[rank] += received_WS[other]
        received_WS[rank] /= world_size

    def all_gather() -> None:
        swap(shards_WS, lambda other: shards_WS[rank])

    def measure(part: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        part()
        return 1e3 * (time.perf_counter() - start)

    def step(batch: Batch) -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        compute = measure(lambda: model(*batch).backward())
        communication = measure(reduce_scatter) + measure(all_gather)
        if stage == 0:
            communication = min(communication, measure(lambda: dist.all_reduce(flat_P)))
        if stage == 3:
            communication += measure(all_gather)
        update = measure(optimizer.step)
        parts = {"compute": compute, "communication": communication, "update": update}
        beside = {"copies": measure(copy_grads), "casts": measure(cast) if is_bf16 else 0.0}
        return parts | beside | {"step": sum(parts.values())}

    return step


def make_ddp(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    """DistributedDataParallel, in stage 1 with ZeroRedundancyOptimizer; compiled, a
    graph for each of its buckets.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(GPT(size), gradient_as_bucket_view=True)
    if mode != "eager":
        model.compile()
    if stage == 0:
        return usual_step(
            model,
            torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
            autocast=dtype == "bf16",
        )
    sharded = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **sharded, fused=True, **ADAMW)
    return usual_step(model, optimizer, autocast=dtype == "bf16")


def make_fsdp2(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    """`fully_shard` per block; stage 2 keeps the gathered parameters until the backward
    pass, stage 3 gathers again.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    narrow = torch.bfloat16 if dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
    model, mesh = GPT(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if mode != "eager" else ():
        block.compile()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    return usual_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def of_engine(engine: Any) -> Step:
    """A step as DeepSpeed's scripts write it."""

    def train(batch: Batch) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return timed(train)


def make_deepspeed(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    """DeepSpeed with its defaults, but PyTorch's fused AdamW and no clipping (its
    default is a norm of 1).
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    config = {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if mode != "eager":
        engine.compile()

    return of_engine(engine)


def fzero_config(size: Size, stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bf16"},
    }


def make_engine(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    """fzero as DeepSpeed's scripts call it: forward, backward and step of an engine."""
    import fzero

    engine, *_ = fzero.initialize(model=GPT(size), config=fzero_config(size, stage, dtype))

    return of_engine(engine)


def make_fzero(size: Size, stage: int, dtype: str, mode: Mode) -> Step:
    import fzero

    model, config = GPT(size), fzero_config(size, stage, dtype)
    train_step = fzero.make_train_step(model, config, compile=None if mode == "eager" else mode)
    state = train_step.init()
    model.to("meta")  # frees the module's own copy: the state holds the weights now

    def train(batch: Batch) -> Tensor:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics.loss

    return timed(train)


ALL = (0, 1, 2, 3)
Contenders = dict[str, tuple[Callable[[Size, int, str, Mode], Step], tuple[int, ...], Mode]]
"""By name: its maker, stages and mode."""
EAGER: Contenders = {
    "DDP": (make_ddp, (0,), "eager"),
    "ZeroRedundancyOptimizer": (make_ddp, (1,), "eager"),
    "FSDP2": (make_fsdp2, (2, 3), "eager"),
    "DeepSpeed": (make_deepspeed, ALL, "eager"),
    "fzero": (make_fzero, ALL, "eager"),
    "fzero engine": (make_engine, ALL, "eager"),
    "floor": (make_floor, ALL, "eager"),
}
COMPILED: Contenders = {
    "DDP + compile": (make_ddp, (0,), "block"),
    "ZeroRedundancyOptimizer + compile": (make_ddp, (1,), "block"),
    "FSDP2 + compile": (make_fsdp2, (2, 3), "block"),
    "DeepSpeed + compile": (make_deepspeed, ALL, "block"),
    "fzero": (make_fzero, ALL, "eager"),
    "fzero block": (make_fzero, ALL, "block"),
    "fzero step": (make_fzero, ALL, "step"),
    "floor": (make_floor, ALL, "block"),
}
ALONE: Contenders = {
    "bare": (make_bare, (0,), "eager"),
    "bare + compile": (make_bare, (0,), "block"),
    "fzero": (make_fzero, (0,), "eager"),
    "fzero block": (make_fzero, (0,), "block"),
    "fzero step": (make_fzero, (0,), "step"),
}
"""Those that show in one process what compiling gains and holds, without fzero and with
it.
"""
SETS = {"eager": EAGER, "compile": COMPILED, "alone": ALONE}


def forget_peak() -> None:
    """Gives back what compiling left, and counts the most memory from now on (Linux
    with glibc).
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_resident_mb() -> float:
    """The most memory this process held since the start, or since `forget_peak`
    (Linux).
    """
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def run_rank(
    contender: str,
    stage: int,
    size: Size,
    dtype: str,
    set_name: str,
    rank: int,
    world_size: int,
    folder: Path,
    pipe: Connection,
) -> None:
    """One rank of one contender: sends `ready`, then answers each number of steps with
    what they measured; 0 ends it.

    Between blocks it sleeps on the pipe. An error is the last thing it sends. All that
    is printed goes to a log in `folder`, where the ranks also find each other.
    """
    log = os.open(folder / f"{contender}_rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / f"{contender}.store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        torch.manual_seed(0)
        make_step, _, mode = SETS[set_name][contender]
        step = make_step(size, stage, dtype, mode)
        pipe.send(("ready", None))
        num_done = 0
        while num_steps := pipe.recv():
            batches = [make_batch(size, step=num_done + i, rank=rank) for i in range(num_steps)]
            dist.barrier()
            pipe.send(("measured", ([step(batch) for batch in batches], peak_resident_mb())))
            num_done += num_steps
            if set_name != "eager" and num_done == num_steps:  # the warm-up
                forget_peak()
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}".strip().splitlines()[-1]))
        raise
