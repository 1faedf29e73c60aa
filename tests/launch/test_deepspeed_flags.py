"""The flags of DeepSpeed's launcher: what each rank is started with, and real ranks
that say so.
"""

from __future__ import annotations

import argparse
import ast
import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fzero.launch.bind_cores import parse_cores, share
from fzero.launch.cli import LaunchError, choose_hosts, parser, work_of
from fzero.launch.deepspeed_flags import check_flags, is_quiet, rank_words
from fzero.launch.hostfile import Host

ROOT = Path(__file__).parents[2]
ONE, TWO = (Host("localhost", (0, 1)),), (Host("a", (0, 1)), Host("b", (0, 1)))


def flags(*words: str, script: str = "train.py") -> argparse.Namespace:
    return parser().parse_args([*words, script, "--steps", "3"])


def command(*words: str, hosts: Sequence[Host] = ONE, script: str = "train.py") -> tuple[str, ...]:
    return rank_words(flags(*words, script=script), ("python", script), hosts)


# --- --local_rank ---------------------------------------------------------------------------------


def test_a_script_that_has_the_flag_gets_its_local_rank_before_its_arguments(
    tmp_path: Path,
) -> None:
    script = tmp_path / "old.py"
    script.write_text('parser.add_argument("--local_rank", type=int)')
    passed = ("python", str(script), "--local_rank=${local_rank}", "--steps", "3")
    assert command(script=str(script)) == passed
    assert command(script=str(script), hosts=TWO) == passed
    without = ("python", str(script), "--steps", "3")
    for words in (["--no_local_rank"], ["--elastic_training"]):
        assert command(*words, script=str(script)) == without
    # as in DeepSpeed
    assert command("--launcher", "openmpi", script=str(script), hosts=TWO) == without
    script.write_text("import os")
    assert command(script=str(script)) == without
    assert command("--local_rank", script=str(script)) == passed


# --- cores ----------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 63), min_size=1), st.data())
def test_ranks_have_as_many_cores_each_and_none_in_common(
    cores: set[int], data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, len(cores)))
    listed = parse_cores(",".join(map(str, sorted(cores))))
    shares = [share(listed, num_ranks, rank) for rank in range(num_ranks)]
    joined = [core for one in shares for core in one]
    assert {len(one) for one in shares} == {len(cores) // num_ranks} and len({*joined}) == len(
        joined
    )
    assert {*joined} <= cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "2,1", "1-", "-1", "0-2,2", "1 ,2"])
def test_a_list_of_cores_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ascending order"):
        parse_cores(text)


def test_each_rank_is_bound_by_its_number_on_the_host() -> None:
    *python, path, cores, num_ranks, local_rank = command(
        "--bind_cores_to_rank", "--bind_core_list", "0-3"
    )[:7]
    assert python == [sys.executable, "-I", "-S"] and Path(path).name == "bind_cores.py"
    assert (cores, num_ranks, local_rank) == ("0-3", "2", "${local_rank}")


# --- what is refused, in words --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hosts", "says"),
    [
        (["--venv_script", "x"], ONE, "--venv_script x: is not needed"),
        (["--local_rank", "--no_local_rank"], ONE, "exclude each other"),
        (["--bind_core_list", "0-3"], ONE, "needs --bind_cores_to_rank beside it"),
        (
            ["--bind_cores_to_rank", "--bind_core_list", "0"],
            ONE,
            "needs a core for each of the 2 ranks",
        ),
        (
            ["--bind_cores_to_rank", "--bind_core_list", "x"],
            ONE,
            "--bind_core_list: 'x' must be numbers and ranges",
        ),
        (["--bind_cores_to_rank", "--launcher", "openmpi"], TWO, "openmpi binds ranks itself"),
        (["--min_elastic_nodes", "1"], TWO, "needs --elastic_training beside it"),
        (["--elastic_training", "--nnodes", "1:2"], TWO, "exclude each other"),
        (["--elastic_training", "--max_elastic_nodes", "3"], TWO, "must be the number of hosts, 2"),
        (["--elastic_training", "--min_elastic_nodes", "3"], TWO, "must be from 1 to 2"),
    ],
)
def test_a_flag_that_cannot_be_honoured_says_why(
    words: list[str], hosts: Sequence[Host], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        check_flags(flags(*words), hosts)


def test_elastic_training_goes_on_with_fewer_hosts_and_starts_again() -> None:
    work = work_of(flags("--elastic_training"), TWO, is_local=False)
    assert (work.min_nodes, work.max_restarts) == (1, 100)
    work = work_of(
        flags("--elastic_training", "--min_elastic_nodes=2", "--max_restarts=3"),
        TWO,
        is_local=False,
    )
    assert (work.min_nodes, work.max_restarts) == (2, 3)
    check_flags(
        flags("--elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "2"), TWO
    )


# --- slots without devices ------------------------------------------------------------------------


def test_slots_of_a_machine_without_devices_are_processes(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert choose_hosts(flags("--include", "localhost:0,1")) == (Host("localhost", (0, 1)),)
    assert choose_hosts(flags("--include", "localhost")) == (Host("localhost", (0,)),)
    assert choose_hosts(flags("--nproc_per_node", "3")) == choose_hosts(flags("--num_procs=3"))
    with pytest.raises(LaunchError, match=r"no GPU; --num_procs N starts N ranks"):
        choose_hosts(flags("--exclude", "localhost:1"))
    capsys.readouterr()
    choose_hosts(flags())
    assert "starting one rank" in capsys.readouterr().err
    assert choose_hosts(flags("--num_gpus", "2")) == (Host("localhost", (0, 1)),)
    assert (
        "no GPU is here: --num_gpus 2 starts as many processes on the CPU"
        in capsys.readouterr().err
    )
    for words in (
        ["-q"],
        ["-q", "--num_gpus=2"],
        ["--quiet"],
        ["--log_level", "warning"],
        ["--log_level", "critical"],
    ):
        assert is_quiet(flags(*words))
        choose_hosts(flags(*words))
        assert capsys.readouterr().err == ""


# --- real ranks -----------------------------------------------------------------------------------

RANK = """
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("out")
given = parser.parse_args()
names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "OMP_NUM_THREADS")
pids = [path.name for path in pathlib.Path("/tmp").glob("*.deepspeed")]
found = [given.local_rank, *(os.environ[name] for name in names), len(os.sched_getaffinity(0)), pids]
pathlib.Path(given.out, os.environ["RANK"]).write_text(repr(found))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_get_what_deepspeed_gives_them(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    flags = ["--num_procs", "2", "--bind_cores_to_rank", "--bind_core_list", cores, "--save_pid"]
    job = subprocess.Popen(
        [sys.executable, "-m", "fzero", "run", *flags, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and f"launcher pid: {job.pid}" in out
    for rank in (0, 1):
        *given, pids = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert given == [rank, str(rank), "2", "0", "1", "1", 1]
        assert f"{job.pid}.deepspeed" in pids
    assert not Path(f"/tmp/{job.pid}.deepspeed").exists()


# --- every form of start, as DeepSpeed's launcher starts it ---------------------------------------

PROBE = """
import json, os, pathlib, sys
words = [sys.argv[1:], len(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]]
pathlib.Path(os.environ["FOUND"], os.environ["RANK"]).write_text(json.dumps(words))
"""
FORMS = {
    "script": ["probe.py"],
    "module": ["--module", "probe"],
    "program": ["--no_python", "./probe"],
}
PASSED: dict[tuple[str, ...], bool] = {
    (): True,
    ("--no_local_rank",): False,
    ("--bind_cores_to_rank",): True,
    ("--elastic_training",): False,
    ("--bind_cores_to_rank", "--no_local_rank"): False,
}
"""Flags, and whether ranks then get `--local_rank=N`: in DeepSpeed, and here with
`--as-deepspeed`.
"""
FEW = [("module", ("--bind_cores_to_rank",))]
STARTS = [
    *FEW,
    *(("script", words) for words in ((), ("--no_local_rank",))),
    *(("program", words) for words in ((), ("--elastic_training",), [*PASSED][4])),
]
"""Each flag in one form, and each form with several flags: a start takes seconds."""


def _probed(folder: Path, command: list[str], **more: str) -> list[list[object]]:
    (folder / "probe.py").write_text(PROBE)
    (folder / "probe").write_text(f"#!{sys.executable}\n{PROBE}")
    (folder / "probe").chmod(0o755)
    (folder / "found").mkdir()
    environment = os.environ | {"FOUND": str(folder / "found"), "PYTHONPATH": str(ROOT), **more}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / "found" / str(rank)).read_text()) for rank in range(2)]


def _check_ranks(found: list[list[object]], words: Sequence[str]) -> None:
    bound = "--bind_cores_to_rank" in words
    num_cores = len(os.sched_getaffinity(0))
    each = num_cores // 2 if bound else num_cores
    for rank, (words_of_rank, cores, threads) in enumerate(found):
        passed = [f"--local_rank={rank}"] if PASSED[tuple(words)] else []
        assert words_of_rank == [*passed, "--steps", "3"] and cores == each, (
            rank,
            words_of_rank,
            cores,
        )
        assert not bound or threads == str(each)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("form", "words"),
    [pytest.param(*x, marks=[] if x in FEW else [pytest.mark.long]) for x in STARTS],
)
def test_every_start_as_deepspeed_gives_ranks_what_deepspeeds_launcher_gives(
    form: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    start = [sys.executable, "-m", "fzero", "run", "--as-deepspeed", "--num_procs", "2", *words]
    _check_ranks(_probed(tmp_path, [*start, *FORMS[form], "--steps", "3"]), words)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "words"), [("script", ()), ("module", ("--no_local_rank",)), ("program", ())]
)
def test_the_table_of_starts_is_that_of_deepspeeds_launcher(
    form: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Without the flags that need numactl or a rendezvous of DeepSpeed's."""
    pytest.importorskip("deepspeed")
    world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    start = [
        sys.executable,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        "--master_port=29713",
        *words,
    ]
    found = _probed(
        tmp_path, [*start, *FORMS[form], "--steps", "3"], DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"
    )
    _check_ranks(found, words)
