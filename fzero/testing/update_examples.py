"""The examples of `fzero.testing.transform_laws`: updates of flat buffers. P padded elements of a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from fzero.optim.elementwise import LATE_STARTS
from fzero.plans.flat_params import ALIGNMENT
from sharding import FlatLayout, TensorSpec
from sharding.testing import layouts, shapes
from sharding.views import torch_dtype


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates of one flat buffer with random numbers of very different magnitudes; padding is zero.

    >>> layout = FlatLayout(("w",), ((3,),), world_size=2, multiple_of=32)
    >>> updates = Updates(layout, "float32", num_updates=4, seed=0)
    >>> updates.param.shape, updates.grads.shape, updates.param[3:].any().item()
    (torch.Size([64]), torch.Size([4, 64]), False)
    """

    layout: FlatLayout
    dtype: str
    num_updates: int
    seed: int
    start: int = 0  # the number of earlier updates, by the state's own counts (`fzero.optim.elementwise.started`)

    @property
    def param(self) -> Tensor:
        """The parameter before the first update (P,)."""
        return self._random(1, self.seed)[0]

    @property
    def grads(self) -> Tensor:
        """The gradient of each update (num_updates, P)."""
        return self._random(self.num_updates, self.seed + 1) * torch.logspace(-3, 2, self.numel).to(
            torch_dtype(self.dtype)
        )

    @property
    def numel(self) -> int:
        """P."""
        return self.layout.partition.padded_numel

    def _random(self, num_rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(num_rows, self.numel, generator=generator)
        rows[:, self.layout.numel :] = 0
        return rows.to(torch_dtype(self.dtype))


def updates(min_parameters: int = 0, max_parameters: int = 4) -> st.SearchStrategy[Updates]:
    """Updates of buffers on a few ranks, including empty ones, and ones of which some ranks hold padding only."""
    parameters = shapes() | st.tuples(st.integers(ALIGNMENT + 1, 6 * ALIGNMENT))  # large enough for several ranks
    aligned = layouts(max_parameters, 5, min_parameters=min_parameters, parameters=parameters).map(
        lambda layout: replace(layout, multiple_of=ALIGNMENT)
    )
    return st.builds(
        Updates,
        aligned,
        st.sampled_from(["float32", "float64"]),
        num_updates=st.integers(1, 4),
        seed=st.integers(0, 999),
        start=st.sampled_from((0, *LATE_STARTS)),
    )


def several_updates() -> st.SearchStrategy[list[Updates]]:
    """Updates of several buffers of one dtype, with different numbers of updates."""
    return st.lists(updates(), min_size=1, max_size=4).map(lambda them: [replace(x, dtype=them[0].dtype) for x in them])


class Skips(NamedTuple):
    """Updates of which some are skipped."""

    updates: Updates
    overflows: tuple[tuple[bool, ...], ...]  # per step and rank, whether a gradient is not finite


class Cut(NamedTuple):
    """A parameter's spec, and its number of ranks."""

    spec: TensorSpec
    world_size: int
