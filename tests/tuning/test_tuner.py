"""The laws of `fzero tune`: what is tried next and when it is enough, what ranks tell,
what is kept, and one real search.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import fzero
from fzero.__main__ import main
from fzero.config.autotuning import Autotuning, autotuning
from fzero.config.config import Config, ConfigError
from fzero.tuning.cli import Tuning, _shown
from fzero.tuning.probe import VARIABLE, Request
from fzero.tuning.report import Tuned
from fzero.tuning.runs import OF_SPACE, Results, Runs, Script, key_of, reason
from fzero.tuning.search import Point, Strategy, next_trial
from fzero.tuning.space import Result, candidates

# --- the search -----------------------------------------------------------------------------------


def searched(
    points: list[Point], costs: list[float | None], strategy: Strategy
) -> dict[int, float | None]:
    """What was measured, in order."""
    found: dict[int, float | None] = {}
    while (index := next_trial(points, found, strategy)) is not None:
        assert index not in found, "a point was measured twice"
        found[index] = costs[index]
    return found


def machine(seed: int) -> tuple[list[Point], list[float]]:
    """A search space of 24 configurations, and what each really costs: effects,
    interactions and noise that no plan knows.
    """
    chance = np.random.default_rng(seed)
    stages = np.cumsum(np.abs(chance.normal(0, 0.15, 4)))
    micro, curve, checkpoints = (
        chance.normal(-0.2, 0.2),
        abs(chance.normal(0, 0.1)),
        chance.uniform(0.1, 0.35),
    )
    points, costs = [], []
    for stage, size, has in product(range(4), (-1, 0, 1), (0, 1)):
        features = ((stage >= 1) - 0.5, (stage >= 2) - 0.5, (stage >= 3) - 0.5, size, has - 0.5)
        predicted = 0.1 * (stage == 3) + checkpoints * has + chance.normal(0, 0.1) - 3
        points.append(Point(features, math.exp(predicted)))
        own = chance.normal(0, 0.03)
        costs.append(
            math.exp(stages[stage] + micro * size + curve * size**2 + checkpoints * has + own)
        )
    order = [20, *(index for index in range(24) if index != 20)]  # begins at stage 3
    return [points[index] for index in order], [costs[index] for index in order]


def test_a_third_of_the_runs_finds_a_configuration_within_5_percent_of_the_best() -> None:
    found = []
    for seed in range(60):
        points, costs = machine(seed)
        measured = searched(points, costs, Strategy(num_trials=8))  # type: ignore[arg-type]
        found.append(min(costs[index] for index in measured) / min(costs))
    assert np.mean([ratio < 1.05 for ratio in found]) >= 0.9 and np.mean(found) < 1.02


@st.composite
def spaces(draw: st.DrawFn) -> tuple[list[Point], list[float | None]]:
    """Points, and costs of which some are missing."""
    numbers = st.floats(0.01, 100)
    drawn = draw(
        st.lists(
            st.tuples(st.tuples(st.floats(-3, 3), st.floats(-1, 1)), numbers),
            min_size=1,
            max_size=12,
        )
    )
    costs = draw(st.lists(st.none() | numbers, min_size=len(drawn), max_size=len(drawn)))
    return [Point(features, predicted) for features, predicted in drawn], costs


@pytest.mark.property
@given(
    spaces(),
    st.sampled_from(["model_based", "random", "gridsearch"]),
    st.integers(1, 15),
    st.integers(0, 4),
)
def test_no_point_is_measured_twice_and_trials_are_bounded(
    space, kind, num_trials, patience
) -> None:
    points, costs = space
    found = searched(points, costs, Strategy(kind, num_trials, patience))
    assert 1 <= len(found) <= num_trials
    if kind != "model_based" and not patience:
        assert len(found) == min(num_trials, len(points))


def test_a_search_that_gets_no_better_is_stopped() -> None:
    points = [Point((float(n),), 1.0) for n in range(20)]
    costs: list[float | None] = [3.0, 2.0, 1.0, None, *[1.5] * 16]
    assert list(searched(points, costs, Strategy("gridsearch", 50, 5))) == list(
        range(9)
    )  # one that failed does not count
    assert len(searched(points, costs, Strategy("gridsearch", 50, 0))) == 20
    assert len(searched(points, costs, Strategy("random", 50, 19))) == 20


def test_what_needs_as_much_as_what_ran_out_of_memory_is_not_tried() -> None:
    points = [Point((), 1.0, nbytes) for nbytes in (1.0, 5.0, 3.0, 6.0)]
    order = []
    costs: dict[int, float | None] = {}
    while (
        index := next_trial(
            points, costs, Strategy("gridsearch"), out_of_memory=frozenset(order[1:2])
        )
    ) is not None:
        order.append(index)
        costs[index] = None if points[index].nbytes > 4 else 1.0
    assert order == [0, 1, 2]


# --- the search space -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_keys",
    [{"train_batch_size": 48}, {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3}],
)
def test_the_batch_stays_where_it_is_given(given_keys: dict[str, Any]) -> None:
    settings = Autotuning(num_tuning_micro_batch_sizes=9, max_train_micro_batch_size_per_gpu=12)
    found = candidates(given_keys, settings, 2)
    assert found[0].keys == given_keys and found[0].is_given
    assert len({one.name for one in found}) == len(found)
    assert {one.micro for one in found[1:]} >= {1, 2, 3, 4, 6, 8, 12}
    for one in found:
        assert Config.load(dict(one.keys)).batch_sizes(2) == (48, one.micro, one.num_micro_steps)


def test_candidates_are_what_they_say() -> None:
    keys = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"every": 2},
    }
    found = candidates(keys, Autotuning(fast=False), 4, offload=("device", "host"))
    assert len(found) == len({one.name for one in found}) == 3 * 2 * 2 * (4 + 3 + 1)
    for one in found:
        cfg = Config.load(dict(one.keys))
        zero, block = cfg.zero_optimization, cfg.zero_optimization.offload_optimizer
        assert zero.stage == one.choices.stage and (block is not None) == (
            one.choices.optimizer == "host"
        )
        assert cfg.activation_checkpointing.every == (2 if one.choices.checkpoints else None)
        assert cfg.batch_sizes(4).micro == one.micro and one.micro in (4, 8, 16)


def test_a_configuration_without_a_batch_keeps_its_micro_batches() -> None:
    assert {one.micro for one in candidates({}, Autotuning(), 2)} == {None}


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"tuner_typ": "random"}, "autotuning.tuner_typ: unknown key; did you mean 'tuner_type'?"),
        (
            {"tuner_type": "xgboost"},
            "autotuning.tuner_type: must be 'model_based', 'random' or 'gridsearch', got 'xgboost'",
        ),
        ({"mp_size": 2}, "autotuning.mp_size: must be 1"),
        (
            {"end_profile_step": 2},
            "autotuning.end_profile_step: must be at least start_profile_step, 3, got 2",
        ),
        (3, "autotuning: must be an object, got 3"),
    ],
)
def test_a_wrong_block_is_reported_with_its_key(block: Any, says: str) -> None:
    with pytest.raises(ConfigError) as reported:
        autotuning({"autotuning": block})
    assert str(reported.value).startswith(says)


# --- the script and its results -------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [["--config", "c.json", "-x"], ["-x", "--deepspeed_config=c.json"]]
)
def test_a_script_is_started_with_another_configuration_and_all_else_as_it_was(
    args: list[str],
) -> None:
    script = Script.of(["--num_procs", "2"], "train.py", args)
    words = ["--num_procs", "2", "train.py", *args]
    assert script.config == "c.json" and script.words("c.json") == words
    assert script.words("d.json") == [word.replace("c.json", "d.json") for word in words]
    assert script.words("c.json", {"-x": 3, "--batch": 4})[-3:] in (
        ["-x", "3", "--batch"],
        ["3", "--batch", "4"],
    )


@pytest.mark.parametrize(
    "before", [["--deepspeed"], ["--config", "model.yaml", "--deepspeed"], ["--config=model.yaml"]]
)
def test_deepspeeds_own_flag_names_the_configuration(before: list[str]) -> None:
    script = Script.of([], "train.py", [*before, "--deepspeed_config", "ds.json"])
    assert script.config == "ds.json" and script.words("x")[1:] == [
        *before,
        "--deepspeed_config",
        "x",
    ]


def test_results_are_found_again_also_after_a_torn_line(tmp_path: Path) -> None:
    slow, good = (
        Result("a", "x", error="no result in 5 s", timed_out=True, time_limit=5.0),
        Result("b", "y", 0.5, 8, 100),
    )
    Results(tmp_path).add(slow.as_dict())
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"key": "c", "na')
    Results(tmp_path).add(good.as_dict())
    found = Results(tmp_path)
    assert found.find("b", 60.0) == good and found.find("c", 5.0) is None
    assert found.find("a", 5.0) == slow and found.find("a", 60.0) is None  # it has more time now
    assert Results(tmp_path, overwrite=True).find("b", 5.0) is None


@pytest.mark.parametrize("change", [{"nbytes": None}, {"flops": 3}])
def test_a_result_of_another_version_is_not_known(change: dict[str, Any], tmp_path: Path) -> None:
    line = Result("a", "x", 0.5, 8, 100).as_dict() | change
    Results(tmp_path).add(
        {name: value for name, value in line.items() if value is not None or name == "config"}
    )
    assert Results(tmp_path).find("a", 60.0) is None


def test_the_key_of_a_result_is_its_configuration_command_and_limits() -> None:
    request = Request("measure", "out")
    key = key_of({"zero_optimization": {"stage": 1}}, ["train.py"], request)
    assert key == key_of(
        {"autotuning": {}, "zero_optimization": {"stage": 1}},
        ["train.py"],
        Request("measure", "other"),
    )
    others = [
        key_of({"zero_optimization": {"stage": 2}}, ["train.py"], request),
        key_of({"zero_optimization": {"stage": 1}}, ["train.py", "--wide"], request),
        key_of(
            {"zero_optimization": {"stage": 1}}, ["train.py"], Request("measure", "out", memory=1e9)
        ),
    ]
    assert len({key, *others}) == 4


@pytest.mark.parametrize("name", OF_SPACE)
def test_the_key_of_a_plan_is_also_the_search_space(name: str) -> None:
    other = {"fast": False, "arg_mappings": {"bf16": "--bf16"}}.get(name, 2)
    plan, run = Request("describe", "out"), Request("measure", "out")
    assert key_of({"autotuning": {name: other}}, [], plan) != key_of({}, [], plan)
    assert key_of({"autotuning": {"tuner_type": "random"}}, [], plan) == key_of({}, [], plan)
    assert key_of({"autotuning": {name: other}}, [], run) == key_of({}, [], run)


ALLOCATED = (
    "[rank 0] [rank0]: RuntimeError: [enforce fail at alloc_cpu.cpp] can't allocate memory: 4 bytes"
)
RESERVED = "[rank 0] keeps 1 GB, or runs out of memory\n"
NCCL = (
    "[rank 0] [rank0]: torch.distributed.DistBackendError: NCCL error\n[rank 0] Cuda failure "
    "2 'out of memory'\n"
)
ABORTED = (
    "[rank 1] terminate called after throwing an instance of 'std::bad_alloc'\n[rank 0] "
    "RuntimeError: closed by peer\n"
)
MISSED = (
    "[rank 1] fzero.comms.axes.CollectiveError: rank 0 died\n[rank 0] ValueError: batch: "
    "must hold 4\n"
)


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        (ALLOCATED, 1, "out of memory of 2 GB"),
        ("fzero: rank 1 on a was killed by SIGKILL", 137, "out of memory of 2 GB"),
        (RESERVED + MISSED, 1, "ValueError: batch: must hold 4"),
        (RESERVED + "[rank 0] ValueError: x\n" + RESERVED.replace("0", "1"), 1, "ValueError: x"),
        (
            "[rank 0] torch.OutOfMemoryError: out of memory\n[rank 0] ValueError: x\n",
            1,
            "ValueError: x",
        ),
        (
            NCCL + "[rank 0] fzero.comms.axes.CollectiveError: rank 1 died",
            1,
            "out of memory of 2 GB",
        ),
        (ABORTED, 1, "out of memory of 2 GB"),
        ("[rank 0] [rank0]: MemoryError", 1, "out of memory of 2 GB"),
        (MISSED, 1, "ValueError: batch: must hold 4"),
        ("done", 0, "ended before step 5"),
        ("what is this", 3, "ended with code 3: what is this"),
        ("", 3, "ended with code 3: it wrote nothing"),
    ],
)
def test_why_a_run_failed_is_reported_in_few_words(log: str, code: int, says: str) -> None:
    assert reason(log, code, Request("measure", "", memory=2e9)) == says


# --- in the ranks ---------------------------------------------------------------------------------


class Ended(BaseException):
    """In place of the end of the process."""


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


KEYS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks this process, as its one rank, for something; what is asked next is what it
    answered.
    """

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    # measured in seconds
    monkeypatch.setattr("fzero.profiling.machine.matrix_rate", lambda *_: 1e10)

    def ask(mode: Any, **more: Any) -> Path:
        out = tmp_path / "out"
        monkeypatch.setenv(
            VARIABLE, Request(mode, str(out), start=2, end=3, keys=KEYS, **more).as_text()
        )
        return out

    return ask


def train(steps: int) -> None:
    step = fzero.make_train_step(
        Model(), KEYS, loss_fn=lambda model, x: (model(x) - 1).square().mean()
    )
    state = step.init()
    for _ in range(steps):
        state, _ = step(state, torch.randn(4, 16))


def train_by_engine(steps: int) -> None:
    engine, *_ = fzero.initialize(model=Model(), config=KEYS | {"optimizer": {"type": "AdamW"}})
    for _ in range(steps):
        engine.backward((engine(torch.randn(4, 16)) - 1).square().mean())
        engine.step()


@pytest.mark.parametrize("script", [train, train_by_engine])
def test_a_rank_times_the_steps_that_are_asked_for_and_ends(script: Any, asked: Any) -> None:
    out = asked("measure")
    script(2)
    assert not out.exists()
    with pytest.raises(Ended):
        script(10)
    found = json.loads(out.read_text())
    assert 0 < found["seconds"] < 5 and found["samples"] == 4


def test_a_micro_batch_that_the_script_does_not_make_is_not_timed(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = asked("measure")
    monkeypatch.setitem(KEYS, "train_micro_batch_size_per_gpu", 16)
    with pytest.raises(
        ValueError,
        match="the script's batch has 4 rows, not 16: build batches by the configuration",
    ):
        train_by_engine(10)
    assert not out.exists()


@pytest.mark.long
@pytest.mark.parametrize("script", [train, train_by_engine])
def test_a_rank_plans_every_candidate_with_the_scripts_model_and_batch(
    script: Any, asked: Any
) -> None:
    out = asked("describe")
    with pytest.raises(Ended):
        script(1)
    found = json.loads(out.read_text())
    assert found["num_params"] == 3 * 17 * 16 and not found["note"]
    plans = {one["choices"]["stage"]: one for one in found["candidates"] if one["micro"] == 4}
    assert len(found["candidates"]) == 24 and not any(one["refused"] for one in found["candidates"])
    larger = {one["micro"]: one for one in found["candidates"] if one["choices"]["stage"] == 2}
    assert plans.keys() == {0, 1, 2, 3} and larger[8]["flops"] == 2 * larger[4]["flops"] > 0
    out.unlink()
    asked("describe without a batch")
    with pytest.raises(Ended):
        script(0)
    assert "activations are not counted" in json.loads(out.read_text())["note"]


def test_where_nothing_fits_offload_is_planned_too(asked: Any) -> None:
    out = asked("describe", memory=1.0)
    with pytest.raises(Ended):
        train(1)
    found = {one["choices"]["optimizer"]: one for one in json.loads(out.read_text())["candidates"]}
    assert found.keys() == {"device", "host"} and all(
        one["refused"].startswith("does not fit: ") for one in found.values()
    )


def test_a_job_on_cpus_is_planned_as_one(asked: Any) -> None:
    out = asked("describe without a batch", offload=("host",))
    with pytest.raises(Ended):
        train(0)
    found = {
        one["choices"]["stage"]: one["nbytes"] for one in json.loads(out.read_text())["candidates"]
    }
    planned = fzero.estimation.compare_plans(Model(), KEYS, device="cpu")["stage 3, all on host"]
    # host memory is the device's
    assert found[3] == planned.nbytes("device") > 0 == planned.nbytes("host")


# --- all of it ------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, fzero
cfg = fzero.Config.load(sys.argv[2])
micro = cfg.train_micro_batch_size_per_gpu

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
    def forward(self, x):
        if cfg.activation_checkpointing.every and not isinstance(x, torch._subclasses.FakeTensor):
            self.much = torch.ones(1 << 30)  # which no plan knows
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

step = fzero.make_train_step(Model(), cfg)
state = step.init()
while True:
    state, _ = step(state, torch.randn(micro, 16))
"""


@pytest.mark.long
def test_a_search_survives_what_runs_out_of_memory_ends_with_the_best_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    Path("train.py").write_text(SCRIPT)
    block = {
        "num_tuning_micro_batch_sizes": 1,
        "start_profile_step": 1,
        "end_profile_step": 2,
        "tuner_type": "gridsearch",
    }
    keys = {
        "train_micro_batch_size_per_gpu": 4,
        "autotuning": block,
        "zero_optimization": {"stage": 1},
    }
    Path("c.json").write_text(json.dumps(keys))
    words = [
        "tune",
        "--memory",
        "1GB",
        "--stages",
        "1",
        "--json",
        "--num_procs",
        "1",
        "train.py",
        "--config",
        "c.json",
    ]
    assert main(words) == 0
    reported = json.loads(capsys.readouterr().out)
    failed = {
        one["name"]: one["reason"]
        for one in reported["candidates"]
        if one["trial"] is not None and one["reason"]
    }
    assert reported["best"] == "stage 1, micro-batch 4" and failed == {
        "stage 1, activation checkpointing, micro-batch 4": "out of memory of 1 GB"
    }
    best = json.loads(Path("autotuning_results/best.json").read_text())
    assert best == {name: value for name, value in keys.items() if name != "autotuning"}
    assert reported["use"] == "fzero --num_procs 1 train.py --config autotuning_results/best.json"
    assert Path("autotuning_results/tuning.png").stat().st_size > 1000
    monkeypatch.setattr(Runs, "_run", None)  # a second search runs nothing
    assert main(words) == 0
    again = capsys.readouterr()
    # nothing is said to be planned or run
    assert json.loads(again.out) == reported and again.err == ""
    path = Path("autotuning_results/results.jsonl")
    path.write_text(path.read_text().replace('"refused"', '"why"'))
    with pytest.raises(TypeError, match="NoneType"):  # a plan of another version is made again
        main(words)


def test_a_script_may_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    monkeypatch.setattr("fzero.tuning.runs._start", lambda words, *rest: found.extend(words) or 1)
    Runs(Script.of([], "train.py", ["--config", "c.json"]), Path("exps"), {}, 1.0).measure(
        "x", {}, Request("measure", "")
    )
    assert Path(found[-1]).is_absolute() and Path(found[-1]).read_text() == "{}"


@pytest.mark.long
def test_a_run_that_hangs_is_ended_with_all_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    path, marker = tmp_path / "hang.py", tmp_path / "rank"
    path.write_text(
        f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    script = Script.of(["--num_procs", "1"], str(path), ["--config", "c.json"])
    began = time.monotonic()

    limit = 2.0
    # of which the launcher takes some seconds to start the rank
    while not marker.exists() and limit < 60:
        limit *= 2
        result = Runs(script, tmp_path / "exps", {}, limit).measure("x", {}, Request("measure", ""))
    assert (
        result.timed_out and result.error == f"no result in {limit:g} s" and result.seconds is None
    )
    assert time.monotonic() - began < 4 * limit + 60
    rank = int(marker.read_text())
    while (
        _runs(rank) and time.monotonic() - began < 4 * limit + 90
    ):  # it has been killed, which a busy machine does late
        time.sleep(0.1)
    assert not _runs(rank)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_seconds_left_are_those_of_runs_and_not_of_known_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter((0.0, 0.0, 20.0))
    monkeypatch.setattr("fzero.tuning.cli.time", SimpleNamespace(monotonic=lambda: next(now)))
    with _shown() as show:
        show("run 9: x", 8, 12)  # eight were known
        show("run 10: y", 9, 12)
    assert capsys.readouterr().err.splitlines() == [
        "fzero: run 9: x",
        "fzero: run 10: y, at most 60 s left",
    ]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["train.py"],
            1,
            "train.py: must be given its configuration as a file, by one of --config",
        ),
        (
            ["train.py", "--deepspeed", "--steps", "3"],
            1,
            "train.py: must be given its configuration as a file",
        ),
        (["train.py", "--config", "missing.json"], 1, "cannot read 'missing.json'"),
        (["train.py", "--config", "bad.json"], 1, "is not JSON"),
        (
            ["train.py", "--config", "wrong.json"],
            1,
            "autotuning.metric: must be 'throughput', 'latency' or 'flops'",
        ),
        (["--memory", "much", "train.py", "--config", "bad.json"], 2, "must be a number of bytes"),
        (["--stages", "4", "train.py", "--config", "bad.json"], 2, "must be stages from 0 to 3"),
        (["--time_limit", "0", "train.py"], 2, "must be a positive number"),
        (
            ["--offload", "nvme", "train.py", "--config", "good.json"],
            1,
            "--offload nvme: needs --nvme PATH",
        ),
        (
            ["--out", ".", "train.py", "--config", "good.json"],
            1,
            "--out: cannot write '.', Is a directory; name another",
        ),
        (
            ["--out", "bad.json/x", "train.py", "--config", "good.json"],
            1,
            "--out: cannot write 'bad.json/x'",
        ),
    ],
)
def test_a_mistake_is_reported_in_a_line(
    words: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Runs, "_run", None)  # nothing was run
    for name, text in {
        "bad": "{",
        "wrong": '{"autotuning": {"metric": "luck"}}',
        "good": "{}",
    }.items():
        Path(f"{name}.json").write_text(text)
    try:
        found = main(["tune", *words])
    except SystemExit as error:
        found = error.code
    reported = capsys.readouterr().err
    assert found == code and says in reported and "Traceback" not in reported


@pytest.mark.parametrize(
    ("word", "started"),
    [("tune", []), ("run", [["--num_procs", "2", "train.py", "--config", "b"]])],
)
def test_a_run_with_autotuning_tunes_and_then_starts_with_the_best(
    word: str, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    path.write_text("{}")
    one = candidates(KEYS, Autotuning(), 2)[0]
    tuned = Tuned(
        (replace(one, result=Result("a", "", 0.5), number=0),),
        "throughput",
        2,
        1e9,
        use="fzero --num_procs 2 train.py --config b",
    )
    asked: list[Any] = []
    monkeypatch.setattr(Tuning, "run", lambda self: asked.append(self.script) or tuned)
    found: list[Any] = []
    monkeypatch.setattr("fzero.launch.cli.main", lambda words: found.append(words) or 0)
    words = ["--num_procs", "2", "train.py", "--config", str(path)]
    assert main(["run", "--autotuning", word, *words]) == 0
    assert found == started and asked == [
        Script(("--num_procs", "2"), "train.py", ("--config", str(path)), "--config", 1)
    ]


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    assert "fzero tune --num_procs 2 train.py --config c.json" in capsys.readouterr().out


def test_the_table_and_the_picture_report_measured_failed_and_pruned() -> None:
    found = candidates(KEYS, Autotuning(), 2)[:4]
    planned: dict[str, Any] = {"nbytes": 10**9, "predicted": 0.1}
    rows = (
        replace(found[0], **planned, result=Result("a", "", 0.2, 8, 10**9), number=0),
        replace(found[1], **planned, result=Result("b", "", error="out of memory [x]"), number=1),
        replace(found[2], **planned),
        replace(found[3], nbytes=10**9, refused="does not fit"),
    )
    tuned = Tuned(rows, "throughput", 2, 2e9)
    text = str(tuned)
    assert tuned.best == rows[0] and tuned.gain == 1.0 and "2 of 4 candidates were run" in text
    assert "out of memory [x]" in text and "does not fit" in text and "40" in text
    assert len(tuned.draw().axes) == 2
