"""`next_trial`: the search of `fzero tune`, which chooses the next configuration to
measure from the costs so far.

    while (index := next_trial(points, costs, strategy)) is not None:
        costs[index] = measure(index) # seconds per sample, say; None if the run failed

The first point is measured first. `gridsearch` continues in their order, `random` in a
random one. `model_based` corrects the plan's predictions by a Gaussian process: the
logarithm of a cost is the prediction's, plus a sum of effects of the features (the
stage, the micro-batch, checkpointing, …), plus an effect of the point itself, which is
similar for close points. All effects are Gaussian, so that a measurement also informs
about the other points. The search measures the point with the best prediction, then
always the one with the greatest expected improvement (Jones et al. 1998), and ends when
that is less than 0.003 of the cost.
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
TunerType = Literal["model_based", "random", "gridsearch"]

# Standard deviations of logarithms: 0.1 is about 10 % of a cost.
OFFSET = 2.0  # the common error of all predictions: the rates of a machine are known only roughly
SLOPE = 0.5  # the relative error of the differences between predictions
EFFECT = 0.3  # the error that one feature adds to the prediction
OWN = 0.15  # the error of a single point, which is similar for close points
NOISE = 0.03  # the error of a measurement
ENOUGH = 0.003  # the expected improvement below which the search ends


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration, as the search sees it."""

    features: tuple[float, ...]  # coordinates of the point, about 1 apart between unlike points
    predicted: float  # its planned cost; positive
    nbytes: float = 0.0  # its planned memory


@dataclass(frozen=True, slots=True)
class Strategy:
    """How points are chosen."""

    kind: TunerType = "model_based"  # see the top of this file
    num_trials: int = 50  # the most points that are measured
    # ends after so many measured points in a row without improvement; 0 never does
    early_stopping: int = 5
    seed: int = 0  # seed of the strategy `random`


def next_trial(
    points: Sequence[Point],
    costs: Mapping[int, float | None],
    strategy: Strategy,
    *,
    out_of_memory: frozenset[int] = frozenset(),
) -> int | None:
    """The index of the point to measure next; None ends the search.

    Args:
        points: all points; the first is measured first.
        costs: measured so far, in the order of the trials; None for a failed one.
        out_of_memory: the points that ran out of memory; points that need as much by
            the plan are not tried.

    >>> two = [Point((0,), 1.0), Point((1,), 2.0)]
    >>> [
    ...     next_trial(two, costs, Strategy("gridsearch"))
    ...     for costs in ({}, {0: 1.0}, {0: 1.0, 1: 2.0})
    ... ]
    [0, 1, None]
    """
    largest = min((points[index].nbytes for index in out_of_memory), default=math.inf)
    rest = [
        index for index, point in enumerate(points) if index not in costs and point.nbytes < largest
    ]
    if (
        not rest
        or len(costs) >= strategy.num_trials
        or _is_stuck(list(costs.values()), strategy.early_stopping)
    ):
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
    """Posterior mean and standard deviation of the logarithm of every point's cost,
    given the measured costs.
    """
    seen = [index for index, cost in costs.items() if cost is not None]
    predicted = np.log([point.predicted for point in points])
    kernel = _kernel(points, predicted)
    residuals = np.log(np.array([float(costs[index] or 0) for index in seen])) - predicted[seen]
    cross = kernel[:, seen]
    weights = np.linalg.solve(kernel[np.ix_(seen, seen)] + NOISE**2 * np.eye(len(seen)), cross.T)
    variance = np.diag(kernel) - np.einsum("ns,sn->n", cross, weights)
    mean: Array = predicted + weights.T @ residuals
    return mean, np.sqrt(np.maximum(variance, 1e-12))


def _kernel(points: Sequence[Point], predicted: Array) -> Array:
    features = np.array([point.features for point in points], dtype=np.float64).reshape(
        len(points), -1
    )
    features -= features.mean(0)  # so that effects do not shift all points together
    slope = predicted - predicted.mean()
    distance = ((features[:, None] - features[None]) ** 2).sum(-1)
    effects = EFFECT**2 * features @ features.T
    made: Array = (
        OFFSET**2 + SLOPE**2 * np.outer(slope, slope) + effects + OWN**2 * np.exp(-distance / 2)
    )
    return made


def _most_promising(
    points: Sequence[Point], costs: Mapping[int, float | None], rest: list[int]
) -> int | None:
    mean, deviation = believed(points, costs)
    best = min(math.log(cost) for cost in costs.values() if cost is not None)
    gains = {index: _expected_gain(best - mean[index], deviation[index]) for index in rest}
    best_index = max(rest, key=gains.__getitem__)
    return best_index if gains[best_index] >= ENOUGH else None


def _expected_gain(mean: Any, deviation: Any) -> float:
    """The mean of max(0, x) for a Gaussian x with this mean and standard deviation."""
    z = mean / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(mean * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density)


def _is_stuck(costs: Sequence[float | None], patience: int) -> bool:
    measured = [cost for cost in costs if cost is not None]
    return 0 < patience < len(measured) and min(measured[-patience:]) >= min(measured[:-patience])
