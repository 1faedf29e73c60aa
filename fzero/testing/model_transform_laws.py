"""`check_model_transform`: the laws of a transformation of the model, in training steps of
all stages, on simulated ranks and in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any, Literal

import optree
import torch
from torch import Tensor, nn

from fzero.checkpoint.loading import load
from fzero.checkpoint.saving import save
from fzero.common.arguments import check_callable, check_whole
from fzero.comms.axes import AbstractAxis
from fzero.model.transforms import ModelTransform
from fzero.simulation import LockstepRanks, simulate
from fzero.step import make_train_step

NUM_STEPS, ROWS = 3, 2
ROUNDING = 1e-4
"""Of captured arithmetic, and of sums over another number of ranks, in a few updates."""


class _Net(nn.Module):
    """Two blocks between two layers; its loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.outlet = nn.Linear(8, 6)

    def forward(self, x_BD: Tensor) -> Tensor:
        x = self.inlet(x_BD)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = (self.outlet(x) - x_BD.flip(1)).square().mean()
        return loss


def check_model_transform(
    make: Callable[[], ModelTransform],
    *,
    model: Callable[[], nn.Module] = _Net,
    batch: Callable[[int], Any] = lambda rows: torch.randn(rows, 6),
    name: str = "transform",
    captured: bool = True,
    world_size: int = 2,
) -> None:
    """Raises if a transformation of the model breaks a law that stages and runners rely
    on, in the steps that it tries.

    A few updates of a small model on ranks in lockstep: all stages give the same bits; so
    does the same step once more; training that is saved and loaded goes on with the same
    bits; all ranks at once in one graph give the same numbers to rounding; all stays finite.
    It runs the transform, and proves nothing about other models and longer runs.

    Args:
        make: makes the transform, anew for each step.
        model: makes the model, whose forward takes a batch and returns its loss.
        batch: draws a batch of so many rows: a tensor, or a dict or tuple of tensors.
        name: its name in messages.
        captured: whether a step in one graph must take it.
        world_size: the number of ranks.

    Raises:
        AssertionError: a law is broken; the message has the law and the fix.
        ValueError: `make` is not callable.

    >>> from fzero.transforms import weight_norm
    >>> check_model_transform(lambda: weight_norm("blocks.*.0"), captured=False)
    """
    check_callable("make", make, "a function without arguments that makes the transform")
    check_whole("world_size", world_size, 1)
    lab = _Lab(make, model, batch, world_size)
    first = lab.trained(0)
    for stage in (1, 2, 3):
        _same(name, f"all stages must give the same bits; stage {stage}", lab.trained(stage), first)
    _same(name, "the same step must give the same bits again; it", lab.trained(0), first)
    _same(name, "training must go on from a checkpoint; resumed training", lab.resumed(), first)
    for key, value in first.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise AssertionError(
                f"{name}: weights must stay finite, and {key!r} does not in {NUM_STEPS} updates; "
                f"divide by no number that may be 0"
            )
    if captured:
        found = lab.trained(3, compile="step")
        text = "the step in one graph must give the numbers of the eager one; it"
        _same(name, text, found, first, rounding=ROUNDING)


class _Lab:
    """Trains with a transform, always from the same weights on the same batches."""

    def __init__(
        self,
        make: Callable[[], ModelTransform],
        model: Callable[[], nn.Module],
        batch: Callable[[int], Any],
        world_size: int,
    ) -> None:
        self._make, self._model, self._size = make, model, world_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self._batches = [[batch(ROWS) for _ in range(world_size)] for _ in range(NUM_STEPS)]

    def _step(self, stage: int, compile: Literal["step"] | None = None) -> LockstepRanks:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._model()
        keys = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        axis = AbstractAxis("data", self._size)
        step = make_train_step(model, keys, transforms=[self._make()], mesh=axis, compile=compile)
        if compile is None:
            return simulate(step, self._size, by="lockstep")
        return simulate(step, self._size, by="vmap", compile="aot_eager")

    def trained(self, stage: int, compile: Literal["step"] | None = None) -> Mapping[str, Tensor]:
        """The weights after all updates."""
        step = self._step(stage, compile)
        return step.gather(self._go_on(step, step.init(), 0))

    def resumed(self) -> Mapping[str, Tensor]:
        """The same, saved after the first update and loaded in another stage."""
        step, other = self._step(0), self._step(1)
        state, _ = step(step.init(), _stacked(self._batches[0]))
        with TemporaryDirectory(prefix="fzero-transform-") as folder:
            save(state, folder, step=step)
            loaded = load(folder, step=other).state
        return other.gather(self._go_on(other, loaded, 1))

    def _go_on(self, step: LockstepRanks, state: Any, first: int) -> Any:
        for batches in self._batches[first:]:
            state, _ = step(state, _stacked(batches))
        return state


def _stacked(batches: list[Any]) -> Any:
    return optree.tree_map(lambda *xs: torch.stack(xs), *batches)


def _same(
    name: str,
    law: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    rounding: float = 0.0,
) -> None:
    """Raises unless two trees of weights are equal, up to rounding."""
    fix = "compute from the arguments alone, and keep nothing between calls"
    for key, value in expected.items():
        if key not in found or found[key].shape != value.shape:
            raise AssertionError(f"{name}: {law} has another tensor {key!r}; {fix}")
        far = (found[key].double() - value.double()).abs().max().item() if value.numel() else 0.0
        if not far <= rounding * max(1.0, value.abs().max().item() if far else 0.0):
            raise AssertionError(f"{name}: {law} differs by {far:.1e} in {key!r}; {fix}")
