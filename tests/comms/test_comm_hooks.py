"""The laws of comm hooks: equal bits on every kind of axis, errors within the bound,
fewer bytes, no error lost for good.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPool
from test_codecs import codecs
from test_simulate import assert_same
from torch import Tensor

import fzero
from fzero.comms import CommRecord
from fzero.comms.axes import LockstepAxis
from fzero.comms.codecs import Codec, cast, quantize
from fzero.comms.comm_hooks import CommHook, exact
from fzero.comms.compression import compressed, error_feedback, reset_every
from fzero.comms.lockstep import Hub
from fzero.comms.stacked import Stacked
from sharding import Mesh


def _parts(world_size: int, shard_numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(world_size, world_size * shard_numel, generator=generator)


def _in_lockstep(function: Any, parts_W: Tensor) -> list[Any]:
    hub = Hub(len(parts_W))
    return hub.run(
        lambda rank: function(parts_W[rank], LockstepAxis("data", len(parts_W), rank, hub))
    )


def _stacked(verb: Any, parts_W: Tensor, state_W: Any = None) -> tuple[Tensor, Any]:
    """The results and the new states of all ranks at once; `state_W` is stacked, too."""
    ranks = Stacked(Mesh.of(data=len(parts_W)), ("data",))
    axis = ranks.axis("data")

    def on_a_rank(part: Tensor, state: Any) -> Any:
        result, state = verb(part, axis, state)
        return result if state is None else (result, state)

    found = ranks.map(on_a_rank)(parts_W, state_W)
    return found if isinstance(found, tuple) else (found, None)


def _first_states(hook: CommHook, parts_W: Tensor) -> Any:
    """The first states of a hook on all ranks, stacked."""
    return optree.tree_map(lambda *xs: torch.stack(xs), *map(hook.init, parts_W))


@st.composite
def hooks(draw: st.DrawFn) -> CommHook:
    hook = draw(st.just(exact()) | codecs().map(compressed))
    if draw(st.booleans()):
        hook = error_feedback(hook, decay=draw(st.sampled_from([0.0, 0.8])))
        return reset_every(hook, every=2) if draw(st.booleans()) else hook
    return hook


@given(hooks(), st.integers(1, 5), st.integers(0, 40))
def test_stacked_ranks_and_ranks_in_lockstep_get_the_same_bits(
    hook: CommHook, world_size: int, shard_numel: int
) -> None:
    full = _parts(world_size, shard_numel)
    shards = full[:, :shard_numel].contiguous()
    for verb, parts in ((hook.gather, shards), (hook.reduce_scatter, full)):
        stacked, state = _stacked(verb, parts, _first_states(hook, parts))
        for rank, (alone, own) in enumerate(
            _in_lockstep(lambda x, axis, verb=verb: verb(x, axis, hook.init(x)), parts)
        ):
            assert torch.equal(alone, stacked[rank])
            assert_same(own, optree.tree_map(lambda x, rank=rank: x[rank], state))


@given(codecs(), st.integers(1, 5), st.integers(0, 40))
def test_a_coded_gather_is_equal_on_all_ranks_and_within_the_bound(
    codec: Codec, world_size: int, shard_numel: int
) -> None:
    shards = _parts(world_size, shard_numel)[:, :shard_numel].contiguous()
    arrived, _ = _stacked(compressed(codec).gather, shards)
    assert all(torch.equal(row, arrived[0]) for row in arrived)
    assert (
        (arrived[0].double() - shards.flatten().double()).abs() <= codec.bound(shards).flatten()
    ).all()


@given(codecs(), st.integers(1, 5), st.integers(0, 40))
def test_a_coded_reduction_is_within_the_sum_of_the_bounds(
    codec: Codec, world_size: int, shard_numel: int
) -> None:
    full = _parts(world_size, shard_numel)
    arrived, _ = _stacked(compressed(codec).reduce_scatter, full)
    meant = full.double().sum(0)
    # Besides the codec's error: W sums in fp32, each of which rounds by half a last bit of the sum
    # so far.
    bound = codec.bound(full.view(world_size, world_size, -1)).flatten(1).sum(0)
    bound = bound + world_size * 2**-24 * (full.double().abs().sum(0) + bound)
    assert ((arrived.double().flatten() - meant).abs() <= bound).all()


@pytest.mark.parametrize(
    "codec", [quantize(8, 16), quantize(4, 16), cast("bfloat16")], ids=lambda codec: codec.name
)
def test_error_feedback_loses_nothing_for_long(codec: Codec) -> None:
    """The sum of all results is the sum of all inputs, less the error that is not sent
    yet: the rounds telescope.
    """
    hook, world_size, arrived, meant = error_feedback(compressed(codec)), 3, 0.0, 0.0
    error = _first_states(hook, _parts(world_size, 32))
    for seed in range(50):
        full = _parts(world_size, 32, seed)
        reduced, error = _stacked(hook.reduce_scatter, full, error)
        arrived, meant = arrived + reduced.double().flatten(), meant + full.double().sum(0)
    # Fifty rounds of fp32 sums of numbers below 8, as above.
    torch.testing.assert_close(
        arrived, meant - error.double().sum(0), rtol=0, atol=50 * 3 * 8 * 2**-23
    )
    alone, total = compressed(codec), 0.0
    for seed in range(50):
        total = (
            total
            + _stacked(alone.reduce_scatter, _parts(world_size, 32, seed))[0].double().flatten()
        )
    assert (total - meant).abs().max() > 2 * (arrived - meant).abs().max()


def _bytes_on_a_rank(numel: int) -> list[tuple[str, int]]:
    sent: list[CommRecord] = []
    axis = fzero.comms.ProcessAxis(
        "data",
        torch.distributed.get_world_size(),
        torch.distributed.get_rank(),
        observe=sent.append,
    )
    full = _parts(axis.size, numel)[axis.rank]
    for hook in (exact(), compressed(quantize(8, 64)), compressed(quantize(4, 64))):
        hook.gather(full[:numel].contiguous(), axis, None)
        hook.reduce_scatter(full, axis, None)
    return [(record.collective, record.nbytes) for record in sent]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_real_rank_sends_what_the_codec_says(ranks: RankPool, world_size: int) -> None:
    nbytes = [4 * 640, quantize(8, 64).nbytes(640), quantize(4, 64).nbytes(640)]
    assert nbytes[0] / nbytes[1] > 3.7 and nbytes[0] / nbytes[2] > 7
    expected = [
        (collective, (world_size - 1) * of_a_shard)
        for of_a_shard, reduction in zip(
            nbytes, ("reduce_scatter", "all_to_all", "all_to_all"), strict=True
        )
        for collective in ("all_gather", reduction)
    ]
    assert ranks(world_size, _bytes_on_a_rank, 640) == [expected] * world_size


def _numbers_on_a_rank() -> list[Tensor]:
    axis = fzero.comms.ProcessAxis(
        "data", torch.distributed.get_world_size(), torch.distributed.get_rank()
    )
    full, hook = _parts(axis.size, 37)[axis.rank], error_feedback(compressed(quantize(4, 16)))
    gathered, _ = hook.gather(full[:37].contiguous(), axis, hook.init(full[:37]))
    reduced, error = hook.reduce_scatter(full, axis, hook.init(full))
    return [gathered, reduced, error]


def test_real_ranks_get_the_bits_of_stacked_ones(ranks: RankPool) -> None:
    hook, full = error_feedback(compressed(quantize(4, 16))), _parts(3, 37)
    shards = full[:, :37].contiguous()
    gathered, _ = _stacked(hook.gather, shards, _first_states(hook, shards))
    reduced, error = _stacked(hook.reduce_scatter, full, _first_states(hook, full))
    for rank, found in enumerate(ranks(3, _numbers_on_a_rank)):
        for x, y in zip(found, (gathered, reduced, error), strict=True):
            assert torch.equal(x, y[rank])


def test_a_hook_that_is_reset_at_two_periods_starts_again_at_each() -> None:
    hook = error_feedback(compressed(quantize(4, 16)))
    twice, alone = reset_every(reset_every(hook, every=2), every=3), reset_every(hook, every=1)
    state = _first_states(twice, _parts(2, 32))
    for index in range(7):
        full = _parts(2, 32, index)
        arrived, state = _stacked(twice.reduce_scatter, full, state)
        is_reset = index % 3 % 2 == 0
        anew, _ = _stacked(alone.reduce_scatter, full, _first_states(alone, full))
        assert torch.equal(arrived, anew) == is_reset
    for given_ in (quantize(4), state):
        with pytest.raises(
            ValueError, match=r"reset_every: hook must be a CommHook, got .*; pass error_feedback"
        ):
            reset_every(given_, every=2)  # type: ignore[arg-type]


def test_an_overflow_reaches_its_rank_and_leaves_no_error_in_the_state() -> None:
    hook, full = error_feedback(compressed(quantize(8, 16))), _parts(2, 32)
    full[1, 3] = float("inf")
    reduced, error = _stacked(hook.reduce_scatter, full, _first_states(hook, full))
    assert (
        not reduced[0].isfinite().all() and reduced[1].isfinite().all() and error.isfinite().all()
    )
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1"):
        error_feedback(exact(), decay=1)
