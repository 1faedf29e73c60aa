"""Keyed random numbers: a layer draws under a seed that is made of the numbers of the
step, the layer and the micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fzero.common.random_states import seed


@dataclass(frozen=True, slots=True)
class StepSeeds:
    """The seeds of one step.

    Attributes:
        root: the number of the step, drawn from the state's random state. It is equal
            on all stages.
        device: where layers draw.

    >>> seeds = StepSeeds(1, torch.device("cpu"))
    >>> seeds.of(0, 1) == seeds.of(0, 1), seeds.of(0, 1) == seeds.of(1, 0)
    (True, False)
    """

    root: int
    device: torch.device

    def of(self, layer: int, micro_batch: int) -> int:
        """The seed of a layer and a micro-batch."""
        digest = hashlib.blake2b(
            f"{self.root}/{layer}/{micro_batch}".encode(), digest_size=8
        ).digest()
        return int.from_bytes(digest, "little") >> 1

    def key(self, layer: int, micro_batch: int) -> None:
        """From here on, random numbers are those of a layer and a micro-batch."""
        seed(self.of(layer, micro_batch), self.device)


@contextmanager
def keyed(device: torch.device) -> Iterator[StepSeeds]:
    """Inside, layers draw keyed random numbers; afterwards the random state is that of
    the next step.
    """
    root = int(torch.randint(2**62, ()))
    after = torch.get_rng_state()
    try:
        yield StepSeeds(root, device)
    finally:
        torch.set_rng_state(after)
