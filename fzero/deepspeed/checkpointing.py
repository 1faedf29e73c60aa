"""`deepspeed.checkpointing`: activation checkpointing of a function, by torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result; the backward recomputes its saved tensors. To be called inside the engine's module."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Raises for options that `checkpoint` does not support; otherwise does nothing.

    Raises:
        ValueError: partitioned activations, contiguous memory or host memory are requested.
    """
    global _configured
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    wanted = [name for name, value in given.items() if value]
    if wanted:
        raise ValueError(
            f"checkpointing.configure: {wanted[0]} must be False, got True; leave it out, or name whole blocks in "
            f'"activation_checkpointing": {{"every": 1, "cpu_checkpointing": true}} of the configuration'
        )
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Does nothing: no memory is kept between steps."""
