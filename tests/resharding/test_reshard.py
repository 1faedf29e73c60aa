"""The laws of moving a training state to another stage, number of ranks, mesh or
layout.
"""

from __future__ import annotations

import gc
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from ranks import RankError, RankPool
from test_sharding_laws import counted_lines
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training import ADAMW, Odd, Plain, config, make, part, tokens, vectors

import fzero
from fzero.comms import collectives
from fzero.optim.fragments import grids_of
from fzero.plans.plan import FlatParamPlan
from fzero.state import TrainState
from sharding import Mesh, Order, Sharded, TensorSpec, round_robin
from sharding.transfer import merged
from sharding.views import flatten, take_shard, torch_dtype

# --- steps, and the states that they would cut of one whole state ---------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": ADAMW,
    "SGD": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3}},
    "Adamax": {"type": "Adamax", "params": {"lr": 1e-2}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
}
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"bf16": {"enabled": True}}}
UNITS = (None, ["blocks"], ["blocks.*"], ["blocks.0", "norm"])
GROUPS: tuple[list[dict[str, Any]], ...] = ([], [{"params": r"norm|bias", "weight_decay": 0.0}])


class Normed(nn.Module):
    """`Odd` with a module that has buffers, one of them 0-d and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.statistics = Odd(5, 3), nn.BatchNorm1d(3)


ORDERS: dict[str, Any] = {
    "as declared": None,
    "round robin": round_robin,
    "backwards": lambda length: Order(tuple(reversed(range(length)))),
    "by length of name": sorted(dict(Normed().named_parameters()), key=len),
}


@dataclass(frozen=True)
class Setting:
    """What a step is made from, besides the model."""

    stage: int
    world_size: int
    optimizer: str = "AdamW"
    precision: str = "float32"
    units: int = 0
    groups: int = 0
    threshold: int = 0
    order: str = "as declared"
    mesh: Mesh | None = None
    is_hpz: bool = False


@cache
def step_of(setting: Setting) -> fzero.TrainStep:
    zero = {
        "stage3_param_persistence_threshold": setting.threshold,
    }
    if setting.is_hpz and setting.mesh is not None and setting.stage == 3:
        zero["zero_hpz_partition_size"] = setting.mesh.axis_size("data")
    cfg = (
        config(setting.stage, optimizer=OPTIMIZERS[setting.optimizer], **zero)
        | PRECISIONS[setting.precision]
    )
    units = UNITS[setting.units]
    return fzero.make_train_step(
        make(Normed),
        cfg,
        mesh=fzero.comms.AbstractAxis("data", setting.world_size, mesh=setting.mesh),
        units=units and [f"odd.{name}" for name in units],
        param_groups=GROUPS[setting.groups] if setting.optimizer == "AdamW" else [],
        order=ORDERS[setting.order],
    )


MESHES = (
    *(Mesh.of(data=size) for size in range(1, 6)),
    *(
        Mesh.of(node=2, data=2),
        Mesh.of(node=2, data=3),
        Mesh.of(node=3, data=2),
        Mesh.of(node=3, data=1),
    ),
    *(Mesh.of(data=2, node=2), Mesh.of(pod=2, node=2, data=2), Mesh.of(pod=2, data=2, node=2)),
)


def settings(
    optimizer: str, *, precisions: tuple[str, ...] = ("float32",)
) -> st.SearchStrategy[Setting]:
    return st.sampled_from(MESHES).flatmap(lambda mesh: _settings_on(mesh, optimizer, precisions))


def _settings_on(
    mesh: Mesh, optimizer: str, precisions: tuple[str, ...]
) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        stage=st.integers(0, 3),
        world_size=st.just(mesh.size),
        mesh=st.just(mesh),
        is_hpz=st.booleans() if mesh.axis_size("data") not in (1, mesh.size) else st.just(False),
        optimizer=st.just(optimizer),
        precision=st.sampled_from(precisions),
        units=st.integers(0, len(UNITS) - 1),
        groups=st.integers(0, len(GROUPS) - 1),
        threshold=st.sampled_from((0, 30)),
        order=st.sampled_from(sorted(ORDERS)),
    )


@st.composite
def paths(
    draw: st.DrawFn, length: int, precisions: tuple[str, ...] = ("float32", "bfloat16")
) -> list[Setting]:
    """Settings of one optimizer."""
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    return [draw(settings(optimizer, precisions=precisions)) for _ in range(length)]


def whole(quantity: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """The value of a quantity of a parameter, which tells the three and the place in
    it; exact in fp32.
    """
    index = zlib.crc32(f"{quantity}/{name}".encode()) % 16_000 * 1000
    return torch.arange(index, index + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def state_of(step: fzero.TrainStep, rank: int) -> TrainState[Tensor]:
    """What a rank holds of the state whose every quantity is `whole`; written without
    regard to `fzero.reshard`.
    """
    specs, mesh = step.specs, step.plan.mesh
    state = optree.tree_map(
        lambda spec: torch.zeros(spec.local_shape(mesh), dtype=torch_dtype(spec.dtype)), specs
    )

    def held(flat: Tensor, spec: TensorSpec) -> Tensor:
        """What the rank holds of a whole buffer."""
        if not isinstance(spec.spec, Sharded):
            return flat
        return take_shard(flat, spec.partition(mesh), mesh.shard_of(rank, spec.spec))

    for buffer in step.plan.flat_buffers:
        # nothing remembers more
        value = _cut("value", buffer) if buffer.trainable else _cut("value", buffer) % 128
        state.params[buffer.key].copy_(
            held(value.to(torch_dtype(buffer.dtypes.param)), buffer.params)
        )
        if not buffer.trainable:
            continue
        if buffer.has_master:
            state.master[buffer.key].copy_(held(value, buffer.master))
        accessors, leaves, _ = optree.tree_flatten_with_accessor(state.optimizer[buffer.key])
        for accessor, leaf in zip(accessors, leaves, strict=True):
            path = accessor.codify("")
            if leaf.ndim == 0:
                leaf.fill_(7)
            elif path in (".row_var", ".col_var"):
                leaf.copy_(_statistics(path, buffer))
            else:
                leaf.copy_(held(_cut(path, buffer), buffer.master))
    for name, tensor in state.buffers.items():
        tensor.copy_(whole("buffer", name, tuple(tensor.shape)))
    for kind, tensor in step.runtime.builder.rng(rank).items():
        state.rng[kind].copy_(tensor)
    scale = fzero.optim.LossScale(torch.tensor(1.0), torch.tensor(2), torch.tensor(0))
    return state._replace(step=torch.tensor(11), loss_scale=scale)


def _cut(quantity: str, buffer: FlatParamPlan) -> Tensor:
    layout = buffer.layout
    return flatten({n: whole(quantity, n, layout.shape(n)) for n in layout.names}, layout)


def _statistics(path: str, buffer: FlatParamPlan) -> Tensor:
    entries = [
        whole(
            path,
            buffer.layout.names[i],
            (grid.matrices * (grid.rows if path == ".row_var" else grid.columns),),
        )
        for i, grid in grids_of(buffer.layout).items()
    ]
    return torch.cat(entries)


def states_of(step: fzero.TrainStep) -> list[TrainState[Tensor]]:
    """The ranks' states, where the step holds them."""
    states = [state_of(step, rank) for rank in range(step.world_size)]
    return states if step.device.type == "cpu" else [fzero.place(state, step) for state in states]


def assert_same(states: list[Any], others: list[Any]) -> None:
    """Equal in structure, dtypes, shapes and every element."""
    assert len(states) == len(others)
    for state, other in zip(states, others, strict=True):
        accessors, leaves, treespec = optree.tree_flatten_with_accessor(state)
        theirs, their_treespec = optree.tree_flatten(other)
        assert treespec == their_treespec
        for accessor, leaf, their in zip(accessors, leaves, theirs, strict=True):
            assert leaf.dtype == their.dtype, accessor.codify("state")
            assert torch.equal(leaf.cpu(), their.cpu()), accessor.codify("state")


# --- in one process -------------------------------------------------------------------------------


@given(paths(2))
def test_resharded_states_are_what_the_new_step_would_cut_of_the_whole_one(
    path: list[Setting],
) -> None:
    old, new = map(step_of, path)
    assert_same(fzero.resharding.reshard_all(states_of(old), old, new), states_of(new))


@given(paths(2))
def test_there_and_back_again_changes_nothing(path: list[Setting]) -> None:
    old, new = map(step_of, path)
    states = states_of(old)
    assert_same(
        fzero.resharding.reshard_all(fzero.resharding.reshard_all(states, old, new), new, old),
        states,
    )


@pytest.mark.long
@given(paths(3))
def test_two_moves_are_one(path: list[Setting]) -> None:
    first, second, third = map(step_of, path)
    by_way = fzero.resharding.reshard_all(
        fzero.resharding.reshard_all(states_of(first), first, second), second, third
    )
    assert_same(by_way, fzero.resharding.reshard_all(states_of(first), first, third))


def test_the_states_given_stay_as_they_were_and_share_no_memory_with_the_new_ones() -> None:
    old = step_of(Setting(1, 2))
    states = states_of(old)
    made = fzero.resharding.reshard_all(states, old, old)
    assert_same(made, states)
    for tensor in optree.tree_leaves(made):
        tensor.zero_()
    assert_same(states, states_of(old))


def held_by(step: fzero.TrainStep, rank: int) -> Iterator[tuple[str, str, int]]:
    """Every element that a rank holds after a step: quantity, parameter, place in it."""
    mesh = step.plan.mesh
    for buffer in step.plan.flat_buffers:
        layout = buffer.layout
        places = [
            (name, i)
            for name in layout.names
            for i in range(layout.bounds(name)[1] - layout.bounds(name)[0])
        ]

        def held(spec: TensorSpec) -> list[tuple[str, int]]:
            if not isinstance(spec.spec, Sharded):
                return places  # noqa: B023
            start, stop = spec.partition(mesh).bounds(mesh.shard_of(rank, spec.spec))
            return places[start:stop]  # noqa: B023

        yield from (("params", *x) for x in held(buffer.params))
        if buffer.trainable:
            for quantity in ("exp_avg", "exp_avg_sq", *(["master"] if buffer.has_master else [])):
                yield from ((quantity, *x) for x in held(buffer.master))


def planned(
    plan: fzero.resharding.ReshardPlan, process: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """The moves between different processes, with their flows."""
    for window in plan.rounds:
        for flow in window.flows:
            yield from (
                (flow, move)
                for move in plan.moves(flow, process)
                if move.source_rank != move.target_rank
            )


@given(st.tuples(settings("AdamW"), settings("AdamW")))
def test_a_process_gets_each_element_once_that_it_needs_and_has_not(
    path: tuple[Setting, Setting],
) -> None:
    old, new = map(step_of, path)
    plan = fzero.resharding.plan_reshard(old.plan, new.plan)
    held = [set(held_by(old, rank)) for rank in range(old.world_size)]
    needed = [set(held_by(new, rank)) for rank in range(new.world_size)]
    buffers = sum(spec.numel for spec in new.plan.buffers.values())
    for rank, elements in enumerate(needed):
        is_there = rank < old.world_size
        missing = len(elements - (held[rank] if is_there else set())) + (0 if is_there else buffers)
        assert sum(move.numel for _, move in planned(plan) if move.target_rank == rank) == missing


@given(
    st.tuples(
        settings("AdamW", precisions=("bfloat16",)), settings("AdamW", precisions=("bfloat16",))
    )
)
def test_in_16_bits_no_element_comes_as_a_master_and_again_as_a_parameter(
    path: tuple[Setting, Setting],
) -> None:
    old, new = map(step_of, path)
    plan = fzero.resharding.plan_reshard(old.plan, new.plan)
    held = [set(held_by(old, rank)) for rank in range(old.world_size)]
    for rank in range(new.world_size):
        needed = set(held_by(new, rank))
        masters = {x[1:] for x in needed if x[0] == "master"}
        needed = {x for x in needed if x[0] != "params" or x[1:] not in masters}
        missing = len(needed - (held[rank] if rank < old.world_size else set()))
        parameters = [
            m.numel
            for f, m in planned(plan)
            if m.target_rank == rank and "buffers" not in f.target.name
        ]
        assert sum(parameters) == missing


@given(paths(2))
def test_the_moves_of_one_process_are_those_of_all_that_it_takes_part_in(
    path: list[Setting],
) -> None:
    old, new = map(step_of, path)
    num_processes = max(old.world_size, new.world_size) + 1
    rows = list(
        zip([*range(old.world_size)] + [None] * num_processes, range(num_processes), strict=False)
    )
    # The processes are in another order than the ranks of both jobs, which are not on the same
    # ones.
    shifted = [
        r if r is not None and r < new.world_size else None
        for r in (num_processes - 1 - i for _, i in rows)
    ]
    places = [
        fzero.resharding.JobRank(rank, other)
        for (rank, _), other in zip(rows, shifted, strict=True)
    ]
    for plan in (
        fzero.resharding.plan_reshard(old.plan, new.plan, rng=new.specs.rng),
        fzero.resharding.plan_reshard(old.plan, new.plan, rng=new.specs.rng, job_ranks=places),
    ):
        for flow in (flow for window in plan.rounds for flow in window.flows):
            everything = list(plan.moves(flow))
            for process in range(len(plan.job_ranks)):
                own = [
                    move for move in everything if process in (move.source_rank, move.target_rank)
                ]
                assert list(plan.moves(flow, process)) == list(merged(own))


def test_a_plan_of_many_tensors_on_many_ranks_holds_no_moves() -> None:
    """Its memory is that of the names, and of the processes: neither elements nor
    parameters × ranks enter.
    """

    def held(num_blocks: int, numel: int, world_size: int) -> float:
        params = [torch.empty(numel, device="meta") for _ in range(12 * num_blocks)]
        model = nn.ModuleList(
            nn.ParameterList(params[start : start + 12]) for start in range(0, len(params), 12)
        )
        cfg = config(3, stage3_max_live_parameters=10**12)
        old, new = (fzero.plan(model, cfg, world_size=w) for w in (world_size, world_size * 3 // 4))
        tracemalloc.start()
        plan = fzero.resharding.plan_reshard(old, new)
        gc.collect()  # cycles that wait for the collector are not held
        nbytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(plan.rounds) > num_blocks // 2
        return nbytes

    base = held(100, 1000, 8)
    held(100, 10**9, 8)  # fills the caches of the process, which are not of a plan
    assert held(100, 10**9, 8) < 1.1 * base + 20_000  # larger integers take some bytes more
    ranks = 4096 + 3072
    assert held(100, 1000, 4096) < base + 300 * ranks, (
        "places, and the process of each piece; 300 flows' moves would be more"
    )


def test_what_every_rank_holds_before_and_after_costs_a_process_no_look_at_the_others() -> None:
    """Parameters whole on 4096 ranks and on 3072: counted in lines that run, for a time
    would depend on the machine.
    """
    model = nn.ModuleList(nn.Linear(400, 4000, device="meta") for _ in range(4))
    cfg = config(1) | PRECISIONS["bfloat16"]
    old, new = (fzero.plan(model, cfg, world_size=w) for w in (4096, 3072))
    plan = fzero.resharding.plan_reshard(old, new)
    flows = [
        flow for window in plan.rounds for flow in window.flows if "params" in flow.target.name
    ]
    moves, lines = counted_lines(lambda: [list(plan.moves(flow, 7)) for flow in flows])
    assert len(flows) == 4 and all(0 < len(own) <= 2 for own in moves)
    # Who else lacks them is asked once, and not for each flow: a look at each new rank is two
    # lines.
    assert lines < 2 * 3072 + 4 * 1000


@pytest.mark.long
@given(paths(2))
def test_each_process_sees_its_own_moves_and_both_ends_see_them_in_one_order(
    path: list[Setting],
) -> None:
    old, new = map(step_of, path)
    plan = fzero.resharding.plan_reshard(old.plan, new.plan, rng=new.specs.rng)
    for window in plan.rounds:
        for flow in window.flows:
            everything = {element for move in plan.moves(flow) for element in _elements(move)}
            by_process = [list(plan.moves(flow, process)) for process in range(len(plan.job_ranks))]
            assert everything == {
                element for moves in by_process for move in moves for element in _elements(move)
            }
            for sender, sent in enumerate(by_process):
                for receiver, received in enumerate(by_process):
                    ends = [
                        [
                            x
                            for move in moves
                            if (move.source_rank, move.target_rank) == (sender, receiver)
                            for x in _elements(move)
                        ]
                        for moves in (sent, received)
                    ]
                    assert ends[0] == ends[1]


def _elements(move: Any) -> list[tuple[int, int, int, int]]:
    return [
        (move.source_rank, move.source_start + i, move.target_rank, move.target_start + i)
        for i in range(move.numel)
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stages", [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_a_higher_stage_on_the_same_ranks_sends_nothing(
    stages: tuple[int, int], precision: str
) -> None:
    old, new = (step_of(Setting(stage, 4, precision=precision)) for stage in stages)
    assert fzero.resharding.plan_reshard(old.plan, new.plan).sent_nbytes == (0, 0, 0, 0)
    assert sum(fzero.resharding.plan_reshard(new.plan, old.plan).sent_nbytes) > 0 or stages == (
        1,
        2,
    )


def test_what_every_old_rank_holds_is_sent_by_all_of_them_in_equal_parts() -> None:
    model = Plain(width=64)
    old, new = (fzero.plan(model, config(0), world_size=w) for w in (4, 8))
    sent = fzero.resharding.plan_reshard(old, new).sent_nbytes
    state = 12 * sum(param.numel() for param in model.parameters())
    assert sum(sent) == 4 * state and sent[4:] == (0,) * 4
    # what the alignment of shards makes
    assert max(sent) - min(sent[:4]) < 4 * 12 * 32 * 4 * len(old.flat_buffers)


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [{}, {"zero_hpz_partition_size": 2}], ids=["hybrid", "hpZ"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_hold_the_same_send_it_in_equal_parts(stage: int, zero: dict[str, Any]) -> None:
    model = Plain(width=64)
    old = fzero.plan(
        model, config(stage, **(zero if stage == 3 else {})), mesh=Mesh.of(node=3, data=2)
    )
    new = fzero.plan(model, config(0), world_size=12)
    sent = fzero.resharding.plan_reshard(old, new).sent_nbytes
    state = 12 * sum(param.numel() for param in model.parameters())
    # of the state; what each of the first six ranks has of it
    parts = {"parameters": 1 / 3, "moments": 2 / 3}
    is_fine = stage == 3 and zero
    held = {"parameters": 1 if stage == 1 else 1 / 2, "moments": 1 / 6 if is_fine else 1 / 2}
    lacked = sum(parts[name] * (6 * (1 - held[name]) + 6) for name in parts)
    assert sum(sent) == pytest.approx(state * lacked) and sent[6:] == (0,) * 6
    # what the alignment of shards makes
    assert max(sent) - min(sent[:6]) < 12 * 12 * 32 * 6 * len(old.flat_buffers)


def test_a_mesh_of_as_many_ranks_sends_what_lies_elsewhere_and_no_more() -> None:
    """To finer shards nothing, for each holds what it keeps of it."""
    model = Plain(width=64)
    mesh = Mesh.of(node=2, data=2)
    hybrid, hpz = (
        fzero.plan(model, config(3, **zero), mesh=mesh)
        for zero in ({}, {"zero_hpz_partition_size": 2})
    )
    assert fzero.resharding.plan_reshard(hybrid, hpz).sent_nbytes == (0,) * 4
    sent = fzero.resharding.plan_reshard(hpz, hybrid).sent_nbytes
    assert sum(sent) == 8 * sum(param.numel() for param in model.parameters()), (
        "moments, of the other half of a shard"
    )
    assert max(sent) - min(sent) <= 8 * hpz.padding
    assert "ZeRO stage 3 on 4 ranks, node 2 × data 2 -> stage 3 on 4 ranks" in str(
        fzero.resharding.plan_reshard(hybrid, hpz)
    )


def test_numbers_of_a_larger_plan_do_not_grow_with_its_elements() -> None:
    plans = [
        fzero.plan(nn.Linear(10_000, 10_000, device="meta"), config(stage), world_size=w)
        for stage, w in ((1, 48), (3, 64))
    ]
    plan = fzero.resharding.plan_reshard(*plans)
    flows = [flow for window in plan.rounds for flow in window.flows]
    assert 0 < sum(len(list(plan.moves(flow))) for flow in flows) < 3 * (48 + 64 + 2)
    assert "ZeRO stage 1 on 48 ranks -> stage 3 on 64 ranks" in str(plan)


def test_a_rank_keeps_its_random_state_and_a_further_one_starts_as_in_init() -> None:
    old, new = step_of(Setting(1, 2)), step_of(Setting(1, 3))
    states = states_of(old)
    for rank, state in enumerate(states):
        state.rng["cpu"].copy_(torch.Generator().manual_seed(100 + rank).get_state())
    made = fzero.resharding.reshard_all(states, old, new)
    for rank in range(2):
        assert torch.equal(made[rank].rng["cpu"], states[rank].rng["cpu"])
    assert torch.equal(made[2].rng["cpu"], new.runtime.builder.rng(2)["cpu"])


def test_padding_of_the_optimizer_state_is_what_init_makes_it() -> None:
    optimizer = {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 3.0}}
    old, new = (
        fzero.make_train_step(
            make(Plain),
            config(stage, optimizer=optimizer),
            mesh=fzero.comms.AbstractAxis("data", w),
        )
        for stage, w in ((0, 1), (3, 3))
    )
    last = fzero.resharding.reshard_all([state_of(old, 0)], old, new)[-1]
    for buffer in new.plan.flat_buffers:
        padding = buffer.layout.partition.padding
        assert padding and (last.optimizer[buffer.key].sum[-padding:] == 3.0).all()
        assert (last.params[buffer.key][-padding:] == 0.0).all()


def test_a_loss_scale_stays_where_both_steps_move_it_and_else_starts_anew() -> None:
    cfgs = {
        "moved": {"fp16": {"enabled": True, "initial_scale_power": 4}},
        "fixed": {"fp16": {"enabled": True, "loss_scale": 32.0}},
        "none": {},
    }
    steps = {
        name: fzero.make_train_step(
            make(Plain), config(1) | cfg, mesh=fzero.comms.AbstractAxis("data", 1)
        )
        for name, cfg in cfgs.items()
    }
    state = state_of(steps["moved"], 0)._replace(
        loss_scale=fzero.optim.LossScale(torch.tensor(128.0), torch.tensor(1), torch.tensor(5))
    )
    for name, expected in (
        ("moved", (128.0, 1, 5)),
        ("fixed", (32.0, 2, 0)),
        ("none", (1.0, 2, 0)),
    ):
        (made,) = fzero.resharding.reshard_all([state], steps["moved"], steps[name])
        assert tuple(x.item() for x in made.loss_scale) == expected
    (made,) = fzero.resharding.reshard_all(
        [state_of(steps["none"], 0)], steps["none"], steps["moved"]
    )
    assert made.loss_scale.scale.item() == 16.0


# --- on real processes ----------------------------------------------------------------------------


class Lively(Odd):
    """`Odd` with module buffers that every step moves, and dropout, so that the random
    states matter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(7), self.norm, nn.Dropout(0.2))


@dataclass(frozen=True)
class Job:
    """A stage on some of the processes, in this order."""

    stage: int
    processes: tuple[int, ...]
    cfg: tuple[tuple[str, Any], ...] = ()
    units: tuple[str, ...] | None = None
    mesh: Mesh | None = None
    hpz: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        return config(
            self.stage, **({"zero_hpz_partition_size": self.hpz} if self.hpz else {})
        ) | dict(self.cfg)


def bind(
    job: Job, sent: list[fzero.comms.CommRecord] | None = None, model: Any = Lively, **options: Any
) -> fzero.TrainStep:
    """The job's step, on this process. Every process makes the group."""
    groups = dist.new_group(sorted(job.processes))
    axis: fzero.comms.ProcessAxis | fzero.comms.AbstractAxis = fzero.comms.AbstractAxis(
        "data", len(job.processes), mesh=job.mesh
    )
    if dist.get_rank() in job.processes:
        observe = None if sent is None else sent.append
        rank = sorted(job.processes).index(dist.get_rank())
        group = groups if len(job.processes) > 1 else None
        axis = fzero.comms.ProcessAxis("data", len(job.processes), rank, group, observe, job.mesh)
    units = None if job.units is None else list(job.units)
    return fzero.make_train_step(make(model), job.config, mesh=axis, units=units, **options)


def _batch(step: fzero.TrainStep, data: Any, index: int) -> Any:
    return part(data(index), step.rank, step.world_size)


def _train_through(
    jobs: list[Job], num_steps: int = 3, model: Any = Lively, data: Any = tokens, **options: Any
) -> Any:
    """Trains some steps in each job, one after the other; this process' curve, the
    state at the end, the weights.
    """
    state, curve, old, index = None, [], None, 0
    for job in jobs:
        new = bind(job, model=model, **options)
        is_here = dist.get_rank() in job.processes
        if old is not None:
            state = fzero.reshard(state, old, new)
        elif is_here:
            state = new.init()
        assert (state is not None) == is_here
        for _ in range(num_steps):
            if state is not None:
                state, metrics = new(state, _batch(new, data, index))
                curve.append((index, metrics.loss.item(), metrics.grad_norm.item()))
            index += 1
        old = new
    assert old is not None
    return curve, state, None if state is None else old.gather(state)


SQUARE = Mesh.of(node=2, data=2)
WORLD = {w: tuple(range(w)) for w in (1, 2, 3, 4)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("stages", [(0, 3), (3, 0), (1, 3), (3, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_goes_on_as_if_it_had_been_in_the_new_stage_all_along(
    ranks: RankPool, world_size: int, stages: tuple[int, int]
) -> None:
    old, new = (Job(stage, WORLD[world_size]) for stage in stages)
    moved = ranks(world_size, _train_through, [old, new])
    always = ranks(world_size, _train_through, [new], 6)
    for (curve, state, weights), (curve_always, state_always, weights_always) in zip(
        moved, always, strict=True
    ):
        assert curve == curve_always
        assert_same([state, weights], [state_always, weights_always])


@pytest.mark.covering(0)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stages", [(1, 3), (3, 2), (0, 3)])
def test_training_in_16_bits_goes_on_in_the_new_stage(
    ranks: RankPool, stages: tuple[int, int], precision: str
) -> None:
    cfg = (
        (
            precision,
            {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {}),
        ),
    )
    old, new = (Job(stage, WORLD[2], cfg) for stage in stages)
    moved = ranks(2, _train_through, [old, new], 3, Odd)
    always = ranks(2, _train_through, [new], 6, Odd)
    for (curve, state, _), (curve_always, state_always, _) in zip(moved, always, strict=True):
        assert curve == curve_always
        assert_same([state], [state_always])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["Lamb", "Adafactor", "Muon", "Adamax"])
def test_training_with_every_kind_of_optimizer_goes_on_in_the_new_stage(
    ranks: RankPool, name: str
) -> None:
    cfg = (("optimizer", OPTIMIZERS[name]),)
    old, new = (Job(stage, WORLD[2], cfg) for stage in (1, 3))
    moved = ranks(2, _train_through, [old, new], 3, Plain, vectors)
    always = ranks(2, _train_through, [new], 6, Plain, vectors)
    for (curve, state, _), (curve_always, state_always, _) in zip(moved, always, strict=True):
        assert curve == curve_always
        assert_same([state], [state_always])


IN_BF16 = (("bf16", {"enabled": True}), ("data_types", {"buffer_dtype": "bf16"}))
IN_FP16 = (
    ("fp16", {"enabled": True, "initial_scale_power": 8}),
    ("data_types", {"buffer_dtype": "fp16"}),
)
JOBS = [
    [Job(1, (0, 1)), Job(3, (0, 1, 2, 3))],
    [Job(3, (0, 1, 2, 3)), Job(1, (0, 1))],
    [Job(0, (0,)), Job(2, (0, 1, 2))],
    [Job(3, (0, 1, 2), units=("blocks",)), Job(3, (1, 2, 3))],
    [Job(2, (0, 1)), Job(3, (2, 3))],
    [Job(3, (0, 1, 2)), Job(0, (1, 2), units=("blocks.0", "norm")), Job(1, (0, 1, 2, 3))],
    [
        Job(3, (0, 1, 2)),
        Job(1, (0, 1), IN_BF16),
        Job(2, (1, 2), IN_FP16),
        Job(3, (0, 1), units=("blocks",)),
    ],
    [
        Job(3, (0, 1, 2, 3), IN_BF16, mesh=SQUARE),
        Job(3, (0, 1, 2, 3), IN_BF16, hpz=2),
        Job(2, (1, 2, 3), IN_BF16),
    ],
    [
        Job(1, (0, 2), mesh=Mesh.of(node=2, data=1)),
        Job(3, (0, 1, 2, 3), hpz=2),
        Job(0, (0, 1, 2, 3), mesh=SQUARE),
    ],
]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "jobs",
    JOBS,
    ids=lambda jobs: "-".join(
        (
            f"{j.stage}on{''.join(map(str, j.processes))}{'mesh' * (j.mesh is not None or j.hpz is not None)}"
        )
        for j in jobs
    ),
)
def test_on_other_processes_the_state_is_the_one_made_of_all_old_states(
    ranks: RankPool, jobs: list[Job]
) -> None:
    """The oracle is the move in one process, of which other laws tell what it does, and
    training from there.
    """
    world_size = 1 + max(process for job in jobs for process in job.processes)
    moved = ranks(world_size, _train_through, jobs)
    states = [state for _, state, _ in ranks(world_size, _train_through, jobs[:1])]
    steps = [_on_paper(job) for job in jobs]
    held = [states[process] for process in jobs[0].processes]
    for index in range(1, len(jobs)):
        held = fzero.resharding.reshard_all(held, steps[index - 1], steps[index])
        held = ranks(len(held), _train_from, jobs[index], held, 3 * index)
    assert_same([moved[process][1] for process in jobs[-1].processes], held)


def _on_paper(job: Job) -> fzero.TrainStep:
    units = None if job.units is None else list(job.units)
    return fzero.make_train_step(
        make(Lively),
        job.config,
        mesh=fzero.comms.AbstractAxis("data", len(job.processes), mesh=job.mesh),
        units=units,
    )


def _train_from(job: Job, states: list[TrainState[Tensor]], index: int) -> TrainState[Tensor]:
    step = bind(replace(job, processes=WORLD[len(states)]))
    state = states[step.rank]
    for offset in range(3):
        state, _ = step(state, _batch(step, tokens, index + offset))
    return state


def _sent(jobs: list[Job]) -> tuple[Any, list[fzero.comms.CommRecord], int]:
    sent: list[fzero.comms.CommRecord] = []
    old, new = (bind(job, sent) for job in jobs)
    state = old.init() if dist.get_rank() in jobs[0].processes else None
    sent.clear()
    fzero.reshard(state, old, new)
    moved = [record for record in sent if record.label.purpose == "reshard"]
    places = [
        fzero.resharding.JobRank(
            *(job.processes.index(process) if process in job.processes else None for job in jobs)
        )
        for process in range(dist.get_world_size())
    ]
    return (
        fzero.resharding.plan_reshard(
            old.plan, new.plan, job_ranks=places, rng=new.specs.rng
        ).sent_nbytes,
        moved,
        len(new.plan.units),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "jobs",
    [
        [Job(1, (0, 1)), Job(3, (0, 1))],
        [Job(3, (0, 1)), Job(0, (0, 1, 2))],
        [Job(0, (0, 1, 2)), Job(3, (1, 2))],
        [
            Job(2, (0, 1, 2), (("bf16", {"enabled": True}),)),
            Job(1, (0, 1), (("bf16", {"enabled": True}),)),
        ],
        [Job(3, (0, 1, 2, 3), hpz=2), Job(2, (0, 1, 2, 3), mesh=SQUARE)],
    ],
    ids=["1to3", "3to0", "0to3", "bf16", "hpZ to hybrid"],
)
def test_a_process_sends_the_bytes_of_the_plan_in_few_messages(
    ranks: RankPool, jobs: list[Job]
) -> None:
    world_size = 1 + max(process for job in jobs for process in job.processes)
    results = ranks(world_size, _sent, jobs)
    for process, (planned_nbytes, sent, num_units) in enumerate(results):
        assert sum(record.nbytes for record in sent) == planned_nbytes[process]
        assert {record.collective for record in sent} <= {"swap"}
        # A pair, at most two dtypes, what goes to one and what goes to all, in each unit and for
        # the rest.
        assert len(sent) <= (world_size - 1) * 2 * 2 * (num_units + 1)


def test_one_process_alone_changes_its_stage_without_a_process_group() -> None:
    old, new = (
        fzero.make_train_step(make(Odd), config(stage), mesh=fzero.comms.ProcessAxis("data"))
        for stage in (0, 3)
    )
    state, always = old.init(), new.init()
    for index in range(4):
        step = old if index < 2 else new
        state = fzero.reshard(state, old, new) if index == 2 else state
        assert state is not None
        state, _ = step(state, tokens(index))
        always, _ = new(always, tokens(index))
    assert_same([state], [always])


# --- memory ---------------------------------------------------------------------------------------


class Allocated(TorchDispatchMode):
    """The most bytes alive at once of what operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            x.untyped_storage().data_ptr()
            for x in optree.tree_leaves(args)
            if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                storage = x.untyped_storage()
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(
            self.peak, sum(nbytes for ref, nbytes in self._alive.values() if not ref.expired())
        )
        return out


def _peak(jobs: list[Job]) -> tuple[int, int, int]:
    """The most bytes alive besides the old state, those of the new state, and of one
    unit: parameters and two moments.
    """
    old, new = (bind(job, model=partial(Plain, 64)) for job in jobs)
    state = old.init() if dist.get_rank() in jobs[0].processes else None
    gc.disable()  # what only the garbage collector would free must count as alive
    try:
        with Allocated() as allocated:
            made = fzero.reshard(state, old, new)
    finally:
        gc.enable()
    unit = max(
        sum(b.padded_numel for b in unit.buffers)
        for plan in (old.plan, new.plan)
        for unit in plan.units
    )
    return allocated.peak, sum(x.nbytes for x in optree.tree_leaves(made)), 12 * unit


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "jobs",
    [
        [Job(3, (0, 1, 2)), Job(0, (0, 1, 2))],
        [Job(3, (0, 1)), Job(3, (0, 1, 2, 3))],
        [Job(0, (0,)), Job(1, (0, 1, 2, 3))],
        [Job(3, (0,)), Job(1, (1, 2, 3))],
        [Job(1, (0, 1, 2)), Job(0, (0, 3))],
        [Job(3, (0, 1, 2, 3), hpz=2), Job(3, (0, 1, 2, 3), mesh=SQUARE)],
    ],
    ids=lambda jobs: "-".join(f"{j.stage}on{len(j.processes)}" for j in jobs),
)
def test_no_process_holds_more_than_both_states_and_the_shards_of_one_unit(
    ranks: RankPool, jobs: list[Job]
) -> None:
    for peak, made, unit in ranks(4, _peak, jobs):
        assert peak <= made + unit + 4096  # the ranks compare steps in some hundred bytes


# --- errors ---------------------------------------------------------------------------------------


def _fails(old: fzero.TrainStep, new: fzero.TrainStep, *words: str) -> None:
    with pytest.raises(ValueError, match="reshard") as caught:
        fzero.resharding.reshard_all(states_of(old), old, new)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def _plain(
    cfg: Mapping[str, Any] | None = None, model: Any = Plain, **options: Any
) -> fzero.TrainStep:
    return fzero.make_train_step(
        make(model),
        config(1) | dict(cfg or {}),
        mesh=fzero.comms.AbstractAxis("data", 2),
        **options,
    )


def test_another_model_is_named() -> None:
    _fails(_plain(), _plain(model=partial(Plain, 16, 6)), "'blocks.5.weight'", "none", "(16, 16)")
    _fails(_plain(), _plain(model=partial(Plain, 8)), "'blocks.0.weight'", "(16, 16)", "(8, 8)")


def test_another_optimizer_is_reported_with_what_both_keep() -> None:
    sgd = {"optimizer": OPTIMIZERS["SGD"]}
    _fails(
        _plain(), _plain(sgd), "AdamState(step, exp_avg, exp_avg_sq)", "SGDState(step, momentum)"
    )
    _fails(_plain(), _plain({"optimizer": OPTIMIZERS["Lamb"]}), "AdamState", "LambState")


def test_a_master_does_not_become_narrower() -> None:
    pure = {
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
    }
    _fails(_plain(), _plain(pure), "narrower", "float32", "bfloat16")
    old, new = _plain(pure), _plain()
    for state in fzero.resharding.reshard_all(states_of(old), old, new):
        assert all(param.dtype == torch.float32 for param in state.params.values())


def test_counters_that_differ_are_not_joined() -> None:
    old, new = step_of(Setting(1, 1, units=2)), step_of(Setting(1, 1, units=1))
    states = states_of(old)
    states[0].optimizer["odd.blocks.1/float32"].step.fill_(3)
    with pytest.raises(ValueError, match=r"equal numbers.*is 7.*is 3|equal numbers.*is 3.*is 7"):
        fzero.resharding.reshard_all(states, old, new)


def test_what_is_no_step_no_plan_or_no_state_is_reported() -> None:
    step = step_of(Setting(1, 2))
    states = states_of(step)
    with pytest.raises(
        ValueError,
        match=r"plan_reshard: old must be a plan, got TrainStep; pass old\.plan of a step",
    ):
        fzero.resharding.plan_reshard(step, step)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"reshard: old must be a step, .* got int; pass the one that made the state",
    ):
        fzero.reshard(states[0], 1, 2)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="reshard: new must be a step, of make_train_step, got Plan"
    ):
        fzero.resharding.reshard_all(states, step, step.plan)  # type: ignore[arg-type]
    simulated = fzero.simulate(step, by="lockstep"), fzero.simulate(step, by="vmap")
    with pytest.raises(
        ValueError,
        match="reshard: the state of simulated steps must be that of all ranks, got None",
    ):
        fzero.reshard(None, *simulated)
    with pytest.raises(
        ValueError, match="both steps must be simulated or neither, got LockstepRanks and TrainStep"
    ):
        fzero.reshard(None, simulated[0], step)


def test_a_state_of_another_step_is_named() -> None:
    old, new = step_of(Setting(1, 2)), step_of(Setting(3, 2))
    with pytest.raises(
        ValueError, match=r"state\.params.*must be torch.float32 of shape.*pass the step that made"
    ):
        fzero.resharding.reshard_all(states_of(new), old, new)
    with pytest.raises(ValueError, match=r"all 2 ranks.*got 1"):
        fzero.resharding.reshard_all(states_of(old)[:1], old, new)


def _reshard_wrongly(case: str) -> None:
    old, new = bind(Job(1, (0, 1))), bind(Job(3, (0, 1)))
    state = old.init()
    rank = dist.get_rank()
    if case == "none":
        fzero.reshard(state if rank == 0 else None, old, new)
    elif case == "state":
        fzero.reshard(state if rank == 0 else state._replace(master={"x": state.step}), old, new)
    elif case == "steps":
        other = fzero.make_train_step(
            make(Lively), config(2), mesh=fzero.comms.AbstractAxis("data", 2)
        )
        fzero.reshard(state, old, new if rank == 0 else other)
    elif case == "comm hooks":
        fake, hook = (
            fzero.comms.AbstractAxis("data", 2),
            fzero.comms.compressed(fzero.comms.quantize(8)),
        )
        other = fzero.make_train_step(
            make(Lively), Job(3, (0, 1)).config, mesh=fake, reduce_hook=hook
        )
        fzero.reshard(state, old, new if rank == 0 else other)
    elif case == "nobody":
        fzero.reshard(
            state,
            old,
            fzero.make_train_step(
                make(Lively), config(2), mesh=fzero.comms.AbstractAxis("data", 2)
            ),
        )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", "on process 1: state: must be this process' part"),
        (
            "state",
            "on process 1: state: must be one of this step's, got one with state.master['x']; pass "
            "the step that",
        ),
        ("steps", "processes [1] have other plans"),
        ("comm hooks", "processes [1] have other plans"),
        ("nobody", "each of the 2 ranks of the new job"),
    ],
)
def test_what_is_wrong_on_one_process_is_reported_on_all(
    ranks: RankPool, case: str, words: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, _reshard_wrongly, case)
    for error in caught.value.errors:
        assert isinstance(error, ValueError) and words in str(error), error


def _reshard_and_die() -> None:
    old, new = bind(Job(3, (0, 1))), bind(Job(0, (0, 1)))
    state = old.init()
    with (
        patch.object(collectives, "swap", side_effect=ZeroDivisionError)
        if dist.get_rank() == 1
        else nullcontext()
    ):
        fzero.reshard(state, old, new)


def test_a_process_that_fails_in_the_middle_ends_the_others(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, _reshard_and_die)
    first, second = caught.value.errors
    assert isinstance(first, fzero.CollectiveError) and "reshard" in str(first)
    assert isinstance(second, ZeroDivisionError)
