"""The laws of what an engine reports of its steps: a profile, times, memory, what it
sent, and ranges in a trace.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SAMPLES, Net, criterion, data, made, mine, settings
from ranks import RankPool
from torch import Tensor, nn
from training import make

import fzero
import fzero.deepspeed as deepspeed
from fzero.common.flops import counter
from fzero.config.config import ConfigError, ConfigWarning
from fzero.estimation.models import VOCABULARY, PlainGPT
from fzero.storage.movers import DeviceMover
from fzero.storage.stream import SubGroup, cut, stream_update


def train(engine: fzero.Engine, num_steps: int) -> None:
    for index in range(num_steps):
        x, y = mine(engine, data(index))
        engine.backward(criterion(engine(x), y))
        engine.step()


def profiled(stage: int, *, num_steps: int = 2, model: Any = Net, **keys: Any) -> fzero.Engine:
    engine = made(
        stage,
        model,
        flops_profiler={"enabled": True, "profile_step": 1, **keys.pop("block", {})},
        **keys,
    )
    train(engine, num_steps)
    return engine


def counts_of(profile: fzero.profiling.Profile) -> list[tuple[Any, ...]]:
    return [
        (m.name, m.kind, m.depth, m.num_params, m.forward_flops, m.backward_flops)
        for m in profile.modules
    ]


def alone() -> fzero.profiling.Profile:
    x, y = data(1)
    return fzero.profiling.profile(
        make(Net), x, loss_fn=lambda model, x: criterion(model(x), y), num_runs=1
    )


# --- flops_profiler -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_in_every_stage_the_step_that_trains_is_profiled_like_the_model_by_itself(
    stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = made(stage, flops_profiler={"enabled": True, "profile_step": 1})
    train(engine, 1)
    assert engine.profile is None and "FLOPs" not in capsys.readouterr().out
    train(engine, 1)
    found = engine.profile
    assert found is not None and counts_of(found) == counts_of(alone())
    assert all(m.forward > 0 and m.backward > 0 for m in found.modules)
    assert (
        sum(m.forward for m in found.modules if m.depth == 1)
        <= found.model.forward
        <= found.forward
    )
    assert (
        max(m.backward for m in found.modules) == found.model.backward <= found.backward
        and found.update > 0
    )
    assert "blocks.2 (Block)" in capsys.readouterr().out
    train(engine, 1)
    assert engine.profile is found and capsys.readouterr().out == "", "it is reported once"


def test_a_profile_changes_no_number_and_leaves_no_hook() -> None:
    engine, plain = profiled(3), made(3)
    train(plain, 2)
    for a, b in zip(
        engine.module_state_dict().values(), plain.module_state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.module.modules())


def test_all_micro_steps_of_the_step_are_added_up() -> None:
    once, twice = (
        profiled(
            2,
            num_steps=2 * n,
            gradient_accumulation_steps=n,
            train_micro_batch_size_per_gpu=SAMPLES,
        ).profile
        for n in (1, 2)
    )
    assert once is not None and twice is not None and twice.model.flops == 2 * once.model.flops


def test_every_backward_through_a_forward_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks_of(*keeps: bool) -> list[float]:
        engine = made(0, flops_profiler={"enabled": True, "profile_step": 0})
        clock = iter(range(10**6))
        # each look at the clock takes a second
        monkeypatch.setattr(engine.engine_log.watch, "_now", lambda: float(next(clock)))
        x, y = mine(engine, data(0))
        loss = criterion(engine(x), y)
        for keep in keeps:
            engine.backward(loss, retain_graph=keep)
        engine.step()
        assert engine.profile is not None
        return [m.backward for m in engine.profile.modules if m.kind == "Block"]

    assert blocks_of(True, False) == [2 * seconds for seconds in blocks_of(False)]


def test_forwards_of_no_step_are_no_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    engine = made(0, flops_profiler={"enabled": True, "profile_step": 0}, memory_breakdown=True)
    x, _ = mine(engine, data(0))
    with torch.no_grad():
        for _ in range(30):
            engine(x)
    train(engine, 1)
    assert engine.profile is not None
    assert engine.profile.forward < 2 * engine.profile.model.forward
    assert len(re.findall(r"^\s*forward", capsys.readouterr().out, flags=re.MULTILINE)) == 2, (
        "in each table"
    )


def test_forwards_that_run_again_are_counted_apart() -> None:
    plain = profiled(2).profile
    again = profiled(2, activation_checkpointing={"every": 1}).profile
    assert plain is not None and again is not None and counts_of(plain) == counts_of(again)
    # torch ends the second run before `down`, whose output nobody needs
    up = plain["blocks.0.up"].forward_flops
    assert plain.model.again_flops == 0 and again.model.again_flops == 3 * up
    assert again["blocks.1"].again_flops == again["blocks.1.up"].again_flops == up
    assert "ran again" in str(again) and "ran again" not in str(plain)


def test_modules_that_read_the_same_input_are_reported_apart_in_the_backward() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(8, 8)
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            return torch.stack([part(x).square().mean() for part in (self.q, self.k, self.v)]).sum()

    found = fzero.profiling.profile(make(Heads), torch.randn(4, 8), num_runs=1)
    for name in "qkv":
        assert found[name].backward_flops == 2 * found[name].forward_flops > 0
    assert found.model.backward_flops == sum(
        found[name].backward_flops for name in ("into", "q", "k", "v")
    )


def test_a_compiled_block_is_counted_as_a_whole() -> None:
    engine = made(0, flops_profiler={"enabled": True, "profile_step": 1})
    engine.compile("aot_eager")
    train(engine, 2)
    found = engine.profile
    assert found is not None and found.model.forward_flops == alone().model.forward_flops


def test_a_step_that_fails_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    engine = made(1, flops_profiler={"enabled": True, "profile_step": 0}, wall_clock_breakdown=True)
    x, y = data(0)
    engine.backward(criterion(engine(x * float("nan")), y))
    with pytest.raises(FloatingPointError):
        engine.step()
    train(engine, 1)
    assert engine.profile is not None and counts_of(engine.profile) == counts_of(alone())
    assert capsys.readouterr().out.count("wall clock of step 1") == 1


def test_the_report_goes_where_the_block_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "profile.txt"
    profiled(1, block={"output_file": str(path), "detailed": False, "top_modules": 2})
    assert "profile of Net" in path.read_text() and "module by module" not in path.read_text()
    assert capsys.readouterr().out == ""
    with pytest.warns(
        UserWarning, match=r"^flops_profiler\.output_file: must be a file that can be written"
    ):
        profiled(1, block={"output_file": str(path / "below")})
    assert "profile of Net" in capsys.readouterr().out


def test_what_the_blocks_cannot_mean_is_reported() -> None:
    with pytest.warns(
        ConfigWarning, match=r"^flops_profiler\.recompute_fwd_factor: must be 0, got 1"
    ):
        made(0, flops_profiler={"enabled": True, "recompute_fwd_factor": 1.0})
    with pytest.raises(ConfigError, match=r"^comms_logger\.prof_ops: .*'all_gater' is none"):
        made(0, comms_logger={"enabled": True, "prof_ops": ["all_gater"]})
    with pytest.raises(ConfigError, match=r"^flops_profiler\.top_modules: "):
        made(0, flops_profiler={"enabled": True, "top_modules": 0})


@pytest.mark.parametrize("width, depth, sequence", [(256, 2, 32), (128, 4, 64)])
def test_counted_operations_of_a_plain_gpt_are_six_for_each_weight_and_token_and_those_of_attention(
    width: int, depth: int, sequence: int
) -> None:
    """6 N tokens, N without embeddings, norms and biases; attention: 12 · depth · width
    · sequence for each token.
    """
    ids = torch.zeros(2, sequence, dtype=torch.int64)
    model = make(lambda: PlainGPT(depth, width))
    found = fzero.profiling.profile(model, {"input_ids": ids, "labels": ids}, num_runs=1).model
    num_weights = 12 * depth * width**2 + width * VOCABULARY
    dense, attention = 6 * num_weights * ids.numel(), 12 * depth * width * sequence * ids.numel()
    assert found.forward_flops == (dense + attention) // 3
    # A fused attention computes its scores once more in the backward: a sixth of what it does
    # otherwise.
    assert 0 <= found.flops - (dense + attention) <= attention // 6


def test_torchs_counter_counts_the_same() -> None:
    x, y = data(1)
    model = make(Net)
    with counter() as counted:
        criterion(model(x), y).backward()
    assert counted.get_total_flops() == alone().model.flops


# --- wall_clock_breakdown, memory_breakdown, comms_logger -----------------------------------------


def _watched(stage: int) -> tuple[Any, ...]:
    engine = made(
        stage,
        wall_clock_breakdown=True,
        memory_breakdown=True,
        comms_logger={"enabled": True, "debug": True},
        flops_profiler={"enabled": True, "profile_step": 1},
    )
    parts: list[dict[str, float]] = []
    before = engine.engine_log.watch._parts
    engine.engine_log.watch._parts = lambda: parts.append(before()) or parts[-1]  # type: ignore[method-assign, func-returns-value]
    train(engine, 3)
    assert engine.comms_log is not None
    waited = {} if engine.profile is None else dict(engine.profile.waited)
    return parts, engine.comms_log.counts, waited, engine.comms_log.waited


@pytest.mark.parametrize("stage", [0, 3])
def test_on_two_ranks_waits_and_what_was_sent_are_reported_by_what_they_are_for(
    stage: int, ranks: RankPool
) -> None:
    (parts, counts, waited, all_waited), (no_parts, others, no_profile, _) = ranks(
        2, _watched, stage
    )
    assert len(parts) == 3 and no_parts == [] and no_profile == {}, "rank 0 tells"
    for found in parts:
        assert {"forward", "backward", "update"} <= found.keys()
        assert any(name.startswith("  wait: reduce (backward)") for name in found)
        assert any("gather (forward)" in name for name in found) == (stage == 3)
        assert min(found.values()) >= 0
    assert {"reduce", "losses of all ranks"} <= waited.keys() and ("gather" in waited) == (
        stage == 3
    )
    assert waited.keys() <= all_waited.keys() and all(
        all_waited[name] >= waited[name] for name in waited
    )
    verb = "reduce_scatter" if stage else "all_reduce"
    assert any(name.startswith(f"{verb} (reduce blocks.0/") for name, _, _ in counts), (
        "debug tells what for"
    )
    assert counts == others


def _logged(stage: int) -> tuple[Any, Any]:
    engine = made(stage, comms_logger={"enabled": True})
    train(engine, 1)
    before = engine.comms_log.counts.copy()  # type: ignore[union-attr]
    train(engine, 2)
    step = fzero.make_train_step(
        make(Net),
        settings(stage),
        loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1]),
    )
    comm = fzero.profiling.trace_comm(step, step.init(), mine(engine, data(1)))
    return engine.comms_log.counts - before, [
        (row.collective, row.axis, row.nbytes) for row in comm.rows
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_log_of_an_engine_reports_what_a_traced_step_sends(stage: int, ranks: RankPool) -> None:
    counts, rows = ranks(2, _logged, stage)[0]
    rows.append(("stack", "data", 5 * 8))  # on the CPU an engine also says that it updates
    assert counts == {row: 2 * rows.count(row) for row in rows}, "two steps"


def _summarised(**block: Any) -> tuple[str, Any]:
    gc.collect()  # engines of other tests
    engine = made(2, comms_logger={"enabled": True, **block})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(engine, 1)
        reported = deepspeed.comm.log_summary(show_straggler=True, return_dict=True)
    engine.destroy()
    return out.getvalue(), reported


def test_log_summary_prints_on_rank_0_and_gives_its_numbers_to_a_script(ranks: RankPool) -> None:
    (first, reported), (second, _) = ranks(
        2, _summarised, prof_all=False, prof_ops=["reduce_scatter_tensor"], verbose=True
    )
    assert (
        second == ""
        and "least" in first
        and "reduce_scatter" in first
        and "all_gather" not in first
    )
    assert first.count("comm: reduce_scatter along data: reduce ") == 4, "units"
    assert list(reported["summary"]) == ["reduce_scatter"]
    assert sum(row["count"] for row in reported["summary"]["reduce_scatter"].values()) == 4


def test_a_log_that_is_reset_forgets_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"reduce": 1.0}
    monkeypatch.setattr("fzero.comms.collectives.waited", lambda: dict(seconds))
    log: Any = made(1, comms_logger={"enabled": True}).comms_log
    seconds["reduce"] = 3.0
    assert list(log.waited.values()) == [2.0]
    deepspeed.comm.reset_log()
    assert log.waited == {} and not log.counts


# --- ranges in a trace ----------------------------------------------------------------------------


def events_of(path: Path) -> list[dict[str, Any]]:
    """Fzero's ranges, in the order in which they begin."""
    events = json.loads(path.read_text())["traceEvents"]
    own = [
        e
        for e in events
        if e.get("ph") == "X" and e["name"].startswith("fzero::") and e["cat"] == "user_annotation"
    ]
    return sorted(own, key=lambda event: event["ts"])


def ranges_of(path: Path) -> list[tuple[str, float, float]]:
    """Their names, with begin and end."""
    return [(e["name"][7:], e["ts"], e["ts"] + e["dur"]) for e in events_of(path)]


def _traced(folder: str, stage: int) -> None:
    engine = made(stage)
    train(engine, 1)
    with torch.profiler.profile() as recorded:
        train(engine, 1)
    recorded.export_chrome_trace(f"{folder}/{engine.global_rank}.json")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_trace_of_an_engines_step_names_its_units_gathers_reductions_and_update(
    stage: int, tmp_path: Path, ranks: RankPool
) -> None:
    ranks(2, _traced, str(tmp_path), stage)
    units = ["blocks.0", "blocks.1", "blocks.2", "head"]
    for rank in range(2):
        found = ranges_of(tmp_path / f"{rank}.json")
        names = [name for name, _, _ in found]
        assert [n for n in names if n in ("forward", "backward", "update")] == [
            "forward",
            "backward",
            "update",
        ]
        assert [n for n in names if n.startswith("unit ")] == [f"unit {unit}" for unit in units]
        reduced = [n for n in names if re.match("reduce_scatter |all_reduce ", n)]
        assert reduced == [
            f"{'reduce_scatter' if stage else 'all_reduce'} {unit}" for unit in reversed(units)
        ]
        gathered = {n for n in names if n.startswith("gather ")}
        assert gathered == ({f"gather {unit}" for unit in units} if stage == 3 else set())
        assert "wait reduce blocks.0/float32" in names
        spans = {name: (start, stop) for name, start, stop in found}
        start, stop = spans["forward"]
        stays = [spans[f"unit {unit}"] for unit in units]
        assert all(start <= a <= b <= stop for a, b in stays), (
            "the forward is in its units, one after the other"
        )
        assert all(a[1] <= b[0] for a, b in pairwise(stays))


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_save_trace_writes_a_step_and_leaves_the_state(device: str, tmp_path: Path) -> None:
    files = {"device": device, "nvme_path": str(tmp_path / "state")}
    cfg = settings(3)
    if device == "nvme":
        cfg["zero_optimization"]["offload_optimizer"] = files
    step = fzero.make_train_step(
        make(Net), cfg, loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])
    )
    state = step.init()
    params, left = {key: x.clone() for key, x in state.params.items()}, {*tmp_path.rglob("*.flat")}
    fzero.profiling.save_trace(tmp_path / "new" / "trace.json", step, state, data(0))
    names = [name for name, _, _ in ranges_of(tmp_path / "new" / "trace.json")]
    assert names.count("update") == 1 and {"gather head", "reduce_scatter head", "unit head"} <= {
        *names
    }
    assert all(torch.equal(x, params[key]) for key, x in state.params.items())
    gc.collect()
    assert {*tmp_path.rglob("*.flat")} == left and bool(left) == (device == "nvme")
    step(state, data(0))  # which a stale state could not


KEYS = ("blocks.0/float32", "blocks.1/float32", "blocks.2/float32", "head/float32")
LONGS = ("", "/state.exp_avg", "/state.exp_avg_sq")


def with_files(tmp_path: Path, *blocks: str, **keys: Any) -> dict[str, Any]:
    """Stage 3, with what these blocks place in files."""
    cfg = settings(3, **keys)
    for block in blocks:
        more = {"max_in_cpu": 0} if block == "offload_param" else {}
        cfg["zero_optimization"][block] = {
            "device": "nvme",
            "nvme_path": str(tmp_path / "state"),
            **more,
        }
    return cfg


def stepped(cfg: dict[str, Any], **how: Any) -> Any:
    return fzero.make_train_step(
        make(Net), cfg, loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1]), **how
    )


def test_a_trace_names_what_moves_between_files_and_a_step_and_shows_that_it_overlaps(
    tmp_path: Path,
) -> None:
    step = stepped(with_files(tmp_path, "offload_optimizer", "offload_param"))
    fzero.profiling.save_trace(tmp_path / "trace.json", step, step.init(), data(0))
    events = events_of(tmp_path / "trace.json")
    spans = {e["name"][7:]: (e["ts"], e["ts"] + e["dur"]) for e in events}  # of several the last
    names = [e["name"][7:] for e in events]
    numels = {buffer.key: buffer.layout.numel for buffer in step.plan.flat_buffers}
    # shards of parameters come once for the forward, and again for the backward but for the last
    for key in KEYS:
        num = 1 if key == KEYS[-1] else 2
        assert names.count(f"load {key}") == names.count(f"wait load {key}") == num
        assert (
            names.count(f"write_back {key}/grads")
            == names.count(f"wait write_back {key}/grads")
            == 1
        )
        at = f"{key} 0:{-(-numels[key] // 32) * 32}"
        order = [
            spans[f"{verb} {at}"]
            for verb in ("fetch", "wait fetch", "update", "write_back", "wait write_back")
        ]
        assert all(a[1] <= b[0] for a, b in pairwise(order))
        assert all(spans["update"][0] <= a <= b <= spans["update"][1] for a, b in order)
    by_verb = {
        verb: [name for name in names if name.startswith(f"{verb} ")]
        for verb in ("fetch", "update", "prefetch")
    }
    assert len(by_verb["fetch"]) == len(by_verb["update"]) == len(KEYS)
    for name, following in pairwise(by_verb["update"]):  # the next one comes meanwhile
        assert spans[following.replace("update", "fetch")][1] <= spans[name][0]
    forward, backward = spans["forward"], spans["backward"]
    assert by_verb["prefetch"] and all(
        forward[1] <= spans[name][0] < backward[0] for name in by_verb["prefetch"]
    )
    # Threads read and write, and the step goes on.
    own_thread = next(e["tid"] for e in events if e["name"] == "fzero::update")
    moved = [e for e in events if e["name"].startswith(("fzero::read ", "fzero::write "))]
    assert (
        all(e["tid"] != own_thread for e in moved)
        and len({e["tid"] for e in events if e not in moved}) == 1
    )
    read, written = (
        {e["name"][7:] for e in moved if e["name"][7:].startswith(verb)}
        for verb in ("read", "write")
    )
    assert read >= {f"read {key}{long}" for key in KEYS for long in LONGS}
    assert written >= {f"write {key}{long}" for key in KEYS for long in (*LONGS, "/grads")}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_in_a_profile_of_ones_own_the_steps_thread_is_named_and_what_does_not_move_is_not(
    device: str, tmp_path: Path
) -> None:
    cfg = with_files(tmp_path, "offload_optimizer")
    cfg["zero_optimization"]["offload_optimizer"]["device"] = device
    step = stepped(cfg)
    state, _ = step(step.init(), data(0))
    with torch.profiler.profile() as recorded:
        step(state, data(1))
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    verbs = {name.split()[0] for name, _, _ in ranges_of(tmp_path / "trace.json")}
    # host memory is the model's own
    moves = {"fetch", "write_back", "prefetch"} if device == "nvme" else set()
    assert verbs & {"fetch", "write_back", "prefetch", "load", "read", "write"} == moves


def test_sub_groups_from_host_memory_are_named_with_their_elements(tmp_path: Path) -> None:
    x = torch.arange(160.0)
    mover = DeviceMover({"h.0": x, "h.0/exp_avg": x.clone()}, "cpu")
    groups = cut(("h.0", "h.0/exp_avg"), 160, 64)
    with torch.profiler.profile() as recorded:
        stream_update(
            lambda _, tensors: [tensor.add_(1) for tensor in tensors] and None, mover, groups
        )
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [name for name, _, _ in ranges_of(tmp_path / "trace.json")]
    for verb in ("fetch", "wait fetch", "update", "write_back", "wait write_back"):
        found = [name for name in names if name.startswith(f"{verb} ")]
        assert found == [f"{verb} h.0 {at}" for at in ("0:64", "64:128", "128:160")]
    assert torch.equal(x, torch.arange(160.0) + 1)


def test_of_a_step_with_a_graph_what_moves_is_named_and_the_graph_holds_no_names(
    tmp_path: Path,
) -> None:
    cfg = with_files(tmp_path, "offload_optimizer")
    step = stepped(cfg, compile="step", compile_backend="aot_eager")
    state = step.init()
    with torch.profiler.profile() as recorded:  # while it is captured, too
        step(state, data(0))
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [name for name, _, _ in ranges_of(tmp_path / "trace.json")]
    assert names.count("step in one graph") == names.count("update") == 1
    assert {f"write_back {key}/grads" for key in KEYS} <= {*names}
    assert {"fetch", "write_back"} <= {name.split()[0] for name in names}
    nodes = step.explain().liveness.nodes
    assert len(nodes) > 50 and not any("record_function" in name for name in nodes)


def test_ranges_cost_nothing_where_no_trace_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.autograd import profiler

    monkeypatch.setattr(profiler, "record_function", None)
    monkeypatch.setattr(SubGroup, "__str__", None)
    train(made(3), 1)
    step = stepped(with_files(tmp_path, "offload_optimizer", "offload_param"))
    step(step.init(), data(0))
