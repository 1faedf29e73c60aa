"""The laws of elastic batches: a batch is the same on every number of ranks, and no
better one was there.
"""

from __future__ import annotations

import importlib
import math
from random import Random
from typing import Any

import pytest
from engines import quiet
from hypothesis import assume, given, strategies as st
from torch import nn

import fzero
from fzero.config.config import Config, ConfigError
from fzero.config.elastic_sizes import (
    elastic_batch,
    elastic_batch_of_nodes,
    highly_composite_numbers,
    valid_world_sizes,
)
from fzero.deepspeed import elasticity

sizes = st.lists(st.integers(1, 24), min_size=1, max_size=4)


@given(sizes, st.integers(1, 3000), st.integers(1, 40), st.integers(0, 200))
def test_every_number_of_ranks_trains_the_whole_batch_and_no_other_number_could(
    micro_batches, most, fewest, more
):
    assume(max(micro_batches) <= most)
    try:
        batch = elastic_batch(micro_batches, most=most, min_ranks=fewest, max_ranks=fewest + more)
    except ValueError:
        # Then also the batch that most numbers divide, the smallest micro-batch scaled, is trained
        # by none of them.
        assert not valid_world_sizes(min(micro_batches), micro_batches, fewest, fewest + more)
        return
    assert max(micro_batches) <= most and batch.batch_size <= most
    for world_size in range(fewest, fewest + more + 1):
        fits = any(batch.batch_size % (size * world_size) == 0 for size in micro_batches)
        assert (world_size in batch.world_sizes) == fits  # tried one by one, as the definition says
        if fits:
            micro_batch, num_micro_steps = batch.steps_on(world_size)
            assert (
                micro_batch in micro_batches
                and micro_batch * num_micro_steps * world_size == batch.batch_size
            )
            assert not any(
                size > micro_batch and batch.batch_size % (size * world_size) == 0
                for size in micro_batches
            )
        else:
            with pytest.raises(ValueError, match=f"cannot be trained on {world_size} ranks"):
                batch.steps_on(world_size)


@given(sizes, st.integers(24, 3000))
def test_no_candidate_is_divided_by_more_numbers_of_ranks_and_ties_go_as_wished(
    micro_batches, most
):
    larger = elastic_batch(micro_batches, most=most)
    smaller = elastic_batch(micro_batches, most=most, prefer_larger=False)
    assert smaller.batch_size <= larger.batch_size and len(smaller.world_sizes) == len(
        larger.world_sizes
    )
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
    """Version 0.2: a node with a part of the cap is what a rank is in version 0.1; else
    the batch is one for these ranks.
    """
    assume(max(micro_batches) <= most // per_node)
    how = {"prefer_larger": larger, "max_ranks": 128 * per_node}
    world_size = nodes * per_node
    of_node = elastic_batch(
        micro_batches, most=most // per_node, max_ranks=128, prefer_larger=larger
    )
    try:
        batch = elastic_batch_of_nodes(
            micro_batches, most=most, world_size=world_size, ranks_per_node=per_node, **how
        )
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
        (
            ELASTIC | {"model_parallel_size": 2, "version": 0.1},
            {},
            "model_parallel_size must be 1 in version 0.1, got 2",
        ),
        (
            ELASTIC | {"model_parallel_size": 2, "num_gpus_per_node": 3},
            {},
            "num_gpus_per_node must be a multiple of model_parallel_size, 2, got 3",
        ),
        (
            ELASTIC | {"min_gpus": 3, "max_gpus": 2},
            {},
            "min_gpus must not be greater than max_gpus, got 3 and 2",
        ),
        (
            ELASTIC,
            {"train_batch_size": 8},
            "train_batch_size: follows from elasticity, which is enabled, got 8",
        ),
    ],
)
def test_a_wrong_block_is_refused_with_its_key(block, beside, reported):
    with pytest.raises(ConfigError) as error:
        Config.load({"elasticity": block, **beside})
    assert reported in str(error.value)


# --- model parallelism ----------------------------------------------------------------------------

NODES: list[tuple[dict[str, Any], int, Any, int | None]] = [
    (
        {"most": 200, "sizes": [2, 4, 6], "per_node": 8, "parallel": 2},
        16,
        (192, [4, 8, 12, 16, 24, 32, 48, 96], 6),
        6,
    ),
    (
        {"most": 130, "sizes": [2, 4, 6], "per_node": 8, "parallel": 4, "larger": False},
        24,
        (96, [2, 4, 6, 8, 12, 16, 24, 48], 2),
        4,
    ),
    (
        {"most": 100, "sizes": [6, 4], "per_node": 4, "parallel": 2, "larger": False},
        8,
        (96, [2, 4, 6, 8, 12, 16, 24], 6),
        6,
    ),
    (
        {"most": 600, "sizes": [3, 5], "per_node": 4, "parallel": 2, "fewest": 8},
        28,
        (588, [14], 3),
        None,
    ),
    (
        {"most": 80, "sizes": [2, 4], "per_node": 4, "parallel": 2, "largest": 32},
        20,
        (80, [10], 4),
        None,
    ),
    (
        {"most": 300, "sizes": [7, 2], "per_node": 6, "parallel": 3, "larger": False},
        66,
        (154, [22], 2),
        None,
    ),
]
"""Keys and the number of GPUs; then DeepSpeed 0.19.6's batch, numbers of data-parallel
ranks and micro-batch without a `world_size`, and its micro-batch with it; None where
that is an ElasticityIncompatibleWorldSize."""


def _block(
    most: int,
    sizes: list[int],
    per_node: int,
    parallel: int,
    fewest: int = 1,
    largest: int = 10_000,
    larger: bool = True,
) -> dict[str, Any]:
    return {
        "enabled": True,
        "max_train_batch_size": most,
        "micro_batch_sizes": sizes,
        "num_gpus_per_node": per_node,
        "model_parallel_size": parallel,
        "min_gpus": fewest,
        "max_gpus": largest,
        "prefer_larger_batch": larger,
        "version": 0.2,
    }


def _computed(package: Any, block: dict[str, Any], num_gpus: int) -> Any:
    """What `compute_elastic_config` returns without and with a number of ranks, or its
    error's name.
    """
    found = list[Any]()
    for of_ranks in (0, num_gpus):
        try:
            found.append(
                tuple(
                    package.compute_elastic_config({"elasticity": block}, "0.19.6", of_ranks, True)
                )
            )
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize(("keys", "num_gpus", "alone", "micro_batch"), NODES)
def test_with_model_parallelism_the_batch_is_deepspeeds(
    keys: dict[str, Any],
    num_gpus: int,
    alone: Any,
    micro_batch: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(num_gpus))
    of_ranks = (
        "ElasticityIncompatibleWorldSize" if micro_batch is None else (*alone[:2], micro_batch)
    )
    assert _computed(elasticity, _block(**keys), num_gpus) == [alone, of_ranks]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(2, 3),
    st.integers(1, 3),
    st.integers(1, 40),
)
def test_groups_of_ranks_are_what_ranks_are_alone(sizes, parallel, groups_per_node, nodes):
    """`model_parallel_size` GPUs count as one, whatever else."""
    limits: dict[str, Any] = {"most": 900, "prefer_larger": True}
    alone = {
        "world_size": nodes * groups_per_node,
        "ranks_per_node": groups_per_node,
        "max_ranks": 50 * groups_per_node,
    }
    grouped = {key: value * parallel for key, value in alone.items()} | {
        "model_parallel_size": parallel
    }
    try:
        expected = elastic_batch_of_nodes(sizes, **limits, **alone)
    except ValueError:
        with pytest.raises(ValueError):
            elastic_batch_of_nodes(sizes, **limits, **grouped)
        return
    assert elastic_batch_of_nodes(sizes, **limits, **grouped) == expected


def test_model_parallelism_is_refused_by_name_in_training_and_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = _block(most=64, sizes=[2, 4], per_node=4, parallel=2)
    model, named = nn.Linear(2, 2), r"elasticity\.model_parallel_size: must be 1 in training, got 2"
    with pytest.raises(ConfigError, match=named):
        fzero.make_train_step(
            model, {"elasticity": block}, loss_fn=lambda model, batch: model(batch).sum()
        )
    with pytest.raises(ConfigError, match=named):
        fzero.initialize(model=model, config={"elasticity": block, "optimizer": {"type": "Adam"}})
    for num_gpus in ("41", "7"):
        monkeypatch.setenv("WORLD_SIZE", num_gpus)
        with pytest.raises(
            elasticity.ElasticityIncompatibleWorldSize, match=f"multiple of 2, got {num_gpus}"
        ):
            elasticity.compute_elastic_config({"elasticity": block}, "0.19.6")
    for wrong in (block | {"version": 0.1}, block | {"num_gpus_per_node": 3}):
        with pytest.raises(elasticity.ElasticityConfigError, match="model_parallel_size"):
            elasticity.compute_elastic_config({"elasticity": wrong}, "0.19.6", 8)
    assert (
        Config.load({"elasticity": block | {"enabled": False}}).elasticity.model_parallel_size == 2
    )


@pytest.mark.long
def test_elastic_batches_with_and_without_model_parallelism_are_deepspeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Except where DeepSpeed returns a batch of 0 samples or no micro-batch, or ends in
    an error of the wrong kind.
    """
    with quiet():
        real = importlib.import_module("deepspeed.elasticity")
        random, num_equal = Random(3), 0
        for keys, num_gpus in [*(row[:2] for row in NODES), *(_some(random) for _ in range(1000))]:
            block = _block(**keys)
            monkeypatch.setenv("WORLD_SIZE", str(num_gpus))
            for ours, theirs in zip(
                _computed(elasticity, block, num_gpus),
                _computed(real, block, num_gpus),
                strict=True,
            ):
                if ours == theirs:
                    num_equal += isinstance(theirs, tuple)
                elif not isinstance(theirs, tuple) or theirs[0]:
                    # otherwise theirs is a batch of 0 samples
                    is_none = theirs[-1] is None or theirs in ("TypeError", "ValueError")
                    assert is_none or num_gpus % keys["parallel"], (keys, num_gpus, ours, theirs)
                    assert ours == "ElasticityIncompatibleWorldSize", (keys, num_gpus, ours, theirs)
    assert num_equal > 700


def _some(random: Random) -> tuple[dict[str, Any], int]:
    parallel = random.choice([1, 1, 2, 3, 4])
    per_node = parallel * random.randint(1, 4)
    keys = {
        "most": random.randint(20, 3000),
        "sizes": [random.randint(1, 12) for _ in range(random.randint(1, 3))],
        "per_node": per_node,
        "parallel": parallel,
        "larger": random.random() < 0.5,
        "fewest": random.choice([1, 1, per_node, 3 * per_node]),
        "largest": random.choice([10_000, 40 * per_node]),
    }
    return keys, random.choice([per_node * random.randint(1, 40), random.randint(1, 100)])


def test_batch_sizes_beside_the_block_are_ignored_where_it_says_so_and_reported():
    cfg = Config.load(
        {"elasticity": ELASTIC | {"ignore_non_elastic_batch_info": True}, "train_batch_size": 8}
    )
    assert cfg.batch_sizes(3).train == 48
    assert [(note.key, note.reason) for note in cfg.conflicts] == [
        ("train_batch_size", "elasticity sets the batch sizes")
    ]


def test_highly_composite_numbers_are_those_of_the_books():
    # OEIS A002182
    known = [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040]
    numbers = highly_composite_numbers()
    assert [next(numbers) for _ in known] == known


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"micro_batches": [], "most": 8}, "micro_batch_sizes: must be positive"),
        ({"micro_batches": [0], "most": 8}, "micro_batch_sizes: must be positive"),
        (
            {"micro_batches": [9], "most": 8},
            "max_train_batch_size: must be at least the largest micro-batch size, 9",
        ),
        (
            {"micro_batches": [4], "most": 8, "min_ranks": 3, "max_ranks": 2},
            "must be 1 <= min <= max",
        ),
        ({"micro_batches": [4], "most": 8, "min_ranks": 3}, "no batch of at most 8 samples"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(how, reported):
    with pytest.raises(ValueError) as error:
        elastic_batch(how.pop("micro_batches"), **how)
    assert reported in str(error.value)
