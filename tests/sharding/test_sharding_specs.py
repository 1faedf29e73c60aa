"""The laws of meshes and tensor specs."""

import math
import pickle
from dataclasses import replace

from hypothesis import given, settings, strategies as st

from sharding import Mesh, Partial, Partition, Replicated, Sharded, TensorSpec
from sharding.testing import meshes, shapes, world_sizes

law = settings(deadline=None)


@law
@given(meshes())
def test_ranks_and_coordinates_of_a_mesh_are_inverse(mesh):
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(mesh.size))
    assert all(tuple(coordinate) == mesh.names for coordinate in coordinates)
    # Row-major: coordinates in rank order are sorted as tuples, and all differ.
    indices = [tuple(coordinate.values()) for coordinate in coordinates]
    assert indices == sorted(set(indices))


@law
@given(meshes())
def test_peers_along_an_axis_differ_in_that_axis_only_and_partition_the_mesh(mesh):
    for axis in mesh.names:
        groups = {mesh.peers(rank, axis) for rank in range(mesh.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(
                range(mesh.axis_size(axis))
            )
            others = {
                tuple((k, v) for k, v in mesh.coordinate(rank).items() if k != axis)
                for rank in group
            }
            assert len(others) == 1
        for rank in range(mesh.size):
            assert rank in mesh.peers(rank, axis)


@law
@given(shapes(), world_sizes(), st.integers(1, 8))
def test_a_sharded_tensor_has_the_shape_of_its_shard_and_any_other_its_full_shape(
    shape, world_size, multiple_of
):
    sharded = TensorSpec(shape, "float32", Sharded("data"), multiple_of=multiple_of)
    partition = Partition(math.prod(shape), world_size, multiple_of)
    assert sharded.partition(world_size) == partition
    assert sharded.local_shape(world_size) == (partition.shard_numel,)
    assert sharded.local_nbytes(world_size) * world_size == 4 * partition.padded_numel
    for spec in (Replicated(), Partial("data")):
        full = replace(sharded, spec=spec)
        assert full.local_shape(world_size) == shape
        assert full.local_nbytes(world_size) == 4 * math.prod(shape)


@law
@given(meshes(), shapes(), st.integers(1, 8), st.data())
def test_several_axes_cut_a_tensor_along_the_first_axis_first(mesh, shape, multiple_of, data):
    names = data.draw(st.permutations(mesh.names))
    axes = names[: data.draw(st.integers(1, len(names)))]
    finest = TensorSpec(shape, "float32", Sharded(*axes), multiple_of=multiple_of)
    shards = [mesh.shard_of(rank, finest.spec) for rank in range(mesh.size)]
    num_shards = finest.num_shards(mesh)
    assert replace(finest, spec=Replicated()).num_shards(mesh) == 1
    assert (
        finest.partition(mesh).world_size
        == num_shards
        == math.prod(mesh.axis_size(axis) for axis in axes)
    )
    assert finest.local_shape(mesh) == finest.local_shape(num_shards)
    # Every shard occurs once for each rank along the other axes.
    assert sorted(shards) == [
        shard for shard in range(num_shards) for _ in range(mesh.size // num_shards)
    ]
    for length in range(1, len(axes)):
        coarse = Sharded(*axes[:length])
        num_coarse = math.prod(mesh.axis_size(axis) for axis in axes[:length])
        for rank, shard in enumerate(shards):
            assert mesh.shard_of(rank, coarse) == shard // (num_shards // num_coarse)


def test_specs_are_hashable_values_with_short_names():
    assert (
        len({Replicated(), Sharded("data"), Partial("data"), Sharded("data"), Sharded("node")}) == 4
    )
    assert (
        Sharded("data", "node") != Sharded("node", "data")
        and repr(Sharded("a", "b")) == "Sharded('a', 'b')"
    )
    assert pickle.loads(pickle.dumps(Sharded("data", "node"))) == Sharded("data", "node")
    assert [repr(spec) for spec in (Replicated(), Sharded("data"), Partial("node"))] == (
        ["Replicated()", "Sharded('data')", "Partial('node')"]
    )
    assert Mesh.of(node=2, data=4) == Mesh((("node", 2), ("data", 4)))
