"""The laws of elastic batches: a batch is the same on every number of ranks, and no better one was there."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, strategies as st

from fzero.config.config import Config, ConfigError
from fzero.config.elastic_sizes import (
    elastic_batch,
    elastic_batch_of_nodes,
    highly_composite_numbers,
    valid_world_sizes,
)

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


@given(sizes, st.integers(24, 3000), st.integers(1, 8), st.integers(1, 64), st.booleans())
def test_of_whole_nodes_the_batch_is_that_of_so_many_ranks_times_their_number(
    micro_batches, most, per_node, nodes, larger
):
    """Version 0.2: a node with a part of the cap is what a rank is in version 0.1; else the batch is one for these ranks."""
    assume(max(micro_batches) <= most // per_node)
    how = {"prefer_larger": larger, "max_ranks": 128 * per_node}
    world_size = nodes * per_node
    of_node = elastic_batch(micro_batches, most=most // per_node, max_ranks=128, prefer_larger=larger)
    try:
        batch = elastic_batch_of_nodes(micro_batches, most=most, world_size=world_size, ranks_per_node=per_node, **how)
    except ValueError as error:
        assert min(micro_batches) * world_size > most and "less than one micro-batch" in str(error)
        return
    assert batch.batch_size <= most and world_size in batch.world_sizes
    micro_batch, num_micro_steps = batch.steps_on(world_size)
    assert micro_batch * num_micro_steps * world_size == batch.batch_size
    if nodes in of_node.world_sizes:
        assert batch.batch_size == of_node.batch_size * per_node
        assert batch.world_sizes == tuple(number * per_node for number in of_node.world_sizes)
    else:
        assert batch.world_sizes == (world_size,)
        fitting = [most // (size * world_size) * size * world_size for size in micro_batches]
        assert batch.batch_size == (max if larger else min)(filter(None, fitting))


ELASTIC = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}


@given(st.integers(1, 40), st.sampled_from([0.1, 0.2]))
def test_a_configuration_takes_its_batch_sizes_from_the_block(world_size, version):
    cfg = Config.load({"elasticity": ELASTIC | {"version": version}})
    batch = elastic_batch([2, 4], most=64)
    assert batch.batch_size == 48
    if world_size in batch.world_sizes:  # the same batch on all
        micro_batch, num_micro_steps = batch.steps_on(world_size)
        assert cfg.batch_sizes(world_size) == (48, micro_batch, num_micro_steps)
    elif version == 0.1 or world_size > 32:
        with pytest.raises(ConfigError, match=r"elasticity.*rank"):
            cfg.batch_sizes(world_size)
    else:
        assert cfg.batch_sizes(world_size).train == max(
            64 // (size * world_size) * size * world_size for size in (2, 4)
        )


@pytest.mark.parametrize(
    ("block", "beside", "reported"),
    [
        ({"enabled": True}, {}, "max_train_batch_size is required where elasticity is enabled"),
        (ELASTIC | {"micro_batch_sizes": []}, {}, "elasticity.micro_batch_sizes"),
        (ELASTIC | {"micro_batch_sizes": [2, 0]}, {}, "must be at least 1, got 0"),
        (ELASTIC | {"version": 0.3}, {}, "elasticity.version: must be 0.1 or 0.2, got 0.3"),
        (ELASTIC | {"model_parallel_size": 2}, {}, "elasticity.model_parallel_size: must be 1"),
        (ELASTIC | {"min_gpus": 3, "max_gpus": 2}, {}, "min_gpus must not be greater than max_gpus, got 3 and 2"),
        (ELASTIC, {"train_batch_size": 8}, "train_batch_size: follows from elasticity, which is enabled, got 8"),
    ],
)
def test_a_wrong_block_is_refused_with_its_key(block, beside, reported):
    with pytest.raises(ConfigError) as error:
        Config.load({"elasticity": block, **beside})
    assert reported in str(error.value)


def test_batch_sizes_beside_the_block_are_ignored_where_it_says_so_and_reported():
    cfg = Config.load({"elasticity": ELASTIC | {"ignore_non_elastic_batch_info": True}, "train_batch_size": 8})
    assert cfg.batch_sizes(3).train == 48
    assert [(note.key, note.reason) for note in cfg.conflicts] == [
        ("train_batch_size", "elasticity sets the batch sizes")
    ]


def test_highly_composite_numbers_are_those_of_the_books():
    known = [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040]  # OEIS A002182
    numbers = highly_composite_numbers()
    assert [next(numbers) for _ in known] == known


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"micro_batches": [], "most": 8}, "micro_batch_sizes: must be positive"),
        ({"micro_batches": [0], "most": 8}, "micro_batch_sizes: must be positive"),
        ({"micro_batches": [9], "most": 8}, "max_train_batch_size: must be at least the largest micro-batch size, 9"),
        ({"micro_batches": [4], "most": 8, "min_ranks": 3, "max_ranks": 2}, "must be 1 <= min <= max"),
        ({"micro_batches": [4], "most": 8, "min_ranks": 3}, "no batch of at most 8 samples"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(how, reported):
    with pytest.raises(ValueError) as error:
        elastic_batch(how.pop("micro_batches"), **how)
    assert reported in str(error.value)
