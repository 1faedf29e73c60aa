"""The laws of jobs on many hosts: two hosts are made here, loopback addresses with an
sshd of their own, and jobs run on them.

What needs a program that is not installed is skipped: sshd, pdsh, mpirun (Debian:
openssh-server, pdsh, openmpi-bin).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_launch import RANK, assert_none_left, processes_of, wait_for

HOSTS = ("127.0.0.2", "127.0.0.3")
# seconds after which nothing of a job is left: ours are 3 + 10, and the machine may be busy
ALL_HEAR_OF_IT = 30
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin"


def needs(launcher: str) -> pytest.MarkDecorator:
    program = {"openmpi": "mpirun"}.get(launcher, launcher)
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


LAUNCHERS = [pytest.param(name, marks=needs(name)) for name in ("ssh", "pdsh", "openmpi")]
WITH_AGENTS = LAUNCHERS[:2]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts that ssh reaches without a password, and how."""

    hostfile: Path
    config: Path

    def flags(self, launcher: str) -> list[str]:
        args = {
            "ssh": f"-F {self.config}",
            "pdsh": "",
            "openmpi": f"--allow-run-as-root --mca plm_rsh_args '-F {self.config}'",
        }[launcher]
        with socket.socket() as probe:  # another job may just have ended at the default port
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return [
            f"--hostfile={self.hostfile}",
            f"--launcher={launcher}",
            f"--master_port={port}",
            f"--launcher_args={args}",
        ]

    def start(
        self, folder: Path, scenario: str, launcher: str, *flags: str
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "fzero",
            *self.flags(launcher),
            *flags,
            str(RANK),
            scenario,
            str(folder),
        ]
        env = os.environ | {"PDSH_SSH_ARGS_APPEND": f"-F {self.config}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    sshd = shutil.which("sshd", path=SEARCHED)
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("ssh or sshd is not installed, so there are no hosts to start ranks on")
    folder = tmp_path_factory.mktemp("hosts")
    for key in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
        )
    try:
        with socket.socket() as probe:
            probe.bind((HOSTS[1], 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no address {HOSTS[1]}")
    listen = "\n".join(f"ListenAddress {host}" for host in HOSTS)
    (folder / "sshd_config").write_text(
        f"Port {port}\n{listen}\nHostKey {folder}/host_key\nAuthorizedKeysFile "
        f"{folder}/key.pub\nStrictModes no\nPidFile none\nUsePAM no\nPasswordAuthentication "
        f"no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "config").write_text(
        f"Host *\nPort {port}\nIdentityFile {folder}/key\nIdentitiesOnly "
        f"yes\nStrictHostKeyChecking no\nUserKnownHostsFile {folder}/known\nLogLevel ERROR\n"
    )
    (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # which an sshd of root asks for
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:
        deadline = time.monotonic() + 10
        while "listening" not in (said := (folder / "log").read_text()):
            assert server.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        yield Hosts(folder / "hosts", folder / "config")
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def losses_of_one_machine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("one")
    command = [sys.executable, "-m", "fzero", "--num_procs", "2", str(RANK), "train", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return [(folder / f"losses.{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_learn_what_one_machine_learns_bit_for_bit(
    hosts, losses_of_one_machine, tmp_path, launcher
):
    job = hosts.start(tmp_path, "train", launcher)  # after the check of hosts, where there is one
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert [(tmp_path / f"losses.{rank}").read_text() for rank in range(2)] == losses_of_one_machine
    assert_none_left(tmp_path, within=ALL_HEAR_OF_IT)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_of_all_hosts_import_fzero_as_deepspeed(hosts, tmp_path, launcher):
    job = hosts.start(tmp_path, "imports deepspeed", launcher, "--as_deepspeed", "--no_local_rank")
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert [(tmp_path / f"deepspeed.{rank}").read_text() for rank in range(2)] == [
        "fzero.deepspeed.engine.initialize"
    ] * 2


@pytest.mark.parametrize("launcher", WITH_AGENTS)
def test_a_rank_that_fails_ends_the_ranks_of_all_hosts_and_is_reported_once(
    hosts, tmp_path, launcher
):
    job = hosts.start(tmp_path, "exits", launcher, "--no_ssh_check")
    output, errors = job.communicate(timeout=90)
    assert job.returncode == 7, errors
    assert f"[{HOSTS[0]} rank 0] rank 0 of 2 says hello" in output
    assert errors.count("fzero: ") == 1 and f"rank 1 on {HOSTS[1]} ended with code 7" in errors
    assert_none_left(tmp_path, within=ALL_HEAR_OF_IT)


@pytest.mark.parametrize("launcher", WITH_AGENTS)
def test_the_ranks_of_all_hosts_end_when_the_one_who_started_them_is_killed(
    hosts, tmp_path, launcher
):
    job = hosts.start(tmp_path, "sleeps", launcher, "--no_ssh_check")
    wait_for(*(tmp_path / f"started.{rank}" for rank in range(2)))
    job.kill()
    job.communicate()
    assert_none_left(tmp_path, within=ALL_HEAR_OF_IT)


@needs("ssh")
def test_a_host_that_dies_ends_the_job_on_the_others(hosts, tmp_path):
    job = hosts.start(tmp_path, "sleeps", "ssh", "--no_ssh_check")
    wait_for(*(tmp_path / f"started.{rank}" for rank in range(2)))
    (agent,) = [
        process
        for process in processes_of(tmp_path)
        if "--node_rank=1" in process.info["cmdline"]
        and "fzero.launch.agent" in process.info["cmdline"]
    ]
    for process in [agent, *agent.children(recursive=True)]:
        process.kill()
    _, errors = job.communicate(timeout=60)
    assert job.returncode not in (0, None) and f"fzero: ssh to {HOSTS[1]} ended with code" in errors
    assert_none_left(tmp_path, within=ALL_HEAR_OF_IT)


@needs("ssh")
def test_with_restarts_the_ranks_of_all_hosts_come_back(hosts, tmp_path):
    job = hosts.start(tmp_path, "fails once", "ssh", "--no_ssh_check", "--max_restarts=1")
    output, errors = job.communicate(timeout=90)
    assert job.returncode == 0, errors
    assert all(output.count(f"rank {rank} of 2 says hello") == 2 for rank in range(2))


@needs("ssh")
def test_a_signal_ends_the_ranks_of_all_hosts(hosts, tmp_path):
    job = hosts.start(tmp_path, "tells signals", "ssh", "--no_ssh_check")
    wait_for(*(tmp_path / f"ready.{rank}" for rank in range(2)))
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert [(tmp_path / f"signal.{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2
    assert_none_left(tmp_path, within=ALL_HEAR_OF_IT)


@needs("ssh")
def test_a_host_that_cannot_be_reached_is_reported_before_anything_is_started(hosts, tmp_path):
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        nobody = probe.getsockname()[1]
    job = hosts.start(tmp_path, "sleeps", "ssh", f"--ssh_port={nobody}")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    for host in HOSTS:
        assert f"{host}: ssh: connect to host {host} port {nobody}: Connection refused" in errors
    assert not list(tmp_path.iterdir())
