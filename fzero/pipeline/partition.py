"""The partition of layers into the chunks of a pipeline: chunk c holds the layers from
bounds[c] to bounds[c + 1] - 1.

`uniform` and `balanced` give DeepSpeed's bounds for the same weights.
`partition_by_cost` gives the best bounds for the seconds and bytes of each layer, which
may be measured or estimated (`LayerCost`). Integers and floats only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from sharding.checks import check_at_least

Bounds: TypeAlias = tuple[int, ...]


def uniform(num_layers: int, num_parts: int) -> Bounds:
    """Equal numbers of layers, one more in the first parts; with fewer layers than
    parts, one each, and the last parts are empty.

    >>> uniform(10, 4), uniform(2, 4)
    ((0, 3, 6, 8, 10), (0, 1, 2, 2, 2))
    """
    check_at_least("partition", "num_layers", num_layers, 0)
    check_at_least("partition", "num_parts", num_parts, 1)
    size, larger = divmod(num_layers, num_parts)
    return tuple(part * size + min(part, larger) for part in range(num_parts + 1))


def balanced(weights: Sequence[float], num_parts: int) -> Bounds:
    """The bounds that DeepSpeed gives for one weight per layer: about equal sums of
    weights.

    It goes over the first i layers in j parts, and keeps one division of each: that
    with the least difference between its heaviest and lightest part, and of equal ones
    the one with the latest last cut. So it does not always find the best division of
    all layers; `partition_by_cost` does.

    >>> balanced([1, 1, 1, 1, 1, 4], 3)
    (0, 3, 5, 6)
    >>> balanced([10, 1, 1, 1, 1, 1, 1, 1, 1, 10], 4)
    (0, 1, 5, 9, 10)
    """
    num_layers = len(weights)
    check_at_least("partition", "num_parts", num_parts, 1)
    if num_layers <= num_parts:
        return uniform(num_layers, num_parts)
    sums = [0.0, *accumulate(map(float, weights))]
    heaviest, lightest = [0.0] + [math.inf] * num_layers, [math.inf] * (num_layers + 1)
    cuts = []
    for part in range(1, num_parts + 1):
        heaviest, lightest, cut = _one_part_more(part, sums, heaviest, lightest)
        cuts.append(cut)
    bounds = [num_layers]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(reversed(bounds))


def _one_part_more(
    part: int, sums: Sequence[float], heaviest: Sequence[float], lightest: Sequence[float]
) -> tuple[list[float], list[float], list[int]]:
    """For each number of layers, the heaviest and the lightest of `part` parts and the
    last cut, from those of one part less.
    """
    num_layers = len(sums) - 1
    most, least, cuts = (
        [math.inf] * (num_layers + 1),
        [math.inf] * (num_layers + 1),
        [0] * (num_layers + 1),
    )
    for stop in range(part, num_layers + 1):
        best = math.inf
        for start in range(stop):
            weight = sums[stop] - sums[start]
            high, low = max(heaviest[start], weight), min(lightest[start], weight)
            if high - low <= best:
                best, most[stop], least[stop], cuts[stop] = high - low, high, low, start
    return most, least, cuts


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer for one micro-batch on one rank.

    Args:
        forward: seconds.
        backward: seconds, recomputation included.
        state_nbytes: parameters, gradients and optimizer state.
        stored_nbytes: what the forward stores for the backward.
        output_nbytes: what goes to the next layer, and so to the next stage if a cut is
            there.
        weight_share: the share of the backward that gives the gradients of the weights
            (`W`).
        working_nbytes: what a forward or backward holds besides while it runs, at the
            most.
    """

    forward: float
    backward: float
    state_nbytes: int = 0
    stored_nbytes: int = 0
    output_nbytes: int = 0
    weight_share: float = 0.5
    working_nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def partition_by_cost(
    costs: Sequence[LayerCost],
    num_parts: int,
    *,
    in_flight: Sequence[int] = (),
    nbytes: float = math.inf,
) -> Bounds:
    """The bounds whose slowest part is fastest, among those that fit in memory; a
    pipeline runs at the pace of its slowest stage.

    Of equally fast ones, the one whose largest part in memory is smallest. Every part
    has a layer.

    Args:
        costs: by layer.
        num_parts: the number of chunks, at most the number of layers.
        in_flight: by part, how many micro-batches are stored (`PipeOrder.in_flight`);
            one if it is empty.
        nbytes: the memory of a rank, for the state of its part and what is stored.

    Raises:
        ValueError: no partition fits; the message has the least memory with which one
            does.

    >>> partition_by_cost([LayerCost(1, 2), LayerCost(1, 2), LayerCost(2, 4)], 2)
    (0, 2, 3)
    >>> heavy = [LayerCost(1, 2, stored_nbytes=100)] * 4
    >>> partition_by_cost(heavy, 2, in_flight=(2, 1), nbytes=300)
    (0, 1, 4)
    """
    num_layers = len(costs)
    check_at_least("partition_by_cost", "num_parts", num_parts, 1)
    if num_layers < num_parts:
        raise ValueError(
            f"partition_by_cost: num_parts must be at most the number of layers, {num_layers}, got "
            f"{num_parts}; use fewer stages"
        )
    held = tuple(in_flight) or (1,) * num_parts
    if len(held) != num_parts:
        raise ValueError(
            f"partition_by_cost: in_flight must have one number for each of {num_parts} parts, got "
            f"{len(held)}; "
            "use that of the order"
        )
    bounds = _best(costs, held, nbytes)
    if bounds is None:
        least = _best(costs, held, math.inf, by_memory=True)
        assert least is not None
        need = max(part_nbytes(costs, least, part, held[part]) for part in range(num_parts))
        raise ValueError(
            f"partition_by_cost: nbytes must hold the largest part, which has at least {need} "
            f"bytes in {num_parts} parts, got {nbytes}; use more stages, an order with fewer "
            f"micro-batches in flight, or activation checkpointing"
        )
    return bounds


def part_nbytes(
    costs: Sequence[LayerCost], bounds: Sequence[int], part: int, in_flight: int
) -> int:
    """The bytes of one part: its state, what `in_flight` micro-batches store, and what
    one layer holds while it runs.
    """
    own = costs[bounds[part] : bounds[part + 1]]
    working = max((cost.working_nbytes for cost in own), default=0)
    return working + sum(cost.state_nbytes + in_flight * cost.stored_nbytes for cost in own)


def _best(
    costs: Sequence[LayerCost], held: Sequence[int], nbytes: float, *, by_memory: bool = False
) -> Bounds | None:
    """The best bounds by (seconds, bytes) of the worst part, or by (bytes, seconds);
    None if nothing fits.
    """
    seconds = [0.0, *accumulate(cost.seconds for cost in costs)]
    state = [0, *accumulate(cost.state_nbytes for cost in costs)]
    stored = [0, *accumulate(cost.stored_nbytes for cost in costs)]
    best: list[tuple[tuple[float, float], Bounds] | None] = [((0.0, 0.0), (0,))] + [None] * len(
        costs
    )
    for number in held:
        following: list[tuple[tuple[float, float], Bounds] | None] = [None] * (len(costs) + 1)
        for start, found in enumerate(best):
            if found is None:
                continue
            worst, bounds = found
            working = 0
            for stop in range(start + 1, len(costs) + 1):
                working = max(working, costs[stop - 1].working_nbytes)
                size = (
                    working + state[stop] - state[start] + number * (stored[stop] - stored[start])
                )
                if size > nbytes:
                    break
                time = seconds[stop] - seconds[start]
                own = (float(size), time) if by_memory else (time, float(size))
                value = (max(worst[0], own[0]), max(worst[1], own[1]))
                other = following[stop]
                if other is None or value < other[0]:
                    following[stop] = (value, (*bounds, stop))
        best = following
    return None if best[-1] is None else best[-1][1]


def check_bounds(bounds: Sequence[int], num_layers: int, num_parts: int) -> Bounds:
    """The bounds as a tuple; raises unless they are valid.

    Raises:
        ValueError: they are not those of `num_layers` layers in `num_parts` parts, or
            the first part has no layers.

    >>> check_bounds([0, 2, 1], 1, 2)
    Traceback (most recent call last):
    ...
    ValueError: partition: bounds must be 3 integers that rise from 0 to the number of layers, 1, got [0, 2, 1]; give the first \
layer of each stage, and the number of layers
    """
    given = list(bounds)
    is_rising = all(isinstance(bound, int) for bound in given) and given == sorted(given)
    if len(given) != num_parts + 1 or not is_rising or given[0] != 0 or given[-1] != num_layers:
        raise ValueError(
            f"partition: bounds must be {num_parts + 1} integers that rise from 0 to the number of "
            f"layers, {num_layers}, got {given}; give the first layer of each stage, and the "
            f"number of layers"
        )
    if num_layers and not given[1]:
        raise ValueError(
            f"partition: the first stage must have a layer, which the inputs go to, got bounds "
            f"{given}; "
            "let the first cut be at 1 or later"
        )
    return tuple(given)


def owner(bounds: Sequence[int], layer: int) -> int:
    """The part that holds a layer.

    >>> [owner((0, 3, 3, 5), layer) for layer in range(5)]
    [0, 0, 0, 2, 2]
    """
    return next(part for part in range(len(bounds) - 1) if bounds[part] <= layer < bounds[part + 1])
