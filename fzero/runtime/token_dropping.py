"""`dropping`: while a step runs, the chosen layers of its model see the tokens that they keep (`fzero.data.RandomLTD`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.data.schedules import Root, fewer_values
from fzero.data.token_dropping import Draw
from fzero.model.changes import replaced_forwards

if TYPE_CHECKING:
    from fzero.data.token_dropping import TokenDropping
    from fzero.runtime.step_runtime import StepRuntime

MOST_LENGTHS = 8
"""The largest number of different lengths (kept tokens, or a curriculum's) in a compiled step; each is compiled anew."""


def dropping(
    run: StepRuntime, plan: TokenDropping, step: Tensor, forwards: Callable[[], Collection[int]]
) -> AbstractContextManager[None]:
    """Inside, the layers of a bound model that drop tokens do so.

    Args:
        step: the counter of updates.
        forwards: the numbers of those that run (or are recomputed), counted from the last update.
    """
    n = int(step)
    length, rank, num = plan.length(n), run.ranks.rank, run.plan.num_micro_steps
    return replacing(run.spec.model, plan, lambda: Draw(length, n, _only(forwards()), rank, num))


def _only(forwards: Collection[int]) -> int:
    """The one forward that runs, or whose layers a backward runs again."""
    if len(forwards) != 1:
        raise RuntimeError(
            f"random_ltd: a backward that runs layers again must be of one forward, whose tokens they keep, got one of "
            f"{len(forwards)}; call backward for each forward, or checkpoint the layers themselves and nothing around them "
            f"(activation_checkpointing)"
        )
    return next(iter(forwards))


def replacing(model: nn.Module, plan: TokenDropping, draw: Callable[[], Draw]) -> AbstractContextManager[None]:
    """Inside, the layers' forwards are those of the plan."""
    return replaced_forwards(model, plan.names, lambda name, module: plan.forward_of(name, module, draw))


def check_lengths(cfg: Config, plan: TokenDropping | None, compile: str) -> None:
    """Raises a ConfigError if there are more lengths than may be compiled, or if a compiled step does not support a block of
    the configuration."""
    curriculum = cfg.curriculum_learning
    found = (
        {}
        if plan is None
        else {"data_efficiency.data_routing.random_ltd": (plan.how.schedule, 0, "seq_per_step", "min_value")}
    )
    schedule = curriculum.schedule() if curriculum is not None and curriculum.enabled else None
    if isinstance(schedule, Root):
        found["curriculum_learning"] = schedule, 1, "difficulty_step", "min_difficulty"
    for block, (lengths, start, key, smallest) in found.items():
        if (num := len(lengths.values(start))) > MOST_LENGTHS:
            fewer = fewer_values(lengths, MOST_LENGTHS, start)
            also = "" if fewer.minimum == lengths.minimum else f" and {smallest} to {fewer.minimum}"
            raise ConfigError(
                f"{block}: must have at most {MOST_LENGTHS} lengths with compile={compile!r}, which compiles each of them, got "
                f"{num}; set {key} to {fewer.multiple} (now {lengths.multiple}){also}, or leave compile out"
            )
    if compile == "step" and cfg.drops_layers:
        raise ConfigError(
            "progressive_layer_drop.enabled: must be false with compile='step', whose graph always runs the same layers, got "
            "true; pass compile='block', or leave compile out"
        )


def noted_dropping(cfg: Config, model: nn.Module) -> TokenDropping | None:
    """The layers of a model that drop tokens. Warns of blocks of the configuration that only an engine uses.

    Raises:
        ConfigError: the configuration asks for dropped tokens, and no layer of the model is marked for it.
    """
    plan: TokenDropping | None = vars(model).get("token_dropping") if isinstance(model, nn.Module) else None
    if cfg.drops_tokens and plan is None:
        raise ConfigError(
            "data_efficiency.data_routing.random_ltd: needs the class of the layers; call "
            "fzero.data.RandomLTD(...).wrap(model, LayerClass) before make_train_step, or switch the block off"
        )
    for_engine = {
        "curriculum_learning": cfg.curriculum_learning is not None and cfg.curriculum_learning.enabled,
        "progressive_layer_drop": cfg.drops_layers,
        "data_efficiency.data_sampling": cfg.samples,
    }
    instead = {
        "curriculum_learning": "cut batches with fzero.data.truncated(batch, cfg.curriculum_learning.schedule()(n + 1))",
        "progressive_layer_drop": "give the batch fzero.data.theta(n), with which the model drops layers",
        "data_efficiency.data_sampling": "draw batches with fzero.data.CurriculumSampler",
    }
    for block, is_on in for_engine.items():
        if is_on:
            text = (
                f"{block}: is for the engine (fzero.initialize), and a step takes batches as they are; {instead[block]}"
            )
            warnings.warn(text, ConfigWarning, stacklevel=5)
    return plan
