"""Which configuration is measured next, and when is it enough? The search of `fzero tune`, as a function of what was measured.

    while (index := next_trial(points, costs, strategy)) is not None:
        costs[index] = measure(index)          # seconds for a sample, say; None where it failed

The first point is measured first. `gridsearch` goes on in their order, `random` in another. `model_based` believes the plan's
predictions up to what the measurements say: the logarithm of a cost is that of the prediction, plus a sum of effects of the
features (the stage, the micro-batch, checkpointing, …), plus something of each point's own, which is alike for points that are
near each other. All of these are Gaussian (a Gaussian process), so that a measurement tells of the other points, too. Measured
are the one that is predicted to be the best, then always the one with the greatest expected improvement (Jones et al. 1998); when
that is less than three thousandths of the cost, the search is over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Kind = Literal["model_based", "random", "gridsearch"]

# Standard deviations, of logarithms: 0.1 is about a tenth of a cost.
OFFSET = 2.0
"""Of what all predictions are wrong by: rates of machines are known roughly."""
SLOPE = 0.5
"""Of how much more or less costs differ than predictions do, relatively."""
EFFECT = 0.3
"""Of what one feature changes beside the prediction."""
OWN = 0.15
"""Of what is a point's own, and that of near ones."""
NOISE = 0.03
"""Of a measurement."""
ENOUGH = 0.003
"""Expected improvement below which nothing more is measured."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration, as the search sees it.

    Attributes:
        features: numbers that tell it from others, about 1 apart.
        predicted: its cost, as planned; positive.
        nbytes: of memory that it needs, as planned.
    """

    features: tuple[float, ...]
    predicted: float
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Strategy:
    """How points are chosen.

    Attributes:
        kind: see the top of this file.
        num_trials: most points that are measured.
        early_stopping: the search is over when so many measured points in a row were no better than the best; 0 is never.
        seed: of `random`.
    """

    kind: Kind = "model_based"
    num_trials: int = 50
    early_stopping: int = 5
    seed: int = 0


def next_trial(
    points: Sequence[Point],
    costs: Mapping[int, float | None],
    strategy: Strategy,
    *,
    out_of_memory: frozenset[int] = frozenset(),
) -> int | None:
    """The index of the point to measure next, None when it is enough.

    Args:
        points: all; the first is where to start.
        costs: measured so far, in the order of the trials; None of one that failed.
        out_of_memory: those that failed for want of memory: no point is tried that needs as much, by the plan.

    >>> two = [Point((0,), 1.0), Point((1,), 2.0)]
    >>> [next_trial(two, costs, Strategy("gridsearch")) for costs in ({}, {0: 1.0}, {0: 1.0, 1: 2.0})]
    [0, 1, None]
    """
    largest = min((points[index].nbytes for index in out_of_memory), default=math.inf)
    rest = [index for index, point in enumerate(points) if index not in costs and point.nbytes < largest]
    if not rest or len(costs) >= strategy.num_trials or _is_stuck(list(costs.values()), strategy.early_stopping):
        return None
    if 0 in rest or strategy.kind == "gridsearch":
        return rest[0]
    if strategy.kind == "random":
        order = random.Random(strategy.seed).sample(range(len(points)), len(points))
        return next(index for index in order if index in rest)
    if all(costs.get(index) is None for index in range(1, len(points))):
        return min(rest, key=lambda index: points[index].predicted)
    return _most_promising(points, costs, rest)


def believed(points: Sequence[Point], costs: Mapping[int, float | None]) -> tuple[Array, Array]:
    """Mean and standard deviation of the logarithm of every point's cost, given those that were measured."""
    seen = [index for index, cost in costs.items() if cost is not None]
    predicted = np.log([point.predicted for point in points])
    kernel = _kernel(points, predicted)
    if not seen:
        return predicted, np.sqrt(np.diag(kernel))
    told = np.log(np.array([float(costs[index] or 0) for index in seen])) - predicted[seen]
    cross = kernel[:, seen]
    weights = np.linalg.solve(kernel[np.ix_(seen, seen)] + NOISE**2 * np.eye(len(seen)), cross.T)
    variance = np.diag(kernel) - np.einsum("ns,sn->n", cross, weights)
    mean: Array = predicted + weights.T @ told
    return mean, np.sqrt(np.maximum(variance, 1e-12))


def _kernel(points: Sequence[Point], predicted: Array) -> Array:
    features = np.array([point.features for point in points], dtype=np.float64).reshape(len(points), -1)
    features -= features.mean(0)  # so that effects do not add to what all have
    slope = predicted - predicted.mean()
    distance = ((features[:, None] - features[None]) ** 2).sum(-1)
    made: Array = (
        OFFSET**2
        + SLOPE**2 * np.outer(slope, slope)
        + EFFECT**2 * features @ features.T
        + OWN**2 * np.exp(-distance / 2)
    )
    return made


def _most_promising(points: Sequence[Point], costs: Mapping[int, float | None], rest: list[int]) -> int | None:
    mean, deviation = believed(points, costs)
    best = min(math.log(cost) for cost in costs.values() if cost is not None)
    gains = {index: _expected_gain(best - mean[index], deviation[index]) for index in rest}
    found = max(rest, key=lambda index: gains[index])
    return found if gains[found] >= ENOUGH else None


def _expected_gain(ahead: Any, deviation: Any) -> float:
    """The mean of max(0, x) of a Gaussian x of that mean and deviation."""
    z = ahead / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(ahead * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density)


def _is_stuck(costs: Sequence[float | None], patience: int) -> bool:
    found = [cost for cost in costs if cost is not None]
    return 0 < patience < len(found) and min(found[-patience:]) >= min(found[:-patience])
