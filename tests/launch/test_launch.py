"""The laws of starting ranks: hostfiles, filters and commands as values, and real jobs
on one machine.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from fzero.comms.rendezvous import launched
from fzero.launch import feed
from fzero.launch.agent import SECONDS_TO_END, AgentWork, Failure, launch_config, secret_of
from fzero.launch.cli import commands_of, main, parser
from fzero.launch.environment import (
    ALLOCATOR,
    expanded,
    forwarded,
    parse_env_file,
    rank_defaults,
    read_env_files,
)
from fzero.launch.hostfile import Host, choose, decode, encode, parse_hostfile
from fzero.launch.launchers import LAUNCHERS, READS, LaunchJob
from fzero.launch.rendezvous import SECRET, Secret, Signed

RANK = Path(__file__).parents[1] / "support" / "launched_rank.py"

names = st.text("abcdefgh0123.-", min_size=1, max_size=6).filter(lambda name: name[0] not in "-.")
clusters = st.dictionaries(names, st.integers(1, 8), min_size=1, max_size=5).map(
    lambda counts: tuple(Host(name, tuple(range(count))) for name, count in counts.items())
)


@st.composite
def filtered(draw: st.DrawFn) -> tuple[tuple[Host, ...], dict[str, set[int]]]:
    """A cluster and some slots of it."""
    hosts = draw(clusters)
    picked = draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
    return hosts, {
        host.name: draw(st.sets(st.sampled_from(host.slots), min_size=1)) for host in picked
    }


def written(named: dict[str, set[int]]) -> str:
    return "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in named.items())


def used(hosts: tuple[Host, ...]) -> set[tuple[str, int]]:
    return {(host.name, slot) for host in hosts for slot in host.slots}


# --- hosts as values ------------------------------------------------------------------------------


@given(clusters, st.sampled_from(["", "# a comment\n", "\n   \n"]))
def test_a_hostfile_is_read_as_it_was_written(hosts, between):
    lines = "".join(f"{host.name} slots={len(host.slots)}  # here\n{between}" for host in hosts)
    assert parse_hostfile(between + lines) == hosts


@given(filtered())
def test_what_is_included_and_what_is_excluded_are_all_and_nothing_twice(case):
    hosts, named = case
    included = choose(hosts, include=written(named))
    asked = {(name, slot) for name, slots in named.items() for slot in slots}
    assert used(included) == asked
    if asked != used(hosts):
        excluded = choose(hosts, exclude=written(named))
        assert used(excluded) == used(hosts) - asked
        order = [host.name for host in hosts]
        assert [host.name for host in excluded] == [
            name for name in order if name in {host.name for host in excluded}
        ]
    else:
        with pytest.raises(ValueError, match="leaves no slot"):
            choose(hosts, exclude=written(named))


@given(filtered())
def test_an_agent_is_reported_the_hosts_that_were_chosen(case):
    hosts, named = case
    chosen = choose(hosts, include=written(named))
    assert decode(encode(chosen)) == chosen


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("a slots=2\nb", "file, line 2: 'b' is not 'host slots=N'"),
        ("a slots=2\n\na slots=1", "file, line 3: host 'a' is in line 1 already"),
        ("a slots=0", "file, line 1: host 'a' needs at least one slot"),
        ("-oProxyCommand=x slots=1", "file, line 1: "),
        ("-x slots=1", "file, line 1: host '-x': a name must not"),
        ("# nothing", "file: names no host"),
    ],
)
def test_a_wrong_hostfile_is_reported_with_its_line(text, reported):
    with pytest.raises(ValueError) as error:
        parse_hostfile(text, source="file")
    assert reported in str(error.value)


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude exclude each other"),
        ({"include": "a", "num_nodes": 1}, "--include and --num_nodes exclude each other"),
        ({"include": "c"}, "there is no host 'c'; there are a, b"),
        (
            {"include": "a,b"},
            "there is no host 'a,b'; there are a, b; hosts are separated by @, as in 'a@b'",
        ),
        ({"exclude": "a:5"}, "host 'a' has no slot 5; it has [0, 1]"),
        ({"include": "a:"}, "'a:' is not 'host' or 'host:slot,slot'"),
        ({"include": "a@a:1"}, "names host 'a' twice"),
        ({"num_nodes": 3}, "--num_nodes 3: must be from 1 to 2"),
        ({"slots_per_host": 0}, "--num_gpus 0: must be at least 1"),
    ],
)
def test_a_wrong_filter_is_reported_with_what_is_there(how, reported):
    with pytest.raises(ValueError) as error:
        choose(parse_hostfile("a slots=2\nb slots=2"), **how)
    assert reported in str(error.value)


# --- environments ---------------------------------------------------------------------------------


def test_a_wrong_line_of_an_environment_file_is_reported():
    with pytest.raises(ValueError, match="file, line 2: '1A=b' is not 'NAME=VALUE'"):
        parse_env_file("A=b\n1A=b", source="file")


FORMS = {  # value in the file: what ranks get
    "1": "1",
    "": "",
    "eth0,eth1:2": "eth0,eth1:2",
    "b c": "b c",
    "~/x": "~/x",
    "a;b|c&d": "a;b|c&d",
    "it's": "it's",
    "$HERE": "/here",
    "${HERE}/x": "/here/x",
    "$HERE:$UNSET:$HERE": "/here::/here",
    "$HEREx": "",
    "\\$HERE": "$HERE",
    "\\\\": "\\",
    "a\\b": "a\\b",
    "a$ b$": "a$ b$",
    '"one"': "one",
}
FORMS_OF_OUR_OWN = {  # DeepSpeed's shell makes something else of them, which nobody means
    '"b c"': "b c",
    '"$HERE/b c"': "/here/b c",
    "'$HERE `x`'": "$HERE `x`",
    '{"a": 1}': '{"a": 1}',
    '"a":"b"': '"a":"b"',
    "a$1": "a$1",
}


def _as_deepspeed(value: str) -> str:
    """A variable as `MultiNodeRunner.add_export` of DeepSpeed writes it for the shell
    of a host.
    """
    value = f'"{value}"' if re.search(r"[^\w@%+=:,./-]", value) else value
    program = f'unset UNSET; export A={value}; printf %s "$A"'
    return subprocess.run(
        ["bash", "-c", program], env={"HERE": "/here"}, capture_output=True, text=True
    ).stdout


def _on_a_host(line: str) -> str:
    """A variable as the program that starts an agent sets it there."""
    words = [sys.executable, "-I", "-S", "-c", READS, "-c", "import os; print(end=os.environ['A'])"]
    environment = {"HERE": "/here", "PATH": os.environ["PATH"]}
    return subprocess.run(
        words, input=line + "\n", env=environment, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("value", [*FORMS, *FORMS_OF_OUR_OWN])
def test_a_value_of_an_environment_file_is_what_deepspeeds_shell_makes_of_it(value: str) -> None:
    templates = parse_env_file(f"A={value}")
    assert expanded(templates, {"HERE": "/here"}) == {"A": (FORMS | FORMS_OF_OUR_OWN)[value]}
    assert _on_a_host(json.dumps(templates)) == (FORMS | FORMS_OF_OUR_OWN)[value]
    assert (_as_deepspeed(value) == FORMS.get(value)) == (value in FORMS)


@pytest.mark.parametrize("value", ["$(ls)", "`ls`", "${A:-1}", '"$(ls)"', "${A", "${1}"])
def test_a_value_that_a_shell_would_run_is_refused(value: str) -> None:
    with pytest.raises(
        ValueError, match=r"file, line 1: .* which a shell would run or compute; write the result"
    ):
        parse_env_file(f"A={value}", source="file")


def test_a_variable_of_ones_own_is_forwarded_as_it_is() -> None:
    mine = {"NCCL_A": "$HOME ${X} $$ $(x)", "OMP_B": "c"}
    templates = forwarded(mine, parse_env_file("C=$NCCL_A/$OMP_B"))
    assert expanded(templates, {}) == mine | {"C": "$HOME ${X} $$ $(x)/c"}


def test_the_environment_file_here_wins_over_the_one_at_home(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in (home, "A=home\nB=home"), (here, "A=here"):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert read_env_files(None, {}) == {"A": "here", "B": "home"}
    assert read_env_files(None, {"DS_ENV_FILE": "other"}) == {}
    assert read_env_files(home / ".deepspeed_env", {}) == {"A": "home", "B": "home"}


def test_what_is_set_wins_over_defaults_and_no_secret_is_forwarded():
    mine = {
        "OMP_NUM_THREADS": "3",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "HF_TOKEN": "secret",
        "NCCL_DEBUG": "INFO",
    }
    defaults = rank_defaults(mine, num_ranks=2, num_cores=8)
    assert defaults == {"MALLOC_MMAP_THRESHOLD_": ALLOCATOR["MALLOC_MMAP_THRESHOLD_"]}
    assert (
        "HF_TOKEN" not in forwarded(mine, {})
        and forwarded(mine, {"NCCL_DEBUG": "WARN"})["NCCL_DEBUG"] == "WARN"
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "5",
            },
            (3, 4, 1, "a", 5),
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
            | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            (1, 2, 1, "127.0.0.1", 29500),  # all on one host: nothing needs to say which
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "n[07-10]",
            },
            (5, 8, 1, "n07", 29500),
        ),
        # the shell that sbatch gives is no rank
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, (1, 2, 0, "a", 29500)),
    ],
)
def test_a_rank_finds_its_place_whoever_started_it(environment, expected):
    found = launched(environment)
    assert (
        found
        and (found.rank, found.world_size, found.local_rank, found.master_addr, found.master_port)
    ) == expected


def test_ranks_of_several_hosts_must_be_reported_where_the_first_is():
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        launched(
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            }
        )


# --- commands -------------------------------------------------------------------------------------

TWO = (Host("a", (0, 1)), Host("b", (0, 1)))


def job(hosts: tuple[Host, ...] = TWO, **work: object) -> LaunchJob:
    what = AgentWork(hosts, 0, ("python", "-u", "train.py", "50%"), "a", 29500, **work)
    return LaunchJob(
        what, {"NCCL_DEBUG": "A B"}, "/my work", ("--extra",), ("-p", "22"), python="python"
    )


def test_each_launcher_composes_the_command_that_its_manual_describes():
    commands = {
        name: [str(command) for command in compose(job())] for name, compose in LAUNCHERS.items()
    }

    def agent(node_rank: object, percent: str = "%") -> str:
        return shlex.quote(
            f"cd '/my work' && exec python -I -S -c {shlex.quote(READS)} -u -m fzero.launch.agent "
            f"--world_info=eyJhIjogWzAsIDFdLCAiYiI6IFswLCAxXX0= --node_rank={node_rank} "
            f"--master_addr=a --master_port=29500 -- python -u train.py 50{percent}"
        )

    line, ssh = (
        '{"NCCL_DEBUG": "A B"}',
        "ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -p 22",
    )
    feeds = f"{{ printf '%s\\n' '{line}'; cat; }} | {ssh} --extra"
    assert commands == {
        "ssh": [f"{feeds} a {agent(0)}", f"{feeds} b {agent(1)}"],
        "pdsh": [
            f"FZERO_INPUT='{line}' pdsh -R exec -N -S -f 1024 -w a,b --extra python -I -S "
            f"{feed.__file__} {ssh} %h {agent('%n', '%%')}"
        ],
        "openmpi": [
            "NCCL_DEBUG='A B' MASTER_ADDR=a MASTER_PORT=29500 mpirun -n 4 --host a:2,b:2 --map-by "
            "slot --bind-to none --wdir '/my work' -x NCCL_DEBUG -x MASTER_ADDR -x MASTER_PORT "
            "--extra python -u train.py 50%"
        ],
        "mvapich": [
            "NCCL_DEBUG='A B' MASTER_ADDR=a MASTER_PORT=29500 mpirun -np 4 -ppn 2 -hosts a,b -wdir "
            "'/my work' -genvlist NCCL_DEBUG,MASTER_ADDR,MASTER_PORT --extra python -u train.py 50%"
        ],
        "slurm": [
            "NCCL_DEBUG='A B' MASTER_ADDR=a MASTER_PORT=29500 srun --nodes=2 --ntasks=4 "
            "--ntasks-per-node=2 --nodelist=a,b '--chdir=/my work' --export=ALL "
            "--kill-on-bad-exit=1 --label --extra python -u train.py 50%"
        ],
    }


@pytest.mark.parametrize(
    ("launcher", "refused", "reported"),
    [
        ("openmpi", job((Host("a", (1,)), Host("b", (0,)))), "host 'a' is to use slots [1]"),
        (
            "slurm",
            job((Host("a", (0,)), Host("b", (0, 1)))),
            "needs as many slots on every host, got {'a': 1, 'b': 2}",
        ),
        (
            "mvapich",
            job(max_restarts=2, log_dir="logs"),
            "leave out --max_restarts, --enable_each_rank_log",
        ),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(launcher, refused, reported):
    with pytest.raises(ValueError) as error:
        LAUNCHERS[launcher](refused)
    assert reported in str(error.value)


def test_a_dry_run_prints_the_commands_of_the_hosts_that_are_left(tmp_path, capsys):
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\nc slots=4\n")
    flags = ["--hostfile", str(tmp_path / "hosts"), "--launcher", "pdsh", "--dry_run"]
    assert main([*flags, "--exclude", "b", "train.py"]) == 0
    assert " -w a,c " in capsys.readouterr().out
    assert main([*flags, "--num-nodes", "1", "--num_gpus=2", "train.py"]) == 0
    assert "fzero.launch.agent" in (local := capsys.readouterr().out) and "pdsh" not in local
    assert (
        main([*flags, "--num_nodes", "1", "--force_multi", "--master_addr", "m", "train.py"]) == 0
    )
    assert " -w a " in (forced := capsys.readouterr().out) and "--master_addr=m" in forced


def test_how_long_a_collective_waits_is_reported_to_the_ranks_of_all_hosts(tmp_path, capsys):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    flags = [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--timeout",
        "90",
        "--nnodes",
        "1:2",
        "--wait_for_hosts",
        "5",
    ]
    assert main([*flags, "--dry_run", "train.py"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert (
        all('"FZERO_TIMEOUT": "90"' in line and "--last_call=5" in line for line in commands)
        and len(commands) == 2
    )


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--num_nodes", "2"], "needs a hostfile"),
        (["--module", "--no_python"], "exclude each other"),
        (["--nnodes", "1:3"], "MAX the number of hosts, 1"),
        (["--max_restarts", "-1"], "must be 0 or more"),
        (["--master_port", "70000"], "must be from 1 to 65535, got '70000'"),
        (["--num_procs", "0"], "--num_procs 0: must be at least 1"),
        (["--num_procs", "2", "--num_gpus", "2"], "exclude each other"),
        (["--hostfile", "/"], "--hostfile /: is a folder"),
        (["--wait_for_hosts", "-1"], "--wait_for_hosts -1: must be 0 or more"),
        (["--timeout", "0"], "--timeout 0.0: must be a positive number of seconds"),
        (["--node_rank", "1"], "there are 1 hosts"),
        (["--env_file", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_started(flags, reported, capsys):
    with pytest.raises(SystemExit) as end:
        main([*flags, "train.py"])
    assert end.value.code == 2 and reported in capsys.readouterr().err


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan"])
def test_a_timeout_of_the_environment_that_is_none_is_refused_before_anything_is_started(
    value, capsys, monkeypatch
):
    monkeypatch.setenv("FZERO_TIMEOUT", value)
    with pytest.raises(SystemExit) as end:
        main(["--num_procs", "2", "--dry_run", "train.py"])
    assert (
        end.value.code == 2
        and f"FZERO_TIMEOUT: must be a positive number of seconds, got '{value}'"
        in capsys.readouterr().err
    )


def test_every_exit_code_can_be_reported():
    for code in range(1, 256):  # of which some above 128 are no signal's
        reported = str(Failure(0, "here", code, 0.0, False, ()))
        assert f"code {code}," in reported or signal.Signals(code - 128).name in reported


@pytest.mark.long
def test_an_agent_that_is_started_by_hand_is_on_no_leash(tmp_path, capsys):
    """As in a pod, whose standard input is /dev/null, with the command that --dry_run
    prints.
    """
    (tmp_path / "script.py").write_text(
        "import os, time\ntime.sleep(1)\nprint('timeout', os.environ['FZERO_TIMEOUT'])\n"
    )
    assert (
        main(["--num_procs", "1", "--timeout", "7", "--dry_run", str(tmp_path / "script.py")]) == 0
    )
    command = capsys.readouterr().out
    ended = subprocess.run(
        command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and "timeout 7\n" in ended.stdout, ended


@pytest.mark.long
def test_a_port_that_is_taken_is_reported(tmp_path):
    (tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--num_procs", "1", "--master_port", port, "script.py"]
        command = [sys.executable, "-m", "fzero", *flags]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and f"fzero: --master_port {port} of 127.0.0.1" in ended.stderr


@pytest.mark.parametrize("flags", [["--launcher", "slurm"], ["--launcher_args=-x"]])
def test_a_launcher_that_one_host_does_not_need_is_reported(flags, capsys):
    assert main([*flags, "--num_procs", "2", "--dry_run", "train.py"]) == 0
    assert "--launcher and --launcher_args have no effect" in capsys.readouterr().err


def test_a_missing_hostfile_is_one_machine_and_a_line_that_says_so(capsys):
    assert main(["--hostfile", "/nowhere/hosts", "--num_procs", "2", "--dry_run", "train.py"]) == 0
    assert (
        "there is no hostfile /nowhere/hosts: running on this machine alone"
        in capsys.readouterr().err
    )


# --- real jobs on one machine ---------------------------------------------------------------------


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of a job: those that were given its folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in (process.info["cmdline"] or [])
    ]


def assert_none_left(folder: Path, *, within: float = 0) -> None:
    deadline = time.monotonic() + within
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        process.kill()
    assert not left


def fzero(folder: Path, scenario: str, *flags: str, **how: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fzero", *flags, str(RANK), scenario, str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )


def wait_for(*paths: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{[path.name for path in paths]} did not come"
        time.sleep(0.05)


def wait_until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_get_their_environment_a_prefix_and_logs_of_their_own(tmp_path):
    logs = tmp_path / "logs"
    (tmp_path / "env").write_text("FROM_FILE=a b")
    flags = [
        "--num_procs",
        "2",
        "--enable_each_rank_log",
        str(logs),
        "--env_file",
        str(tmp_path / "env"),
    ]
    module = ["run", *flags, "-m", "launched_rank", "environment", str(tmp_path)]
    where = {"PYTHONPATH": f"{RANK.parent}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(
        [sys.executable, "-m", "fzero", *module],
        env=os.environ | where,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f"[rank {rank}] rank {rank} of 2 says hello\n" in run.stdout
        (log,) = logs.glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"rank {rank} of 2 says hello\n"
        given = (tmp_path / f"environment.{rank}").read_text().splitlines()
        assert f"RANK={rank}" in given and "FROM_FILE=a b" in given
        assert any(line.startswith("MALLOC_TRIM_THRESHOLD_=") for line in given)
    assert_none_left(tmp_path)


def test_a_script_may_set_a_port_of_its_own(tmp_path):
    # The launcher's agent keeps the store at another one, where the ranks would wait for ten
    # minutes.
    with socket.create_server(("127.0.0.1", 0)) as found:
        (tmp_path / "port").write_text(str(found.getsockname()[1]))
    job = fzero(tmp_path, "own port", "--num_procs", "2")
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert len({(tmp_path / f"losses.{rank}").read_text() for rank in range(2)}) == 1
    assert_none_left(tmp_path)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("scenario", "code", "how"), [("exits", 7, "ended with code 7"), ("is killed", 137, "SIGKILL")]
)
def test_a_rank_that_fails_ends_the_job_with_its_code_and_one_message(
    tmp_path, scenario, code, how
):
    job = fzero(tmp_path, scenario, "--num_procs", "2")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == code
    assert (
        errors.count("fzero: rank 1 on localhost") == 1
        and how in errors
        and errors.count("fzero:") == 1
    )
    assert errors.endswith("its last lines:\n    the reason is reported here\n")
    assert_none_left(tmp_path)


@pytest.mark.covering(0)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_is_passed_on_and_nothing_is_left(tmp_path, number):
    job = fzero(tmp_path, "tells signals", "--num_procs", "2")
    wait_for(*(tmp_path / f"ready.{rank}" for rank in range(2)))
    job.send_signal(number)
    job.send_signal(number)  # of those who are in a hurry
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 128 + number and not errors
    assert [(tmp_path / f"signal.{rank}").read_text() for rank in range(2)] == [number.name] * 2
    assert_none_left(tmp_path)


@pytest.mark.skipif(not Path("/proc").exists(), reason="the reaper finds processes in /proc")
def test_nothing_is_left_when_fzero_itself_is_killed(tmp_path):
    job = fzero(tmp_path, "tells signals", "--num_procs", "2")
    wait_for(*(tmp_path / f"ready.{rank}" for rank in range(2)))
    job.kill()
    job.communicate(timeout=30)
    wait_for(*(tmp_path / f"signal.{rank}" for rank in range(2)))
    # first they are asked
    assert [(tmp_path / f"signal.{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2
    assert_none_left(tmp_path, within=SECONDS_TO_END + 10)  # also what they had started


@pytest.mark.long
def test_with_restarts_the_ranks_come_back(tmp_path):
    job = fzero(tmp_path, "fails once", "--num_procs", "2", "--max_restarts", "1")
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert output.count("rank 0 of 2 says hello") == 2


@pytest.mark.long
def test_a_rank_that_ends_with_code_0_before_the_others_is_named_by_them_and_by_the_launcher(
    tmp_path,
):
    job = fzero(
        tmp_path, "rank 1 leaves", "--num_procs", "2", env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 1, errors
    by_rank, _, by_launcher = errors.partition("fzero: rank ")
    assert re.search(
        r"rank 1 \(.*, pid \d+\) has not come: its process (has ended|ended with code 0)\n", by_rank
    ), errors
    assert by_launcher.startswith(
        "1 on localhost ended with code 0, and others waited for it, so"
    ), errors
    assert_none_left(tmp_path, within=SECONDS_TO_END + 10)


@pytest.mark.long
def test_a_folder_of_logs_goes_with_a_launcher_that_is_killed(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = fzero(tmp_path, "sleeps", "--num_procs", "1", env=os.environ | {"TMPDIR": str(temporary)})
    wait_for(tmp_path / "started.0", seconds=120)
    assert [*temporary.glob("fzero-*")]
    job.kill()
    job.communicate(timeout=60)
    wait_until(lambda: not [*temporary.glob("fzero-*")])


@pytest.mark.long
def test_one_machine_listens_to_itself_alone(tmp_path):
    """The port of the agent and those of the ranks, on all addresses of this host."""
    (tmp_path / "script.py").write_text(
        "import os, psutil, fzero, torch.distributed as dist\n"
        "fzero.join()\ndist.barrier()\n"
        "for process in (psutil.Process(), psutil.Process(os.getppid())):\n"
        "    for found in process.net_connections('inet'):\n"
        "        if found.status == 'LISTEN': print('listens at', found.laddr.ip)\n"
        "dist.barrier()\nfzero.shutdown()\n"
    )
    command = [
        sys.executable,
        "-m",
        "fzero",
        "--num_procs",
        "2",
        "--max_restarts",
        "1",
        str(tmp_path / "script.py"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.findall(r"listens at (.*)", ended.stdout)
    assert ended.returncode == 0 and len(found) >= 4, ended
    assert {*found} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["train.py"], "there is no script train.py; did you mean train_it.py?"),
        (
            ["-m", "no_such_module.main"],
            "--module no_such_module.main: there is no module 'no_such_module' here",
        ),
        (["--no_python", "no_such_program"], "there is no such program on the PATH"),
        (["--word", "8"], "--word is no flag, did you mean --num_procs?"),
        (["--max_restart=3", "train_it.py"], "did you mean --max_restarts?"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is_near(
    words, reported, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_it.py").touch()
    with pytest.raises(SystemExit) as end:
        main(["--num_procs", "2", *words])
    assert end.value.code == 2 and reported in capsys.readouterr().err


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_value_of_a_variable_is_part_of_a_command_and_no_name_that_a_shell_would_run(
    launcher, monkeypatch, capsys
):
    for name in ("MLFLOW_TRACKING_PASSWORD", "NCCL;touch X", "TORCH_A.B"):
        monkeypatch.setenv(name, "hunter2")
    made = parser().parse_args(["--launcher", launcher, "train.py"])
    work = AgentWork(TWO, 0, ("python", "-u", "train.py"), "a", 29500)
    job, commands = commands_of(made, work, os.environ, {"FROM_FILE": "hunter2"})
    assert {job.environment[name] for name in ("MLFLOW_TRACKING_PASSWORD", "FROM_FILE")} == {
        "hunter2"
    }
    assert not [
        word
        for command in commands
        for word in command.words
        if "hunter2" in word or "touch" in word
    ]
    for command in commands:  # but they are there
        assert (command.line or str(dict(command.environment))).count("hunter2") == 2
    reported = capsys.readouterr().err
    assert (
        "the variable 'NCCL;touch X' is not set on other hosts" in reported
        and "'TORCH_A.B'" in reported
    )


def test_the_first_line_of_an_agent_s_input_is_its_environment_and_the_rest_is_left():
    program = "import os; print(os.environ['A'], os.environ['PYTHONPATH'], os.read(0, 99))"
    line = json.dumps({"A": "x\ny\\'\"", "PYTHONPATH": "/somewhere"})
    command = [sys.executable, "-I", "-S", "-c", READS, "-c", program]
    ended = subprocess.run(
        command, input=f"{line}\nleft", capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "x\ny\\'\" /somewhere b'left'\n", ended


def test_a_state_of_the_rendezvous_that_no_agent_of_the_job_wrote_is_never_unpickled():
    store = HashStore()
    mine, theirs = (Signed(C10dRendezvousBackend(store, "job"), Secret(text * 16)) for text in "ab")
    assert mine.get_state() is None
    _, token, is_set = mine.set_state(b"state")
    assert is_set and mine.get_state() == (b"state", token)
    assert mine.set_state(b"late", b"another token")[::2] == (b"state", False)
    for attack in (
        lambda: theirs.get_state(),
        lambda: store.set("torch.rendezvous.job", b64encode(pickle.dumps(1))),
    ):
        with pytest.raises(RendezvousStateError, match="was not written by an agent of this job"):
            attack() or mine.get_state()


def test_agents_of_several_hosts_that_start_again_need_a_secret_which_no_command_shows(
    monkeypatch, tmp_path
):
    monkeypatch.delenv(SECRET, raising=False)
    work = AgentWork(TWO, 0, ("python", "-u", "train.py"), "a", 29500, max_restarts=1)
    with pytest.raises(ValueError, match="FZERO_SECRET: is not set"):
        secret_of(work)
    job, commands = commands_of(parser().parse_args(["train.py"]), work, {}, {})
    secret = job.environment[SECRET]
    assert not [word for command in commands for word in command.words if secret in word]
    monkeypatch.setenv(SECRET, secret)
    assert secret_of(work) == Secret(secret) and SECRET not in os.environ
    assert secret not in str(launch_config(work, str(tmp_path), Secret(secret)))
