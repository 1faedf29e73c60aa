"""Where do the time and the work of a model go? Module by module, forward and backward, and what an update takes.

    found = fzero.profile(model, batch)
    print(found)                      # a tree
    print(found.report(module_depth=1))

1. One forward and backward under torch's `FlopCounterMode` counts floating point operations by module. (It warms up, too.)
2. A few more are timed without it: a module's forward from its call to its return; its backward from the gradient of its
   output to that of its input (of its parameters, where the input has none), which ends with the last module that reads it. On
   CUDA the host waits at each, so that nothing overlaps: times of modules add up to more than an undisturbed step takes, which
   is timed for itself.
3. The optimizer's update runs on flat buffers of the model's size.

The model is left as it was: its gradients, its buffers, and the random state.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from fzero.config_files import changed
from fzero.flop_counts import counter
from fzero.measure import LossFn, loss_of
from fzero.pieces import Pieces
from fzero.plan import optimizers_of, plan
from fzero.planner import keys_of, quietly
from fzero.profile_reports import ModuleProfile, Profile
from sharding.views import torch_dtype


def profile(
    model: nn.Module, batch: Any, cfg: Any = None, *, loss_fn: LossFn | None = None, num_runs: int = 3
) -> Profile:
    """Parameters, operations and seconds of every module, forward and backward, and of the update.

    Args:
        model: with values, on the device of the batch. It runs as it is, in its own dtypes.
        batch: one micro-batch.
        cfg: whose optimizer is timed, what `Config.load` takes; None is AdamW.
        loss_fn: see `make_train_step`.
        num_runs: how often the model is timed; the fastest run counts.

    Raises:
        ValueError: the model is on `meta`, has nothing to train, or gives no loss.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params or any(param.is_meta for param in params):
        raise ValueError(
            "profile: needs a model with values and with parameters that are trained, got one "
            + ("on 'meta'; use model.to_empty(device=...) and fill it" if params else "without; unfreeze some")
        )
    device = params[0].device

    def run(clock: _Clock, started: Callable[[], Any] | None = None) -> None:
        loss, _ = loss_of(model, loss_fn, batch, reduces_by_sum=False)
        clock.mark("forward")
        if started is not None:
            started()
        torch.autograd.grad(loss, params, allow_unused=True)
        clock.mark("backward")

    with _left_as_it_was(model, device):
        flops = _count_flops(run, device)
        plain = min((_timed(run, device) for _ in range(num_runs)), key=lambda clock: clock.total)
        runs = [_timed(run, device, model) for _ in range(num_runs)]
    by_module = min(runs, key=lambda clock: clock.total)
    modules = tuple(_module_profiles(model, flops, by_module))
    update = _time_update(model, {} if cfg is None else cfg, device, num_runs)
    return Profile(
        modules, plain.seconds["forward"], plain.seconds["backward"], update, matrix_rate(device, params[0].dtype)
    )


def matrix_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, width: int = 1024) -> float:
    """Floating point operations per second that a matrix product reaches on this device; the best of a few."""
    device = torch.device(device)
    width = width if device.type == "cpu" else 8 * width
    a, b = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(4):
        clock = _Clock(device)
        a @ b
        clock.mark("product")
        seconds.append(clock.total)
    return 2 * width**3 / min(seconds)


# --- counting ----------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds since it was made or marked last, by name; on CUDA the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.spans: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
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


Run = Callable[..., None]


def _count_flops(run: Run, device: torch.device) -> dict[str, Counter[str]]:
    """Operations of forward and backward by the name that torch's counter gives a module, class of the model first."""
    with counter() as counted:
        forward: dict[str, int] = {}
        run(_Clock(device), lambda: forward.update(_totals(counted.get_flop_counts())))
        both = _totals(counted.get_flop_counts())
    return {
        "forward": Counter(forward),
        "backward": Counter({name: flops - forward.get(name, 0) for name, flops in both.items()}),
    }


def _totals(counts: dict[str, dict[Any, int]]) -> dict[str, int]:
    return {name: sum(of_module.values()) for name, of_module in counts.items()}


def _timed(run: Run, device: torch.device, model: nn.Module | None = None) -> _Clock:
    """One run; with a model, each of its modules is timed, too."""
    clock = _Clock(device)
    if model is None:
        run(clock)
        return clock
    with _Stopwatches(model, clock):
        run(clock)
    return clock


class _Stopwatches:
    """Hooks on every module that time its calls, and its backward by the gradients that come and go."""

    def __init__(self, model: nn.Module, clock: _Clock) -> None:
        self._model, self._clock = model, clock
        self._handles: list[Any] = []
        self._begun: defaultdict[str, list[float]] = defaultdict(list)
        self._calls: defaultdict[str, list[list[float]]] = defaultdict(list)  # begin and end of the backward of each

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name)))
            self._handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        end = self._clock.now()
        backward: dict[str, float] = {}
        for name, calls in reversed(self._calls.items()):  # of those inside first
            for call in calls:
                call[1] = call[1] if call[1] > call[0] else call[0]
            backward[name] = sum(max(stop - start, 0.0) for start, stop in calls if start < end)
        self._clock.spans["backward"] = backward

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._begun[name].append(self._clock.now())

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            forward = self._clock.spans["forward"]
            forward[name] = forward.get(name, 0.0) + self._clock.now() - self._begun[name].pop()
            outs = [x for x in _tensors(out) if x.requires_grad]
            if outs:
                call = [float("inf"), 0.0]
                self._calls[name].append(call)
                ins = [x for x in _tensors((args, kwargs)) if x.requires_grad]
                self._watch(call, outs, ins or [param for param in module.parameters() if param.requires_grad])

        return hook

    def _watch(self, call: list[float], outs: list[Tensor], ins: list[Tensor]) -> None:
        def begin(grad: Any) -> None:
            call[0] = min(call[0], self._clock.now())

        def end(grad: Any) -> None:
            call[1] = self._clock.now()

        self._handles.append(register_multi_grad_hook(outs, begin, mode="any"))
        self._handles += [x.register_hook(end) for x in ins]  # type: ignore[no-untyped-call]


def _tensors(tree: Any) -> list[Tensor]:
    tree = dict(tree) if hasattr(tree, "items") else tree
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def _module_profiles(model: nn.Module, flops: dict[str, Counter[str]], clock: _Clock) -> Iterator[ModuleProfile]:
    around: list[str] = []  # the names of the modules that the next one may be a part of
    for name, module in model.named_modules():
        if name not in clock.spans["forward"]:
            continue  # a list of modules, or one that is not used
        while around and around[-1] and not name.startswith(f"{around[-1]}."):
            around.pop()
        counted = ".".join(filter(None, (type(model).__name__, name)))
        yield ModuleProfile(
            name, type(module).__name__, len(around), sum(param.numel() for param in module.parameters()),
            flops["forward"][counted], flops["backward"][counted],
            clock.spans["forward"][name], clock.spans["backward"].get(name, 0.0),
        )  # fmt: skip
        around.append(name)


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Module buffers and the random state come back."""
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
    alone = quietly(changed(keys_of(cfg), {"zero_optimization": {"stage": 0}}))
    layout, optimizers = plan(model, alone), optimizers_of(alone)
    updates = []
    for buffer in layout.flat_buffers:
        if buffer.trainable:
            param = torch.zeros(buffer.padded_numel, dtype=torch_dtype(buffer.dtypes.master), device=device)
            transform = optimizers[buffer.group].transform(pieces=Pieces(buffer.layout, ranks=(0,)), kind=buffer.way)
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
