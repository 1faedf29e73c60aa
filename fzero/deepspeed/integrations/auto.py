"""Fills `"auto"` values of a configuration from `TrainingArguments`, as transformers
does for DeepSpeed.

A value `"auto"` is filled in from the arguments, and any other value must equal the
argument. Here a missing key of the step also counts as `"auto"`, so that no argument is
silently ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fzero.config.fields import ConfigError

_ALWAYS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "ranks × per_device_train_batch_size × gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys that are also filled in where they are missing, each with its argument."""
_WHERE_GIVEN = {
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "the number of updates",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
"""Keys that are filled in where they are `"auto"`."""


def resolved(source: Mapping[str, Any], args: Any, model: Any, num_updates: int) -> dict[str, Any]:
    """The configuration with `"auto"` replaced by values from the arguments or the
    model.

    Args:
        source: in DeepSpeed's schema.
        args: a `TrainingArguments`.
        model: its `config` has the hidden size.
        num_updates: the number of updates of the full training.

    Raises:
        ConfigError: one line per value that differs from the argument.
    """
    found, values = copy.deepcopy(dict(source)), _values(args, num_updates)
    if "optimizer" in found:  # else its default would hide learning_rate
        _block(found, "optimizer.params.lr", makes=True).setdefault("lr", "auto")
    wrong = []
    for key, name in (_ALWAYS | _WHERE_GIVEN).items():
        block = _block(found, key, makes=key in _ALWAYS)
        last, value = key.split(".")[-1], values[key]
        if block is None or (last not in block and key not in _ALWAYS):
            continue
        given = block.get(last)
        if given in ("auto", None):
            block[last] = value
        elif _plain(given) != _plain(value):
            wrong.append(
                f"{key}: must be what the arguments say ({name}: {value}), got {given}; make it "
                f"'auto'"
            )
    if wrong:
        raise ConfigError("\n".join(wrong))
    _fill(found, "scheduler.params.warmup_min_lr", lambda: 0)
    for key, of_size in _SIZES.items():
        _fill(
            found,
            f"zero_optimization.{key}",
            lambda key=key, of_size=of_size: of_size(_hidden_size(model, key)),
        )
    return found


_SIZES = {
    "reduce_bucket_size": lambda size: size * size,
    "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Keys that follow from the hidden size of the model."""


def _values(args: Any, num_updates: int) -> dict[str, Any]:
    """The values of all keys: computed, or the argument itself."""
    num_samples = (
        args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    )
    computed = {
        "train_batch_size": num_samples,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "scheduler.params.total_num_steps": num_updates,
        "scheduler.params.warmup_num_steps": max(1, args.get_warmup_steps(num_updates)),
    }
    return computed | {
        k: getattr(args, name) for k, name in (_ALWAYS | _WHERE_GIVEN).items() if k not in computed
    }


def _block(found: dict[str, Any], key: str, *, makes: bool) -> Any:
    """The mapping that holds the last part of a key, or None where there is none."""
    block: Any = found
    for part in key.split(".")[:-1]:
        block = block.setdefault(part, {}) if makes else block.get(part)
        if not isinstance(block, dict):
            return None
    return block


def _fill(found: dict[str, Any], key: str, value: Any) -> None:
    block, last = _block(found, key, makes=False), key.split(".")[-1]
    if block is not None and block.get(last) == "auto":
        block[last] = value()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _hidden_size(model: Any, key: str) -> int:
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        sizes = getattr(place, "hidden_size", None) or getattr(place, "hidden_sizes", None)
        if sizes:
            return int(max(sizes) if isinstance(sizes, list | tuple) else sizes)
    raise ConfigError(
        f"zero_optimization.{key}: 'auto' needs a model whose config has hidden_size or "
        f"hidden_sizes, got {type(model).__name__}; give a number"
    )
