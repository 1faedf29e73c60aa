"""The torch generators that a model on a device draws from: the CPU's, and on a GPU
that GPU's too. Other GPUs keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


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


def order_in_memory(x: Tensor) -> list[int] | None:
    """The dimensions of a tensor, outermost in memory first, if a dropout fills its
    noise in that order and not as they are.

    A graph has no in-place operators, and the one in place of `bernoulli_` fills memory
    of its own, as the dimensions are.
    """
    sizes, strides = x.size(), x.stride()
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], dim))
    numels = accumulate((sizes[dim] for dim in reversed(order)), mul, initial=1)
    is_dense = all(
        strides[dim] == numel for dim, numel in zip(reversed(order), numels) if sizes[dim] > 1
    )
    return (
        order if is_dense and order != sorted(order) and _fills_memory_in_order(x.device) else None
    )


@cache
def _fills_memory_in_order(device: torch.device) -> bool:
    """Whether `bernoulli_` fills a transposed tensor in the order of its memory (MKL
    does not).
    """
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        rows, columns = torch.empty(64, 2, device=device), torch.empty(2, 64, device=device)
        for x in (rows, columns.t()):
            x.bernoulli_(0.5, generator=torch.Generator(device).manual_seed(0))
        return torch.equal(rows.view(-1), columns.view(-1))
