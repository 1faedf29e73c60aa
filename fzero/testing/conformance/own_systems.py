"""The adapters of fzero: the step, the engine, the step as one graph, all ranks in one
process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fzero
import fzero.deepspeed as deepspeed
from fzero.simulation import stacked
from fzero.testing.conformance.engine_trainer import EngineTrainer, config_of
from fzero.testing.conformance.training import (
    Batches,
    Norm,
    Setup,
    System,
    Trainer,
    Weights,
    in_real_parts,
    joined,
)

IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32", "reduce_dtype": "fp32"}}
"""Keys: gradients are added up in fp32."""


def make_step(
    setup: Setup, mesh: Any, compile: Literal["step"] | None, after: Any = None
) -> fzero.TrainStep:
    """The step of a training; `after` says when the states of a checkpoint begin."""
    options, count, rates = dict(setup.options), setup.count, setup.rates
    lr = options["lr"]
    more: dict[str, Any] = {}
    if count is not None:
        more["loss_fn"] = lambda model, batch: (setup.loss(model, batch), count(batch))
    if rates is not None:
        more["lr_schedule"] = lambda n: lr * rates(n)
    return fzero.make_train_step(
        in_real_parts(setup.model()),
        {**config_of(setup, **IN_FP32), "optimizer": {"type": setup.optimizer, "params": options}},
        param_groups=[{"params": re.escape(piece), **dict(own)} for piece, own in setup.groups],
        mesh=mesh,
        compile=compile,
        compile_backend="aot_eager",
        after=after,
        **{"loss_fn": setup.loss} | more,
    )


class StepTrainer:
    """`make_train_step` on this rank, or `simulate` of it on all ranks.

    Args:
        make: makes the step, for the argument `after` of `make_train_step`.
        rank: None where the step is that of all ranks.
    """

    def __init__(self, setup: Setup, make: Callable[[Any], Any], *, rank: int | None) -> None:
        self._make, self._rank = make, rank
        self._step = make(None)
        self._state = self._step.init()
        if rank is not None:
            self._step.spec.model.to("meta")  # frees the module's own weights (`TrainStep`)
        self._norm = Norm(float("nan"), 2.0**setup.scale_power)

    def _own(self, batches: Batches) -> list[Any]:
        """The micro-batches of this rank, or of all ranks."""
        if self._rank is not None:
            return list(batches[self._rank])
        return [stacked(of_ranks) for of_ranks in zip(*batches, strict=True)]

    def step(self, batches: Batches, *, update: bool = True) -> float:
        own = self._own(batches)
        if not update:
            losses = [self._step.evaluate(self._state, batch).item() for batch in own]
            return float(sum(losses) / len(losses))
        self._state, metrics = self._step(self._state, iter(own) if len(own) > 1 else own[0])
        scale = self._state.loss_scale.scale.reshape(-1)[0].item()
        self._norm = Norm(metrics.grad_norm.item(), scale)
        return float(metrics.loss.item())

    def weights(self) -> Weights:
        found: Weights = self._step.gather(self._state)
        return joined({name: x.clone() for name, x in found.items()})

    def norm(self) -> Norm:
        return self._norm

    def save(self, folder: Path) -> None:
        fzero.save(self._state, folder, step=self._step)

    def load(self, folder: Path) -> int:
        # parameters that the checkpoint's job did not train: docs/recipes/freezing.md
        self._step = self._make(fzero.checkpoint.starts(folder))
        self._state = fzero.load(folder, step=self._step).state
        return int(self._state.step.reshape(-1)[0].item())


def by_step(setup: Setup, rank: int, world_size: int) -> Trainer:
    """The eager step."""
    return StepTrainer(setup, lambda after: make_step(setup, None, None, after), rank=rank)


def by_graph(setup: Setup, rank: int, world_size: int) -> Trainer:
    """The step as one graph."""
    return StepTrainer(setup, lambda after: make_step(setup, None, "step", after), rank=rank)


def by_simulation(setup: Setup, rank: int, world_size: int) -> Trainer:
    """All ranks in this process."""
    axis = fzero.comms.AbstractAxis("data", world_size)

    def make(after: Any) -> Any:
        return fzero.simulate(make_step(setup, axis, None, after), world_size)

    return StepTrainer(setup, make, rank=None)


def by_engine(setup: Setup, rank: int, world_size: int) -> Trainer:
    """DeepSpeed's loop on fzero's engine."""
    return EngineTrainer(setup, config_of(setup, **IN_FP32), deepspeed, rank, world_size)


def version() -> str:
    return fzero.__version__


ALL = (0, 1, 2, 3)
OWN_SYSTEMS = (
    System(
        "fzero",
        by_step,
        ALL,
        version,
        aside="complex parameters are joined from real ones (torch.nn.utils.parametrize), as its "
        "error says; a job that thaws parameters passes after=",
    ),
    System("fzero-engine", by_engine, (1, 3), version, aside="in stages 1 and 3"),
    System(
        "fzero-captured",
        by_graph,
        (3,),
        version,
        aside="compile='step', compile_backend='aot_eager': the scheduled graph, without generated code; in stage 3",
    ),
    System(
        "fzero-simulated",
        by_simulation,
        (1, 3),
        version,
        in_one_process=True,
        aside="in stages 1 and 3",
    ),
)
