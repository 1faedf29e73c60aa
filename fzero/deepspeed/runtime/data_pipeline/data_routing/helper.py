"""`deepspeed.runtime.data_pipeline.data_routing.helper`: random layer-token dropping
for an engine; see docs/data.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from fzero.config.config import ConfigError
from fzero.deepspeed.engine.data_efficiency import dropping_of_block
from fzero.deepspeed.engine.engine import Engine

__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]

T = TypeVar("T")


def convert_to_random_ltd(model: Engine, convert_type: type[nn.Module]) -> Engine:
    """Lets the layers that `random_ltd_layer_id` names drop tokens in training from
    here on; returns the engine.

    The modules and their names stay. Numbers of layers are positions among the modules
    of the class (DeepSpeed looks for them in the modules' names, where 1 is also in
    10). *Collective:* every rank.

    Args:
        model: of `initialize`, with the block
            `data_efficiency.data_routing.random_ltd`.
        convert_type: the class of the layers.
    """
    if not isinstance(model, Engine):
        raise ConfigError(
            f"convert_to_random_ltd: model must be the engine, got {type(model).__name__}; call it "
            f"after initialize, or use fzero.data.RandomLTD"
        )
    model.module.__dict__["token_dropping"] = dropping_of_block(
        model.cfg, model.module, convert_type
    )
    model.random_ltd_initialize()
    return model


def save_without_random_ltd(model: Engine | nn.Module) -> dict[str, Any]:
    """The weights of a model, under its own names, which do not change here.
    *Collective* for an engine: every rank.
    """
    return model.module_state_dict() if isinstance(model, Engine) else model.state_dict()


def remove_random_ltd_state_dict(state_dict: Mapping[str, T]) -> dict[str, T]:
    """A state dict of DeepSpeed's with random layer-token dropping, under the model's
    own names.

    >>> remove_random_ltd_state_dict({"h.1.random_ltd_layer.weight": 1, "h.2.weight": 2})
    {'h.1.weight': 1, 'h.2.weight': 2}
    """
    return {key.replace(".random_ltd_layer", ""): value for key, value in state_dict.items()}
