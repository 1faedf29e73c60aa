"""The malloc of `make memcheck` finds what it is there for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import memcheck
import pytest

HARM = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
x = libc.malloc(40)
"""
DONE = {
    "written after it was freed": "libc.free(x); ctypes.memset(x + 8, 1, 1)",
    "written past its end": "ctypes.memset(x + 40, 1, 1); libc.free(x)",
    "freed twice": "libc.free(x); libc.free(x)",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("memcheck") / "quarantine.so"
    source = Path(__file__).with_name("quarantine.c")
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", "-pthread", "-o", made, source], check=True)
    return made


def found(library: Path, code: str) -> str:
    log = library.with_suffix(".log")
    log.unlink(missing_ok=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "QUARANTINE_LOG": str(log)}
    subprocess.run([sys.executable, "-c", HARM + code], env=environment, check=True)
    return log.read_text() if log.exists() else ""


@pytest.mark.parametrize("fault", DONE)
def test_harm_to_memory_is_found_and_named(library: Path, fault: str) -> None:
    assert f"{fault}. Process" in found(library, DONE[fault])


def test_new_memory_holds_no_number(tmp_path: Path) -> None:
    test = tmp_path / "test_new.py"
    test.write_text(
        "import torch\ndef test_new(): assert torch.empty(3).isnan().all() and torch.empty(2, "
        "dtype=int).min() > 9**18\n"
    )
    support = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-p", "filled", "-c", os.devnull, str(test)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(support)}, cwd=tmp_path, check=True)


@pytest.mark.parametrize("change", [1, -1, 16])
def test_a_look_ends_a_process_whose_freed_memory_was_written_to(change: int) -> None:
    code = f"""
import tripwire
tripwire.look()
x, y = libc.malloc(600), libc.malloc(600)
libc.free(x), libc.free(y)
ctypes.c_int.from_address(y).value += {change}
tripwire.look()
"""
    support = Path(__file__).parent
    plain = {
        key: value for key, value in os.environ.items() if key != "LD_PRELOAD"
    }  # glibc's malloc, in `make memcheck` too
    done = subprocess.run(
        [sys.executable, "-c", HARM + code], cwd=support, capture_output=True, text=True, env=plain
    )
    # glibc aborts where it sees a wrong address, and reads from it (SIGSEGV) where the address is a
    # multiple of 16.
    seen = done.returncode == -signal.SIGABRT and "tcache" in done.stderr
    assert seen or (change % 16 == 0 and done.returncode == -signal.SIGSEGV)


def test_a_program_without_fault_is_let_alone(library: Path) -> None:
    assert not found(library, "ctypes.memset(x, 1, 40); libc.free(x)")


def test_a_run_in_which_no_test_ran_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memcheck, "OUT", tmp_path)
    for code, num_found in {0: 0, 1: 0, 4: 1, 5: 1, -11: 1}.items():  # 5: no test was chosen
        ended = subprocess.CompletedProcess([], code)
        monkeypatch.setattr(subprocess, "run", lambda *args, ended=ended, **kwargs: ended)
        assert len(memcheck.quarantine([])) == num_found


def test_reports_of_several_processes_do_not_mix(library: Path) -> None:
    log = library.with_suffix(".log")
    log.unlink(missing_ok=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "QUARANTINE_LOG": str(log)}
    code = (
        HARM + "for _ in range(200): x = libc.malloc(40); ctypes.memset(x + 40, 1, 1); libc.free(x)"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(4)]
    assert [job.wait() for job in jobs] == [0] * 4
    parts = ["== quarantine", "made by", "freed by", "found by"]
    heads = [line for line in log.read_text().splitlines() if line.startswith(tuple(parts))]
    # each write is found when the block is freed, and again when it leaves
    num_reports = 4 * 200 * 2
    assert len(heads) == num_reports * len(parts)
    assert all(head.startswith(part) for head, part in zip(heads, parts * num_reports, strict=True))
