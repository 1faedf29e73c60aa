"""The laws of elastic batches: a batch is the same on every number of ranks, and no better one was there."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fzero.elasticity import elastic_batch, highly_composite_numbers, valid_world_sizes

sizes = st.lists(st.integers(1, 24), min_size=1, max_size=4)


@given(sizes, st.integers(1, 3000), st.integers(1, 40), st.integers(0, 200))
def test_every_number_of_ranks_trains_the_whole_batch_and_no_other_number_could(micro_batches, most, fewest, more):
    assume(max(micro_batches) <= most)
    try:
        batch = elastic_batch(micro_batches, most=most, min_ranks=fewest, max_ranks=fewest + more)
    except ValueError:
        # Then also the batch that most numbers divide, the smallest micro-batch scaled, is trained by none of them.
        assert not valid_world_sizes(min(micro_batches), micro_batches, fewest, fewest + more)
        return
    assert max(micro_batches) <= most and batch.batch_size <= most
    for world_size in range(fewest, fewest + more + 1):
        fits = any(batch.batch_size % (size * world_size) == 0 for size in micro_batches)
        assert (world_size in batch.world_sizes) == fits  # tried one by one, as the definition says
        if fits:
            micro_batch, num_micro_steps = batch.steps_on(world_size)
            assert micro_batch in micro_batches and micro_batch * num_micro_steps * world_size == batch.batch_size
            assert not any(size > micro_batch and batch.batch_size % (size * world_size) == 0 for size in micro_batches)
        else:
            with pytest.raises(ValueError, match=f"cannot be trained on {world_size} ranks"):
                batch.steps_on(world_size)


@given(sizes, st.integers(24, 3000))
def test_no_candidate_is_divided_by_more_numbers_of_ranks_and_ties_go_as_wished(micro_batches, most):
    larger = elastic_batch(micro_batches, most=most)
    smaller = elastic_batch(micro_batches, most=most, prefer_larger=False)
    assert smaller.batch_size <= larger.batch_size and len(smaller.world_sizes) == len(larger.world_sizes)
    for base in {*micro_batches, math.lcm(*micro_batches)}:
        for number in highly_composite_numbers():
            if base * number > most:
                break
            candidate = base * number
        if base <= most:
            num_valid = len(valid_world_sizes(candidate, micro_batches, 1, 10_000))
            assert num_valid <= len(larger.world_sizes)
            if num_valid == len(larger.world_sizes):
                assert smaller.batch_size <= candidate <= larger.batch_size


def test_highly_composite_numbers_are_those_of_the_books():
    known = [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040]  # OEIS A002182
    numbers = highly_composite_numbers()
    assert [next(numbers) for _ in known] == known


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"micro_batches": [], "most": 8}, "micro_batch_sizes: must be positive"),
        ({"micro_batches": [0], "most": 8}, "micro_batch_sizes: must be positive"),
        ({"micro_batches": [9], "most": 8}, "max_train_batch_size: must be at least the largest micro-batch size, 9"),
        ({"micro_batches": [4], "most": 8, "min_ranks": 3, "max_ranks": 2}, "must be 1 <= min <= max"),
        ({"micro_batches": [4], "most": 8, "min_ranks": 3}, "no batch of at most 8 samples"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(how, told):
    with pytest.raises(ValueError) as error:
        elastic_batch(how.pop("micro_batches"), **how)
    assert told in str(error.value)
