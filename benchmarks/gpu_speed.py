"""The speed of `gpu.py`: contenders that train one GPT in bf16 with fp32 masters and
AdamW, and the idle times of one step.

All train 6 floating-point operations per parameter and token, and those of causal
attention; a share of `PEAK` is of these.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_scale import MEGA, Scale, keep, own_folder, synchronize

PEAK = 989e12
"""Floating-point operations per second of an H100's or H200's bf16 matrix units, by its
maker, without sparsity.
"""
NUM_ROUNDS = 3
Step = Callable[[Any], Any]
"""Trains on a batch and returns its loss."""


def size_of(scale: Scale, width: int = 0, num_blocks: int = 0) -> Any:
    from gpt import Size

    width = width or scale.width
    return Size(
        width, num_blocks or scale.num_blocks, width // 128 or 1, scale.context, scale.num_rows
    )


def num_params(size: Any) -> int:
    """Of the matrices, and of both embeddings."""
    return 12 * size.num_blocks * size.width**2 + 2 * 256 * size.width


def operations_per_token(size: Any) -> int:
    return (
        6 * num_params(size) + 6 * size.num_blocks * size.width * size.context
    )  # causal attention: half of the scores


def rate_of_products(scale: Scale) -> float:
    """The floating-point operations per second of a large bf16 matrix product."""
    import torch

    x, y = (
        torch.randn(scale.product, scale.product, device=scale.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    seconds = []
    for _ in range(6):
        synchronize(scale.device)
        start = time.perf_counter()
        x @ y
        synchronize(scale.device)
        seconds.append(time.perf_counter() - start)
    return 2 * scale.product**3 / statistics.median(seconds[1:])


def timed(scale: Scale, make: Callable[[Any], Step]) -> dict[str, Any]:
    """Tokens per second, peak and last loss of one contender; kept after each round,
    should the row be cut off.
    """
    import torch
    from gpt import make_batch

    size = size_of(scale)
    torch.manual_seed(0)
    start = time.perf_counter()
    step = make(size)
    batches = [
        tuple(x.to(scale.device) for x in make_batch(size, step=i, rank=0)) for i in range(2)
    ]
    synchronize(scale.device)
    made = time.perf_counter() - start
    loss = step(batches[0])  # compiles
    synchronize(scale.device)
    first = time.perf_counter() - start - made
    for batch in batches:
        step(batch)
    synchronize(scale.device)
    if scale.on_card:
        torch.cuda.reset_peak_memory_stats()
    rounds, found = list[float](), dict[str, Any]()
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        # the host may be ahead of the device, as in a training
        for index in range(scale.num_steps):
            loss = step(batches[index % 2])
        synchronize(scale.device)
        rounds.append((time.perf_counter() - start) / scale.num_steps)
        found = {"make_s": made, "first_step_s": first, "rounds_s": rounds, "loss": float(loss)}
        found |= figures(size, statistics.median(rounds), num_tokens=size.num_rows * size.context)
        if scale.on_card:
            found |= {"peak_mib": torch.cuda.max_memory_allocated() / MEGA}
            found |= {"reserved_mib": torch.cuda.max_memory_reserved() / MEGA}
        keep(found | {"passed": math.isfinite(found["loss"])})
    return found | {"passed": math.isfinite(found["loss"])}


def figures(size: Any, seconds: float, num_tokens: int) -> dict[str, Any]:
    rate = operations_per_token(size) * num_tokens / seconds
    return {
        "parameters": num_params(size),
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "ms": 1e3 * seconds,
        "tflops": rate / 1e12,
        "mfu": rate / PEAK,
    }


# --- contenders without fzero ---------------------------------------------------------------------


def plain(compiled: bool = False, graph: bool = False) -> Callable[[Scale], dict[str, Any]]:
    """PyTorch alone: bf16 parameters, fp32 masters, the fused AdamW and foreach copies
    between them.
    """

    def run(scale: Scale) -> dict[str, Any]:
        if graph and not scale.on_card:
            return {"not_run": "CUDA graphs need a card"}

        def make(size: Any) -> Step:
            step = plain_contender(scale, size, compiled=compiled, capturable=graph)
            return graphed(step, size) if graph else step

        return timed(scale, make)

    return run


def plain_contender(scale: Scale, size: Any, *, compiled: bool, capturable: bool = False) -> Step:
    import torch
    from gpt import GPT

    with torch.device(scale.device):
        model = GPT(size)
    # before they are rounded, as with mixed precision
    masters = [x.detach().clone() for x in model.parameters()]
    model.bfloat16()
    for block in model.blocks if compiled else ():
        block.compile(backend=scale.backend)
    return plain_step(model, masters, capturable=capturable)


def plain_step(model: Any, masters: list[Any], capturable: bool) -> Step:
    import torch

    params = list(model.parameters())
    for x in masters:
        x.grad = torch.empty_like(x)
    grads = [x.grad for x in masters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True, capturable=capturable)

    def step(batch: Any) -> Any:
        loss = model(*batch)
        loss.backward()
        torch._foreach_copy_(grads, [x.grad for x in params])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        for x in params:
            x.grad = None
        return loss.detach()

    return step


def graphed(step: Step, size: Any) -> Step:
    """The same step as one CUDA graph."""
    import torch
    from gpt import make_batch

    batch = tuple(x.cuda() for x in make_batch(size, step=0, rank=0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(batch)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.empty_cache()  # a graph has memory of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(batch)

    def replay(given: Any) -> Any:
        for x, y in zip(batch, given, strict=True):
            x.copy_(y)
        graph.replay()
        return loss

    return replay


def fsdp2(compiled: bool) -> Callable[[Scale], dict[str, Any]]:
    def run(scale: Scale) -> dict[str, Any]:
        import torch
        import torch.distributed as dist
        from gpt import GPT
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dist.init_process_group(
            "nccl" if scale.on_card else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=nccl_device(scale),
        )

        def make(size: Any) -> Step:
            with torch.device(scale.device):
                model = GPT(size)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            mesh = dist.device_mesh.init_device_mesh(scale.device, (1,))
            for block in model.blocks:
                if compiled:
                    block.compile(backend=scale.backend)
                fully_shard(block, mp_policy=policy, mesh=mesh)
            fully_shard(model, mp_policy=policy, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

            def step(batch: Any) -> Any:
                loss = model(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return step

        return timed(scale, make)

    return run


def nccl_device(scale: Scale) -> Any:
    """The device that a process group of NCCL belongs to; gloo has none."""
    import torch

    return torch.device("cuda", 0) if scale.on_card else None


# --- fzero ----------------------------------------------------------------------------------------


def config_of(size: Any, stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage} | zero,
    }


def fzero_step(scale: Scale, size: Any, *, stage: int, how: str | None = None) -> Step:
    import torch
    from gpt import GPT

    import fzero

    with torch.device(scale.device):
        model = GPT(size)
    made: Any = {"compile": how, "compile_backend": scale.backend} if how else {}
    step = fzero.make_train_step(model, config_of(size, stage), **made)
    state = step.init()
    model.to("meta")

    def run_step(batch: Any) -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics.loss

    return run_step


def fzero_contender(stage: int, how: str | None = None) -> Callable[[Scale], dict[str, Any]]:
    return lambda scale: timed(scale, lambda size: fzero_step(scale, size, stage=stage, how=how))


def planned(scale: Scale) -> dict[str, Any]:
    """The peaks that fzero plans for these trainings, by stage; this needs no card."""
    import torch
    from gpt import GPT, make_batch

    import fzero

    size = size_of(scale)
    with torch.device("meta"):
        model = GPT(size)
    batch = tuple(x.to("meta") for x in make_batch(size, step=0, rank=0))
    device: Any = scale.device
    compared = fzero.estimation.compare_plans(model, config_of(size, 0), batch=batch, device=device)
    peaks = {
        one.name: one.step.nbytes / MEGA for one in compared.columns if one.name.count(" ") == 1
    }
    return {
        "passed": len(peaks) == 4,
        "rows": [{"plan": name, "peak_mib": peak} for name, peak in peaks.items()],
    }


# --- gaps -----------------------------------------------------------------------------------------


def gaps(contender: Callable[[Scale, Any], Step]) -> Callable[[Scale], dict[str, Any]]:
    """How long the device waits in a step, and on what it works, from a trace of some
    steps of torch.profiler.
    """

    def run(scale: Scale) -> dict[str, Any]:
        from gpt import make_batch
        from torch.profiler import ProfilerActivity, profile

        size, num_steps = size_of(scale), 3
        step = contender(scale, size)
        batch = tuple(x.to(scale.device) for x in make_batch(size, step=0, rank=0))
        for _ in range(3):
            step(batch)
        synchronize(scale.device)
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * scale.on_card]
        with profile(activities=activities) as profiler:
            for _ in range(num_steps):
                step(batch)
            synchronize(scale.device)
        path = own_folder("trace")
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        path.unlink()
        of_device = DEVICE if scale.on_card else ("cpu_op",)
        found = idle(events, of_device, num_steps)
        return found | {"steps": num_steps, "work": work_of(events, of_device, num_steps)}

    return run


def work_of(
    events: list[dict[str, Any]], categories: tuple[str, ...], num_steps: int
) -> list[dict[str, Any]]:
    """The kernels and copies that take the most time of a device, by name.

    >>> events = [
    ...     {"cat": "kernel", "dur": 2_000, "name": "gemm"},
    ...     {"cat": "kernel", "dur": 6_000, "name": "copy"},
    ... ] * 2
    >>> work_of(events, DEVICE, num_steps=2)
    [{'ms': 6.0, 'times': 1.0, 'kernel': 'copy'}, {'ms': 2.0, 'times': 1.0, 'kernel': 'gemm'}]
    """
    spent: dict[str, tuple[float, int]] = {}
    for x in events:
        if x.get("cat") in categories and "dur" in x:
            ms, times = spent.get(x["name"], (0.0, 0))
            spent[x["name"]] = ms + x["dur"] / 1e3, times + 1
    most = sorted(spent.items(), key=lambda one: one[1], reverse=True)[:25]
    return [
        {"ms": ms / num_steps, "times": times / num_steps, "kernel": name[:160]}
        for name, (ms, times) in most
    ]


DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of a trace's events that keep a card busy."""


def idle(
    events: list[dict[str, Any]], categories: tuple[str, ...], num_steps: int
) -> dict[str, Any]:
    """From the first to the last event of a device: the share of time without any, the
    longest such times, and what ended them.

    >>> busy = [(0, 40, "a"), (10, 10, "b"), (50, 50, "c")]
    >>> events = [{"cat": "kernel", "ts": ts, "dur": dur, "name": name} for ts, dur, name in busy]
    >>> found = idle(events, DEVICE, 1)
    >>> found["idle"], [gap["before"] for gap in found["rows"]]
    (0.1, ['c'])
    """
    spans = sorted(
        (x["ts"], x["ts"] + x["dur"], x["name"])
        for x in events
        if x.get("cat") in categories and "dur" in x
    )
    if not spans:
        return {"passed": False, "error": "the trace has no event of the device"}
    start, until, waits = spans[0][0], spans[0][0], list[tuple[float, str]]()
    for begin, end, name in spans:
        if begin > until:
            waits.append((begin - until, name))
        until = max(until, end)
    waits.sort(reverse=True)
    total = sum(wait for wait, _ in waits)
    return {
        "passed": True,
        "idle": total / (until - start),
        "ms": (until - start) / 1e3 / num_steps,
        "idle_ms": total / 1e3 / num_steps,
        "kernels": len(spans) / num_steps,
        "rows": [{"gap_ms": wait / 1e3, "before": name[:100]} for wait, name in waits[:8]],
    }
