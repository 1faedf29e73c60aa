"""The parts of `gpu.py`: fzero's laws on a device, and the speed of contenders that train one GPT.

A part is a function of a `Scale` that returns a dictionary for the results: `passed` with `laws` or `rows`, or what was measured.
torch is imported inside of the parts, since the command must be able to say that it is missing.
"""

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_ranks import between_ranks, hang

MEGA = 1 << 20


def replace_file(path: Path, text: str) -> None:
    """Writes a file that is whole at every moment."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def keep(result: dict[str, Any]) -> None:
    """Hands a part's result, or what there is of it, to the process that started the part."""
    replace_file(Path(os.environ["GPU_OUT"]) / "part.json", json.dumps(result))


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the parts are: on a card, or `--tiny`."""

    device: str
    width: int
    num_blocks: int
    context: int
    num_rows: int
    num_steps: int
    product: int
    """The rows of the square matrices whose product measures the card's rate."""
    largest: tuple[tuple[int, int], ...]
    """The widths and numbers of blocks that are tried for the largest model, in this order."""


LARGEST = ((2048, 26), (3072, 32), (4096, 32), (5120, 40), (6144, 56), (8192, 56))  # 1.3B to 45B parameters
CARD = Scale("cuda", 2048, 26, 1024, 8, 8, 8192, LARGEST)
TINY = Scale("cpu", 64, 2, 32, 2, 2, 256, ((64, 2), (128, 2)))


# --- laws ----------------------------------------------------------------------------------------------------------


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def small_training(
    device: str, num_steps: int = 4, folder: Path | None = None, rank: int = 0, **how: Any
) -> dict[str, Any]:
    """The losses and the weights of a small GPT, trained by fzero; with a folder it is saved and resumed half-way."""
    import torch
    from gpt import GPT, Size, make_batch

    import fzero

    size = Size(width=64, num_blocks=3, num_heads=4, context=32, num_rows=4)
    zero, precision, optimizer = how.pop("zero", {}), how.pop("precision", {}), how.pop("optimizer", ADAMW)
    cfg = {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": optimizer,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": how.pop("stage"), "stage3_param_persistence_threshold": 0} | zero,
    }

    def made() -> Any:
        torch.manual_seed(0)
        return fzero.make_train_step(GPT(size).to(device), cfg | precision, **how)

    step = made()
    state, losses = step.init(), []
    for number in range(num_steps):
        if folder is not None and number == num_steps // 2:
            fzero.save(state, folder, step=step)
            step = made()
            state = fzero.load(folder, step=step).state
        batch = tuple(x.to(device) for x in make_batch(size, step=number, rank=rank))
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return {"losses": [float(x) for x in losses], "weights": {k: x.cpu() for k, x in step.gather(state).items()}}


def plain_training(device: str, num_steps: int = 4) -> dict[str, Any]:
    """The same training by a loop without fzero, in fp32, with SGD: AdamW divides rounding by rounding where a gradient is 0."""
    import torch
    from gpt import GPT, Size, make_batch

    size = Size(width=64, num_blocks=3, num_heads=4, context=32, num_rows=4)
    torch.manual_seed(0)
    model = GPT(size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(num_steps):
        loss = model(*(x.to(device) for x in make_batch(size, step=number, rank=0)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": [float(x) for x in losses], "weights": {k: x.cpu() for k, x in model.state_dict().items()}}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of two weights; NaN if one has a NaN, which Python's `max` may pass over."""
    import torch

    return float(
        torch.stack(
            [(x.float() - expected["weights"][k].float()).abs().max() for k, x in found["weights"].items()]
        ).max()
    )


class Laws:
    """The checks of a part: by name, what was found and whether that is right."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str, found: float, most: float) -> None:
        self.rows.append({"name": name, "found": found, "most": most, "passed": bool(found <= most)})

    def result(self) -> dict[str, Any]:
        return {"passed": all(row["passed"] for row in self.rows), "laws": self.rows}


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def stages(scale: Scale) -> dict[str, Any]:
    """All stages in fp32, bf16 and fp16: fp32 against a plain loop, and the bits of stage 0."""
    laws, expected = Laws(), plain_training(scale.device)
    for precision, keys in PRECISIONS.items():
        first = small_training(scale.device, stage=0, precision=keys)
        if precision == "fp32":  # the norm of a flat buffer, by which gradients are clipped, rounds in other places
            plain = difference(small_training(scale.device, stage=0, optimizer=SGD), expected)
            laws.check("fp32, stage 0, SGD, largest difference of a weight from a plain loop", plain, 1e-6)
        laws.check(f"{precision}, stage 0, loss is finite", float(not all(map(math.isfinite, first["losses"]))), 0)
        for stage in (1, 2, 3):
            found = small_training(scale.device, stage=stage, precision=keys)
            laws.check(f"{precision}, stage {stage}, difference from stage 0", difference(found, first), 0)
    return laws.result()


def offload(scale: Scale) -> dict[str, Any]:
    """State in pinned host memory and in files, in stage 3, against state on the device."""
    laws = Laws()
    folder = Path(os.environ["GPU_OUT"]) / "state"
    placements: dict[str, dict[str, Any]] = {
        "optimizer on the host": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "all on the host": {f"offload_{x}": {"device": "cpu", "pin_memory": True} for x in ("optimizer", "param")},
        "optimizer in files": {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "all in files": {f"offload_{x}": {"device": "nvme", "nvme_path": str(folder)} for x in ("optimizer", "param")},
    }
    for precision in ("fp32", "bf16"):
        expected = small_training(scale.device, stage=3, precision=PRECISIONS[precision])
        for name, zero in placements.items():
            found = small_training(scale.device, stage=3, precision=PRECISIONS[precision], zero=zero)
            # The processor's AdamW rounds otherwise than the device's; in bf16 that may change a weight's last bit.
            most = 1e-6 if precision == "fp32" else 2**-7
            laws.check(f"{precision}, {name}, difference from the device", difference(found, expected), most)
    shutil.rmtree(folder, ignore_errors=True)
    return laws.result()


def compiled(scale: Scale) -> dict[str, Any]:
    """The step as one graph, and equal blocks compiled once, against the eager step."""
    laws = Laws()
    for stage in (0, 3):
        expected = small_training(scale.device, stage=stage)
        for how in ("block", "step"):
            found = small_training(scale.device, stage=stage, compile=how)
            laws.check(f'stage {stage}, compile="{how}", difference from eager', difference(found, expected), 2e-4)
    return laws.result()


def checkpoint(scale: Scale) -> dict[str, Any]:
    """Two steps, save, load, two steps are four steps, bit for bit."""
    laws, folder = Laws(), Path(os.environ["GPU_OUT"]) / "saved"
    for stage in (0, 3):
        shutil.rmtree(folder, ignore_errors=True)
        precision = PRECISIONS["bf16"]
        expected = small_training(scale.device, stage=stage, precision=precision)
        found = small_training(scale.device, stage=stage, precision=precision, folder=folder)
        laws.check(f"bf16, stage {stage}, difference after a resume", difference(found, expected), 0)
    shutil.rmtree(folder, ignore_errors=True)
    return laws.result()


# --- speed ---------------------------------------------------------------------------------------------------------


def rate_of_products(scale: Scale) -> float:
    """The floating-point operations per second of a large bf16 matrix product."""
    import torch

    x, y = (torch.randn(scale.product, scale.product, device=scale.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(6):
        synchronize(scale.device)
        start = time.perf_counter()
        x @ y
        synchronize(scale.device)
        seconds.append(time.perf_counter() - start)
    return 2 * scale.product**3 / statistics.median(seconds[1:])


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def timed(scale: Scale, make: Callable[[Any], Callable[[Any], Any]]) -> dict[str, Any]:
    """Tokens per second, share of the measured rate, peak and last loss of one contender."""
    import torch
    from gpt import Size, make_batch

    size = Size(scale.width, scale.num_blocks, scale.width // 128 or 1, scale.context, scale.num_rows)
    torch.manual_seed(0)
    start = time.perf_counter()
    step = make(size)
    batches = [tuple(x.to(scale.device) for x in make_batch(size, step=i, rank=0)) for i in range(scale.num_steps)]
    loss = step(batches[0])  # compiles
    synchronize(scale.device)
    first, seconds = time.perf_counter() - start, []
    for batch in batches[1:] * 2:
        start = time.perf_counter()
        loss = step(batch)
        synchronize(scale.device)
        seconds.append(time.perf_counter() - start)
    median, tokens, rate = statistics.median(seconds), size.num_rows * size.context, rate_of_products(scale)
    num_params = 12 * size.num_blocks * size.width**2 + 2 * 256 * size.width
    operations = tokens * (6 * num_params + 6 * size.num_blocks * size.width * size.context)  # causal attention
    peak = torch.cuda.max_memory_allocated() / MEGA if scale.device == "cuda" else None
    return {
        "parameters": num_params,
        "tokens": tokens,
        "num_steps": len(seconds),
        "tokens_per_second": tokens / median,
        "ms": 1e3 * median,
        "used": operations / median / rate,
        "product_flops": rate,
        "peak_mib": peak,
        "first_step_s": first,
        "loss": float(loss),
        "passed": math.isfinite(float(loss)),
    }


def plain_step(loss_of: Callable[..., Any], optimizer: Any) -> Callable[[Any], Any]:
    """A step of a plain loop."""

    def step(batch: Any) -> Any:
        loss = loss_of(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain_contender(scale: Scale) -> dict[str, Any]:
    """PyTorch alone: fp32 weights under bf16 autocast, compiled, with the fused AdamW."""
    import torch
    from gpt import GPT

    def make(size: Any) -> Callable[[Any], Any]:
        with torch.device(scale.device):
            model = GPT(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if scale.device == "cuda" else model

        @torch.autocast(scale.device, dtype=torch.bfloat16)
        def loss_of(*batch: Any) -> Any:
            return run(*batch)

        return plain_step(loss_of, optimizer)

    return timed(scale, make)


def fsdp2_contender(scale: Scale) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from gpt import GPT
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl" if scale.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(size: Any) -> Callable[[Any], Any]:
        with torch.device(scale.device):
            model = GPT(size)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = dist.device_mesh.init_device_mesh(scale.device, (1,))
        for block in model.blocks:
            block.compile()
            fully_shard(block, mp_policy=policy, mesh=mesh)
        fully_shard(model, mp_policy=policy, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        return plain_step(model, optimizer)

    return timed(scale, make)


def deepspeed_contender(scale: Scale) -> dict[str, Any]:
    import deepspeed
    from gpt import GPT

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")

    def make(size: Any) -> Callable[[Any], Any]:
        engine, *_ = deepspeed.initialize(model=GPT(size), config=config_of(size, 2))

        def step(batch: Any) -> Any:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return timed(scale, make)


def config_of(size: Any, stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": size.num_rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage} | zero,
    }


def fzero_contender(stage: int, how: str | None) -> Callable[[Scale], dict[str, Any]]:
    def run(scale: Scale) -> dict[str, Any]:
        import torch
        from gpt import GPT

        import fzero

        def make(size: Any) -> Callable[[Any], Any]:
            with torch.device(scale.device):
                model = GPT(size)
            step = fzero.make_train_step(model, config_of(size, stage), compile=how)
            state = step.init()
            model.to("meta")

            def run_step(batch: Any) -> Any:
                nonlocal state
                state, metrics = step(state, batch)
                return metrics.loss

            return run_step

        return timed(scale, make)

    return run


def largest(scale: Scale) -> dict[str, Any]:
    """The largest of some models whose step runs with state and parameters in host memory. Every model is kept as soon as it ran;
    one that would take more than the time left, as the last one took per parameter, is named as not tried."""
    import torch

    rows: list[dict[str, Any]] = []
    found = {"passed": False, "rows": rows}
    seconds_per_param, until = 0.0, float(os.environ["GPU_UNTIL"])
    for width, num_blocks in scale.largest:
        row = {"width": width, "blocks": num_blocks, "parameters": 12 * num_blocks * width**2}
        rows.append(row)
        start = time.time()
        if start + seconds_per_param * row["parameters"] > until:
            row["not_run"] = "no time left"
            break
        try:
            row |= trained_on_host(scale, width, num_blocks)
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            row["error"] = str(error).splitlines()[0][:200]
            break
        found["passed"] = math.isfinite(row["loss"])
        if scale.device == "cuda":
            torch._C._host_emptyCache()  # PyTorch keeps pinned memory that is free
        seconds_per_param = (time.time() - start) / row["parameters"]
        keep(found)
    return found


def trained_on_host(scale: Scale, width: int, num_blocks: int) -> dict[str, Any]:
    """Two steps of a model in stage 3 with state and parameters in host memory."""
    import torch
    from gpt import GPT, Size, first_values, make_batch

    import fzero

    size = Size(width, num_blocks, width // 128 or 1, scale.context, 1)
    host = {"device": "cpu", "pin_memory": scale.device == "cuda"}
    with torch.device("meta"):
        model = GPT(size)
    cfg = config_of(size, 3, offload_optimizer=host, offload_param=host)
    step = fzero.make_train_step(model, cfg, checkpoint=1)  # a model on meta trains on the card, if there is one
    state = step.init(init_fn=first_values)
    batch = tuple(x.to(scale.device) for x in make_batch(size, step=0, rank=0))
    state, _ = step(state, batch)
    start = time.perf_counter()
    state, metrics = step(state, batch)
    return {"loss": float(metrics.loss), "step_s": time.perf_counter() - start}


Part = tuple[Callable[[Scale], dict[str, Any]], int]
"""What runs, and the seconds that it may take on a card, whatever other parts take; a part gets what earlier ones leave, too."""
LAWS: dict[str, Part] = {
    "stages": (stages, 35),
    "offload": (offload, 35),
    "checkpoint": (checkpoint, 20),
}
PLAIN = "plain, compiled"
SPEED: dict[str, Part] = {
    PLAIN: (plain_contender, 75),
    "fzero, stage 0": (fzero_contender(0, None), 20),
    "fzero, stage 0, block": (fzero_contender(0, "block"), 25),
    "fzero, stage 3, block": (fzero_contender(3, "block"), 25),
    "fzero, stage 3, step": (fzero_contender(3, "step"), 65),
    "FSDP2, compiled": (fsdp2_contender, 25),
    "DeepSpeed 2": (deepspeed_contender, 90),  # which compiles its kernels
}
REST: dict[str, Part] = {
    "compiled": (compiled, 55),
    "between ranks": (between_ranks, 25),
    "hang": (hang, 45),
    "largest": (largest, 45),
}
PARTS = LAWS | SPEED | REST
TOTAL = 590
"""Seconds for all parts: ten minutes less what it takes to end."""
