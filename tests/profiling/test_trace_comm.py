"""What a step is said to send is what it sends, from whichever side one looks:
processes, lockstep, a graph, a plan.
"""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from einops import rearrange
from ranks import RankError, RankPool
from torch import Tensor, nn
from training import Odd, Plain, config, make, part, tokens, vectors

import fzero
from fzero.comms.lockstep import Hub
from fzero.profiling.comm_trace import CommTrace
from fzero.simulation import LockstepRanks
from fzero.storage.file_tensor import in_memory
from sharding import Mesh

AOT: dict[str, Any] = {"compile": "step", "compile_backend": "aot_eager"}
TWICE = {"train_batch_size": 12, "gradient_accumulation_steps": 2}
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
"""Keys of `zero_optimization`: codes on the way."""
ALIKE = ("gather", "reduce", "all_gather_params", "norm")
"""The purposes of which all sides tell the same."""


class Normed(nn.Module):
    """A batch norm, whose statistics move, and a module buffer that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.norm(self.up(x * self.table[1]))), y)


def reported(comm: CommTrace, *purposes: str) -> Counter[Any]:
    """What was sent, in any order; all of it, or what is for some purposes."""
    rows = [row for row in comm.rows if not purposes or row.purpose in purposes]
    return Counter((row.purpose, row.axis, row.unit, row.nbytes) for row in rows)


def for_ranks(batch: Any, world_size: int) -> Any:
    return optree.tree_map(
        lambda x: rearrange(x, "(rank b) ... -> rank b ...", rank=world_size), batch
    )


def in_lockstep(step: fzero.TrainStep, data: Any) -> CommTrace:
    ranks = fzero.simulate(step, by="lockstep")
    return fzero.profiling.trace_comm(ranks, ranks.init(), for_ranks(data(0), ranks.world_size))


def on_paper(
    model: Any, data: Any, cfg: Any, axis: fzero.comms.AbstractAxis
) -> tuple[fzero.TrainStep, CommTrace]:
    step = fzero.make_train_step(make(model), cfg, mesh=axis)
    return step, fzero.profiling.plan_comm(step, part(data(0), 0, axis.size))


def check_plan(comm: CommTrace, plan: fzero.Plan) -> None:
    """The elements of each kind along each axis are the plan's."""
    kinds = {
        "gather": ("all_gather in the forward", "all_gather in the backward"),
        "reduce": ("all_reduce of gradients", "reduce_scatter of gradients"),
        "all_gather_params": ("all_gather of updated parameters",),
    }
    found: Counter[tuple[str, str]] = Counter()
    for row in comm.rows:
        if row.purpose in kinds:
            found[row.axis, row.purpose] += row.num_elements
    planned = {
        (a, p): sum(sent[k] for k in names)
        for a, sent in plan.sent_by_axis.items()
        for p, names in kinds.items()
    }
    assert found == Counter(planned)
    total = sum(row.num_elements for row in comm.rows if row.purpose in kinds)
    assert total == sum(plan.sent_per_step.values()) > 0


# --- all sides agree ------------------------------------------------------------------------------


def _traced(model: Any, data: Any, cfg: Any) -> list[CommTrace]:
    """By an eager step and by a compiled one, on this rank."""
    found = []
    for options in ({}, AOT):
        step = fzero.make_train_step(make(model), cfg, **options)
        found.append(
            fzero.profiling.trace_comm(step, step.init(), part(data(0), step.rank, step.world_size))
        )
    return found


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("world_size", "stage", "keys"),
    [(2, 0, {}), (3, 2, TWICE), (2, 3, {}), (2, 3, CODED)],
)
def test_processes_lockstep_compiled_step_and_plan_report_the_same_which_is_the_plans(
    ranks: RankPool, world_size: int, stage: int, keys: Mapping[str, Any]
) -> None:
    cfg = config(stage, **keys) if keys is CODED else config(stage) | keys
    step, planned = on_paper(
        Plain, vectors, cfg, fzero.comms.AbstractAxis("data", world_size, backend="gloo")
    )
    check_plan(planned, step.plan)
    simulated = in_lockstep(step, vectors)
    for eager, compiled in ranks(world_size, _traced, Plain, vectors, cfg):
        assert eager.rows == simulated.rows, "the same collectives in the same order"
        assert compiled.rows == planned.rows
        assert reported(eager, *ALIKE) == reported(planned, *ALIKE)
        # Loss, weight, number of the pass, checksum of hyper-parameters, and in an eager step
        # whether a module buffer moved.
        assert [row.num_elements * 4 for row in eager.rows if row.purpose == "loss_stats"] == [
            row.num_elements * 5 for row in planned.rows if row.purpose == "loss_stats"
        ]
        assert {row.purpose for row in (*eager.rows, *compiled.rows)} <= {*ALIKE, "loss_stats"}


def _traced_in_files(stage: int, path: str) -> tuple[CommTrace, list[bytes], list[bytes]]:
    """On a real rank: what a step with state in files tells, and the state before and
    after.
    """

    def bits() -> list[bytes]:
        return [
            x.reshape(-1).view(torch.uint8).numpy().tobytes()
            for x in optree.tree_leaves(in_memory(state))
        ]

    step = fzero.make_train_step(make(Plain), config(stage, **_in_files(stage, path)))
    state = step.init()
    before = bits()
    comm = fzero.profiling.trace_comm(step, state, part(vectors(0), step.rank, step.world_size))
    return comm, before, bits()


def _in_files(stage: int, path: Path | str) -> dict[str, Any]:
    files = {"device": "nvme", "nvme_path": str(path)}
    return {"offload_optimizer": files} | (
        {"offload_param": files | {"max_in_cpu": 0}} if stage == 3 else {}
    )


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3), (3, 2)])
def test_a_step_whose_state_is_in_files_sends_the_same_and_reports_whether_they_are_whole(
    ranks: RankPool, world_size: int, stage: int, tmp_path: Path
) -> None:
    axis = fzero.comms.AbstractAxis("data", world_size)
    here, there = (
        in_lockstep(fzero.make_train_step(make(Plain), config(stage, **zero), mesh=axis), vectors)
        for zero in ({}, _in_files(stage, tmp_path / "lockstep"))
    )
    assert [row[1:] for row in there.rows if row.purpose != "files"] == [
        row[1:] for row in here.rows
    ]
    assert world_size == 1 or "files" in there.by_purpose()
    if world_size == 2:
        for comm, before, after in ranks(2, _traced_in_files, stage, str(tmp_path / "real")):
            assert comm.rows == there.rows
            assert before == after
        planned = on_paper(
            Plain, vectors, config(stage, **_in_files(stage, tmp_path / "plan")), axis
        )[1]
        assert (
            reported(planned, *ALIKE) == reported(there, *ALIKE)
            and not (tmp_path / "plan").exists()
        ), "nor makes files"
    assert not list(tmp_path.rglob("*.flat")), "a copy goes with the trace"


@pytest.mark.long
@pytest.mark.parametrize(("stage", "keys"), [(0, {"zero_quantized_gradients": True}), (3, CODED)])
def test_through_comm_hooks_lockstep_and_plan_report_the_elements_that_are_meant_and_the_bytes_that_are_sent(
    stage: int, keys: Mapping[str, Any]
) -> None:
    step, planned = on_paper(
        Plain, vectors, config(stage, **keys), fzero.comms.AbstractAxis("data", 3)
    )
    simulated = in_lockstep(step, vectors)
    assert reported(simulated, *ALIKE) == reported(planned, *ALIKE)
    for comm in (simulated, planned):
        check_plan(comm, step.plan)
        sent = sum(row.nbytes for row in comm.rows if row.purpose in ("gather", "reduce"))
        assert (
            sent
            == sum(step.plan.sent_nbytes_per_step.values())
            < 4 * sum(step.plan.sent_per_step.values())
        )


@pytest.mark.long
def test_nccl_and_gloo_send_the_same_in_other_collectives() -> None:
    nccl, gloo = (
        on_paper(Plain, vectors, config(0), fzero.comms.AbstractAxis("data", 3, backend=b))[1]
        for b in ("nccl", "gloo")
    )  # type: ignore[arg-type]
    assert reported(nccl) == reported(gloo), "on gloo an all-reduce is two collectives, and one row"
    assert set(nccl.by_collective()) == {"all_gather", "all_reduce"} == set(gloo.by_collective())


@pytest.mark.long
def test_a_graph_gathers_in_the_backward_what_it_reads_and_an_eager_step_whole_units() -> None:
    step, planned = on_paper(Odd, tokens, config(3), fzero.comms.AbstractAxis("data", 3))
    eager = in_lockstep(step, tokens)
    # a bias: no gradient needs it
    (frozen,) = [buffer for buffer in step.plan.flat_buffers if not buffer.trainable]
    again = Counter([("gather", "data", "blocks.1", 2 * 4 * frozen.shard_numel)])
    assert reported(eager, *ALIKE) - reported(planned, *ALIKE) == again and reported(
        planned, *ALIKE
    ) <= reported(eager, *ALIKE)
    # An unused parameter is not gathered for its zero gradient: only for the embedding, and for the
    # head tied to it.
    assert [row.unit for row in planned.rows if row.purpose == "gather"].count("(root)..embed") == 2


@pytest.mark.long
@pytest.mark.parametrize(("backend", "stage"), [("gloo", 2), ("nccl", 0), ("nccl", 3)])
def test_collectives_that_are_joined_are_reported_flat_buffer_by_flat_buffer(
    stage: int, backend: Any
) -> None:
    axis = fzero.comms.AbstractAxis("data", 3, backend=backend)
    cfg = config(stage, reduce_bucket_size=3000, allgather_bucket_size=3000)
    step, joined = on_paper(Odd, tokens, cfg, axis)
    _, alone = on_paper(Odd, tokens, config(stage), axis)
    # Joined with others of its unit, the frozen buffer is gathered in the backward like those.
    frozen = [b.shard_numel for b in step.plan.flat_buffers if not b.trainable and stage == 3]
    assert reported(joined) - reported(alone) == Counter(
        ("gather", "data", "blocks.1", 2 * 4 * numel) for numel in frozen
    )
    assert reported(alone) <= reported(joined)
    assert any(row.is_joined for row in joined.rows) and not any(
        row.is_joined for row in alone.rows
    )
    assert "(joined)" in str(joined)


def test_a_graph_makes_all_module_buffers_equal_and_an_eager_step_those_that_move() -> None:
    step, planned = on_paper(Normed, vectors, config(1), fzero.comms.AbstractAxis("data", 3))
    eager = in_lockstep(step, vectors)
    assert reported(eager, *ALIKE) == reported(planned, *ALIKE)
    moving, number = 2 * 8 * 4, 8  # mean and variance; how many batches there were
    assert reported(eager, "buffers") == Counter(
        [("buffers", "data", "", 2 * n) for n in (moving, number)]
    )
    assert reported(planned, "buffers") == Counter(
        [("buffers", "data", "", 2 * n) for n in (moving + 5 * 4, number)]
    )


def test_ranks_as_a_dimension_report_what_one_of_them_would_send() -> None:
    step, planned = on_paper(
        Plain, vectors, config(3), fzero.comms.AbstractAxis("data", 3, backend="gloo")
    )
    ranks = fzero.simulate(step, by="vmap")
    assert (
        fzero.profiling.trace_comm(ranks, ranks.init(), for_ranks(vectors(0), 3)).rows
        == planned.rows
    )
    wired = fzero.make_train_step(
        make(Plain), config(3, **CODED), mesh=fzero.comms.AbstractAxis("data", 3, backend="gloo")
    )
    coded = fzero.profiling.trace_comm(
        fzero.simulate(wired, by="vmap"), ranks.init(), for_ranks(vectors(0), 3)
    )
    assert 0 < 2 * coded.by_purpose()["gather"] < planned.by_purpose()["gather"]


@pytest.mark.parametrize("by", ["vmap", "lockstep"])
def test_what_is_no_step_or_no_state_of_it_is_reported(by: Any) -> None:
    step = fzero.make_train_step(make(Plain), config(3), mesh=fzero.comms.AbstractAxis("data", 3))
    ranks, batch = fzero.simulate(step, by=by), for_ranks(vectors(0), 3)
    with pytest.raises(ValueError, match="state: must be a TrainState, got None"):
        fzero.profiling.trace_comm(ranks, None, batch)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"plan_comm: step must be of make_train_step, got \w+; .*trace_comm\(step, st",
    ):
        fzero.profiling.plan_comm(ranks, batch)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match="trace_comm: step must be of make_train_step or of simulate, got Plan; pass",
    ):
        fzero.profiling.trace_comm(step.plan, ranks.init(), batch)  # type: ignore[arg-type]


# --- several axes ---------------------------------------------------------------------------------

SQUARE = Mesh.of(node=2, data=2)
MESHES = [
    (0, {}),
    (2, {}),
    (3, {}),
    (3, {"zero_hpz_partition_size": 2}),
    (3, {"mics_shard_size": 2}),
]


def _mesh_config(stage: int, keys: Mapping[str, Any]) -> Any:
    return config(stage, **keys)


def _traced_on_a_mesh(stage: int, keys: Mapping[str, Any]) -> CommTrace:
    axis = replace(fzero.join(), mesh=None if keys else SQUARE)
    step = fzero.make_train_step(make(Plain), _mesh_config(stage, keys), mesh=axis)
    return fzero.profiling.trace_comm(
        step, step.init(), part(vectors(0), step.rank, step.world_size)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stage", "keys"), MESHES)
def test_on_several_axes_processes_and_lockstep_report_what_the_plan_says_of_each(
    ranks: RankPool, stage: int, keys: Mapping[str, Any]
) -> None:
    axis = fzero.comms.AbstractAxis("data", 4, mesh=None if keys else SQUARE)
    step = fzero.make_train_step(make(Plain), _mesh_config(stage, keys), mesh=axis)
    simulated = in_lockstep(step, vectors)
    check_plan(simulated, step.plan)
    assert set(simulated.by_axis()) == {"data", "node", "world"}
    assert {row.purpose for row in simulated.rows if row.axis == "world"} == {"loss_stats"}
    for comm in ranks(4, _traced_on_a_mesh, stage, keys):
        assert comm.rows == simulated.rows


# --- nothing else is sent, and nothing changes ----------------------------------------------------


class Counting(Hub):
    """Adds up the bytes that rank 1 sends."""

    nbytes = 0

    def send(self, source: int, target: int, value: Any) -> None:
        assert isinstance(value, Tensor), "what is no tensor would be sent untold"
        Counting.nbytes += value.nbytes * (source == 1)
        super().send(source, target, value)


@pytest.mark.parametrize(
    ("mesh", "keys"), [(None, {}), (SQUARE, {}), (SQUARE, {"zero_hpz_partition_size": 2})]
)
def test_every_byte_that_a_rank_sends_is_reported(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh | None, keys: Mapping[str, Any]
) -> None:
    monkeypatch.setitem(LockstepRanks.__init__.__globals__, "Hub", Counting)
    monkeypatch.setattr(Counting, "nbytes", 0)
    log: list[fzero.comms.CommRecord] = []
    for stage in (3,) if keys else (0, 2, 3):
        recipe = fzero.make_train_step(
            make(Normed), config(stage, **keys), mesh=fzero.comms.AbstractAxis("data", 4, mesh=mesh)
        ).spec
        ranks = LockstepRanks(
            recipe, 4, lambda rank, sent: log.append(sent) if rank == 1 else None, mesh
        )
        state = ranks.init()
        for index in range(2):  # the first negotiates
            state, _ = ranks(state, for_ranks(vectors(index), 4))
        assert sum(sent.nbytes for sent in log) == Counting.nbytes > 0
    purposes = {sent.label.purpose for sent in log}
    assert {
        "compare",
        "negotiate",
        "agree",
        "loss_stats",
        "norm",
        "gather",
        "reduce",
        "buffers",
    } <= purposes


@pytest.mark.covering(0)
@pytest.mark.parametrize("options", [{}, AOT, {"schedule": "negotiated"}])
def test_tracing_leaves_state_and_step_as_they_are(options: dict[str, Any]) -> None:
    step = fzero.make_train_step(make(Normed), config(3), **options)
    other = fzero.make_train_step(make(Normed), config(3), **options)
    state, expected = step.init(), other.init()
    for index in range(2):
        before = step.schedule
        kept = optree.tree_map(torch.clone, state)
        assert fzero.profiling.trace_comm(step, state, iter([vectors(7)])).rows == ()  # of one rank
        assert (
            optree.tree_all(optree.tree_map(torch.equal, state, kept)) and step.schedule == before
        )
        state, _ = step(state, vectors(index))
        expected, _ = other(expected, vectors(index))
    assert optree.tree_all(optree.tree_map(torch.equal, state, expected))


def test_a_step_that_negotiates_reports_it_and_one_that_learned_does_not() -> None:
    for schedule, negotiates in (("learned", False), ("negotiated", True)):
        step = fzero.make_train_step(
            make(Plain), config(3), mesh=fzero.comms.AbstractAxis("data", 2), schedule=schedule
        )  # type: ignore[arg-type]
        assert ("negotiate" in in_lockstep(step, vectors).by_purpose()) == negotiates


def _both_observers() -> tuple[int, int, int]:
    log: list[fzero.comms.CommRecord] = []
    step = fzero.make_train_step(
        make(Plain), config(2), mesh=replace(fzero.join(), observe=log.append)
    )
    state, batch = step.init(), part(vectors(0), step.rank, step.world_size)
    state, _ = step(state, batch)
    log.clear()
    comm = fzero.profiling.trace_comm(step, state, batch)
    num_told = len(log)
    step(state, batch)
    return len(comm.rows), num_told, len(log)


def _traced_on_rank_0_alone() -> None:
    step = fzero.make_train_step(make(Plain), config(3))
    batch = part(vectors(0), step.rank, step.world_size)
    state, _ = step(step.init(), batch)
    if step.rank == 0:
        fzero.profiling.trace_comm(step, state, batch)
    for _ in range(2):
        state, _ = step(state, batch)


def test_a_trace_on_one_rank_alone_ends_all_ranks_and_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, _traced_on_rank_0_alone)
    for error in caught.value.errors:
        assert isinstance(error, fzero.CollectiveError)
        assert "[4, 6] passes" in str(
            error
        ) and "only some ranks called a collective method (trace_comm" in str(error)


def _named_otherwise() -> CommTrace:
    step = fzero.make_train_step(make(Normed), config(3), mesh=replace(fzero.join(), name="x"))
    return fzero.profiling.trace_comm(
        step, step.init(), part(vectors(0), step.rank, step.world_size)
    )


def test_what_is_sent_along_one_axis_goes_by_the_name_of_the_mesh_alone(ranks: RankPool) -> None:
    for comm in ranks(2, _named_otherwise):
        assert set(comm.by_axis()) == {"data"} and {
            "loss_stats",
            "gather",
            "norm",
            "buffers",
        } <= set(comm.by_purpose())


def test_who_observed_before_is_reported_as_before(ranks: RankPool) -> None:
    for num_rows, num_told, in_two in ranks(2, _both_observers):
        assert num_told == num_rows > 0 and in_two == 2 * num_rows


# --- the report -----------------------------------------------------------------------------------


def test_a_report_adds_up_and_has_a_table_and_a_picture(tmp_path: Path) -> None:
    step = fzero.make_train_step(
        make(Plain), config(3), mesh=fzero.comms.AbstractAxis("data", 4, mesh=SQUARE)
    )
    comm = in_lockstep(step, vectors)
    for totals in (comm.by_unit(), comm.by_axis(), comm.by_collective(), comm.by_purpose()):
        assert sum(totals.values()) == comm.nbytes == sum(row.nbytes for row in comm.rows)
    assert next(iter(comm.by_unit())) == "blocks.0" and comm.num_elements < comm.nbytes
    assert [row.number for row in comm.rows] == list(range(len(comm.rows)))
    lines = str(comm).splitlines()
    assert lines[0] == "what a rank sends in a step: ZeRO stage 3 on 4 ranks, node 2 × data 2"
    assert sum("reduce_scatter" in line and "backward" in line for line in lines) == 5
    assert any("all of it" in line and f"{comm.by_axis()['node']:,}" in line for line in lines)
    comm.save(tmp_path / "new" / "comm.png")
    assert (tmp_path / "new" / "comm.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = comm.draw().axes
    assert [lane.get_text() for lane in axes.get_yticklabels()] == list(comm.by_axis())
    assert len(comm.by_axis()) == 3 and len(axes.patches) == len(comm.rows)
    most = max(row.nbytes for row in comm.rows)
    for row, bar in zip(comm.rows, axes.patches, strict=True):
        assert bar.get_height() == pytest.approx(0.8 * row.nbytes / most)
    phases = dict.fromkeys(row.phase for row in comm.rows)
    assert [label.get_text() for label in axes.get_xticklabels()] == list(phases)


@pytest.mark.long
def test_the_example_reports_what_crosses_each_axis_and_leaves_its_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "examples" / "what_is_sent.py"
    monkeypatch.setattr(sys, "argv", [str(page), "--out", str(tmp_path / "sent.png")])
    runpy.run_path(str(page), run_name="__main__")
    said = capsys.readouterr().out
    # Three blocks of 64·64 + 64 numbers, padded to four parts of a multiple of 32. Along data three
    # gathers, one once more (the first block's input needs no gradient, the last block is still
    # there) and three reductions, of a half each; along node a quarter each of gradients and
    # parameters.
    numel = 4 * 1056
    data, node = 4 * (3 + 1 + 3) * numel // 2, 4 * 2 * 3 * numel // 4
    assert (
        f"hybrid sharding: {data + 8:,} bytes along data, 120 bytes along world, {node:,} bytes "
        f"along node" in said
    )
    assert (
        f"hpZ: {data + 16:,} bytes along data, 120 bytes along world, {node + 8:,} bytes along node"
        in said
    )
    assert "one rank of 1024 would send" in said and (tmp_path / "sent.png").stat().st_size > 10_000


@pytest.mark.long
def test_of_one_rank_there_is_nothing_to_report_and_a_picture_of_it() -> None:
    step = fzero.make_train_step(make(Plain), config(3), mesh=fzero.comms.AbstractAxis("data", 1))
    comm = fzero.profiling.plan_comm(step, vectors(0))
    assert comm.rows == () and comm.nbytes == 0 and str(comm) and comm.draw().axes


def test_a_step_without_ranks_is_traced_in_a_dry_run_only() -> None:
    step = fzero.make_train_step(make(Plain), config(3), mesh=fzero.comms.AbstractAxis("data", 4))
    ranks = fzero.simulate(step, by="lockstep")
    with pytest.raises(
        ValueError,
        match=r"trace_comm: the step must be of ranks that exist.*plan_comm\(step, batch\)",
    ):
        fzero.profiling.trace_comm(step, ranks.init(), vectors(0))
