"""`configured`: the transforms that a configuration and the arguments of a step ask
for, in the order of their application.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fzero import graph
from fzero.common.arguments import check_model
from fzero.compression.matching import compression
from fzero.compression.plan import CompressionPlan
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.data.schedules import Root
from fzero.data.token_dropping import TokenDropping, dropping_of
from fzero.model.transforms import Changes, Choice, ModelTransform, TransformedStep
from fzero.transforms.checkpointing import Checkpointing
from fzero.transforms.layer_drop import LayerDrop
from fzero.transforms.token_dropping import DroppedTokens, check_lengths


def configured(
    cfg: Config,
    given: Sequence[ModelTransform] = (),
    *,
    compress: CompressionPlan | None,
    drop: TokenDropping | None,
    checkpoint: Choice | None = None,
    compile: str | None = None,
) -> tuple[ModelTransform, ...]:
    """The transforms of a step: compression, those of the user, compiled blocks,
    checkpointing, dropped tokens.

    Compression and the user's see the model's own modules. A checkpointed block runs
    compiled, and its layers keep the tokens that they kept first.

    Args:
        given: the user's.
        compress: the plan of the block `compression_training`.
        drop: the layers that drop tokens.
        checkpoint: the argument; None is `activation_checkpointing.every`.
        compile: the argument.
    """
    found: list[ModelTransform] = [*([] if compress is None else [compress]), *given]
    if compile == "block":
        found.append(graph.blocks.compiled_blocks)
    block = cfg.activation_checkpointing
    if checkpoint is not None:
        found.append(Checkpointing(checkpoint, on_host=block.cpu_checkpointing))
    elif block.every is not None or block.cpu_checkpointing:
        found.append(
            Checkpointing(block.every, "activation_checkpointing.every", block.cpu_checkpointing)
        )
    if drop is not None:
        found.append(DroppedTokens(drop))
    if cfg.curriculum_learning is not None and cfg.curriculum_learning.enabled:
        found.append(TruncatedInputs())
    return tuple(found)


def with_blocks(transforms: Sequence[ModelTransform]) -> tuple[ModelTransform, ...]:
    """The transforms of the same step with `compile="block"`."""
    outer = [one for one in transforms if isinstance(one, Checkpointing | DroppedTokens)]
    compiled: ModelTransform = graph.blocks.compiled_blocks
    return (
        *(one for one in transforms if one not in outer and one is not compiled),
        compiled,
        *outer,
    )


def with_dropping(
    transforms: Sequence[ModelTransform], drop: TokenDropping | None
) -> tuple[ModelTransform, ...]:
    """The transforms of the same step with other layers that drop tokens."""
    kept = [one for one in transforms if not isinstance(one, DroppedTokens)]
    return (*kept, *([] if drop is None else [DroppedTokens(drop)]))


def of_step(
    cfg: Config,
    model: nn.Module,
    given: Sequence[ModelTransform],
    *,
    checkpoint: Choice | None,
    compile: str | None,
    seed: int,
) -> tuple[ModelTransform, ...]:
    """The transforms of `make_train_step`; warns of blocks of the configuration that
    only an engine uses.

    Raises:
        ConfigError: a transform is none, or the configuration asks for dropped tokens,
            and no layer is marked for it.
    """
    check_model(model)
    if not isinstance(given, Sequence):
        raise ValueError(f"transforms: must be a list, got {given!r}; pass [it]")
    for index, one in enumerate(given):
        if not callable(one):
            raise ValueError(
                f"transforms: must be functions of a step's spec (fzero.transforms), got {one!r} "
                f"at position {index}; pass fzero.transforms.lora('*.q_proj', rank=8), say"
            )
    compress, drop = (
        compression(cfg, model, seed=seed) if cfg.compresses else None,
        dropping_of(model),
    )
    if cfg.drops_tokens and drop is None:
        raise ConfigError(
            "data_efficiency.data_routing.random_ltd: needs the class of the layers; call "
            "fzero.data.RandomLTD(...).wrap(model, LayerClass) before make_train_step, or switch "
            "the block off"
        )
    for_engine = {
        "curriculum_learning": cfg.curriculum_learning is not None
        and cfg.curriculum_learning.enabled,
        "data_efficiency.data_sampling": cfg.samples,
    }
    instead = {
        "curriculum_learning": (
            "cut batches with fzero.data.truncated(batch, "
            "cfg.curriculum_learning.schedule()(n + 1))"
        ),
        "data_efficiency.data_sampling": "draw batches with fzero.data.CurriculumSampler",
    }
    for block, is_on in for_engine.items():
        if is_on:
            text = (
                f"{block}: is for the engine (fzero.initialize), and a step takes batches as "
                f"they are; {instead[block]}"
            )
            warnings.warn(text, ConfigWarning, stacklevel=4)
    layers = cfg.progressive_layer_drop
    own = (LayerDrop(layers.theta, layers.gamma),) if layers is not None and layers.enabled else ()
    return (
        *configured(
            cfg, given, compress=compress, drop=drop, checkpoint=checkpoint, compile=compile
        ),
        *own,
    )


@dataclass(frozen=True)
class TruncatedInputs:
    """The transform of a curriculum of lengths: it changes no module, because batches
    follow it, and checks the step.
    """

    field: str = "curriculum_learning"

    def __call__(self, spec: TransformedStep) -> Changes:
        """See `ModelTransform`."""
        schedule = spec.cfg.curriculum_learning.schedule()
        if spec.compile is not None and isinstance(schedule, Root):
            check_lengths(
                self.field, schedule, 1, ("difficulty_step", "min_difficulty"), spec.compile
            )
        return Changes(name=self.field, is_exact=True)
