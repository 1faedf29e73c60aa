"""`deepspeed.elasticity`: the batch of an elastic job."""

from __future__ import annotations

import json
import os
from typing import Any

from fzero.config.config import Config
from fzero.config.elastic_sizes import micro_batch_of_gpus
from fzero.config.fields import ConfigError
from fzero.deepspeed.elasticity.config import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)

ELASTICITY, ENABLED, ENABLED_DEFAULT, DEEPSPEED_ELASTICITY_CONFIG = (
    "elasticity", "enabled", False, "DEEPSPEED_ELASTICITY_CONFIG",
)  # fmt: skip


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Whether a configuration has the block `elasticity` switched on."""
    return bool(ds_config.get(ELASTICITY, {}).get(ENABLED, ENABLED_DEFAULT))


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """(Samples of a step, numbers of data-parallel ranks that can train it[, samples of
    a rank's micro-step]).

    `world_size` stands for both numbers of DeepSpeed's formulas: the GPUs, of which
    `model_parallel_size` make a data-parallel rank, and the data-parallel ranks, which
    must be among those that can train the batch.

    Args:
        ds_config: with the block `elasticity`.
        target_deepspeed_version: ignored.
        world_size: the number of ranks; 0 takes `WORLD_SIZE` where one is needed.
        return_microbatch: whether the third number is returned without a `world_size`,
            too.

    Raises:
        ElasticityConfigError: the block is missing, off or invalid.
        ElasticityIncompatibleWorldSize: the number of ranks cannot train the batch.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError(
            "elasticity.enabled: must be true, got none; add the block to the configuration"
        )
    block = {"version": 0.2, **ds_config[ELASTICITY]}
    try:
        keys = Config.load({ELASTICITY: block | {"ignore_non_elastic_batch_info": True}}).elasticity
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    needs = world_size > 0 or return_microbatch or keys.version == 0.2
    num_ranks = world_size or int(os.environ.get("WORLD_SIZE", 0))
    if needs and not num_ranks:
        raise ElasticityConfigError(
            "world_size: must be given, or WORLD_SIZE be set, got neither; pass the number of ranks"
        )
    try:
        batch = keys.batch_of_gpus(num_ranks)
        found = batch.batch_size, [*batch.world_sizes]
        if not (world_size > 0 or return_microbatch):
            return found
        if world_size > 0 or keys.version == 0.1:
            return *found, batch.steps_on(num_ranks)[0]
        assert keys.micro_batch_sizes is not None
        larger = keys.prefer_larger_batch
        return *found, micro_batch_of_gpus(
            found[0], keys.micro_batch_sizes, num_ranks, prefer_larger=larger
        )
    except ValueError as error:
        raise ElasticityIncompatibleWorldSize(str(error)) from None


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Raises unless the block is that of the scheduler of the job
    (`DEEPSPEED_ELASTICITY_CONFIG`), where there is one.
    """
    planned = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    for key in (
        ("max_train_batch_size", "micro_batch_sizes", "version") if planned is not None else ()
    ):
        there, here = json.loads(planned or "{}").get(key), runtime_elastic_config_dict.get(key)
        if there != here:
            raise ElasticityConfigError(
                f"elasticity.{key}: must be that of the scheduler, {there!r} "
                f"({DEEPSPEED_ELASTICITY_CONFIG}), got {here!r}; use the same configuration"
            )


__all__ = [
    "DEEPSPEED_ELASTICITY_CONFIG",
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
