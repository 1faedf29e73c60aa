"""The laws of the four verbs, on simulated axes and on real ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from profiles import examples
from ranks import RankPool
from torch import Tensor

import fzero
from fzero.comms.axes import ProcessAxis
from sharding import Partial, Replicated, Sharded, TensorSpec
from sharding.testing import SPECS, StateTree, distinct_tensors, spec_trees, state_trees, world_sizes

WORLD_SIZES = (1, 2, 3, 4)


def grads_of(specs: Any, rank: int) -> Any:
    """Gradients that differ from rank to rank, and whose sums are not exact."""
    return optree.tree_map(lambda x: (x + 1) / (rank + 1), distinct_tensors(specs, first=10 * rank))


def stacked(trees: list[Any]) -> Any:
    """The trees of all ranks as one tree of a `Sim` axis."""
    return optree.tree_map(lambda *rows: torch.stack(rows), *trees)


def equal(found: Any, expected: Any) -> bool:
    """Structure, shapes, dtypes and bits."""
    found, found_tree = optree.tree_flatten(found)
    expected, expected_tree = optree.tree_flatten(expected)
    return found_tree == expected_tree and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, expected, strict=True)
    )


# --- on a simulated axis -----------------------------------------------------------------------------------------


@given(state_trees(("float32", "bfloat16", "int64", "bool")), world_sizes())
def test_gather_undoes_shard(tree: StateTree, world_size: int) -> None:
    axis = fzero.comms.Sim("data", world_size)
    full = stacked([tree.tensors] * world_size)
    shards = fzero.shard(full, tree.specs, axis)
    assert equal(fzero.gather(shards, tree.specs, axis), full)


@given(spec_trees(), world_sizes())
def test_shards_have_the_shape_that_their_spec_says(specs: Any, world_size: int) -> None:
    axis = fzero.comms.Sim("data", world_size)
    shards = fzero.shard(stacked([distinct_tensors(specs)] * world_size), specs, axis)
    optree.tree_map(lambda x, spec: _check(x.shape == (world_size, *spec.local_shape(world_size))), shards, specs)


def _check(holds: bool) -> None:
    assert holds


@given(spec_trees(), world_sizes())
def test_shards_of_all_ranks_are_the_tensor_and_zeros(specs: Any, world_size: int) -> None:
    axis = fzero.comms.Sim("data", world_size)
    full = distinct_tensors(specs, first=1)

    def one(shards: Tensor, x: Tensor, spec: TensorSpec) -> None:
        if isinstance(spec.spec, Sharded):
            joined = shards.flatten()
            assert torch.equal(joined[: x.numel()], x.flatten()) and not joined[x.numel() :].any()

    optree.tree_map(one, fzero.shard(stacked([full] * world_size), specs, axis), full, specs)


@given(spec_trees(), world_sizes())
def test_reduced_gradients_are_shards_of_the_mean_and_partial_ones_stay(specs: Any, world_size: int) -> None:
    axis = fzero.comms.Sim("data", world_size)
    on_ranks = [grads_of(specs, rank) for rank in range(world_size)]

    def mean(spec: TensorSpec, *grads: Tensor) -> Tensor:
        if isinstance(spec.spec, Partial):
            return torch.stack(grads)
        total = grads[0].clone()
        for grad in grads[1:]:  # in rank order: that fixes the bits
            total += grad
        return torch.stack([total * (1 / world_size)] * world_size)

    means = optree.tree_map(mean, specs, *on_ranks)
    assert equal(fzero.reduce_scatter_grads(stacked(on_ranks), specs, axis), fzero.shard(means, specs, axis))


@given(st.integers(0, 40), world_sizes(), st.integers(1, 4))
def test_gather_and_world_size_times_reduce_scatter_are_adjoint(numel: int, world_size: int, multiple_of: int) -> None:
    axis = fzero.comms.Sim("data", world_size)
    spec = TensorSpec((numel,), "float64", Sharded("data"), multiple_of=multiple_of)
    generator = torch.Generator().manual_seed(numel)
    shards = fzero.shard(torch.randn(numel, generator=generator).double().expand(world_size, -1), spec, axis)
    grads = torch.randn(world_size, numel, generator=generator).double()
    left = (fzero.gather(shards, spec, axis) * grads).sum()
    right = (shards * world_size * fzero.reduce_scatter_grads(grads, spec, axis)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)  # float64; the two sums add in another order


@given(spec_trees(), world_sizes(3))
def test_the_verbs_leave_their_inputs_unchanged(specs: Any, world_size: int) -> None:
    axis = fzero.comms.Sim("data", world_size)
    grads = stacked([grads_of(specs, rank) for rank in range(world_size)])
    shards = fzero.shard(grads, specs, axis)
    kept = optree.tree_map(torch.clone, (grads, shards))
    fzero.shard(grads, specs, axis)
    fzero.gather(shards, specs, axis)
    fzero.reduce_scatter_grads(grads, specs, axis)
    assert equal((grads, shards), kept)


# --- on real ranks -----------------------------------------------------------------------------------------------


def _verbs_on_a_rank(trees: list[Any]) -> list[Any]:
    axis = fzero.join()
    found = []
    for specs in trees:
        full, grads = distinct_tensors(specs), grads_of(specs, axis.rank)
        kept = optree.tree_map(torch.clone, (full, grads))
        shards = fzero.shard(full, specs, axis)
        gathered = fzero.gather(shards, specs, axis)
        reduced = fzero.reduce_scatter_grads(grads, specs, axis)
        assert equal((full, grads), kept), "a verb wrote into its input"
        found.append((shards, gathered, reduced))
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@examples(10)
@given(trees=st.lists(spec_trees(), min_size=8, max_size=8))
def test_real_ranks_and_a_simulated_axis_give_the_same_bits(ranks: RankPool, world_size: int, trees: list[Any]) -> None:
    axis = fzero.comms.Sim("data", world_size)
    on_ranks = ranks(world_size, _verbs_on_a_rank, trees)
    for index, specs in enumerate(trees):
        full = stacked([distinct_tensors(specs)] * world_size)
        grads = stacked([grads_of(specs, rank) for rank in range(world_size)])
        shards = fzero.shard(full, specs, axis)
        simulated = shards, fzero.gather(shards, specs, axis), fzero.reduce_scatter_grads(grads, specs, axis)
        assert equal(stacked([found[index] for found in on_ranks]), simulated)
        assert equal(simulated[1], full)


def _what_is_sent(spec: TensorSpec) -> list[tuple[str, int]]:
    sent: list[fzero.comms.CommRecord] = []
    bound = fzero.join()
    axis = fzero.comms.ProcessAxis(bound.name, bound.size, bound.rank, observe=sent.append)
    full = distinct_tensors(spec)
    fzero.gather(fzero.shard(full, spec, axis), spec, axis)
    fzero.reduce_scatter_grads(full, spec, axis)
    return [(record.collective, record.num_elements) for record in sent]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_verbs_send_what_they_say(ranks: RankPool, world_size: int) -> None:
    padded = world_size * 8  # of 13 elements on 2 ranks, for one
    numel = padded - 3
    share = padded * (world_size - 1) // world_size
    gather, reduce = ("all_gather", share), ("reduce_scatter", share)
    expected = {"Sharded": [gather, reduce], "Replicated": [reduce, gather], "Partial": []}
    for spec in SPECS:
        tensor = TensorSpec((numel,), "float32", spec, multiple_of=8)
        for sent in ranks(world_size, _what_is_sent, tensor):
            assert sent == (expected[type(spec).__name__] if world_size > 1 else [])


# --- the update --------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "adamw": fzero.adamw(1e-2),
    "sgd": fzero.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "chain": fzero.chain(fzero.optim.scale(0.5), fzero.optim.adam(1e-2, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@examples(20)
@given(specs=spec_trees(("float32",)))
def test_an_update_changes_nothing_that_it_is_given_and_returns_new_tensors(name: str, specs: Any) -> None:
    transform = TRANSFORMS[name]
    params, grads = distinct_tensors(specs, first=1), grads_of(specs, rank=1)
    state = optree.tree_map(transform.init, params)
    for _ in range(2):
        kept = optree.tree_map(torch.clone, (params, grads, state))
        new_params, new_state = fzero.optimizer_update(transform, params, grads, state)
        assert equal((params, grads, state), kept)
        given_memory = {x.data_ptr() for x in optree.tree_leaves((params, grads, state)) if x.numel()}
        assert not any(x.data_ptr() in given_memory for x in optree.tree_leaves((new_params, new_state)))
        optree.tree_map(lambda new, old: _check(not old.numel() or not torch.equal(new, old)), new_params, params)
        params, state = new_params, new_state


# --- bad input ---------------------------------------------------------------------------------------------------

TWO = fzero.comms.Sim("data", 2)


def test_a_leaf_of_another_shape_is_named_with_its_shape_and_its_specs() -> None:
    specs = {"layer": [TensorSpec((3, 2), "float32", Sharded("data"))]}
    with pytest.raises(
        ValueError, match=r"layer\.0: must have the shape \(2, 3, 2\).*got \(2, 2, 3\); pass full tensors"
    ):
        fzero.shard({"layer": [torch.zeros(2, 2, 3)]}, specs, TWO)
    with pytest.raises(ValueError, match=r"layer\.0: must have the shape \(2, 3, 2\).*got \(2, 6\); pass full tensors"):
        fzero.reduce_scatter_grads({"layer": [torch.zeros(2, 6)]}, specs, TWO)
    with pytest.raises(
        ValueError, match=r"layer\.0: must have the shape \(2, 3\).*got \(2, 4\); pass shards of 2 ranks"
    ):
        fzero.gather({"layer": [torch.zeros(2, 4)]}, specs, TWO)
    with pytest.raises(ValueError, match=r"layer\.0: must have the shape \(6,\).*got \(3, 2\)"):
        fzero.gather({"layer": [torch.zeros(3, 2)]}, specs, fzero.comms.ProcessAxis("data"))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("verb", [fzero.shard, fzero.gather, fzero.reduce_scatter_grads])
@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (4,), ()])
def test_a_simulated_tensor_must_hold_one_row_for_each_rank(verb: Any, spec: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"w: must have the shape \(2, .*a row for each rank, got"):
        verb({"w": torch.zeros(shape)}, {"w": TensorSpec((4,), "float32", spec)}, TWO)


@pytest.mark.parametrize("spec", [Sharded("model"), Partial("model")])
@pytest.mark.parametrize("verb", [fzero.shard, fzero.gather, fzero.reduce_scatter_grads])
def test_a_spec_that_names_another_axis_is_told_with_both_names(verb: Any, spec: Any) -> None:
    specs = {"w": TensorSpec((4,), "float32", spec)}
    x = torch.zeros(2, 2 if verb is fzero.gather and isinstance(spec, Sharded) else 4)
    with pytest.raises(ValueError, match=rf"w: its spec {type(spec).__name__}\('model'\) must name.*got 'data'"):
        verb({"w": x}, specs, TWO)


@pytest.mark.parametrize("tree", [{"w": torch.zeros(2, 4)}, {"w": torch.zeros(2, 4), "c": torch.zeros(2, 4)}])
def test_a_tree_of_another_structure_than_its_specs_is_refused(tree: Any) -> None:
    specs = fzero.specs_of({"w": torch.zeros(4), "b": torch.zeros(4)})
    for verb in (fzero.shard, fzero.gather, fzero.reduce_scatter_grads):
        with pytest.raises(ValueError, match="'b'"):
            verb(tree, specs, TWO)


def test_gradients_of_another_structure_than_the_parameters_are_refused() -> None:
    transform, params = TRANSFORMS["sgd"], {"w": torch.zeros(2)}
    state = optree.tree_map(transform.init, params)
    with pytest.raises(ValueError, match="'v'"):
        fzero.optimizer_update(transform, params, {"v": torch.zeros(2)}, state)


def test_specs_of_a_tree_have_its_shapes_and_dtypes() -> None:
    tree = {"w": torch.zeros(3, 2, dtype=torch.bfloat16), "n": (torch.tensor(1),)}
    specs = fzero.specs_of(tree, Sharded("data"), multiple_of=8)
    assert specs == {
        "w": TensorSpec((3, 2), "bfloat16", Sharded("data"), multiple_of=8),
        "n": (TensorSpec((), "int64", Sharded("data"), multiple_of=8),),
    }
    assert isinstance(fzero.specs_of(tree)["w"].spec, Replicated)


def test_an_axis_with_more_ranks_than_the_job_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ProcessAxis: rank must be in \[0, 2\), got 2"):
        ProcessAxis("data", 2, 2)
    with pytest.raises(ValueError, match=r"ProcessAxis: 2 ranks need a process group; start with torchrun"):
        ProcessAxis("data", 2, 0)
