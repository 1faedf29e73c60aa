"""The tests under a malloc that finds stale writes (quarantine.c), then Inductor's
kernels under AddressSanitizer and chosen jobs under valgrind. `make memcheck` runs it.

    python tests/support/memcheck.py
        the tests of `make test`: 25 minutes; and the other parts
    python tests/support/memcheck.py --long
        with the long tests: many hours on two cores
    python tests/support/memcheck.py --tests tests/storage/test_stream.py
        these tests only, and nothing else
    python tests/support/memcheck.py --kernels
        AddressSanitizer only
    python tests/support/memcheck.py --valgrind
        valgrind only: about a quarter of an hour

Under quarantine.c a test that limits memory, or measures it or time, may fail; what
counts is what the malloc writes to out/memcheck/quarantine.log, and whether a process
is ended by a signal. New memory holds NaN (filled.py), so any other test that fails may
have read memory that nobody wrote. AddressSanitizer (g++ has it) looks at every access
of the kernels that Inductor generates, and at no other code. Valgrind
(`apt-get install valgrind`) looks at every access of two gloo processes, of which one
is killed in its last backward.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
OUT = ROOT / "out" / "memcheck"
SIMPLE = {  # instructions that valgrind knows
    "PYTHONMALLOC": "malloc",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OMP_NUM_THREADS": "1",
}
KERNELS = ("tests/graph", "tests/comms/test_primitives.py")
CORRUPTED = (
    "malloc():",
    "free():",
    "corrupted",
    "Segmentation fault",
    "Fatal Python error",
    "crashed while running",
)
TESTS_RAN = (0, 1)  # pytest's codes where all tests ran: some may have failed


def quarantine(tests: list[str], *, with_long: bool = False) -> list[str]:
    """Runs tests under quarantine.c, on all cores; returns what was found."""
    library, log = OUT / "quarantine.so", OUT / "quarantine.log"
    build = [
        "cc",
        "-O2",
        "-fPIC",
        "-shared",
        "-pthread",
        "-o",
        str(library),
        str(SUPPORT / "quarantine.c"),
    ]
    subprocess.run(build, check=True)
    log.unlink(missing_ok=True)
    environment = {"HYPOTHESIS_PROFILE": "short"} | os.environ
    environment |= {"LD_PRELOAD": str(library), "QUARANTINE_LOG": str(log), "OMP_NUM_THREADS": "1"}
    chosen = "not nightly" if with_long else "not long and not nightly"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "filled",
        "-n",
        "logical",
        "--dist",
        "worksteal",
        "-m",
        chosen,
        "-rf",
        *tests,
    ]
    with (OUT / "pytest.log").open("w") as out:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    text = (OUT / "pytest.log").read_text()
    print("\n".join(text.splitlines()[-20:]))
    found = [line for line in text.splitlines() if any(word in line for word in CORRUPTED)]
    if code not in TESTS_RAN:
        found.append(f"pytest ended with {code}, so not all tests ran: see {OUT / 'pytest.log'}")
    if log.exists():
        found += [line for line in log.read_text().splitlines() if line.startswith("== quarantine")]
    return found


def kernels() -> list[str]:
    """Runs the tests that compile Inductor's kernels, with AddressSanitizer in these;
    returns what was found.
    """
    compiler, log = OUT / "asan-g++", OUT / "asan"
    compiler.write_text('#!/bin/sh\nunset LD_PRELOAD\nexec g++ -fsanitize=address -g "$@"\n')
    compiler.chmod(0o755)
    for old in OUT.glob("asan.*"):
        old.unlink()
    paths = [["g++", f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    libraries = [
        subprocess.run(path, check=True, capture_output=True, text=True).stdout.strip()
        for path in paths
    ]
    environment = os.environ | {
        "CXX": str(compiler),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": f"detect_leaks=0:handle_segv=0:log_path={log}",
    }
    command = [sys.executable, "-m", "pytest", "-rf", "-k", "inductor or generated_code", *KERNELS]
    with tempfile.TemporaryDirectory() as folder, (OUT / "kernels.log").open("w") as out:
        environment["TORCHINDUCTOR_CACHE_DIR"] = folder  # no kernel that was compiled before
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    found = [
        line
        for report in OUT.glob("asan.*")
        for line in report.read_text().splitlines()
        if "ERROR: " in line
    ]
    return found + (
        [f"the tests of kernels ended with {code}: see {OUT / 'kernels.log'}"] if code else []
    )


def valgrind() -> list[str]:
    """Runs `memcheck_job.py` on two ranks under valgrind; returns what was found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, logs = [], [OUT / f"valgrind.{rank}.log" for rank in range(2)]
    folder = tempfile.mkdtemp()  # of state in files
    for rank, log in enumerate(logs):
        command = [
            "valgrind",
            "--undef-value-errors=no",
            "--num-callers=30",
            f"--suppressions={SUPPORT / 'valgrind.supp'}",
            f"--log-file={log}",
            sys.executable,
            str(SUPPORT / "memcheck_job.py"),
            str(rank),
            str(port),
            folder,
        ]
        environment = os.environ | SIMPLE | {"PYTHONPATH": str(ROOT)}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    codes = [rank.wait() for rank in ranks]
    shutil.rmtree(folder)
    found = (
        []
        if codes == [0, -9]
        else [f"valgrind: the ranks ended with {codes}, and must with 0 and -9"]
    )
    for log in logs:
        found += [
            f"{log.name}: {line}" for line in log.read_text().splitlines() if "Invalid " in line
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[],
        help="tests as pytest names them; those of `make test` by default",
    )
    parser.add_argument("--long", action="store_true", help="run the long tests, too")
    parser.add_argument(
        "--kernels", action="store_true", help="Inductor's kernels under AddressSanitizer only"
    )
    parser.add_argument("--valgrind", action="store_true", help="valgrind only")
    args = parser.parse_args()
    if not args.tests and not args.kernels and shutil.which("valgrind") is None:
        parser.error("valgrind: must be installed (apt-get install valgrind), or pass --tests")
    OUT.mkdir(parents=True, exist_ok=True)
    is_all = not (args.tests or args.kernels or args.valgrind)
    found = quarantine(args.tests, with_long=args.long) if args.tests or is_all else []
    if args.kernels or is_all:
        found += kernels()
    if args.valgrind or is_all:
        found += valgrind()
    print("\n".join(found) or "memcheck: nothing was found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
