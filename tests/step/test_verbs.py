"""The laws of the four verbs, on stacked ranks, on ranks in lockstep and on real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from profiles import examples
from ranks import RankPool
from torch import Tensor
from torch.func import grad as gradient, vjp
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.comms import primitives
from fzero.comms.axes import LockstepAxis, ProcessAxis
from fzero.comms.lockstep import Hub
from sharding import Partial, Replicated, Sharded, TensorSpec
from sharding.testing import (
    SPECS,
    StateTree,
    distinct_tensors,
    spec_trees,
    state_trees,
    world_sizes,
)

WORLD_SIZES = (1, 2, 3, 4)


def grads_of(specs: Any, rank: int) -> Any:
    """Gradients that differ from rank to rank, and whose sums are not exact."""
    return optree.tree_map(lambda x: (x + 1) / (rank + 1), distinct_tensors(specs, first=10 * rank))


def stacked(trees: list[Any]) -> Any:
    """The trees of all ranks as one tree of stacked ranks."""
    return optree.tree_map(lambda *rows: torch.stack(rows), *trees)


def on_each(world_size: int, verb: Callable[..., Any], tree: Any, specs: Any) -> Any:
    """A verb on every one of stacked ranks."""
    ranks = fzero.comms.Stacked(world_size)
    return ranks.map(lambda tree: verb(tree, specs, ranks.axis()))(tree)


def equal(found: Any, expected: Any) -> bool:
    """Structure, shapes, dtypes and bits."""
    found, found_tree = optree.tree_flatten(found)
    expected, expected_tree = optree.tree_flatten(expected)
    return found_tree == expected_tree and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, expected, strict=True)
    )


# --- on stacked ranks -----------------------------------------------------------------------------


@given(state_trees(("float32", "bfloat16", "int64", "bool")), world_sizes())
def test_gather_undoes_shard(tree: StateTree, world_size: int) -> None:
    full = stacked([tree.tensors] * world_size)
    shards = on_each(world_size, fzero.shard, full, tree.specs)
    assert equal(on_each(world_size, fzero.gather, shards, tree.specs), full)


@given(spec_trees(), world_sizes())
def test_shards_have_the_shape_that_their_spec_says(specs: Any, world_size: int) -> None:
    shards = on_each(
        world_size, fzero.shard, stacked([distinct_tensors(specs)] * world_size), specs
    )
    optree.tree_map(
        lambda x, spec: _check(x.shape == (world_size, *spec.local_shape(world_size))),
        shards,
        specs,
    )


def _check(holds: bool) -> None:
    assert holds


@given(spec_trees(), world_sizes())
def test_shards_of_all_ranks_are_the_tensor_and_zeros(specs: Any, world_size: int) -> None:
    full = distinct_tensors(specs, first=1)

    def one(shards: Tensor, x: Tensor, spec: TensorSpec) -> None:
        if isinstance(spec.spec, Sharded):
            joined = shards.flatten()
            assert torch.equal(joined[: x.numel()], x.flatten()) and not joined[x.numel() :].any()

    optree.tree_map(
        one, on_each(world_size, fzero.shard, stacked([full] * world_size), specs), full, specs
    )


@given(spec_trees(), world_sizes())
def test_reduced_gradients_are_shards_of_the_mean_and_partial_ones_stay(
    specs: Any, world_size: int
) -> None:
    on_ranks = [grads_of(specs, rank) for rank in range(world_size)]

    def mean(spec: TensorSpec, *grads: Tensor) -> Tensor:
        if isinstance(spec.spec, Partial):
            return torch.stack(grads)
        total = grads[0].clone()
        for grad in grads[1:]:  # in rank order: that fixes the bits
            total += grad
        return torch.stack([total * (1 / world_size)] * world_size)

    means = optree.tree_map(mean, specs, *on_ranks)
    reduced = on_each(world_size, fzero.reduce_scatter_grads, stacked(on_ranks), specs)
    assert equal(reduced, on_each(world_size, fzero.shard, means, specs))


def _is_adjoint(
    axis: Any, spec: TensorSpec, shard: Tensor, full: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """This rank's terms of pairs of inner products that are equal when summed over
    ranks, and a gradient with its law.
    """
    gathered, summed = primitives.all_gather(shard, axis), primitives.reduce_scatter(full, axis)
    transposed = vjp(lambda shard: fzero.gather(shard, spec, axis), shard)[1](grad)[0]
    reduced = axis.size * fzero.reduce_scatter_grads(grad, spec, axis)
    return (gathered * full).sum(), (shard * summed).sum(), transposed, reduced


def _adjoint_terms_of_a_rank(*args: Any) -> tuple[Tensor, ...]:
    spec, shards, fulls, grads = args
    axis = fzero.join()
    return _is_adjoint(axis, spec, shards[axis.rank], fulls[axis.rank], grads[axis.rank])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@examples(10)
@given(numel=st.integers(0, 40), multiple_of=st.integers(1, 4), seed=st.integers(0, 9))
def test_all_gather_and_reduce_scatter_are_adjoint_and_gather_has_its_transpose(
    ranks: RankPool, world_size: int, numel: int, multiple_of: int, seed: int
) -> None:
    spec = TensorSpec((numel,), "float64", Sharded("data"), multiple_of=multiple_of)
    partition = spec.partition(world_size)
    generator = torch.Generator().manual_seed(seed)
    shards, fulls, grads = (
        # so that sums are exact
        torch.randint(-9, 9, (world_size, n), generator=generator).double()
        for n in (partition.shard_numel, partition.padded_numel, numel)
    )
    simulated = fzero.comms.Stacked(world_size)
    on_stacked = simulated.map(partial(_is_adjoint, simulated.axis(), spec))(shards, fulls, grads)
    for left, right, transposed, reduced in (
        on_stacked,
        stacked(ranks(world_size, _adjoint_terms_of_a_rank, spec, shards, fulls, grads)),
    ):
        assert left.sum() == right.sum() and torch.equal(
            transposed, reduced.to(torch.float64).round()
        )
        assert torch.equal(transposed.flatten()[:numel], grads.sum(0))


def _gradients(axis: Any, specs: Any, tree: Any, weight: Tensor) -> Any:
    def loss(tree: Any) -> Tensor:
        full = optree.tree_leaves(fzero.gather(tree, specs, axis))
        return weight * sum((x**2 * torch.arange(x.numel()).view(x.shape)).sum() for x in full)  # type: ignore[no-any-return]

    return gradient(loss)(tree)


def _gradients_of_a_rank(specs: Any, full: Any, capture: bool) -> Any:
    axis = fzero.join()
    shards, weight = fzero.shard(full, specs, axis), torch.tensor(axis.rank + 1.0)
    if capture:
        graph = make_fx(
            lambda tree, weight: _gradients(axis, specs, tree, weight), tracing_mode="fake"
        )(shards, weight)
        return graph(shards, weight)
    return _gradients(axis, specs, shards, weight)


@pytest.mark.covering(1)
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_gathered_shard_has_the_gradients_of_all_ranks_and_a_full_leaf_that_of_its_own(
    ranks: RankPool, world_size: int, capture: bool
) -> None:
    full = {"shared": torch.arange(1.0, 7.0).view(2, 3), "own": torch.arange(1.0, 5.0)}
    specs = {
        "shared": TensorSpec((2, 3), "float32", Sharded("data")),
        "own": TensorSpec((4,), "float32"),
    }
    grads = optree.tree_map(lambda x: 2 * x * torch.arange(x.numel()).view(x.shape), full)
    weights = torch.arange(1.0, world_size + 1)
    expected = {
        "shared": on_each(
            world_size,
            fzero.shard,
            stacked([weights.sum() * grads["shared"]] * world_size),
            specs["shared"],
        ),
        "own": torch.stack([weight * grads["own"] for weight in weights]),
    }
    assert equal(stacked(ranks(world_size, _gradients_of_a_rank, specs, full, capture)), expected)
    simulated = fzero.comms.Stacked(world_size)
    axis = simulated.axis()
    shards = on_each(world_size, fzero.shard, stacked([full] * world_size), specs)
    assert equal(simulated.map(partial(_gradients, axis, specs))(shards, weights), expected)


@given(spec_trees(), world_sizes(3))
def test_the_verbs_leave_their_inputs_unchanged(specs: Any, world_size: int) -> None:
    grads = stacked([grads_of(specs, rank) for rank in range(world_size)])
    shards = on_each(world_size, fzero.shard, grads, specs)
    kept = optree.tree_map(torch.clone, (grads, shards))
    for verb, tree in (
        (fzero.shard, grads),
        (fzero.gather, shards),
        (fzero.reduce_scatter_grads, grads),
    ):
        on_each(world_size, verb, tree, specs)
    assert equal((grads, shards), kept)


# --- on real ranks --------------------------------------------------------------------------------


def _verbs_on_a_rank(trees: list[Any], axis: Any = None) -> list[Any]:
    axis = axis or fzero.join()
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
def test_real_ranks_and_ranks_in_lockstep_and_stacked_give_the_same_bits(
    ranks: RankPool, world_size: int, trees: list[Any]
) -> None:
    on_ranks, hub = ranks(world_size, _verbs_on_a_rank, trees), Hub(world_size)
    in_lockstep = hub.run(
        lambda rank: _verbs_on_a_rank(trees, LockstepAxis("data", world_size, rank, hub))
    )
    assert equal(on_ranks, in_lockstep)
    for index, specs in enumerate(trees):
        full = stacked([distinct_tensors(specs)] * world_size)
        grads = stacked([grads_of(specs, rank) for rank in range(world_size)])
        shards = on_each(world_size, fzero.shard, full, specs)
        gathered = on_each(world_size, fzero.gather, shards, specs)
        simulated = shards, gathered, on_each(world_size, fzero.reduce_scatter_grads, grads, specs)
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


# --- the update -----------------------------------------------------------------------------------

TRANSFORMS = {
    "adamw": fzero.adamw(1e-2),
    "sgd": fzero.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "chain": fzero.chain(fzero.optim.scale(0.5), fzero.optim.adam(1e-2, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@examples(20)
@given(specs=spec_trees(("float32",)))
def test_an_update_changes_nothing_that_it_is_given_and_returns_new_tensors(
    name: str, specs: Any
) -> None:
    transform = TRANSFORMS[name]
    params, grads = distinct_tensors(specs, first=1), grads_of(specs, rank=1)
    state = optree.tree_map(transform.init, params)
    for _ in range(2):
        kept = optree.tree_map(torch.clone, (params, grads, state))
        new_params, new_state = fzero.optimizer_update(transform, params, grads, state)
        assert equal((params, grads, state), kept)
        given_memory = {
            x.data_ptr() for x in optree.tree_leaves((params, grads, state)) if x.numel()
        }
        assert not any(
            x.data_ptr() in given_memory for x in optree.tree_leaves((new_params, new_state))
        )
        optree.tree_map(
            lambda new, old: _check(not old.numel() or not torch.equal(new, old)),
            new_params,
            params,
        )
        params, state = new_params, new_state


# --- bad input ------------------------------------------------------------------------------------

TWO = fzero.comms.AbstractAxis("data", 2)


def test_a_leaf_of_another_shape_is_named_with_its_shape_and_its_specs() -> None:
    specs = {"layer": [TensorSpec((3, 2), "float32", Sharded("data"))]}
    with pytest.raises(
        ValueError, match=r"layer\.0: must have the shape \(3, 2\).*got \(2, 3\); pass full tensors"
    ):
        fzero.shard({"layer": [torch.zeros(2, 3)]}, specs, TWO)
    with pytest.raises(
        ValueError, match=r"layer\.0: must have the shape \(3, 2\).*got \(6,\); pass full tensors"
    ):
        fzero.reduce_scatter_grads({"layer": [torch.zeros(6)]}, specs, TWO)
    with pytest.raises(
        ValueError,
        match=r"layer\.0: must have the shape \(3,\).*got \(4,\); pass shards of 2 ranks",
    ):
        fzero.gather({"layer": [torch.zeros(4)]}, specs, TWO)
    with pytest.raises(ValueError, match=r"layer\.0: must have the shape \(6,\).*got \(3, 2\)"):
        fzero.gather({"layer": [torch.zeros(3, 2)]}, specs, fzero.comms.ProcessAxis("data"))


@pytest.mark.parametrize("spec", [Sharded("model"), Partial("model")])
@pytest.mark.parametrize("verb", [fzero.shard, fzero.gather, fzero.reduce_scatter_grads])
def test_a_spec_that_names_another_axis_is_reported_with_both_names(verb: Any, spec: Any) -> None:
    specs = {"w": TensorSpec((4,), "float32", spec)}
    x = torch.zeros(2 if verb is fzero.gather and isinstance(spec, Sharded) else 4)
    with pytest.raises(
        ValueError, match=rf"w: its spec {type(spec).__name__}\('model'\) must name.*got 'data'"
    ):
        verb({"w": x}, specs, TWO)


@pytest.mark.parametrize(
    "tree", [{"w": torch.zeros(4)}, {"w": torch.zeros(4), "c": torch.zeros(4)}]
)
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
    with pytest.raises(
        ValueError, match=r"ProcessAxis: 2 ranks need a process group; start with torchrun"
    ):
        ProcessAxis("data", 2, 0)
