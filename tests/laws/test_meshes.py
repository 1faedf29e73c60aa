"""The laws of several mesh axes: hybrid sharding, MiCS and hpZ, in lockstep and on real
processes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from profiles import examples
from ranks import RankError, RankPool
from test_compiled import AOT, SGD, Short
from test_simulate import CASES, assert_same, for_ranks
from training import ADAMW, Odd, Plain, adamw, config, make, part, tokens, train_plainly, vectors

import fzero
from fzero.graph.liveness import liveness
from fzero.graph.nodes import is_collective
from fzero.simulation import LockstepRanks, VmapRanks, stacked
from fzero.storage.shard_transfer import own_shard
from sharding import Mesh, Partial, Replicated, Sharded

SQUARE = Mesh.of(node=2, data=2)
MESHES = {
    "2x2": SQUARE,
    "2x3": Mesh.of(node=2, data=3),
    "3x2": Mesh.of(node=3, data=2),
    "4x1": Mesh.of(node=4, data=1),
    "1x4": Mesh.of(node=1, data=4),
    "2x2x2": Mesh.of(pod=2, node=2, data=2),
    "data first": Mesh.of(data=2, node=3),
}
MODES = ("hybrid 0", "hybrid 1", "hybrid 2", "hybrid 3", "mics 1", "mics 3", "hpz 3")


def config_of(mode: str, mesh: Mesh, **keys: Any) -> dict[str, Any]:
    """The configuration of a mode such as `"hpz 3"`, of stage 3."""
    kind, stage = mode.split()
    named = {"mics": "mics_shard_size", "hpz": "zero_hpz_partition_size"}.get(kind)
    size = {named: mesh.axis_size("data")} if named else {}
    threshold = keys.pop("threshold", 0)
    return config(int(stage), stage3_param_persistence_threshold=threshold, **size) | keys


def given_mesh(mode: str, mesh: Mesh) -> Mesh | None:
    """The mesh to be passed: the configuration has that of the other modes."""
    return (
        mesh
        if mode.startswith("hybrid") or len(mesh.axes) > 2 or mesh.names != ("node", "data")
        else None
    )


def in_lockstep(
    mode: str,
    mesh: Mesh,
    model: Any,
    observe: Any = None,
    *,
    options: Mapping[str, Any] = {},
    **keys: Any,
) -> LockstepRanks:
    fake = fzero.comms.AbstractAxis("data", mesh.size, mesh=given_mesh(mode, mesh))
    step = fzero.make_train_step(make(model), config_of(mode, mesh, **keys), mesh=fake, **options)
    return LockstepRanks(step.spec, mesh.size, observe, mesh=fake.mesh)


def train(
    simulated: LockstepRanks, data: Any, num_steps: int
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    state, curve = simulated.init(), []
    for index in range(num_steps):
        state, metrics = simulated(state, for_ranks(data(index), simulated.world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    return curve, simulated.gather(state)


# --- on real processes ----------------------------------------------------------------------------


def _on_a_rank(case: str, mode: str, mesh: Mesh) -> tuple[Any, list[fzero.Metrics]]:
    model, data, keys, options = CASES[case]
    cfg = config_of(mode, mesh) | {"optimizer": ADAMW} | keys
    step = fzero.make_train_step(make(model), cfg, mesh=given_mesh(mode, mesh), **options)
    state, curve = step.init(), []
    for index in range(3):
        state, metrics = step(state, part(data(index), step.rank, step.world_size))
        curve.append(metrics)
    return state, curve


ALL_MODES, SOME_MODES = (
    ("odd", "bf16"),
    ("noisy", "checkpointed", "overflows", "muon", "lamb", "negotiated"),
)
CASES_AND_MODES = [
    *((case, mode) for case in ALL_MODES for mode in MODES),
    *((case, mode) for case in SOME_MODES for mode in ("hybrid 2", "hybrid 3", "hpz 3")),
]
"""Two models in all modes, the others in those that differ most."""


@pytest.mark.covering(0)
@pytest.mark.parametrize(("case", "mode"), CASES_AND_MODES)
def test_meshes_in_lockstep_have_the_bits_of_as_many_processes(
    ranks: RankPool, case: str, mode: str
) -> None:
    model, data, keys, options = CASES[case]
    on_ranks = ranks(4, _on_a_rank, case, mode, SQUARE)
    simulated = in_lockstep(
        mode, SQUARE, model, options=options, **({"optimizer": ADAMW} | dict(keys))
    )
    assert simulated.plan.mesh == SQUARE
    state = simulated.init()
    for index in range(3):
        state, metrics = simulated(state, for_ranks(data(index), 4))
        assert_same(metrics, on_ranks[0][1][index])
    assert_same(state, stacked([of_rank for of_rank, _ in on_ranks]))


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "mesh",
    [Mesh.of(data=3), Mesh.of(node=1, data=3), Mesh.of(node=3, data=1), Mesh.of(node=2, data=1)],
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_so_have_meshes_of_one_long_axis(ranks: RankPool, mesh: Mesh, stage: int) -> None:
    on_ranks = ranks(mesh.size, _on_a_rank, "odd", f"hybrid {stage}", mesh)
    simulated = in_lockstep(f"hybrid {stage}", mesh, Odd, **CASES["odd"].cfg)
    state = simulated.init()
    for index in range(3):
        state, metrics = simulated(state, for_ranks(CASES["odd"].data(index), mesh.size))
        assert_same(metrics, on_ranks[0][1][index])
    assert_same(state, stacked([of_rank for of_rank, _ in on_ranks]))


def _groups_and_bits(cfg: Mapping[str, Any]) -> tuple[bool, Any]:
    first, second = (fzero.make_train_step(make(Plain), cfg) for _ in range(2))
    assert first.runtime.mesh.axes[0].group is second.runtime.mesh.axes[0].group
    state = second.init()
    state, _ = second(state, part(vectors(0), second.rank, second.world_size))
    return second.runtime.mesh.axes[0].group is not None, second.gather(state)


def test_steps_share_the_process_groups_of_their_axes(ranks: RankPool) -> None:
    found = ranks(4, _groups_and_bits, config(3, mics_shard_size=2))
    assert all(has_group for has_group, _ in found)
    assert_same(found[0][1], found[3][1])


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", MESHES)
def test_every_mode_gives_the_same_bits_on_a_mesh_and_one_axis_to_rounding(name: str) -> None:
    mesh = MESHES[name]
    modes = [mode for mode in MODES if mesh.axis_size("data") > 1 or not mode.startswith("hpz")]
    data = tokens if 12 % mesh.size == 0 else functools.partial(tokens, size=24)
    runs = {
        mode: train(in_lockstep(mode, mesh, Odd, gradient_clipping=0.0), data, 4) for mode in modes
    }
    curve, weights = runs["hybrid 0"]
    for mode, (other_curve, other_weights) in runs.items():
        assert [loss for loss, _ in other_curve] == [loss for loss, _ in curve], mode
        assert_same(other_weights, weights)
        if not mode.startswith("hpz"):
            assert other_curve == curve, mode
    # The norm is added up shard by shard, and hpZ has more of them.
    torch.testing.assert_close(
        torch.tensor(runs[modes[-1]][0]), torch.tensor(curve), rtol=1e-6, atol=0
    )
    simulated = fzero.simulate(
        fzero.make_train_step(make(Odd), config(2, clip=0.0)), mesh.size, by="lockstep"
    )
    for other_curve, other_weights in (
        train(simulated, data, 4),
        train_plainly(Odd, data, adamw, num_steps=4, clip=0.0),
    ):
        # Rounding only, as in test_stages: sums within nodes are other sums, and AdamW turns last
        # bits into parts of 1e-2.
        torch.testing.assert_close(
            torch.tensor(curve), torch.tensor(other_curve), rtol=2e-6, atol=2e-6
        )
        torch.testing.assert_close(weights, other_weights, rtol=0, atol=1e-5)


def _added_up(terms: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_micro_steps", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["2x2", "2x3", "3x2", "data first"])
def test_gradients_are_added_up_within_a_node_and_then_over_the_nodes_each_in_rank_order(
    name: str, mode: str, num_micro_steps: int
) -> None:
    mesh, kind, stage = MESHES[name], mode.split()[0], int(mode[-1])
    keys = {"gradient_accumulation_steps": num_micro_steps, "train_micro_batch_size_per_gpu": 2}
    simulated = in_lockstep(mode, mesh, Plain, gradient_clipping=0.0, **keys)
    size = 2 * mesh.size * num_micro_steps
    batch, model = vectors(0, size), make(Plain)
    share = 1 / (mesh.size * num_micro_steps)

    def summand(node: int, data: int, micro: int) -> dict[str, torch.Tensor]:
        rows = part(
            part(batch, mesh.rank({"node": node, "data": data}), mesh.size), micro, num_micro_steps
        )
        grads = torch.autograd.grad(model(*rows), list(model.parameters()))
        return {name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True)}

    nodes, places, micros = (
        range(mesh.axis_size("node")),
        range(mesh.axis_size("data")),
        range(num_micro_steps),
    )
    unscaled = {(n, d, m): summand(n, d, m) for n in nodes for d in places for m in micros}

    def expected(key: str) -> torch.Tensor:
        of = {place: grads[key] * share for place, grads in unscaled.items()}
        if stage < 2:  # every rank adds up its own first, as it divides them
            own = {(n, d): of[n, d, 0] for n in nodes for d in places}
            for n, d in own if num_micro_steps > 1 else ():
                own[n, d] = torch.add(own[n, d], unscaled[n, d, 1][key], alpha=share)
            return _added_up([_added_up([own[n, d] for d in places]) for n in nodes])
        within = {(n, m): _added_up([of[n, d, m] for d in places]) for n in nodes for m in micros}
        if kind == "hpz":
            return _added_up([_added_up([within[n, m] for n in nodes]) for m in micros])
        return _added_up([_added_up([within[n, m] for m in reversed(micros)]) for n in nodes])

    state, _ = simulated(simulated.init(), for_ranks(batch, mesh.size))
    for buffer in simulated.plan.flat_buffers:
        rows, spec = state.grads[buffer.key], Sharded(*simulated.plan.axes)
        own = {
            mesh.shard_of(r, spec): own_shard(rows[r], buffer, mesh.shard_of(r, spec))
            for r in range(mesh.size)
        }
        whole = torch.cat([own[shard] for shard in range(buffer.layout.world_size)])
        for name_ in buffer.layout.names:
            start, stop = buffer.layout.bounds(name_)
            assert torch.equal(
                whole[start:stop].view(buffer.layout.shape(name_)), expected(name_)
            ), name_


@examples(8)
@given(
    mesh=st.sampled_from([mesh for name, mesh in MESHES.items() if name not in ("2x2", "2x2x2")]),
    width=st.integers(3, 40),
    clip=st.sampled_from([0.0, 0.1]),
    num_micro_steps=st.sampled_from([1, 2]),
    optimizer=st.sampled_from(["AdamW", "Muon", "Lamb", "Adafactor"]),
    threshold=st.sampled_from([0, 30]),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_stages_agree_on_every_mesh(
    mesh: Mesh,
    width: int,
    clip: float,
    num_micro_steps: int,
    optimizer: str,
    threshold: int,
    precision: str,
) -> None:
    """Where each micro-step is reduced by itself (2 and 3) sums differ from where they
    are added up first (0 and 1).
    """
    keys = {
        "gradient_clipping": clip,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2}},
        "threshold": threshold,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": num_micro_steps,
        "bf16": {"enabled": precision == "bf16"},
    }
    model = functools.partial(Odd, width, 2)
    data = functools.partial(tokens, size=2 * num_micro_steps * mesh.size)
    of_stage = [
        train(in_lockstep(f"hybrid {stage}", mesh, model, **keys), data, 2) for stage in range(4)
    ]
    one_axis = fzero.make_train_step(
        make(model),
        config_of("hybrid 2", mesh, **keys),
        mesh=fzero.comms.AbstractAxis("data", mesh.size),
    )
    curve, _ = train(fzero.simulate(one_axis, by="lockstep"), data, 2)
    assert_same(of_stage[0], of_stage[1])
    assert_same(of_stage[2], of_stage[3])
    if num_micro_steps == 1 or mesh.axis_size("data") == 1:
        assert_same(of_stage[0], of_stage[2])
    # One step of another rounding; bf16 rounds the gradients to 8 bits.
    tolerance = 2e-5 if precision == "fp32" else 5e-2
    torch.testing.assert_close(of_stage[2][0][0], curve[0], rtol=tolerance, atol=tolerance)
    if mesh.axis_size("data") > 1:
        hpz = train(in_lockstep("hpz 3", mesh, model, **keys), data, 2)
        torch.testing.assert_close(
            hpz[0][0], of_stage[3][0][0], rtol=1e-6 if precision == "fp32" else 1e-2, atol=0
        )
        # Where no sum is over shards, and none over micro-steps, which hybrid sharding makes within
        # the node first.
        if clip == 0 and optimizer == "AdamW" and num_micro_steps == 1:
            assert_same(hpz[1], of_stage[3][1])


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["hybrid 0", "hybrid 1", "mics 3", "hpz 3"])
@pytest.mark.parametrize("mesh", [SQUARE, MESHES["3x2"]])
def test_the_first_overflow_is_found_on_every_mesh(mode: str, mesh: Mesh) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "auto_cast": True, "hysteresis": 1}
    simulated = in_lockstep(mode, mesh, Plain, fp16=fp16)
    state = simulated.init()
    before = optree.tree_map(torch.clone, state.params)
    state, metrics = simulated(state, for_ranks(vectors(0), mesh.size))
    one_axis = fzero.simulate(
        fzero.make_train_step(make(Plain), config(2) | {"fp16": fp16}), mesh.size, by="lockstep"
    )
    other, _ = one_axis(one_axis.init(), for_ranks(vectors(0), mesh.size))
    assert (
        metrics.overflow
        and simulated.first_overflow(state) == one_axis.first_overflow(other) is not None
    )
    assert_same(state.params, before)


@pytest.mark.parametrize("mode", ["hybrid 3", "hpz 3"])
def test_evaluation_and_weights_are_those_of_one_process(mode: str) -> None:
    alone = fzero.make_train_step(make(Odd), config(3))
    simulated = in_lockstep(mode, MESHES["2x3"], Odd)
    state, start = simulated.init(), alone.init()
    assert_same(simulated.gather(state), alone.gather(start))
    loss = simulated.evaluate(state, for_ranks(tokens(0), 6))
    # a mean of six means
    torch.testing.assert_close(loss, alone.evaluate(start, tokens(0)), rtol=2e-6, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_should_hold_the_same_do(mode: str) -> None:
    mesh = MESHES["3x2"]
    simulated = in_lockstep(mode, mesh, Odd, threshold=30)
    state = simulated.init()
    for index in range(2):
        state, _ = simulated(state, for_ranks(tokens(index), mesh.size))
    specs = simulated.specs
    for part_ in ("params", "master", "optimizer"):
        tensors, of = (
            optree.tree_leaves(getattr(state, part_)),
            optree.tree_leaves(getattr(specs, part_)),
        )
        for rows, spec in zip(tensors, of, strict=True):
            by_shard: dict[int, torch.Tensor] = {}
            for rank, row in enumerate(rows):
                shard = mesh.shard_of(rank, spec.spec) if isinstance(spec.spec, Sharded) else 0
                assert torch.equal(by_shard.setdefault(shard, row), row)
            assert len(by_shard) == (
                spec.partition(mesh).world_size if isinstance(spec.spec, Sharded) else 1
            )


# --- memory and bytes -----------------------------------------------------------------------------


def modes_of(*names: str) -> list[tuple[str, str]]:
    """The meshes with each mode; hpZ where several ranks are along `data`: a partition
    of one is DeepSpeed's word for none.
    """
    return [
        (name, mode)
        for name in names
        for mode in MODES
        if not mode.startswith("hpz") or MESHES[name].axis_size("data") > 1
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "mode"), modes_of(*MESHES))
def test_specs_and_planned_bytes_are_those_of_the_state_and_the_formula(
    name: str, mode: str
) -> None:
    mesh = MESHES[name]
    for model in (Odd, Plain):
        simulated = in_lockstep(mode, mesh, model)
        state, plan = simulated.init(), simulated.plan
        for tensor, spec in zip(
            optree.tree_leaves(state), optree.tree_leaves(simulated.specs), strict=True
        ):
            assert tuple(tensor.shape) == (mesh.size, *spec.local_shape(mesh))
        parts = {"parameters": state.params, "gradients": state.grads, "optimizer": state.optimizer}
        held = {
            part_: sum(x.nbytes for x in optree.tree_leaves(tree)) // mesh.size
            for part_, tree in parts.items()
        }
        assert {part_: plan.bytes_per_rank[part_] for part_ in held} == held
    kind, stage = mode.split()[0], int(mode.split()[1])
    padded = sum(buffer.padded_numel for buffer in plan.flat_buffers)  # of Plain
    in_node = mesh.axis_size("data")
    finest = mesh.size if kind == "hpz" else in_node
    counters = 4 * len(plan.flat_buffers)
    assert plan.num_shards == finest and plan.padding < 32 * mesh.size * len(plan.flat_buffers)
    assert plan.bytes_per_rank == {
        "parameters": 4 * padded // (in_node if stage == 3 else 1),
        "master": 0,
        "gradients": 4 * padded // (finest if stage >= 2 else 1),
        "optimizer": 8 * padded // (finest if stage >= 1 else 1) + counters,
    }


def test_a_row_says_which_axes_each_part_is_divided_over() -> None:
    rows = {mode: in_lockstep(mode, SQUARE, Plain).plan.flat_buffers[0].row for mode in MODES}
    assert rows["hybrid 0"][:3] == (Replicated(), Replicated(), Replicated())
    assert rows["mics 1"][:3] == (Replicated(), Partial("data"), Sharded("data"))
    assert rows["hybrid 3"][:3] == (Sharded("data"), Sharded("data"), Sharded("data"))
    assert rows["hpz 3"][:3] == (Sharded("data"), Sharded("data", "node"), Sharded("data", "node"))


def test_fine_shards_of_a_node_axis_are_neighbours() -> None:
    simulated = in_lockstep("hpz 3", MESHES["3x2"], Plain)
    state = simulated.init()
    buffer = simulated.plan.flat_buffers[0]
    whole = torch.cat([state.params[buffer.key][rank] for rank in (0, 1)])  # node 0
    assert buffer.shard_numel * 6 == whole.numel()
    for rank in range(6):
        node, data = divmod(rank, 2)
        start = (data * 3 + node) * buffer.shard_numel
        own = state.params[buffer.key][rank][node * buffer.shard_numel :][: buffer.shard_numel]
        assert torch.equal(own, whole[start : start + buffer.shard_numel])


METRICS = ("loss_stats", "norm", "optimizer")


def _sorted(log: list[fzero.comms.CommRecord]) -> dict[str, Counter[str]]:
    """What was sent by axis and kind."""
    sent: dict[str, Counter[str]] = {}
    for record in log:
        assert record.nbytes == record.num_elements * (8 if record.label.purpose in METRICS else 4)
        kind = {
            "reduce_scatter": "reduce_scatter of gradients",
            "all_reduce": "all_reduce of gradients",
        }
        name = (
            "metrics"
            if record.label.purpose in METRICS
            else kind.get(record.collective, record.label.purpose)
        )
        sent.setdefault(record.axis, Counter())[name] += record.num_elements
    return sent


def _sent_in_third_step(
    mode: str, mesh: Mesh, keys: Mapping[str, Any]
) -> tuple[dict[str, Counter[str]], fzero.Plan]:
    log: list[fzero.comms.CommRecord] = []
    axis = replace(fzero.join(), observe=log.append, mesh=given_mesh(mode, mesh))
    step = fzero.make_train_step(make(Plain), config_of(mode, mesh, **keys), mesh=axis)
    state = step.init()
    for index in range(3):
        log.clear()
        state, _ = step(state, part(vectors(index, 24), step.rank, step.world_size))
    return _sorted(log), step.plan


def _check_sent(sent: dict[str, Counter[str]], plan: fzero.Plan, mode: str) -> None:
    planned = plan.sent_by_axis
    assert set(sent) <= {*planned, "world"}
    assert set(sent.get("world", ())) <= {"metrics"}
    for axis, kinds in planned.items():
        found = sent.get(axis, Counter())
        for kind in ("all_reduce of gradients", "reduce_scatter of gradients"):
            assert found[kind] == kinds[kind], (axis, kind)
        assert (
            found["gather"]
            == kinds["all_gather in the forward"] + kinds["all_gather in the backward"]
        )
        assert found["all_gather_params"] == kinds["all_gather of updated parameters"]
    total = {name: sum(kinds[name] for kinds in planned.values()) for name in plan.sent_per_step}
    assert plan.sent_per_step == total
    if plan.num_micro_steps > 1:
        return
    size, nodes = plan.mesh.axis_size("data"), plan.mesh.axis_size("node")
    whole = sum(buffer.padded_numel for buffer in plan.flat_buffers)
    within, between = whole * (size - 1) // size, whole // size * (nodes - 1) // nodes
    kept = plan.units[-1].gathered_numel * (size - 1) // size
    # Within a node it is ZeRO §7's; between nodes hpZ reduce-scatters and gathers, and the others
    # all-reduce: the same.
    is_hpz, stage = mode.startswith("hpz"), int(mode[-1])
    assert sum(planned["node"].values()) == 2 * between
    assert planned["node"]["all_gather of updated parameters"] == (between if is_hpz else 0)
    assert sum(planned["data"].values()) == (3 * within - kept if stage == 3 else 2 * within)


@pytest.mark.covering(0)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_sends_along_each_axis_what_the_plan_says(ranks: RankPool, mode: str) -> None:
    for keys in (
        {},
        {"train_batch_size": 24, "gradient_accumulation_steps": 2},
        {"threshold": 100},
    ):
        for sent, plan in ranks(4, _sent_in_third_step, mode, SQUARE, keys):
            if "threshold" not in keys:
                _check_sent(sent, plan, mode)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "mode"), modes_of("2x3", "3x2", "4x1", "1x4"))
def test_so_it_does_in_lockstep(name: str, mode: str) -> None:
    mesh = MESHES[name]
    log: list[fzero.comms.CommRecord] = []
    simulated = in_lockstep(
        mode, mesh, Plain, lambda rank, sent: log.append(sent) if rank == 1 else None
    )
    state = simulated.init()
    for index in range(2):
        log.clear()
        state, _ = simulated(state, for_ranks(vectors(index), mesh.size))
    sent = _sorted(log)
    if mesh.axis_size("node") == 1:
        assert set(sent) == {"data"}
    else:
        _check_sent(sent, simulated.plan, mode)


def test_a_plan_reports_what_crosses_each_axis() -> None:
    text = str(fzero.plan(make(Plain), config(3, zero_hpz_partition_size=4), world_size=8))
    assert "ZeRO stage 3 on 8 ranks, node 2 × data 4" in text
    assert "elements that a rank sends along node in a step" in text
    assert "elements that a rank sends in a step" in str(
        fzero.plan(make(Plain), config(3), world_size=8)
    )
    assert fzero.plan(make(Plain), config(3), mesh=SQUARE).world_size == 4


# --- as one graph ---------------------------------------------------------------------------------


SHARED = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}
GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid 0": ("hybrid 0", {}),
    "mics 1, twice": ("mics 1", SHARED | {"threshold": 100}),
    "hybrid 3, narrow": (
        "hybrid 3",
        SHARED | {"bf16": {"enabled": True, "auto_cast": True}, "communication_data_type": "fp32"},
    ),
    "hpz 3": ("hpz 3", {"threshold": 100}),
}


def _by_block(mode: str) -> tuple[bool, float]:
    """Whether blocks that are compiled have the bits of an eager step, and the loss of
    an evaluation then.
    """
    curves, losses = [], []
    for options in ({}, {"compile": "block", "compile_backend": "aot_eager"}):
        step = fzero.make_train_step(
            make(Short), config_of(mode, SQUARE), mesh=given_mesh(mode, SQUARE), **options
        )
        state, curve = step.init(), []
        for index in range(2):
            state, metrics = step(state, part(vectors(index, 8), step.rank, step.world_size))
            curve.append((metrics.loss.item(), metrics.grad_norm.item()))
        curves.append((curve, step.gather(state)))
        losses.append(step.evaluate(state, part(vectors(2, 8), step.rank, step.world_size)).item())
    (curve, weights), (by_block, found) = curves
    same = (
        curve == by_block
        and losses[0] == losses[1]
        and all(torch.equal(x, found[n]) for n, x in weights.items())
    )
    return same, losses[0]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["hybrid 3", "hpz 3"])
def test_compiled_blocks_and_evaluation_on_a_mesh_are_those_of_the_eager_step(
    ranks: RankPool, mode: str
) -> None:
    found = ranks(4, _by_block, mode)
    assert found == [(True, found[0][1])] * 4


class Run(NamedTuple):
    """What one rank saw of an eager or a captured step, run twice."""

    curve: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    sent: Counter[str]
    """Elements of tensors of the model, by axis, in the second step."""
    graphs: list[torch.fx.Graph]
    plan: fzero.Plan


def _run(mode: str, keys: Mapping[str, Any], options: Mapping[str, Any]) -> Run:
    log: list[fzero.comms.CommRecord] = []
    axis = replace(fzero.join(), observe=log.append, mesh=given_mesh(mode, SQUARE))
    step = fzero.make_train_step(make(Short), _config(mode, keys), mesh=axis, **options)
    state, curve = step.init(), []
    for index in range(2):
        log.clear()
        state, metrics = step(state, part(vectors(index, 8), step.rank, step.world_size))
        curve.append((metrics.loss.item(), metrics.grad_norm.item()))
    sent: Counter[str] = Counter()
    for record in log:
        # not losses and norms
        sent[record.axis] += record.num_elements * (record.num_elements > 20)
    graphs = [] if step.program is None else step.program.compiled.graphs
    return Run(curve, step.gather(state), sent, graphs, step.plan)


def _captured(case: str) -> tuple[bool, dict[str, int], dict[str, int], list[int], bool]:
    mode, keys = GRAPHS[case]
    eager_, captured = _run(mode, keys, {}), _run(mode, keys, AOT)
    same = eager_.curve == captured.curve
    same &= all(torch.equal(x, captured.weights[name]) for name, x in eager_.weights.items())
    planned = {name: sum(kinds.values()) for name, kinds in captured.plan.sent_by_axis.items()}
    gathered = [liveness(graph).peak_gathered_numel for graph in captured.graphs]
    if fzero.join().rank:
        return same, planned, dict(captured.sent), gathered, True
    fake = fzero.comms.AbstractAxis("data", 4, 0, "gloo", given_mesh(mode, SQUARE))
    paper = fzero.make_train_step(make(Short), _config(mode, keys), mesh=fake)
    traced = [collectives_of(c.scheduled().graph) for c in paper.trace(part(vectors(0, 8), 0, 4))]
    ran = [collectives_of(graph) for graph in captured.graphs]
    return (
        same,
        planned,
        dict(captured.sent),
        gathered,
        traced[-1] == ran[-1] and traced[0] == ran[0],
    )


def _config(mode: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return config_of(mode, SQUARE, **({"optimizer": SGD, "gradient_clipping": 0.05} | dict(keys)))


def collectives_of(graph: torch.fx.Graph) -> list[tuple[str, torch.Size]]:
    return [
        (str(node.target), node.meta["val"].shape) for node in graph.nodes if is_collective(node)
    ]


@pytest.mark.long
@pytest.mark.parametrize("case", GRAPHS)
def test_a_captured_step_has_the_bits_of_the_eager_one_and_sends_what_the_plan_says(
    ranks: RankPool, case: str
) -> None:
    plan = in_lockstep(GRAPHS[case][0], SQUARE, Short, **GRAPHS[case][1]).plan
    for same, planned, sent, gathered, is_as_on_paper in ranks(4, _captured, case):
        assert same and is_as_on_paper
        assert {name: sent[name] for name in planned} == planned and set(sent) <= {
            *planned,
            "world",
        }
        assert all(
            numel <= 2 * max(unit.gathered_numel for unit in plan.units) for numel in gathered
        )
        assert any(gathered) == (plan.stage == 3)


@pytest.mark.long
def test_a_step_of_a_mesh_in_a_dry_run_reports_what_crosses_each_axis() -> None:
    """Of 64 ranks, of which none is there; every element is counted once, in fp32."""
    mesh = Mesh.of(node=8, data=8)
    of_axis = {}
    for mode in ("hybrid 2", "hybrid 3", "hpz 3"):
        step = fzero.make_train_step(
            make(Plain),
            config_of(mode, mesh),
            mesh=fzero.comms.AbstractAxis("data", 64, mesh=given_mesh(mode, mesh)),
        )
        timeline = step.explain(vectors(0, 2))
        planned = {name: 4 * sum(kinds.values()) for name, kinds in step.plan.sent_by_axis.items()}
        # losses; norms, of hpZ within data shards first
        numbers = {"world": 4 * 8 * 63, "data": 8 * 7, "node": 0}
        if mode == "hpz 3":
            numbers |= {"data": 8 * 8 * 7, "node": 8 * 7}
        assert timeline.sent_by_axis == {
            axis: planned.get(axis, 0) + sent for axis, sent in numbers.items()
        }
        assert timeline.sent == sum(timeline.sent_by_axis.values())
        assert f"stage {mode[-1]} on 64 ranks, node 8 × data 8" in str(timeline)
        assert "a rank sends" in str(timeline) and "MB along node" in str(timeline)
        of_axis[mode] = timeline.sent_by_axis
    assert of_axis["hybrid 3"]["data"] > of_axis["hybrid 2"]["data"]
    one_axis = fzero.make_train_step(
        make(Plain), config(3), mesh=fzero.comms.AbstractAxis.of(Mesh.of(node=1, data=4))
    )
    assert set(one_axis.explain(vectors(0, 3)).sent_by_axis) == {"data"}


# --- as a dimension -------------------------------------------------------------------------------


def as_a_dimension(
    mode: str, mesh: Mesh, model: Any, compile: Literal["aot_eager"] | None = None, **keys: Any
) -> LockstepRanks:
    fake = fzero.comms.AbstractAxis("data", mesh.size, mesh=given_mesh(mode, mesh))
    step = fzero.make_train_step(make(model), config_of(mode, mesh, **keys), mesh=fake)
    return fzero.simulate(step, by="vmap", compile=compile)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "mode"), modes_of("2x3", "4x1", "2x2x2", "data first"))
def test_ranks_of_a_mesh_as_a_dimension_are_those_in_lockstep_to_rounding(
    name: str, mode: str
) -> None:
    mesh = MESHES[name]
    data = functools.partial(tokens, size=2 * mesh.size)
    for keys in ({}, SHARED | {"threshold": 30, "gradient_clipping": 0.0}):
        curve, weights = train(in_lockstep(mode, mesh, Odd, **keys), data, 2)
        found, found_weights = train(as_a_dimension(mode, mesh, Odd, **keys), data, 2)
        # Batched products round otherwise: last bits of losses and norms of about 20, of weights of
        # about 1.
        torch.testing.assert_close(torch.tensor(found), torch.tensor(curve), rtol=2e-6, atol=0)
        torch.testing.assert_close(found_weights, weights, rtol=0, atol=2e-6)


@pytest.mark.covering(0)
@pytest.mark.parametrize("mode", ["hybrid 2", "hpz 3"])
def test_so_they_are_captured(mode: str) -> None:
    mesh, data = MESHES["2x3"], functools.partial(vectors, size=12)
    keys = {"optimizer": SGD}
    curve, weights = train(in_lockstep(mode, mesh, Short, **keys), data, 2)
    found, found_weights = train(as_a_dimension(mode, mesh, Short, "aot_eager", **keys), data, 2)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(curve), rtol=2e-6, atol=0)
    torch.testing.assert_close(found_weights, weights, rtol=0, atol=2e-6)


# --- what goes wrong ------------------------------------------------------------------------------

NOT_FITTING: dict[str, tuple[dict[str, Any], Mesh | None, str]] = {
    "does not divide": (
        {"mics_shard_size": 3},
        None,
        "zero_optimization.mics_shard_size: must divide the 4 ranks of the job, got 3; take one of "
        "1, 2, 4",
    ),
    "too large": (
        {"zero_hpz_partition_size": 8},
        None,
        "zero_optimization.zero_hpz_partition_size: must be at most the 4 ranks of the job, got 8; "
        "lower it",
    ),
    "both": (
        {"mics_shard_size": 2, "zero_hpz_partition_size": 4},
        None,
        "zero_optimization.mics_shard_size: excludes zero_optimization.zero_hpz_partition_size, "
        "got 2 beside 4; remove one",
    ),
    "another mesh": (
        {"mics_shard_size": 4},
        SQUARE,
        "zero_optimization.mics_shard_size: must be the size of the axis 'data' where a mesh of "
        "several axes is given, which is 2, got 4; leave one of them out",
    ),
    "another size": (
        {},
        Mesh.of(node=2, data=4),
        "mesh: its axes must hold all 4 ranks of the job, got 2 × 4 = 8 in Mesh",
    ),
}


def _make(zero: dict[str, Any], mesh: Mesh | None) -> None:
    fzero.make_train_step(make(Plain), config(3, **zero), mesh=mesh)


@pytest.mark.covering(0)
@pytest.mark.parametrize("case", NOT_FITTING)
def test_a_mesh_that_does_not_fit_is_reported_on_every_rank(ranks: RankPool, case: str) -> None:
    zero, mesh, message = NOT_FITTING[case]
    with pytest.raises(RankError) as caught:
        ranks(4, _make, zero, mesh)
    assert len(caught.value.errors) == 4
    assert all(
        isinstance(error, ValueError) and message in str(error) for error in caught.value.errors
    )


def _make_on_a_mesh_of_its_own() -> None:
    mesh = SQUARE if fzero.join().rank else Mesh.of(data=4)
    fzero.make_train_step(make(Plain), config(2), mesh=mesh)


def test_ranks_on_different_meshes_are_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4, _make_on_a_mesh_of_its_own)
    assert all(isinstance(error, fzero.runtime.MismatchError) for error in caught.value.errors)


def test_wrong_meshes_are_reported() -> None:
    with pytest.raises(
        ValueError, match="Mesh: an axis must be named 'data', got \\('node', 'rack'\\)"
    ):
        Mesh.of(node=2, rack=2)
    with pytest.raises(ValueError, match="Mesh: axis names must differ, got 'data' twice"):
        Mesh((("data", 2), ("data", 2)))
    with pytest.raises(ValueError, match="Sharded: axis names must differ, got 'data' twice"):
        Sharded("data", "data")
    with pytest.raises(ValueError, match="Sharded: axes must name at least one axis, got none"):
        Sharded()
    with pytest.raises(ValueError, match="Sharded: axis is for one axis, got"):
        _ = Sharded("data", "node").axis


def test_a_simulation_takes_the_mesh_of_its_step_or_its_own() -> None:
    step = fzero.make_train_step(make(Plain), config(3), mesh=fzero.comms.AbstractAxis.of(SQUARE))
    simulate = functools.partial(fzero.simulate, by="lockstep")
    assert simulate(step).plan.mesh == simulate(step, 4).plan.mesh == SQUARE
    assert simulate(step, mesh=MESHES["2x3"]).plan.mesh == MESHES["2x3"]
    assert simulate(step, 6).plan.mesh == Mesh.of(data=6)
    assert isinstance(fzero.simulate(step, mesh=SQUARE), VmapRanks)
    with pytest.raises(
        ValueError, match="mesh: its axes must hold all 6 ranks of the job, got 2 × 2 = 4"
    ):
        simulate(step, 6, mesh=SQUARE)


# --- from one mode to another ---------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ["3x2", "data first"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hybrid 0", "hpz 3"),
        ("hpz 3", "mics 1"),
        ("hybrid 3", "hpz 3"),
        ("hpz 3", "hybrid 2"),
        ("mics 1", "hybrid 3"),
    ],
)
def test_training_goes_on_in_another_mode_as_if_it_had_been_in_that_all_along(
    name: str, before: str, after: str
) -> None:
    mesh, keys = (
        MESHES[name],
        {"gradient_clipping": 0.0, "bf16": {"enabled": True}, "threshold": 30},
    )
    old, new = (in_lockstep(mode, mesh, Odd, **keys) for mode in (before, after))
    state, always = old.init(), new.init()
    for index in range(4):
        if index == 2:
            state = fzero.reshard(state, old, new)
        step = old if index < 2 else new
        state, metrics = step(state, for_ranks(tokens(index), mesh.size))
        always, expected = new(always, for_ranks(tokens(index), mesh.size))
        assert metrics.loss == expected.loss
    assert_same(state, always)
