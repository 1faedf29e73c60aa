"""Which of fzero's paths work on a card at all: one small probe of each, in seconds,
before anything is measured.

A probe is a function of a `Scale` that raises, or returns what it found with `passed`.
Without a card those that have a meaning there run on the processor; the others say that
they need one.
"""

import os
import time
import warnings
from typing import Any

from gpu_scale import (
    ADAMW,
    PRECISIONS,
    SGD,
    Scale,
    difference,
    forget,
    plain_training,
    small_training,
    synchronize,
)

NEEDS_CARD = {"not_run": "needs a card"}
HOST = {"device": "cpu", "pin_memory": True}
ALL_ON_HOST = {"offload_optimizer": HOST, "offload_param": HOST}


def close(name: str, found: float, most: float) -> dict[str, Any]:
    """A row that says what was found, and the bound."""
    return {"passed": bool(found <= most), "rows": [{"check": name, "found": found, "most": most}]}


# --- what the card is -----------------------------------------------------------------------------


def card(scale: Scale) -> dict[str, Any]:
    """Its name and memory, and the rates by which other figures can be judged."""
    import torch
    from gpu_speed import rate_of_products

    found: dict[str, Any] = {"passed": True, "product_tflops": rate_of_products(scale) / 1e12}
    if scale.on_card:
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "gib": card.total_memory / 2**30,
        }
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        for name, pair in (("host_to_device", (device, host)), ("device_to_host", (host, device))):
            pair[0].copy_(pair[1], non_blocking=True)
            synchronize("cuda")
            start = time.perf_counter()
            for _ in range(4):
                pair[0].copy_(pair[1], non_blocking=True)
            synchronize("cuda")
            found[f"{name}_gb_per_s"] = 4 * 2**28 / (time.perf_counter() - start) / 1e9
    return found


# --- eager steps ----------------------------------------------------------------------------------


def first_step(scale: Scale) -> dict[str, Any]:
    """Stage 0 in fp32 with SGD against a plain loop."""
    found = small_training(scale.device, stage=0, optimizer=SGD)
    return close(
        "largest difference of a weight from a plain loop",
        difference(found, plain_training(scale.device)),
        1e-6,
    )


def transfers(scale: Scale) -> dict[str, Any]:
    """Shards and gradients that cross between the memories on streams of their own,
    against state on the device.
    """
    expected = small_training(scale.device, stage=3, optimizer=SGD)
    found = small_training(scale.device, stage=3, optimizer=SGD, zero=ALL_ON_HOST)
    return close("difference from state on the device", difference(found, expected), 1e-6)


def pinned(scale: Scale) -> dict[str, Any]:
    """Memory that copies cross from is pinned, and does not grow from step to step."""
    import optree
    import torch
    from gpt import GPT, Size, make_batch
    from gpu_speed import config_of

    import fzero

    size = Size(64, 2, 2, 32, 2)
    cfg = config_of(size, 3, **ALL_ON_HOST, stage3_param_persistence_threshold=0)
    step = fzero.make_train_step(GPT(size).to(scale.device), cfg)
    state, grown = step.init(), list[int]()
    for index in range(4):
        state, _ = step(
            state, tuple(x.to(scale.device) for x in make_batch(size, step=index, rank=0))
        )
        synchronize(scale.device)
        if scale.on_card:
            grown.append(torch.cuda.host_memory_stats().get("allocated_bytes.current", -1))
    crossing = [x.is_pinned() for x in optree.tree_leaves((state.params, state.grads))]
    found = [
        {"pinned": sum(crossing), "of": len(crossing), "bytes pinned after each step": str(grown)}
    ]
    passed = all(crossing) and len({*grown[1:]}) <= 1 if scale.on_card else bool(crossing)
    return {"passed": passed, "rows": found}


def waits(scale: Scale) -> dict[str, Any]:
    """How often the host waits for the device in a step that has learned its order, and
    where; the goal is never.
    """
    if not scale.on_card:
        return NEEDS_CARD
    rows = []
    for precision in PRECISIONS:
        for stage in (0, 3):
            found = waits_of_step(stage, PRECISIONS[precision])
            rows.append(
                {
                    "step": f"{precision}, stage {stage}",
                    "waits": len(found),
                    "where": "; ".join(sorted({*found})),
                }
            )
    return {"passed": not any(row["waits"] for row in rows), "rows": rows}


def waits_of_step(stage: int, precision: dict[str, Any], after: int = 2) -> list[str]:
    """File and line of each wait in the step after `after` ones."""
    import torch
    from gpt import GPT, Size, make_batch
    from gpu_speed import config_of

    import fzero

    size = Size(64, 2, 2, 32, 2)
    cfg = config_of(size, stage) | {"bf16": {"enabled": False}} | precision
    step = fzero.make_train_step(GPT(size).cuda(), cfg)
    state, batch = step.init(), tuple(x.cuda() for x in make_batch(size, step=0, rank=0))
    for _ in range(after):
        state, _ = step(state, batch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            state, _ = step(state, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # PyTorch also warns once that this mode does not see every wait.
    return [f"{x.filename}:{x.lineno}" for x in seen if "called a synchronizing" in str(x.message)]


def overflow(scale: Scale) -> dict[str, Any]:
    """fp16 with a loss scale that overflows: updates are skipped, the scale falls, and
    then it trains; all without a wait.
    """
    import torch
    from gpt import GPT, Size, make_batch
    from gpu_speed import config_of

    import fzero

    size, fp16 = (
        Size(64, 2, 2, 32, 2),
        {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}},
    )
    cfg = config_of(size, 2) | {"bf16": {"enabled": False}} | fp16
    step = fzero.make_train_step(GPT(size).to(scale.device), cfg)
    state, scales, skipped = step.init(), list[float](), list[bool]()
    batch = tuple(x.to(scale.device) for x in make_batch(size, step=0, rank=0))
    found = []
    for _ in range(16):
        state, metrics = step(state, batch)
        found.append((metrics.loss_scale, metrics.overflow))
    scales, skipped = [float(x) for x, _ in found], [bool(x) for _, x in found]
    waited = waits_of_step(2, fp16) if scale.on_card else []
    passed = (
        skipped[0]
        and not skipped[-1]
        and scales[-1] < scales[0]
        and int(state.step) == 16 - sum(skipped)
    )
    finite = all(bool(torch.isfinite(x).all()) for x in state.params.values())
    row = {
        "skipped": sum(skipped),
        "of": 16,
        "last scale": scales[-1],
        "weights are finite": finite,
    }
    return {
        "passed": passed and finite,
        "rows": [row | {"waits": len(waited), "where": "; ".join(sorted({*waited}))}],
    }


def random_numbers(scale: Scale) -> dict[str, Any]:
    """Dropout on the card: one state gives one result, another seed another."""
    import torch
    from torch import nn

    import fzero

    cfg = {"optimizer": ADAMW, "train_micro_batch_size_per_gpu": 8}
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(scale.device)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1)).to(scale.device)
        step = fzero.make_train_step(
            model, cfg, seed=seed, loss_fn=lambda model, x: model(x).square().mean()
        )
        state, found = step.init(), []
        for _ in range(3):
            # the script's own numbers must not change the step's
            torch.randn(5, device=scale.device)
            state, metrics = step(state, batch)
            found.append(metrics.loss.item())
        assert not scale.on_card or "cuda" in state.rng, (
            f"the state has the generators {[*state.rng]} only"
        )
        return found

    first, again, other = losses(1), losses(1), losses(2)
    return {
        "passed": first == again != other,
        "rows": [{"losses": str(first), "another seed": str(other)}],
    }


def kernels(scale: Scale) -> dict[str, Any]:
    """The fused AdamW and foreach clipping of the device against those of the
    processor.
    """
    import torch

    def updated(device: str) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        make = lambda: [torch.randn(n, generator=generator).to(device) for n in (1, 100, 70_001)]  # noqa: E731
        params, grads = [x.requires_grad_() for x in make()], make()
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        for _ in range(3):
            for x, grad in zip(params, grads, strict=True):
                x.grad = grad.clone()
            norm = torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            optimizer.step()
        return [*(x.detach().cpu() for x in params), norm.cpu()]

    pairs = zip(updated(scale.device), updated("cpu"), strict=True)
    return close(
        "largest relative difference",
        max(float(((x - y) / (1 + y.abs())).abs().max()) for x, y in pairs),
        1e-5,
    )


def recomputed(scale: Scale) -> dict[str, Any]:
    """Activation checkpointing gives the same bits."""
    runs = [
        small_training(scale.device, stage=3, precision=PRECISIONS["bf16"], checkpoint=x)
        for x in (None, 1, 2)
    ]
    return close("difference", max(difference(run, runs[0]) for run in runs), 0)


def accumulated(scale: Scale) -> dict[str, Any]:
    """Two micro-steps in stages 2 and 3 have the bits of stage 0."""
    keys = PRECISIONS["bf16"] | {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 2,
    }
    runs = [small_training(scale.device, stage=stage, precision=keys) for stage in (0, 2, 3)]
    return close("difference from stage 0", max(difference(run, runs[0]) for run in runs), 0)


def lockstep(scale: Scale) -> dict[str, Any]:
    """Two ranks as threads of one process: all stages have the same bits."""
    return close("difference from stage 0", *_simulated(scale, "lockstep"))


def as_dimension(scale: Scale) -> dict[str, Any]:
    """Four ranks as a dimension (`vmap`): all stages agree to rounding."""
    return close("difference from stage 0", *_simulated(scale, "vmap"))


def _simulated(scale: Scale, how: str) -> tuple[float, float]:
    import torch
    from torch import nn

    import fzero

    num_ranks = {"lockstep": 2, "vmap": 4}[how]
    results: list[dict[str, Any]] = []
    for stage in (0, 1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        ).to(scale.device)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        cfg = {"optimizer": SGD, "zero_optimization": zero}
        step = fzero.make_train_step(
            model, cfg, loss_fn=lambda model, x: (model(x) - x).square().mean()
        )
        ranks = fzero.simulate(step, num_ranks, by=how)  # type: ignore[arg-type]
        state = ranks.init()
        for index in range(3):
            x = torch.randn(num_ranks, 4, 24, generator=torch.Generator().manual_seed(index))
            state, _ = ranks(state, x.to(scale.device))
        results.append({"weights": {key: x.cpu() for key, x in ranks.gather(state).items()}})
    found = max(difference(run, results[0]) for run in results[1:])
    return found, 0.0 if how == "lockstep" else 1e-6


def generation(scale: Scale) -> dict[str, Any]:
    """The model computes with the state's parameters, in whole copies and unit by unit."""
    import torch
    from gpt import GPT, Size, make_batch
    from gpu_speed import config_of

    import fzero

    size = Size(64, 2, 2, 32, 2)
    torch.manual_seed(0)
    step = fzero.make_train_step(GPT(size).to(scale.device), config_of(size, 3))
    state, batch = step.init(), tuple(x.to(scale.device) for x in make_batch(size, step=0, rank=0))
    state, _ = step(state, batch)
    losses = []
    for by in ("copy", "unit"):
        with torch.no_grad(), fzero.generating(step, state, by=by) as model:  # type: ignore[arg-type]
            losses.append(float(model(*batch)))
    losses.append(float(step.evaluate(state, batch)))
    return close("largest difference of a loss", max(abs(x - losses[-1]) for x in losses), 1e-3)


def out_of_memory(scale: Scale) -> dict[str, Any]:
    """The error of a step that is too large for the card, and that the same process
    trains on after it.
    """
    import torch
    from gpt import GPT, Size, make_batch
    from gpu_speed import config_of

    import fzero

    if not scale.on_card:
        return NEEDS_CARD
    size = Size(256, 2, 2, 128, 4096)
    step = fzero.make_train_step(GPT(size).cuda(), config_of(size, 3))
    state, batch = step.init(), tuple(x.cuda() for x in make_batch(size, step=0, rank=0))
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        step(state, batch)
    except torch.OutOfMemoryError as error:
        said = str(error)
    else:
        return {"passed": False, "error": "a step of several GiB fitted into 2 % of the card"}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del step, state, batch
    forget()
    after = small_training(scale.device, stage=3, num_steps=1)["losses"]
    return {"passed": after[0] == after[0], "rows": [{"says": said[:600]}]}


# --- compiled -------------------------------------------------------------------------------------


def compiled(how: str, backend: str | None = None) -> Any:
    """A compiled step in stage 3 against the eager one."""

    def run(scale: Scale) -> dict[str, Any]:
        expected = small_training(scale.device, stage=3, optimizer=SGD)
        how_made: Any = {"compile": how, "compile_backend": backend or scale.backend}
        found = small_training(scale.device, stage=3, optimizer=SGD, **how_made)
        return close("difference from the eager step", difference(found, expected), 1e-5)

    return run


def flex_attention(scale: Scale) -> dict[str, Any]:
    """FlexAttention with its backward against the kernel that all devices have."""
    import torch

    from fzero.attention import Fixed, sparse_attention

    if not scale.on_card:
        return NEEDS_CARD
    layout = Fixed(num_local_blocks=2, attention="unidirectional").layout(8)
    results = []
    for backend in ("blocks", "flex"):
        generator = torch.Generator().manual_seed(0)
        qkv = [
            torch.randn(2, 2, 512, 64, generator=generator).cuda().requires_grad_()
            for _ in range(3)
        ]
        out = sparse_attention(*qkv, layout, block=64, backend=backend)  # type: ignore[arg-type]
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in qkv)])
    found = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(*results, strict=True))
    # Triton's products of fp32 may use TF32
    return close("largest relative difference", found, 1e-2)


# --- between ranks --------------------------------------------------------------------------------


def collectives(scale: Scale) -> dict[str, Any]:
    """The process group of one rank, made as jobs make it, and each collective that
    fzero calls, waited for and not.
    """
    import torch
    import torch.distributed as dist

    import fzero

    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    )
    start = time.perf_counter()
    fzero.join(scale.device)
    x = torch.arange(1024.0, device=scale.device)
    calls = {
        "all_gather_into_tensor": lambda out, **how: dist.all_gather_into_tensor(out, x, **how),
        "reduce_scatter_tensor": lambda out, **how: dist.reduce_scatter_tensor(out, x, **how),
        "all_to_all_single": lambda out, **how: dist.all_to_all_single(out, x, **how),
        "all_reduce": lambda out, **how: dist.all_reduce(out.copy_(x), **how),
        "broadcast": lambda out, **how: dist.broadcast(out.copy_(x), src=0, **how),
    }
    rows = []
    for name, call in calls.items():
        if name == "all_to_all_single" and not scale.on_card and dist.get_backend() == "gloo":
            continue
        for is_async in (False, True):
            out = torch.full_like(x, -1.0)
            work = call(out, async_op=is_async)
            if is_async:
                work.wait()
            rows.append({"collective": name, "async": is_async, "right": bool(out.equal(x))})
    fzero.shutdown()
    rows.append(
        {
            "collective": f"group and all of it, {time.perf_counter() - start:.1f} s",
            "async": "",
            "right": True,
        }
    )
    return {"passed": all(row["right"] for row in rows), "rows": rows}


def free_port() -> str:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def joined_training(scale: Scale) -> dict[str, Any]:
    """A training in a group of one rank has the bits of one without a group."""
    import fzero

    alone = small_training(scale.device, stage=3, precision=PRECISIONS["bf16"])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    )
    fzero.join(scale.device)
    try:
        found = small_training(scale.device, stage=3, precision=PRECISIONS["bf16"])
    finally:
        fzero.shutdown()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
    return close("difference from a training without a group", difference(found, alone), 0)
