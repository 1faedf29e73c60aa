"""The dataflow of flat buffers and the list of their state's leaves, against the specs,
the steps and the traffic of plans.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
from hypothesis import given, strategies as st
from training import Odd, config, make

import fzero
from fzero.config.stages import STAGES
from fzero.estimation.dry_run import dry_run
from fzero.optim.precision import Dtypes
from fzero.plans.dataflow import BufferDataflow, GradHome, Holds, carried
from fzero.plans.mesh_axes import num_ranks, shard_axes
from fzero.plans.plan import Plan
from sharding import Mesh, Partition, TensorSpec

MESHES = [
    Mesh.of(data=1),
    Mesh.of(data=4),
    Mesh.of(node=2, data=2),
    Mesh.of(node=2, data=1),
    Mesh.of(pod=2, node=2, data=2),
]
DTYPES = Dtypes("bfloat16", "bfloat16", "float32", "float32", "float32")

PARTS = ("state.params", "state.master", "state.grads", "state.optimizer")

flows = given(st.integers(0, 3), st.sampled_from(MESHES), st.booleans(), st.integers(0, 50))


def plan_of(mesh: Mesh, stage: int, is_hpz: bool = False, **zero: Any) -> Plan:
    size = {"zero_hpz_partition_size": mesh.axis_size("data")} if is_hpz and stage == 3 else {}
    return fzero.plan(make(Odd), config(stage, **zero, **size), mesh=mesh)


@flows
def test_a_buffer_s_lengths_are_those_of_its_specs(
    stage: int, mesh: Mesh, is_hpz: bool, numel: int
) -> None:
    cfg = fzero.Config.load(
        config(3, zero_hpz_partition_size=mesh.axis_size("data")) if is_hpz else config(3)
    )
    axes = shard_axes(mesh, cfg.zero_optimization) if stage == 3 else ("data",)
    specs, partition = (
        STAGES[stage].over(axes),
        Partition(numel, num_ranks(mesh, axes), multiple_of=8),
    )
    flow = BufferDataflow.of(specs, DTYPES, partition, mesh, axes)

    def held(spec: Any) -> int:
        return TensorSpec((partition.padded_numel,), "float32", spec).local_shape(mesh)[0]

    lengths = flow.param_numel, flow.grad_numel, flow.updated_numel
    assert lengths == (held(specs.params), held(specs.grads), held(specs.optimizer))
    assert (
        flow.updated_numel
        == {"full": partition.padded_numel, "shard": partition.shard_numel}[flow.updates]
    )
    assert (
        flow.reduced_numel
        == {"full": partition.padded_numel, "shard": partition.shard_numel}[flow.reduces_to]
    )
    assert (flow.collects == "full") == (flow.grad_numel == partition.padded_numel)


@flows
def test_what_is_scattered_is_gathered_and_joined_again(
    stage: int, mesh: Mesh, is_hpz: bool, numel: int
) -> None:
    for buffer in plan_of(mesh, stage, is_hpz).flat_buffers:
        flow = buffer.flow
        assert {*flow.scatters_over, *flow.sums_over} >= {
            name for name in mesh.names if mesh.axis_size(name) > 1
        }
        assert flow.updated_numel * num_ranks(mesh, flow.joins_over) == flow.param_numel
        assert flow.param_numel * num_ranks(mesh, flow.gathers_over) == buffer.padded_numel
        assert flow.reduced_numel * num_ranks(mesh, flow.scatters_over) == buffer.padded_numel


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("keys", "is_in_place"),
    [
        ({}, True),
        ({"bf16": {"enabled": True}}, True),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, False),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, False),
    ],
)
def test_no_reduction_waits_for_another_where_two_ranks_sum_the_state_s_own_gradients(
    stage: int, num_ranks: int, keys: dict[str, Any], is_in_place: bool
) -> None:
    rules = fzero.plan(make(Odd), config(stage) | keys, world_size=num_ranks).unit_rules
    is_free = is_in_place and stage == 0 and num_ranks == 2
    assert {unit.reduced_numel > 0 for unit in rules.units.values() if unit.grads} == {not is_free}


Contents = dict[str, str]
"""What a tensor holds: gradients of visits, each summed so far over "one" rank, over
the "shard" axes or over "all".
"""


def visited(
    flow: BufferDataflow, home: GradHome, held: Contents, visit: str, *, is_last: bool
) -> Contents:
    """The content of a gradient's home after a visit that follows `home`, by what each
    rule means.
    """
    assert not (home.adds_to_sum and home.fills == "scratch")
    flat = dict(held) if home.adds_to_sum else {}
    flat[visit] = "one"
    held = flat if home.fills == "home" else held  # it is written over
    if not home.reduces:
        return flat
    assert {*flat.values()} == {"one"}  # what is reduced must not be reduced again
    reduced = dict.fromkeys(flat, "all" if is_last or not flow.sums_over else "shard")
    if home.adds_held:
        assert {*held.values()} <= {"shard"} and is_last
        reduced |= dict.fromkeys(held, "all")
    elif home.adds_late:
        assert not {*held} & {*reduced}
        reduced |= held
    else:
        assert {*held} <= {*reduced}  # nothing that the home held is lost
    assert not (home.is_in_place and (home.adds_held or home.adds_late))
    return reduced


@given(
    *(st.integers(0, 3), st.sampled_from(MESHES), st.booleans(), st.booleans()),
    *(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3)),
)
def test_every_gradient_of_a_step_is_in_its_home_once_and_summed_over_all_ranks(
    stage: int, mesh: Mesh, is_here: bool, is_cast: bool, visits: list[int], num_last: int
) -> None:
    """Backwards of one to three visits of a unit; the last ones count as the last of
    the step.
    """
    axes = shard_axes(mesh, fzero.Config.load(config(stage)).zero_optimization)
    dtypes = DTYPES if is_cast else Dtypes(*["float32"] * 5)
    flow = BufferDataflow.of(
        STAGES[stage].over(axes), dtypes, Partition(8, num_ranks(mesh, axes)), mesh, axes
    )
    holds: Holds = "nothing"
    held: Contents = {}
    was_last = False
    for index, num_visits in enumerate(visits):
        is_last = index >= len(visits) - num_last
        holds = carried(holds, is_first=index == 0, was_last=was_last)
        for visit in range(num_visits):
            home = flow.home(holds, is_last=is_last, is_here=is_here)
            assert is_here or (home.fills != "home" and not home.is_in_place)
            held, holds = (
                visited(flow, home, held, f"{index}.{visit}", is_last=is_last),
                home.leaves,
            )
        was_last = is_last
    every = {f"{index}.{visit}" for index, num in enumerate(visits) for visit in range(num)}
    assert held == dict.fromkeys(every, "all")


def test_one_rank_sends_nothing_and_does_not_round_to_the_dtype_of_communication() -> None:
    sent = {}
    for mesh in (Mesh.of(data=1), Mesh.of(data=2)):
        flow = BufferDataflow.of(STAGES[2], DTYPES, Partition(8, mesh.size), mesh, ("data",))
        sent[mesh.size] = flow.send_dtype, flow.keep_dtype
    assert sent == {1: ("float32", "float32"), 2: ("bfloat16", "float32")}


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor", "Muon"])
@pytest.mark.parametrize("stage", range(4))
def test_the_leaves_of_all_buffers_are_those_of_the_state_under_their_names(
    stage: int, optimizer: str
) -> None:
    cfg = config(stage) | {"optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    cfg |= {"bf16": {"enabled": True}} if optimizer == "AdamW" else {}
    model = make(Odd)
    next(model.parameters()).requires_grad_(False)
    step = fzero.make_train_step(model, cfg)
    accessors, specs, _ = optree.tree_flatten_with_accessor(step.specs)
    named = {
        accessor.codify("state"): spec for accessor, spec in zip(accessors, specs, strict=True)
    }
    state = {name: spec for name, spec in named.items() if name.startswith(PARTS)}
    leaves = [leaf for buffer in step.plan.flat_buffers for leaf in step.plan.leaves(buffer)]
    assert {leaf.state_name: leaf.spec for leaf in leaves} == state
    for names in (
        [x.state_name for x in leaves],
        [x.placed_as for x in leaves],
        [x.stream_name for x in leaves],
    ):
        assert len(set(names)) == len(leaves)
    assert {leaf.placed_as for leaf in leaves if leaf.is_divided} == {*step.plan.placements}


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", range(4))
def test_a_dry_run_sends_along_each_axis_what_the_plan_says(stage: int, mesh: Mesh) -> None:
    plan = plan_of(mesh, stage, stage3_param_persistence_threshold=0)
    planned = {axis: sum(sent.values()) for axis, sent in plan.sent_nbytes_by_axis.items()}
    sent = dry_run(plan).timeline.sent_by_axis
    assert {axis: sent.get(axis, 0) for axis in planned} == planned
