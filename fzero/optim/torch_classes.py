"""The classes of `torch.optim`, by name."""

from __future__ import annotations

import difflib

import torch
from torch.optim import Optimizer


def classes() -> dict[str, type[Optimizer]]:
    """The classes of `torch.optim`, by name."""
    return {
        name: member
        for name, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, Optimizer) and member is not Optimizer
    }


def find(name: str) -> type[Optimizer]:
    """The class of `torch.optim` with that name.

    Raises:
        ValueError: there is no such class; the message names the nearest one.
    """
    by_lower_name = {known.lower(): cls for known, cls in classes().items()}
    if name.lower() not in by_lower_name:
        nearest = difflib.get_close_matches(name.lower(), by_lower_name, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"torch.optim has no {name!r}; did you mean {by_lower_name[nearest].__name__!r}?"
        )
    return by_lower_name[name.lower()]
