"""The states of torch's generators that a model on a device draws from: the CPU's, and on a GPU the GPU's too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """The device types whose generators such a model draws from."""
    return ("cpu", "cuda") if device.type == "cuda" else ("cpu",)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The process' states, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Makes these the process' states; those that are missing stay."""
    torch.set_rng_state(states["cpu"].clone())  # torch misreads a view into other memory
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
