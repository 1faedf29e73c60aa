"""`histories`: what happens to a job, as a value that hypothesis draws and shrinks;
`play` does it to a training on simulated ranks, beside a plain loop.

A history is a tuple of events. `TrainingMachine` draws its own and knows more of them
(overflows, placements, precisions); a history is for tests that have their own step, or
want to keep the one that failed:

    @given(models(), histories())
    def test_my_optimizer_survives(model, history):
        play(history, model, transform=my_optimizer)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fzero.checkpoint.loading import load, starts
from fzero.checkpoint.saving import save
from fzero.comms.axes import AbstractAxis
from fzero.optim.adam_kernels import adamw
from fzero.optim.transforms import Transform
from fzero.plans.param_groups import OwnTransform
from fzero.resharding.reshard import reshard
from fzero.simulation import LockstepRanks, simulate
from fzero.step import make_train_step
from fzero.testing.reference_trainer import optimizer_of_transform

GLOBAL_BATCH = 12
"""Rows of an update, which 1 to 4 ranks divide evenly."""


@dataclass(frozen=True, slots=True)
class Train:
    """Some updates."""

    num_updates: int = 1


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint, to which later events go back."""


@dataclass(frozen=True, slots=True)
class Load:
    """A new job goes on from the last checkpoint; from the start, if there is none."""

    stage: int
    world_size: int


@dataclass(frozen=True, slots=True)
class LoseRank:
    """One rank fewer, from the last checkpoint; on one rank, a restart."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """The running job changes its stage and its number of ranks."""

    stage: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """One of the trained parameters is trained no longer, unless it is the last one."""

    index: int


Event = Train | Save | Load | LoseRank | Reshard | Freeze
History = tuple[Event, ...]


def histories(max_events: int = 6, max_world_size: int = 4) -> st.SearchStrategy[History]:
    """What happens to a job; it begins in stage 0 on two ranks, and ends with an update.

    >>> from hypothesis import find
    >>> find(histories(), lambda history: any(isinstance(one, LoseRank) for one in history))
    (LoseRank(), Train(num_updates=1))
    """
    where = {"stage": st.integers(0, 3), "world_size": st.integers(1, max_world_size)}
    events = st.one_of(
        st.builds(Train, st.integers(1, 2)),
        st.just(Save()),
        st.just(LoseRank()),
        st.builds(Reshard, **where),
        st.builds(Load, **where),
        st.builds(Freeze, st.integers(0, 3)),
    )
    return st.lists(events, max_size=max_events).map(lambda found: (*found, Train()))


def play(
    history: History,
    model: nn.Module,
    *,
    transform: OwnTransform | None = None,
    lr: float = 0.01,
    rounding: float = 1e-4,
) -> None:
    """Does all that happens in a history to a training of `model` on simulated ranks,
    and compares its weights with those of a plain loop after each event.

    Args:
        history: as `histories` draws it.
        model: takes a batch (rows, `model.features`) and returns its loss, a mean over
            rows; see `sharding.testing.models`. It is not changed.
        transform: an elementwise optimizer; None is AdamW.
        rounding: the allowed difference, as a fraction of the largest weight, because
            ranks add up in another order.

    Raises:
        AssertionError: names the event, the weight, and the difference.
    """
    make = transform or (lambda rate: adamw(rate, eps=0.1, weight_decay=0.1))
    job = _Job(copy.deepcopy(model), make, lr)
    for number, event in enumerate(history):
        job.do(event)
        for name, expected in job.plain.weights.items():
            far = (job.weights()[name] - expected).abs().max().item() if expected.numel() else 0.0
            if not far <= rounding * max(1.0, expected.abs().max().item() if far else 0.0):
                raise AssertionError(
                    f"training must equal a plain loop after event {number}, {event}, and weight "
                    f"{name!r} differs by {far:.2g}; the history is {history[: number + 1]}"
                )


@dataclass(slots=True)
class _Plain:
    """A plain loop's numbers: weights, and of each trained parameter the optimizer's
    state.
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    num_updates: int = 0

    def copied(self) -> _Plain:
        return copy.deepcopy(self)


class _Job:
    """A training and its plain loop."""

    def __init__(self, model: nn.Module, make: OwnTransform, lr: float) -> None:
        self._model, self._make, self._lr = model, make, lr
        self._twin = copy.deepcopy(model)  # of the plain loop
        made = (lambda: make) if isinstance(make, Transform) else (lambda: make(lr))
        self._optimizer = optimizer_of_transform(made)
        self._stage, self._size = 0, 2
        self._folder = TemporaryDirectory(prefix="fzero-history-")
        self._step = self._made(None)
        self._state: Any = self._step.init()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        moments = {name: self._optimizer.init(weights[name]) for name in self._trained()}
        self.plain = _Plain(weights, moments)
        self._save()

    def do(self, event: Event) -> None:
        match event:
            case Train():
                for _ in range(event.num_updates):
                    self._train()
            case Save():
                self._save()
            case Load():
                self._load(event.stage, event.world_size)
            case LoseRank():
                self._load(self._stage, max(1, self._size - 1))
            case Reshard():
                self._reshard(event.stage, event.world_size)
            case Freeze():
                self._freeze(event.index)

    def weights(self) -> dict[str, Tensor]:
        found = self._step.gather(self._state)
        return {name: found[name].to(x.dtype) for name, x in self.plain.weights.items()}

    def _trained(self) -> list[str]:
        return [name for name, p in self._model.named_parameters() if p.requires_grad]

    def _made(self, after: Any) -> LockstepRanks:
        zero = {"stage": self._stage, "stage3_param_persistence_threshold": 0}
        keys = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // self._size,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": self._lr}},
            "zero_optimization": zero,
        }
        axis = AbstractAxis("data", self._size)
        step = make_train_step(self._model, keys, transform=self._make, mesh=axis, after=after)
        return simulate(step, self._size, by="lockstep")

    def _batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.plain.num_updates)
        features: Any = self._model.features
        return torch.randn(GLOBAL_BATCH, features, generator=generator)

    def _train(self) -> None:
        batch = self._batch()
        self._state, _ = self._step(self._state, batch.view(self._size, -1, batch.shape[1]))
        plain, trained = self.plain, self._trained()
        with torch.no_grad():
            for name, param in self._twin.named_parameters():
                param.copy_(plain.weights[name])
        params = [p for name, p in self._twin.named_parameters() if name in trained]
        grads = torch.autograd.grad(self._twin(batch), params, materialize_grads=True)
        for name, grad in zip(trained, grads, strict=True):
            weight, plain.moments[name] = self._optimizer.update(
                grad, plain.weights[name], plain.moments[name]
            )
            plain.weights[name] = weight
        plain.num_updates += 1

    def _save(self) -> None:
        save(self._state, self._folder.name, step=self._step)
        self._saved = self.plain.copied()

    def _load(self, stage: int, world_size: int) -> None:
        self._stage, self._size = stage, world_size
        self._step = self._made(starts(self._folder.name))
        self._state = load(self._folder.name, step=self._step).state
        self.plain = self._saved.copied()

    def _reshard(self, stage: int, world_size: int) -> None:
        old, self._stage, self._size = self._step, stage, world_size
        self._step = self._made(old.steps[0])
        self._state = reshard(self._state, old, self._step)

    def _freeze(self, index: int) -> None:
        trained = self._trained()
        if len(trained) > 1:
            name = trained[index % len(trained)]
            dict(self._model.named_parameters())[name].requires_grad_(False)
            self._reshard(self._stage, self._size)
