"""State in host memory on a card: tokens per second beside a training whose state is on
the card, and the largest model.

All train with activation checkpointing and so many tokens for each update, so that they
do the same work but for the update.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_scale import MEGA, Scale, keep, synchronize
from gpu_speed import config_of, figures, num_params, size_of

HOST_BYTES = {"optimizer on the host": 14, "all on the host": 16}
"""Bytes of host memory for each parameter: fp32 master and moments, bf16 gradients; and
bf16 parameters.
"""


def memory_available() -> int:
    """Bytes of host memory that a process may still take."""
    (line,) = (
        x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable")
    )
    return 1024 * int(line.split()[1])


def rates(scale: Scale) -> dict[str, Any]:
    """How fast all cores copy memory, and update fp32 parameters by PyTorch's fused
    AdamW: the limits of state in host memory.
    """
    import torch

    numel = 2**28 if scale.on_card else 2**20
    param, grad, mean, square = (torch.zeros(numel) for _ in range(4))
    calls = {
        "host_copy_gb_per_s": (8e-9, lambda: mean.copy_(grad)),
        "host_adamw_million_per_s": (
            1e-6,
            lambda: torch._fused_adamw_(
                [param],
                [grad],
                [mean],
                [square],
                [],
                [torch.ones(())],
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.01,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            ),
        ),
    }
    found: dict[str, Any] = {"passed": True, "host_threads": torch.get_num_threads()}
    for name, (unit, call) in calls.items():
        call()
        start = time.perf_counter()
        for _ in range(3):
            call()
        found[name] = 3 * numel * unit / (time.perf_counter() - start)
    return found


def native(scale: Scale) -> dict[str, Any]:
    """The smallest model with its state on the device: what the others are compared
    with, scaled by their work per token.
    """
    found = trained(scale, *scale.host[0], stage=2, zero={})
    if found["passed"]:
        _native_file().write_text(json.dumps(found))
    return found


def _native_file() -> Path:
    return Path(os.environ["GPU_OUT"]) / "native.json"


def on_host(index: int, where: str = "optimizer on the host") -> Callable[[Scale], dict[str, Any]]:
    """The model of a place in the scale's list, with its state in pinned host memory."""

    def run(scale: Scale) -> dict[str, Any]:
        if index >= len(scale.host):
            return {"not_run": "no model of this size with --tiny"}
        width, num_blocks = scale.host[index]
        needed = HOST_BYTES[where] * num_params(size_of(scale, width, num_blocks))
        if needed > 0.95 * memory_available():
            return {
                "not_run": (
                    f"needs {needed / 2**30:.0f} GiB of host memory, has "
                    f"{memory_available() / 2**30:.0f} GiB"
                )
            }
        host = {"device": "cpu", "pin_memory": scale.on_card}
        zero = {"offload_optimizer": host} | (
            {"offload_param": host} if where == "all on the host" else {}
        )
        return trained(
            scale, width, num_blocks, stage=3 if "offload_param" in zero else 2, zero=zero
        )

    return run


def trained(
    scale: Scale, width: int, num_blocks: int, *, stage: int, zero: dict[str, Any]
) -> dict[str, Any]:
    """Some steps of a model that is made on `meta`; kept after each, should the row be
    cut off.
    """
    import resource

    import torch
    from gpt import GPT, first_values, make_batch

    import fzero

    size = size_of(scale, width, num_blocks)
    num_tokens = scale.host_micro_steps * size.num_rows * size.context
    with torch.device("meta"):
        model = GPT(size)
    keys = {"gradient_accumulation_steps": scale.host_micro_steps}
    start = time.perf_counter()
    step = fzero.make_train_step(model, config_of(size, stage, **zero) | keys, checkpoint=1)
    state = step.init(init_fn=first_values)  # a model on meta trains on the card, if there is one
    synchronize(scale.device)
    init_s = time.perf_counter() - start
    micro = [make_batch(size, step=i, rank=0) for i in range(scale.host_micro_steps)]
    batch = tuple(torch.cat(parts).to(scale.device) for parts in zip(*micro, strict=True))
    seconds, found = list[float](), dict[str, Any]()
    for index in range(4):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        synchronize(scale.device)
        seconds.append(time.perf_counter() - start)
        if index == 0:
            continue
        found = {
            "init_s": init_s,
            "first_step_s": seconds[0],
            "steps_s": seconds[1:],
            "loss": float(metrics.loss),
        }
        found |= figures(size, min(seconds[1:]), num_tokens)
        found["passed"] = math.isfinite(found["loss"])
        found["host_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if scale.on_card:
            found["peak_mib"] = torch.cuda.max_memory_allocated() / MEGA
        # operations per second are compared: this scales by the work of a token
        if _native_file().exists():
            found["of_native"] = found["tflops"] / json.loads(_native_file().read_text())["tflops"]
        keep(found)
    return found | {"ranges_ms": ranges_of(lambda: step(state, batch), scale)}


def ranges_of(call: Callable[[], Any], scale: Scale) -> dict[str, float]:
    """The parts of a step that fzero names in a trace, and the milliseconds that the
    host spends in each; they may be nested.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
        synchronize(scale.device)
    spent: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.key.startswith("fzero::"):
            name = event.key.removeprefix("fzero::")
            verb = name.rpartition(" ")[0] or name
            spent[verb] = spent.get(verb, 0.0) + event.cpu_time_total / 1e3
    return dict(sorted(spent.items(), key=lambda one: -one[1])[:8])
