"""The partition of layers, layers as descriptions, and topologies: DeepSpeed's values,
and what they refuse.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import random
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from ranks import RankPool
from torch import Tensor, nn

from fzero.comms.process_group import job
from fzero.deepspeed.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    grid_of,
    mesh_of,
)
from fzero.pipeline import (
    LayerCost,
    LayerSpec,
    PipelineError,
    PipelineModule,
    StageLayers,
    TiedLayerSpec,
    balanced,
    partition_by_cost,
    uniform,
)
from fzero.pipeline.layers import LayerSeeds
from fzero.pipeline.partition import part_nbytes
from sharding import Mesh

# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1] * 8, 4, (0, 2, 4, 6, 8)),
        ([1, 1, 1, 1, 1, 4], 3, (0, 3, 5, 6)),
        ([0, 1, 0, 1, 0, 1, 0, 1, 0, 0], 2, (0, 5, 10)),
        ([0, 0, 1, 1, 1, 1, 0], 2, (0, 4, 7)),
        ([10, *[1] * 8, 10], 4, (0, 1, 5, 9, 10)),
        ([5, 1, 1, 1, 1, 1, 5], 3, (0, 1, 6, 7)),
        ([7, 1], 4, (0, 1, 2, 2, 2)),
    ],
)
def test_balanced_bounds_are_upstreams(
    weights: list[int], parts: int, bounds: tuple[int, ...]
) -> None:
    assert balanced(weights, parts) == bounds


@functools.cache
def upstream_functions() -> types.SimpleNamespace:
    """DeepSpeed's two functions of partitions, out of its file, without the rest."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("needs DeepSpeed")
    source = Path(found.origin).with_name("runtime").joinpath("utils.py").read_text()
    start, stop = source.index("def partition_uniform"), source.index("class PartitionedTensor")
    module: dict[str, Any] = {}
    exec(source[start:stop], module)
    return types.SimpleNamespace(**module)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.integers(1, 6))
def test_bounds_are_upstreams_for_all_weights(weights: list[int], parts: int) -> None:
    upstream = upstream_functions()
    assert list(balanced(weights, parts)) == upstream.partition_balanced(weights, parts)
    assert list(uniform(len(weights), parts)) == upstream.partition_uniform(len(weights), parts)


costs = st.builds(
    LayerCost,
    st.integers(0, 9),
    st.integers(0, 9),
    state_nbytes=st.integers(0, 9),
    stored_nbytes=st.integers(0, 9),
    working_nbytes=st.integers(0, 9),
)


@given(
    st.lists(costs, min_size=3, max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(5, 200),
)
def test_bounds_by_cost_are_the_best_of_all(
    layers: list[LayerCost], held: list[int], nbytes: int
) -> None:
    """Against all bounds: the least seconds of the slowest part, among those that fit."""
    parts = len(held)
    every = [
        (0, *cuts, len(layers)) for cuts in itertools.combinations(range(1, len(layers)), parts - 1)
    ]

    def worst(bounds: tuple[int, ...]) -> tuple[float, int]:
        seconds = max(
            sum(cost.seconds for cost in layers[a:b]) for a, b in itertools.pairwise(bounds)
        )
        return seconds, max(part_nbytes(layers, bounds, part, held[part]) for part in range(parts))

    fitting = [worst(bounds) for bounds in every if worst(bounds)[1] <= nbytes]
    if fitting:
        found = worst(partition_by_cost(layers, parts, in_flight=held, nbytes=nbytes))
        assert found[0] == min(fitting)[0]
        assert found[1] <= nbytes
    else:
        least = min(worst(bounds)[1] for bounds in every)
        with pytest.raises(
            ValueError, match=f"at least {least} bytes in {parts} parts, got {nbytes}"
        ):
            partition_by_cost(layers, parts, in_flight=held, nbytes=nbytes)


# --- layers ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.randn(100, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class PythonsDraw(nn.Module):
    """A layer that draws from `random`, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), random.random()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def head(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.T  # type: ignore[operator,union-attr]


def embedding(
    key: str = "embed", cls: type[nn.Module] = nn.Embedding, **kwargs: Any
) -> TiedLayerSpec:
    return TiedLayerSpec(key, cls, 11, 4, **kwargs)


def layers() -> list[Any]:
    return [
        embedding(),
        *[LayerSpec(Block, 4) for _ in range(6)],
        torch.tanh,
        embedding(forward_fn=head),
    ]


def module(**kwargs: Any) -> PipelineModule:
    return PipelineModule(layers(), **{"num_stages": 3, "partition_method": "uniform"} | kwargs)


@pytest.mark.parametrize("bounds", [(0, 9), (0, 3, 6, 9), (0, 1, 1, 8, 9)])
def test_weights_names_and_results_do_not_depend_on_the_stages(bounds: tuple[int, ...]) -> None:
    whole, tokens = module().build(0, 9), torch.arange(8).reshape(2, 4)
    torch.manual_seed(len(bounds))  # the seed of the program does not matter, and goes on
    before = torch.get_rng_state()
    stages = [module().build(start, stop) for start, stop in itertools.pairwise(bounds)]
    assert torch.equal(torch.get_rng_state(), before)
    held = {name: value for stage in stages for name, value in stage.named_parameters()}
    expected = dict(whole.named_parameters())
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))


def test_names_are_those_of_upstream_with_global_indices() -> None:
    assert [name for name, _ in module().build(6, 9).named_parameters()] == [
        "tied_modules.embed.weight", "6.frozen", "6.inner.weight", "6.inner.bias",
    ]  # fmt: skip
    stage = module().build_ranges([(0, 1), (8, 9)])
    assert [name for name, _ in stage.named_parameters()] == ["tied_modules.embed.weight"]
    assert stage.shared_names("embed") == ("tied_modules.embed.weight",)
    assert module().build(1, 2).shared_names("embed") == ()
    assert module().tied["embed"].indices == (0, 8)
    assert list(module().build(3, 3).parameters()) == []


def test_a_layer_has_its_seed_whatever_was_built_before() -> None:
    first, again = module(base_seed=5).build(2, 5), module(base_seed=7).build(0, 3)
    torch.manual_seed(7)
    assert torch.equal(first.get_parameter("2.frozen"), Block(4).frozen)  # layer 2 of the base 5
    torch.manual_seed(9)
    assert torch.equal(again.get_parameter("2.frozen"), Block(4).frozen)
    seeds = list[int]()
    module(seed_fn=lambda seed: seeds.append(seed) or torch.manual_seed(seed)).build(3, 6)
    assert seeds == [1237, 1238, 1239]
    draws = [
        PipelineModule([torch.relu, LayerSpec(PythonsDraw)], 1)
        .build(1, 2)
        .get_parameter("1.weight")
        for _ in range(2)
    ]
    assert torch.equal(*draws)


def test_a_description_on_meta_has_no_values_and_builds_no_layer() -> None:
    built = list[int]()

    class Counted(nn.Linear):
        def __init__(self, index: int) -> None:
            built.append(index)
            super().__init__(2, 2)

    model = PipelineModule(
        [LayerSpec(Counted, index) for index in range(4)], 2, partition_method="uniform"
    )
    assert built == []
    assert list(model.parameters()) == []
    assert {p.device.type for p in model.build(2, 4, device="meta").parameters()} == {"meta"}
    assert built == [2, 3]
    with pytest.raises(PipelineError, match="has no layers of its own outside a job"):
        model(torch.ones(2))


def test_a_sequential_is_a_pipeline_of_its_modules() -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    model = PipelineModule.of(plain, num_stages=2)
    stages = [model.build(*bounds) for bounds in itertools.pairwise(model.partition(2))]
    assert [name for stage in stages for name, _ in stage.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert PipelineModule.of(model) is model
    x = torch.randn(4, 2)
    assert torch.equal(stages[1](stages[0](x)), plain(x))


# --- methods --------------------------------------------------------------------------------------


def test_methods_of_partition_weigh_what_they_name() -> None:
    wide = [
        LayerSpec(nn.Linear, 9, 9),
        *[LayerSpec(Block, 4) for _ in range(4)],
        LayerSpec(nn.Linear, 9, 9),
    ]
    model = PipelineModule(wide, num_stages=2)
    assert model.parts == [0, 3, 6]
    assert PipelineModule(wide, 3).parts == list(balanced([90, 20, 20, 20, 20, 90], 3))
    assert PipelineModule(wide, 3, partition_method="parameters:ALL").parts == list(
        balanced([90, *[420] * 4, 90], 3)
    )
    assert PipelineModule(wide, 2, partition_method="type:block|other").parts == list(
        balanced([0, 1, 1, 1, 1, 0], 2)
    )
    assert PipelineModule(wide, 2, partition_method=[0, 1, 6]).parts == [0, 1, 6]
    slow = [LayerCost(9, 9), *[LayerCost(1, 1)] * 5]
    assert PipelineModule(wide, 2, partition_method=slow).parts == [0, 1, 6]
    assert model.partition(3) == balanced([90, 20, 20, 20, 20, 90], 3)
    assert model.partition(2, "uniform") == (0, 3, 6)


def test_subclasses_set_bounds_and_count_parameters_as_with_upstream() -> None:
    class ByHand(PipelineModule):
        def _partition_layers(self, method: Any = "uniform") -> None:
            self.parts = [0, 1, 2, self._num_layers]
            self._set_bounds(self.parts[0], self.parts[1])

    class Counting(PipelineModule):
        def _count_layer_params(self) -> list[int]:
            return [1] * len(self._layer_specs)

    assert ByHand(layers(), num_stages=3).partition(3) == (0, 1, 2, 9)
    assert Counting(layers(), num_stages=3).parts == [0, 3, 6, 9]
    whole = ByHand(layers(), num_stages=3)
    whole._set_bounds()
    assert (whole._local_start, whole._local_stop) == (0, 9)


def test_a_subclass_has_a_number_of_layers_of_its_own() -> None:
    class Model(PipelineModule):
        def __init__(self) -> None:
            super().__init__(layers(), num_stages=3)
            assert self.num_layers == 9
            self.num_layers = 4  # its blocks, say

    model = Model()
    assert (model.num_layers, model.num_layer_specs) == (4, 9)


def test_blocks_of_layers_are_recomputed_as_upstream_chooses() -> None:
    model = module(activation_checkpoint_interval=2)
    calls = [call for _, call in model.build(0, 9).calls(0, 9)]
    assert model.checkpoint_ranges(5, 9, calls[5:9]) == ((5, 7, True), (7, 9, True))
    assert model.checkpoint_ranges(7, 8, calls[7:8]) == ((7, 8, False),)
    named = module(activation_checkpoint_interval=3, checkpointable_layers=["Block"])
    assert named.checkpoint_ranges(0, 9, calls) == ((0, 3, False), (3, 6, True), (6, 9, False))
    named.set_checkpoint_interval(0)
    assert named.checkpoint_ranges(0, 9, calls) == ((0, 9, False),)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: PipelineModule(layers()),
            RuntimeError,
            "must have num_stages or topology, got neither",
        ),
        (
            lambda: module(num_stages=0),
            ValueError,
            "num_stages must be an integer of at least 1, got 0",
        ),
        (
            lambda: module(num_stages=10),
            ValueError,
            "at most the number of layers, 9, got 10; use fewer stages",
        ),
        (
            lambda: PipelineModule([], 1),
            ValueError,
            "layers must have at least one layer, got none",
        ),
        (
            lambda: PipelineModule([module()], 1),
            NotImplementedError,
            "layer 0 must be no PipelineModule",
        ),
        (
            lambda: PipelineModule([torch.relu, "relu"], 1),
            ValueError,
            "layer 1 must be a LayerSpec, a module or a callable",
        ),
        (
            lambda: LayerSpec(torch.relu),
            RuntimeError,
            "typename must be a subclass of torch.nn.Module",
        ),
        (
            lambda: module(partition_method="type:mlp"),
            RuntimeError,
            "'type:mlp' must match the class of a layer.*Block",
        ),
        (
            lambda: module(partition_method="profile"),
            NotImplementedError,
            "must be 'uniform', 'parameters'.*got 'profile'",
        ),
        (
            lambda: module(partition_method=[0, 9]),
            ValueError,
            r"4 integers that rise from 0 to the .* layers, 9, got \[0, 9\]",
        ),
        (
            lambda: module(partition_method=[0, 0, 5, 9]),
            ValueError,
            "the first stage must have a layer",
        ),
        (
            lambda: module(partition_method=[LayerCost(1, 1)]),
            ValueError,
            "costs must be one for each of 9 layers, got 1",
        ),
        (
            lambda: PipelineModule([*layers(), embedding(cls=nn.Linear)], 1),
            ValueError,
            "key 'embed' must be of one class",
        ),
        (
            lambda: PipelineModule.of(nn.Linear(2, 2)),
            ValueError,
            "must be a PipelineModule or an nn.Sequential, got Linear",
        ),
        (
            lambda: module(num_stages=None, topology=ProcessTopology(["data"], [2])),
            RuntimeError,
            "must have an axis 'pipe'",
        ),
        (lambda: module().set_checkpoint_interval(-1), ValueError, "interval must be at least 0"),
    ],
)
def test_wrong_descriptions_are_refused_in_words(
    make: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_weight_on_two_stages_without_a_tied_spec_is_refused() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    model = PipelineModule([one, torch.relu, two], num_stages=1)
    with pytest.raises(
        ValueError, match=r"layers 0 and 2 share the parameter '2.weight'.*with TiedLayerSpec"
    ):
        model.partition(2, "uniform")
    with pytest.raises(ValueError, match="layers 0 and 2 share"):
        PipelineModule([one, torch.relu, two], num_stages=3, partition_method="uniform")


# --- topologies -----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_topology_is_row_major(dims: list[int]) -> None:
    axes = ["pipe", "data", "model", "node"][: len(dims)]
    topology = ProcessTopology(axes, dims)
    assert topology.world_size() == math.prod(dims)
    for rank in range(math.prod(dims)):
        assert topology.get_rank(**topology.get_coord(rank)._asdict()) == rank
    for axis, length in zip(axes, dims, strict=True):
        lists = topology.get_axis_comm_lists(axis)
        assert sorted(itertools.chain(*lists)) == list(range(math.prod(dims)))
        assert {len(ranks) for ranks in lists} == {length}
    if len(dims) <= 2:
        mesh = mesh_of(topology)
        assert [dict(topology.get_coord(rank)._asdict()) for rank in range(mesh.size)] == [
            {axis: mesh.coordinate(rank)[axis] for axis in axes} for rank in range(mesh.size)
        ]


def test_topologies_and_grids_answer_as_upstream_documents() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("expert") == []
    assert (
        topology.get_dim("expert"),
        topology.get_rank_repr(3),
        topology.get_rank_repr(3, omit_axes=["data"]),
    ) == (
        0,
        "model_01",
        "pipe_00-model_01",
    )
    grid = PipelineParallelGrid(topology, rank=6)
    assert (grid.get_stage_id(), grid.get_data_parallel_rank(), grid.get_slice_parallel_rank()) == (
        1,
        1,
        0,
    )
    assert (grid.is_first_stage, grid.is_last_stage, grid.stage_to_global(0, data=0)) == (
        False,
        True,
        0,
    )
    assert (grid.pp_group, grid.dp_group, grid.get_data_parallel_world_size()) == (
        [2, 6],
        [4, 6],
        2,
    )
    assert grid.p2p_groups[2] == [2, 6]
    assert grid.p2p_groups[6] == [6, 2]
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (2, 4)
    assert grid.get_pipe_parallel_group() is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ProcessTopology(["pipe", "data"], [2]), "one for each of dims"),
        (
            lambda: ProcessTopology(["pipe"], [0]),
            "the length of axis 'pipe' must be an integer of at least 1, got 0",
        ),
        (
            lambda: ProcessTopology(["pipe", "data"], [2, 2]).get_rank(pipe=0),
            "use filter_match for several",
        ),
        (lambda: ProcessTopology(["pipe"], [2]).get_rank(pipe=2), "coordinates must be inside"),
        (
            lambda: ProcessTopology(["pipe"], [2]).get_coord(2),
            "rank must be at least 0 and below 2, got 2",
        ),
        (
            lambda: mesh_of(PipeModelDataParallelTopology(2, 2, 1)),
            "axes other than 'pipe' and 'data' must have length 1",
        ),
    ],
)
def test_wrong_topologies_are_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_mesh_of_a_topology_has_the_axis_data() -> None:
    assert mesh_of(ProcessTopology(["pipe"], [3])) == Mesh.of(pipe=3, data=1)
    assert isinstance(module().build(0, 1), StageLayers)


# --- in a job -------------------------------------------------------------------------------------


def held_in_a_job() -> tuple[list[str], bool, bool, list[list[int]], str]:
    """What a rank of three stages has: names, whether values are those of the
    description, whether a stage is built once.
    """
    model, rank = module(), job().rank
    stage = model.build(model.parts[rank], model.parts[rank + 1])
    whole = dict(StageLayers(model.specs, [(0, 9)], model.tied, LayerSeeds()).named_parameters())
    own = dict(model.named_parameters())
    with pytest.raises(RuntimeError) as found:
        module(num_stages=2)
    same = all(torch.equal(own[name], whole[name]) for name in own)
    grid = grid_of(model)
    groups = (
        grid.get_pipe_parallel_group(),
        grid.get_model_parallel_group(),
        grid.get_slice_parallel_group(),
    )
    return (
        list(own),
        same,
        all(own[n] is p for n, p in stage.named_parameters()),
        [grid.pp_group, *map(dist.get_process_group_ranks, groups)],
        str(found.value),
    )


def test_a_rank_of_a_job_builds_its_own_stage_once(ranks: RankPool) -> None:
    names, same, is_once, groups, errors = zip(*ranks(3, held_in_a_job), strict=True)
    assert names == tuple(
        [n for n, _ in module().build(3 * s, 3 * s + 3).named_parameters()] for s in range(3)
    )
    assert all(same)
    assert all(is_once)
    every = [0, 1, 2]
    assert groups == tuple([every, every, every, [rank]] for rank in every)
    assert {
        "num_stages must divide the number of ranks, 3, got 2; start 2 ranks" in error
        for error in errors
    } == {True}
