"""`profile`: the time and FLOPs of each module in forward and backward, and the time of
an update.

1. One forward and backward counts floating point operations by module, with torch's
  formulas. It is the warm-up, too.
2. A few more are timed without counting (`fzero.profiling.module_timer`). On CUDA the
   host waits at each module, so that nothing overlaps: the modules' times add up to
   more than an undisturbed step takes, which is timed separately.
3. The optimizer's update runs on flat buffers of the model's size.

The model's gradients and buffers, and the random state, are as before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fzero.common.arguments import check_loss_fn, check_model
from fzero.config.files import changed
from fzero.estimation.compare import keys_of, quietly
from fzero.optim.adam_kernels import adamw
from fzero.optim.fragments import ShardContents
from fzero.optim.transforms import mixed_precision
from fzero.plans.param_groups import optimizers_of
from fzero.plans.plan import Plan
from fzero.plans.plan_spec import plan
from fzero.profiling.module_timer import ModuleTimer
from fzero.profiling.reports import Profile, fastest
from fzero.runtime.batches import LossFn, loss_of
from sharding.views import torch_dtype

OF_MANY_RANKS: dict[str, None] = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "elasticity",
    )
)
"""Keys of the global batch, whose values may be invalid for a single process."""


def profile(
    model: nn.Module,
    batch: Any,
    cfg: Any = None,
    *,
    loss_fn: LossFn | None = None,
    num_runs: int = 3,
) -> Profile:
    """Parameters, operations and seconds of every module, forward and backward, and of
    the update.

    Args:
        model: with values, on the device of the batch. It runs in its own dtypes.
        batch: one micro-batch.
        cfg: gives the optimizer that is timed, any argument of `Config.load`; None is
            AdamW.
        loss_fn: see `make_train_step`.
        num_runs: how often the model, and each of its modules, is timed; the fastest
            run counts.

    Raises:
        ValueError: the model is on `meta`, has no trainable parameter, or returns no
            loss.
    """
    check_model(model)
    check_loss_fn(loss_fn)
    params = [param for param in model.parameters() if param.requires_grad]
    if not params or any(param.is_meta for param in params):
        raise ValueError(
            "profile: needs a model with values and with trainable parameters, got one "
            + (
                "on 'meta'; use model.to_empty(device=...) and fill it"
                if params
                else "without; unfreeze some"
            )
        )
    device = params[0].device

    def run(watch: ModuleTimer | None = None) -> _Clock:
        clock = _Clock(device)
        with nullcontext() if watch is None else watch.forward():
            loss, _ = loss_of(model, loss_fn, batch, reduces_by_sum=False)
        clock.mark("forward")
        with nullcontext() if watch is None else watch.backward():
            torch.autograd.grad(loss, params, allow_unused=True)
        clock.mark("backward")
        return clock

    def watched(*, counts: bool) -> ModuleTimer:
        watch = ModuleTimer(model, _Clock(device).now, counts=counts)
        run(watch)
        return watch

    with _restored(model, device):
        counted = watched(counts=True)
        plain = min((run() for _ in range(num_runs)), key=lambda clock: clock.total)
        runs = [watched(counts=False) for _ in range(num_runs)]
    modules = tuple(map(fastest, counted.profiles(), *(watch.profiles() for watch in runs)))
    update = _time_update(model, {} if cfg is None else cfg, device, num_runs)
    ceiling = matrix_rate(device, params[0].dtype)
    return Profile(modules, plain.seconds["forward"], plain.seconds["backward"], update, ceiling)


def dtype_of(plan: Plan, autocast: torch.dtype | None) -> torch.dtype:
    """The dtype of most of a model's computation."""
    largest = max(plan.flat_buffers, key=lambda buffer: buffer.padded_numel, default=None)
    return autocast or (
        torch.get_default_dtype() if largest is None else torch_dtype(largest.dtypes.param)
    )


def matrix_rate(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_weights: int = 1,
    *,
    width: int = 1024,
) -> float:
    """Floating point operations per second that a matrix product reaches on this
    device; the median of a few.

    `num_weights` matrices are multiplied in turn: of several, none is in the cache of a
    CPU. Where that would take long, as in bf16 on a processor without instructions for
    it, they are smaller.
    """
    device = torch.device(device)
    width, num_weights = (width, num_weights) if device.type == "cpu" else (8 * width, 1)
    while width > 256 and device.type == "cpu":
        small = torch.ones(width // 8, width // 8, dtype=dtype)
        if 8**3 * num_weights * usual(lambda x=small: torch.mm(x, x), device) < MOST_SECONDS:  # type: ignore[misc]
            break
        width //= 2
    a, *weights = (
        torch.ones(width, width, dtype=dtype, device=device) for _ in range(1 + num_weights)
    )

    def multiply() -> None:
        for weight in weights:
            torch.mm(a, weight)

    return 2 * width**3 * num_weights / usual(multiply, device)


def pointwise_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Bytes per second that functions of each element read and write: GELU and layer
    norm, forward and backward; the median of a few."""
    device = torch.device(device)
    shape = (256, 2048) if device.type == "cpu" else (4096, 8192)
    x, out = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2))

    def run() -> None:
        for function in (functional.gelu, lambda x: functional.layer_norm(x, shape[1:])):
            torch.autograd.grad(function(x), x, out)

    # a forward reads one and writes one, a backward reads two and writes one
    num_tensors = 2 * (2 + 3)
    return num_tensors * x.nbytes / usual(run, device)


NUM_OPERATORS = 15
"""Of `small_block` in an activation trace: six forward, nine backward."""


def small_block() -> nn.Module:
    """The operators of a block of a transformer, on a few elements."""
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def operator_seconds() -> float:
    """Seconds of Python, dispatch and autograd that an operator takes on the CPU,
    beside its work; the median of a few.
    """
    block, x = small_block(), torch.ones(1, 2, 8)
    params = list(block.parameters())

    def run() -> None:
        for _ in range(20):
            torch.autograd.grad((x + block(x)).sum(), params)

    return usual(run, x.device) / (20 * NUM_OPERATORS)


def update_rate(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, numel: int = 1 << 22
) -> float:
    """Bytes per second that an update of AdamW reads and writes, of a flat buffer
    beside an fp32 master where it has 16 bits.
    """
    device = torch.device(device)
    grad, param = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    is_wide = dtype == torch.float32
    master = param if is_wide else param.float()
    transform = mixed_precision(adamw(1e-3), state_dtype="float32", out=None if is_wide else param)
    state = transform.init(master)
    nbytes = numel * (2 * 3 * 4 + grad.itemsize + (0 if is_wide else param.itemsize))
    return nbytes / usual(lambda: transform.update(grad, master, state), device)


MOST_SECONDS = 2.0
"""Counts and times of the calls of one measurement."""


def usual(work: Callable[[], object], device: torch.device, *, num_calls: int = 7) -> float:
    """The median seconds of some calls, after one warm-up call, because a plan predicts
    the usual step.

    After `MOST_SECONDS` no further call is made; where the warm-up call alone takes
    longer, it counts.
    """
    seconds: list[float] = []
    while len(seconds) <= num_calls and sum(seconds) < MOST_SECONDS:
        clock = _Clock(device)
        work()
        clock.mark("work")
        seconds.append(clock.total)
    return statistics.median(seconds[1:] or seconds)


def attention_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating point operations per second of fused causal attention, forward and
    backward; the median of a few.

    Sixteen heads of 64 features: 128 tokens, on a GPU 4096. All scores count, masked
    ones too, as in a trace.
    """
    device = torch.device(device)
    length = 128 if device.type == "cpu" else 4096
    q, k, v = (
        torch.randn(2, 8, length, 64, dtype=dtype, device=device, requires_grad=True)
        for _ in range(3)
    )

    def attend() -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    products = 2 + 5  # two of the forward and five of the backward, which computes the scores again
    return products * 2 * 16 * length**2 * 64 / usual(attend, device)


class _Clock:
    """Seconds since the last mark, by name; on CUDA the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._last = self.now()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self, name: str) -> None:
        now = self.now()
        self.seconds[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores module buffers and the random state afterwards."""
    before = {name: x.detach().clone() for name, x in model.named_buffers()}
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for name, x in model.named_buffers():
                x.copy_(before[name])


def _time_update(model: nn.Module, cfg: Any, device: torch.device, num_runs: int) -> float:
    """Seconds of the update of all flat buffers on one rank; the fastest of a few."""
    alone = quietly(changed(keys_of(cfg), OF_MANY_RANKS) | {"zero_optimization": {"stage": 0}})
    layout, optimizers = plan(model, alone), optimizers_of(alone)
    updates = []
    for buffer in layout.flat_buffers:
        if buffer.trainable:
            param = torch.zeros(
                buffer.padded_numel, dtype=torch_dtype(buffer.dtypes.master), device=device
            )
            transform = optimizers[buffer.group].transform(
                contents=ShardContents(buffer.layout, ranks=(0,)), kind=buffer.rule
            )
            updates.append([transform, torch.zeros_like(param), param, transform.init(param)])
    seconds = []
    for _ in range(num_runs + 1):
        clock = _Clock(device)
        for update in updates:
            transform, grad, param, state = update
            _, update[2], update[3] = transform.update(grad, param, state)
        clock.mark("update")
        seconds.append(clock.total)
    return min(seconds[1:])
