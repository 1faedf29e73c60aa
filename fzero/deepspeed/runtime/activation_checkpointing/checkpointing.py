"""Activation checkpointing of a function, by torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fzero.deepspeed.accelerator import get_accelerator

_configured = False
_MODEL_PARALLEL = "model-parallel-rng"
deepspeed_checkpointing_enabled = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result; the backward recomputes its saved tensors. To be called
    inside the engine's module.
    """
    return torch_checkpoint(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`, which is never reentrant."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """`CheckpointFunction.apply(function, *args)`, for callers that skip `checkpoint`."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args)


class CudaRNGStatesTracker:
    """States of the random generator by name: inside `fork(name)` random numbers come
    from that state.

    >>> import torch
    >>> tracker = CudaRNGStatesTracker()
    >>> tracker.add("one", 3)
    >>> with tracker.fork("one"):
    ...     first = torch.rand(2)
    >>> torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(3)))
    True
    """

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Makes a state from a seed."""
        if name in self.states_:
            raise ValueError(
                f"CudaRNGStatesTracker.add: name must be new, got {name!r}; call reset() first"
            )
        here = get_accelerator()
        before = here.get_rng_state()
        here.manual_seed(seed)
        self.states_[name] = here.get_rng_state()
        here.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(
                f"CudaRNGStatesTracker.fork: name must be one that was added, got {name!r}; call "
                f"add first"
            )
        here = get_accelerator()
        before = here.get_rng_state()
        here.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = here.get_rng_state()
            here.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device, and the state "model-parallel-rng" as rank 0 of a
    model-parallel group does.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accepts False only."""
    if partition_activation:
        raise ValueError(
            "checkpointing.partition_activations_in_checkpoint: must be False, got True: nothing "
            "is model-parallel; leave it out"
        )


def set_num_layers(nlayers: int) -> None:
    """Does nothing: no memory is kept for the layers."""


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
        ValueError: partitioned activations, contiguous memory or host memory are
            requested.
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
            f"checkpointing.configure: {wanted[0]} must be False, got True; leave it out, or name "
            f"whole blocks in "
            f'"activation_checkpointing": {{"every": 1, "cpu_checkpointing": true}} of the configuration'
        )
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Does nothing: no memory is kept between steps."""
