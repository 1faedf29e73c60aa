"""The torch generators that a model on a device draws from: the CPU's, and on a GPU that GPU's too. Other GPUs keep theirs."""

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


def seed(number: int, device: torch.device) -> None:
    """Seeds these generators. (`torch.manual_seed` also seeds those of the other GPUs.)"""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the generators
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(number)
