"""The law of errors: bad input raises a ValueError that names the field, the value and
the fix.
"""

import pytest
import torch

from sharding import (
    FlatLayout,
    Fragment,
    Mesh,
    NearEqualSplit,
    Order,
    Partition,
    Placement,
    Sharded,
    TensorSpec,
    itemsize,
    plan_buckets,
    plan_transfer,
    reference,
    round_robin,
    views,
)
from sharding.toy_models import ToyRecipe

LAYOUT = FlatLayout(("h.3.w", "h.3.b"), ((4, 8), (8,)), world_size=4)
PARTITION = Partition(10, 4)
W, B = torch.zeros(4, 8), torch.zeros(8)

CASES = {
    "numel": (lambda: Partition(-1, 4), "Partition: numel", "-1"),
    "world_size": (lambda: Partition(10, 0), "Partition: world_size", "0"),
    "world_size_float": (lambda: Partition(10, 2.0), "Partition: world_size", "2.0"),
    "multiple_of": (lambda: Partition(10, 4, 0), "Partition: multiple_of", "0"),
    "rank_above": (lambda: PARTITION.bounds(4), "Partition: rank", "4", "0..3"),
    "rank_below": (lambda: PARTITION.bounds(-1), "Partition: rank", "-1", "0..3"),
    "split_numel": (lambda: NearEqualSplit(-2, 4), "NearEqualSplit: numel", "-2"),
    "split_world_size": (lambda: NearEqualSplit(2, 0), "NearEqualSplit: world_size", "0"),
    "split_rank": (lambda: NearEqualSplit(2, 2).bounds(2), "NearEqualSplit: rank", "2", "0..1"),
    "order_outside": (lambda: Order((0, 2)), "Order: indices", "2"),
    "order_twice": (lambda: Order((0, 0)), "Order: indices", "0 twice"),
    "order_length": (lambda: Order((1, 0)).apply("abc"), "Order: orders 2 items", "3"),
    "round_robin": (lambda: round_robin(3, 0), "round_robin: num_lists", "0"),
    "fragment": (lambda: Fragment("w", 3, 2, 0), "Fragment: stop", "2", "3"),
    "layout_lengths": (lambda: FlatLayout(("w",), (), 2), "FlatLayout", "1 names", "0 shapes"),
    "layout_names": (
        lambda: FlatLayout(("w", "w"), ((), ()), 2),
        "FlatLayout: names",
        "'w' twice",
        "tied",
    ),
    "layout_shape": (lambda: FlatLayout(("w",), ((2, -1),), 2), "FlatLayout", "'w'", "(2, -1)"),
    "layout_world_size": (lambda: FlatLayout((), (), 0), "FlatLayout: world_size", "0"),
    "layout_unknown": (lambda: LAYOUT.bounds("x"), "'x'", "'h.3.w', 'h.3.b'"),
    "check_shape": (
        lambda: LAYOUT.check({"h.3.w": (4, 4), "h.3.b": (8,)}),
        "FlatLayout: parameter 'h.3.w' has shape (4, 4) but the layout was built for (4, 8); "
        "rebuild the layout after changing the model",
    ),
    "check_missing": (
        lambda: LAYOUT.check({"h.3.w": (4, 8)}),
        "'h.3.b'",
        "(8,)",
        "missing",
        "rebuild",
    ),
    "check_unknown": (
        lambda: LAYOUT.check({"h.3.w": (4, 8), "h.3.b": (8,), "x": ()}),
        "'x'",
        "not in",
        "rebuild",
    ),
    "cap": (lambda: plan_buckets([1], 0), "plan_buckets: cap", "0"),
    "bucket_numel": (lambda: plan_buckets([1, -3], 4), "plan_buckets: numels[1]", "-3"),
    "transfer_missing": (
        lambda: plan_transfer(LAYOUT, FlatLayout(("h.3.w",), ((4, 8),), 2)),
        "plan_transfer: parameter 'h.3.b' is in the old layout but not in the new",
    ),
    "transfer_unknown": (
        lambda: plan_transfer(FlatLayout(("h.3.w",), ((4, 8),), 2), LAYOUT),
        "plan_transfer: parameter 'h.3.b' is in the new layout but not in the old",
    ),
    "transfer_shape": (
        lambda: plan_transfer(LAYOUT, FlatLayout(LAYOUT.names, ((8, 4), (8,)), 2)),
        "plan_transfer: parameter 'h.3.w' has shape (4, 8)",
        "(8, 4)",
    ),
    "axis_name": (lambda: Sharded(""), "Sharded: axis", "''"),
    "kind": (lambda: Placement("cpu"), "Placement: kind", "'cpu'", "'host'"),
    "pinned": (lambda: Placement(pinned=True), "Placement: pinned", "'device'", "drop"),
    "nvme": (lambda: Placement("nvme"), "Placement: path", "None", "folder"),
    "path": (lambda: Placement("host", path="/x"), "Placement: path", "'/x'", "'host'"),
    "dtype": (lambda: TensorSpec((2,), "fp32"), "TensorSpec: dtype", "'fp32'", "float32"),
    "spec": (
        lambda: TensorSpec((2,), "float32", "data"),
        "TensorSpec: spec",
        "'data'",
        "Sharded(axis)",
    ),
    "spec_shape": (lambda: TensorSpec((2, -1), "float32"), "TensorSpec: shape", "(2, -1)"),
    "spec_multiple_of": (
        lambda: TensorSpec((2,), "float32", multiple_of=0),
        "TensorSpec: multiple_of",
        "0",
    ),
    "itemsize": (lambda: itemsize("half"), "'half'", "float16"),
    "mesh_data": (lambda: Mesh.of(model=2), "Mesh", "'data'", "('model',)"),
    "mesh_size": (lambda: Mesh.of(data=0), "Mesh", "'data'", "0"),
    "mesh_twice": (lambda: Mesh((("data", 2), ("data", 2))), "Mesh: axis names", "'data' twice"),
    "mesh_axis": (lambda: Mesh.of(data=2).axis_size("node"), "Mesh: unknown axis 'node'", "'data'"),
    "mesh_peers": (lambda: Mesh.of(data=2).peers(0, "node"), "Mesh: unknown axis 'node'", "'data'"),
    "mesh_rank": (lambda: Mesh.of(data=2).coordinate(2), "Mesh: rank", "2", "0..1"),
    "mesh_coordinate": (
        lambda: Mesh.of(node=2, data=2).rank({"data": 1}),
        "Mesh",
        "no index",
        "'node'",
    ),
    "mesh_coordinate_unknown": (
        lambda: Mesh.of(data=2).rank({"data": 1, "x": 0}),
        "Mesh: unknown axis 'x'",
    ),
    "mesh_index": (lambda: Mesh.of(data=2).rank({"data": 2}), "Mesh", "'data'", "2", "0..1"),
    "torch_dtype": (lambda: views.torch_dtype("nn"), "torch_dtype: 'nn'", "'float32'"),
    "pad": (lambda: views.pad(torch.zeros(9), PARTITION), "pad", "10 elements", "(9,)"),
    "flatten_dtype": (
        lambda: views.flatten({"h.3.w": W, "h.3.b": B.double()}, LAYOUT),
        "'h.3.b' is float64 on cpu but 'h.3.w' is float32 on cpu",
        "one dtype",
    ),
    "flatten_device": (
        lambda: views.flatten({"h.3.w": W, "h.3.b": B.to("meta")}, LAYOUT),
        "'h.3.b'",
        "on meta",
    ),
    "flatten_shape": (
        lambda: views.flatten({"h.3.w": W.T, "h.3.b": B}, LAYOUT),
        "'h.3.w'",
        "(8, 4)",
        "(4, 8)",
    ),
    "flatten_empty": (
        lambda: views.flatten({}, FlatLayout((), (), 2)),
        "flatten",
        "no parameters",
        "skip",
    ),
    "unflatten": (
        lambda: views.unflatten(torch.zeros(7), LAYOUT),
        "unflatten",
        "40 elements",
        "(7,)",
    ),
    "unflatten_dim": (
        lambda: views.unflatten(torch.zeros(5, 8), LAYOUT),
        "unflatten",
        "one dim",
        "(5, 8)",
    ),
    "take_shard": (
        lambda: views.take_shard(torch.zeros(10), PARTITION, 0),
        "take_shard",
        "12 elements",
        "(10,)",
    ),
    "take_shard_rank": (
        lambda: views.take_shard(torch.zeros(12), PARTITION, 4),
        "Partition: rank",
        "4",
        "0..3",
    ),
    "join": (lambda: views.join(torch.zeros(3, 4), PARTITION), "join", "(3, 4)", "(4, 3)"),
    "stacked": (lambda: reference.all_gather(torch.zeros(3)), "all_gather", "(3,)"),
    "divided": (
        lambda: reference.reduce_scatter(torch.zeros(2, 3)),
        "reduce_scatter",
        "2 ranks",
        "3 elements",
    ),
    "divided_all_to_all": (
        lambda: reference.all_to_all(torch.zeros(2, 3)),
        "all_to_all",
        "2 ranks",
        "3 elements",
    ),
    "op": (
        lambda: reference.all_reduce(torch.zeros(2, 2), "max"),
        "all_reduce: op",
        "'max'",
        "'sum'",
    ),
    "mean_of_integers": (
        lambda: reference.reduce_scatter(torch.ones(2, 2).int()),
        "mean",
        "torch.int32",
        "cast",
    ),
    "source": (
        lambda: reference.broadcast(torch.zeros(2, 2), -1),
        "broadcast: source",
        "-1",
        "0..1",
    ),
    "toy_width": (lambda: ToyRecipe(features=1, width=0, hidden=()), "ToyRecipe: width", "0"),
    "toy_tied": (
        lambda: ToyRecipe(features=1, width=1, hidden=(), tied="all"),
        "ToyRecipe: tied",
        "'all'",
        "'ends'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_raises_an_error_that_names_the_field_the_value_and_the_fix(case):
    call, *parts = CASES[case]
    with pytest.raises(ValueError) as raised:
        call()
    for part in parts:
        assert part in str(raised.value)
    assert ";" in str(raised.value)  # the message has a rule and a fix
