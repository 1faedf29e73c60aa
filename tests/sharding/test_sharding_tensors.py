"""The laws of views, reference collectives and toy models, on tensors."""

import pickle

import pytest
import torch
from hypothesis import find, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sharding import FlatLayout, Partition, plan_transfer
from sharding.dtypes import ITEMSIZES
from sharding.reference import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from sharding.testing import batches, layouts, models, partitions, world_sizes
from sharding.toy_models import ToyRecipe, make_toy_model
from sharding.views import dtype_name, flatten, join, pad, take_shard, torch_dtype, unflatten

law = settings(deadline=None)


def parameters_of(layout: FlatLayout, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """Parameters whose elements all differ and count from 1, so that none equals
    padding.
    """
    leaves = torch.arange(1, layout.numel + 1, dtype=dtype).split(list(layout.numels))
    return {
        name: part.reshape(shape) for name, shape, part in zip(layout.names, layout.shapes, leaves)
    }


def stack_shards(flat_P: torch.Tensor, partition: Partition) -> torch.Tensor:
    return torch.stack(
        [take_shard(flat_P, partition, rank) for rank in range(partition.world_size)]
    )


@st.composite
def stacked(draw: st.DrawFn, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Full buffers of small random integers, one for each rank: (W, P)."""
    world_size, shard_numel = draw(world_sizes()), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randint(
        -1000, 1000, (world_size, world_size * shard_numel), generator=generator
    ).to(dtype)


# Views


@law
@given(partitions())
def test_pad_appends_zeros_and_nothing_else(partition):
    x_N = torch.arange(1, partition.numel + 1)
    x_P = pad(x_N, partition)
    assert torch.equal(x_P[: partition.numel], x_N)
    assert x_P[partition.numel :].tolist() == [0] * partition.padding


@law
@given(partitions())
def test_join_undoes_pad_and_take_shard(partition):
    x_N = torch.arange(1, partition.numel + 1)
    assert torch.equal(join(stack_shards(pad(x_N, partition), partition), partition), x_N)


@law
@given(layouts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_unflatten_undoes_flatten(layout, dtype):
    parameters = parameters_of(layout, dtype)
    flat_P = flatten(dict(reversed(parameters.items())), layout)
    assert flat_P.shape == (layout.partition.padded_numel,) and flat_P.dtype == dtype
    assert flat_P[layout.numel :].tolist() == [0] * layout.partition.padding
    for flat in (flat_P, flat_P[: layout.numel]):
        leaves = unflatten(flat, layout)
        assert list(leaves) == list(layout.names)
        assert all(torch.equal(leaves[name], parameters[name]) for name in layout.names)


@law
@given(layouts())
def test_leaves_and_shards_are_views_of_the_buffer(layout):
    flat_P = flatten(parameters_of(layout), layout)
    for rank in range(layout.world_size):
        take_shard(flat_P, layout.partition, rank).fill_(-1)
    assert (flat_P == -1).all()
    for leaf in unflatten(flat_P, layout).values():
        leaf.fill_(-2)
    assert (flat_P[: layout.numel] == -2).all() and (flat_P[layout.numel :] == -1).all()


@law
@given(layouts())
def test_flatten_copies(layout):
    parameters = parameters_of(layout)
    flatten(parameters, layout).fill_(-1)
    assert all((parameter > 0).all() for parameter in parameters.values())


@law
@given(layouts())
def test_unflatten_is_one_split(layout):
    called: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    flat_P = flatten(parameters_of(layout), layout)
    with Record():
        unflatten(flat_P, layout)
    assert called.count("split_with_sizes") == 1
    assert set(called) <= {"split_with_sizes", "view"}


@law
@given(layouts())
def test_the_gradient_of_the_buffer_is_the_flattened_gradients_with_zero_padding(layout):
    weights = parameters_of(layout, torch.float64)

    def loss_of(leaves):
        return sum((leaves[name] ** 2 * weights[name]).sum() for name in layout.names)

    flat_P = flatten(weights, layout).requires_grad_()
    (grad_P,) = torch.autograd.grad(loss_of(unflatten(flat_P, layout)), flat_P)
    expected = {name: 2 * weight * weight for name, weight in weights.items()}
    assert torch.equal(grad_P, flatten(expected, layout))


@law
@given(layouts())
def test_unflatten_and_flatten_run_under_vmap(layout):
    flat_P = flatten(parameters_of(layout), layout)
    flat_WP = torch.stack([flat_P * rank for rank in range(1, 4)])
    flat_again_WP = torch.vmap(lambda flat_P: flatten(unflatten(flat_P, layout), layout))(flat_WP)
    assert torch.equal(flat_again_WP, flat_WP)


@law
@given(layouts())
def test_fragments_describe_the_contents_of_a_shard(layout):
    parameters = parameters_of(layout)
    shards_WS = stack_shards(flatten(parameters, layout), layout.partition)
    for rank in range(layout.world_size):
        for fragment in layout.fragments(rank):
            held = shards_WS[rank, fragment.offset : fragment.offset + fragment.numel]
            assert torch.equal(
                held, parameters[fragment.name].reshape(-1)[fragment.start : fragment.stop]
            )


@law
@given(layouts(), world_sizes(), st.integers(1, 8))
def test_a_transfer_of_shards_is_the_flattening_by_the_new_layout(old, world_size, multiple_of):
    new = FlatLayout(old.names[::-1], old.shapes[::-1], world_size, multiple_of)
    parameters = parameters_of(old)
    old_WS = stack_shards(flatten(parameters, old), old.partition)
    new_WS = old_WS.new_zeros(world_size, new.partition.shard_numel)
    for move in plan_transfer(old, new):
        part = old_WS[move.source_rank, move.source_start : move.source_stop]
        new_WS[move.target_rank, move.target_start : move.target_stop] = part
    assert torch.equal(new_WS, stack_shards(flatten(parameters, new), new.partition))


@pytest.mark.parametrize("name", ITEMSIZES)
def test_itemsizes_and_dtype_names_are_those_of_torch(name):
    assert dtype_name(torch_dtype(name)) == name
    assert torch_dtype(name).itemsize == ITEMSIZES[name]


# Reference collectives


@law
@given(partitions())
def test_gather_undoes_shard(partition):
    x_P = pad(torch.arange(1, partition.numel + 1), partition)
    gathered_WP = all_gather(stack_shards(x_P, partition))
    assert torch.equal(gathered_WP, torch.stack([x_P] * partition.world_size))


@law
@given(stacked(torch.float64))
def test_reduce_scatter_is_the_shard_of_the_mean(x_WP):
    world_size, padded_numel = x_WP.shape
    mean_P = all_reduce(x_WP, "mean")[0]
    assert torch.equal(
        reduce_scatter(x_WP), stack_shards(mean_P, Partition(padded_numel, world_size))
    )


@law
@given(stacked(torch.float64), st.sampled_from(["sum", "mean"]))
def test_all_reduce_gives_every_rank_the_same_sum_or_mean(x_WN, op):
    world_size = x_WN.shape[0]
    total_N = [sum(column) for column in zip(*x_WN.tolist())]
    expected = [value if op == "sum" else value * (1 / world_size) for value in total_N]
    assert all_reduce(x_WN, op).tolist() == [expected] * world_size


@law
@given(stacked(), st.integers(0, 2**16))
def test_gather_and_reduce_scatter_are_adjoint(y_WP, seed):
    world_size, padded_numel = y_WP.shape
    x_WS = torch.randint(
        -1000,
        1000,
        (world_size, padded_numel // world_size),
        generator=torch.Generator().manual_seed(seed),
    )
    assert (all_gather(x_WS) * y_WP).sum() == (x_WS * reduce_scatter(y_WP, op="sum")).sum()


@law
@given(stacked())
def test_all_to_all_is_its_own_inverse_and_moves_shard_r_to_rank_r(x_WP):
    world_size, padded_numel = x_WP.shape
    received_WP = all_to_all(x_WP)
    assert torch.equal(all_to_all(received_WP), x_WP)
    partition = Partition(padded_numel, world_size)
    for rank in range(world_size):
        expected = torch.cat(
            [take_shard(x_WP[source], partition, rank) for source in range(world_size)]
        )
        assert torch.equal(received_WP[rank], expected)


@law
@given(stacked(), st.data())
def test_broadcast_gives_every_rank_the_tensor_of_the_source(x_WN, data):
    source = data.draw(st.integers(0, x_WN.shape[0] - 1))
    assert broadcast(x_WN, source).tolist() == [x_WN[source].tolist()] * x_WN.shape[0]


def test_sums_add_in_rank_order():
    x_WN = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])  # float32: 1e8 + 1 is 1e8
    assert all_reduce(x_WN, "sum")[0].item() == 1.0
    assert all_reduce(x_WN.flip(0), "sum")[0].item() == 0.0
    assert reduce_scatter(x_WN.repeat(1, 4), op="sum").tolist() == [[1.0]] * 4
    assert reduce_scatter(x_WN.repeat(1, 4)).tolist() == [[0.25]] * 4


def test_the_mean_is_the_sum_times_the_reciprocal():
    total, world_size = 5.0, 3
    assert total * (1 / world_size) != total / world_size
    x_WN = torch.tensor([[total], [0.0], [0.0]], dtype=torch.float64)
    assert all_reduce(x_WN, "mean")[0].item() == total * (1 / world_size)


# Models


@law
@given(models())
def test_every_parameter_that_is_not_frozen_gets_a_gradient(model):
    loss = model(torch.ones(2, model.features))
    assert loss.shape == () and torch.isfinite(loss)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    assert all(
        grad is not None and grad.shape == p.shape for grad, p in zip(grads, trainable.values())
    )


@law
@given(models())
def test_the_same_recipe_makes_the_same_model_and_leaves_the_random_state_alone(model):
    torch.rand(1)  # advances the random state after the model was made
    before = torch.get_rng_state()
    again, pickled = make_toy_model(model.recipe), pickle.loads(pickle.dumps(model))
    assert torch.equal(torch.get_rng_state(), before)
    for copy in (again, pickled):
        assert [name for name, _ in copy.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
        assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), model.parameters()))


@law
@given(models(), world_sizes(3), st.data())
def test_the_loss_of_a_batch_is_the_mean_over_its_equal_parts(model, world_size, data):
    model = model.double()
    x_BF = data.draw(batches(model.features, multiple_of=world_size, dtype="float64"))
    losses = torch.stack([model(part) for part in x_BF.chunk(world_size)])
    torch.testing.assert_close(losses.mean(), model(x_BF))


@pytest.mark.parametrize(
    "holds",
    [
        lambda model: any(p.numel() == 0 for p in model.parameters()),
        lambda model: any(p.dim() == 0 for p in model.parameters()),
        lambda model: any(not p.requires_grad for p in model.parameters()),
        lambda model: len({p.dtype for p in model.parameters()}) == 2,
        lambda model: model.outlet.weight is model.inlet.weight,
        lambda model: (
            len(model.blocks) > 1 and model.blocks[0].up.weight is model.blocks[1].up.weight
        ),
        lambda model: any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()),
        lambda model: len({block.up.out_features for block in model.blocks}) > 1,
        lambda model: len(model.blocks) == 0,
    ],
    ids=[
        "zero-sized",
        "0-d",
        "frozen",
        "two dtypes",
        "tied ends",
        "tied blocks",
        "LayerNorm",
        "mixed sizes",
        "no blocks",
    ],
)
def test_models_hold_every_kind_of_parameter(holds):
    assert holds(find(models(), holds))


def test_a_toy_model_ties_equal_blocks_only():
    model = make_toy_model(ToyRecipe(features=2, width=3, hidden=(4, 5, 4), tied="blocks"))
    first, other, equal = (block.up.weight for block in model.blocks)
    assert equal is first and other is not first


def test_blocks_of_other_dtypes_take_turns_and_are_not_tied():
    model = make_toy_model(
        ToyRecipe(
            features=2, width=3, hidden=(4, 4, 4), tied="blocks", dtypes=("float32", "float64")
        )
    )
    first, other, equal = (block.up.weight for block in model.blocks)
    assert [x.dtype for x in (first, other, equal)] == [torch.float32, torch.float64, torch.float32]
    assert equal is first and other is not first
