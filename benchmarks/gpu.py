"""Everything that needs a card, in one command: which paths work on it, fzero's laws,
its speed beside peers, and its tests.

    make gpu
        all parts, at most ten minutes on one card
    make gpu ARGS="--laws"
        one of --laws, --speed, --host-state, --tests; some of them, in their order
    make gpu ARGS="--rows 'FSDP2;compile=step'"
        some rows, by name
    make gpu ARGS="--tiny"
        all parts on this machine's processor, to see that they run

It takes the Python that calls it. Packages that are missing there come from the folder
that `make gpu-wheels` has filled; nothing is downloaded. Rows run in processes that are
started anew after one that failed, so that no row ends another; each has a limit of
seconds. `results.json` and `report.md` are written anew when a row begins or ends, and
keep the results of earlier calls: what has passed at the same commit on the same
machine is not run again (but for `--again` and `--rows`).
"""

import argparse
import faulthandler
import importlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from gpu_lanes import Lane, end_all, forget_compiled
from gpu_page import page, verdict
from gpu_parts import PARTS, TOTAL, Row
from gpu_scale import CARD, TINY, forget, keep, repeatable, replace_file

NEEDED = ("torch", "numpy", "optree", "einops", "pydantic", "rich", "hjson")
PACKAGES = ("numpy", "optree", "einops", "pydantic", "triton", "pytest", "hypothesis")
ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "wheels"
SECONDS_TINY = 900
"""Of each row with `--tiny`: a processor, which others may use, compiles for minutes.
"""
CORES_PER_LANE = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# --- where it runs --------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where and with what the rows run, with names for a reader."""
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cards": [f"{card.name}, {card.total_memory / 2**30:.1f} GiB" for card in cards],
        "power": said_by(
            "nvidia-smi",
            "--query-gpu=power.limit,clocks.max.sm,driver_version",
            "--format=csv,noheader",
        ),
        "system": {
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "memory": f"{memory / 2**30:.1f} GiB",
            "CUDA": torch.version.cuda or "torch is built without CUDA",
        },
        "versions": versions,
    }


def commit() -> str:
    """Of the folder; a copy without its history may name it in `GPU_COMMIT`."""
    return (
        os.environ.get("GPU_COMMIT")
        or said_by("git", "describe", "--always", "--dirty", "--exclude=*")
        or "unknown"
    )


def said_by(*command: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):  # it is not installed
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30
        ).stdout.strip()
    return ""


def install(missing: list[str], folder: Path) -> str:
    """Installs packages from the folder of wheels, for this run alone. Returns what is
    in the way, if something is.
    """
    fix = (
        f"run `make gpu-wheels` where there is a network, or pip install "
        f"{' '.join(missing)}, or set PYTHON="
    )
    if not any(WHEELS.glob("*.whl")):
        return f"{sys.executable} must have {', '.join(missing)}; {fix}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-compile",
        "--no-cache-dir",
    ]
    command += ["--upgrade", "--target", str(folder), "--find-links", str(WHEELS), *missing]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PIP_CONFIG_FILE": os.devnull}
    )
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    if done.returncode or any(importlib.util.find_spec(name) is None for name in missing):
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        return (
            f"{WHEELS.name}/ has no {', '.join(missing)} for Python "
            f"{platform.python_version()} ({lines[-1]}); {fix}"
        )
    return ""


# --- the process of a lane ------------------------------------------------------------------------


def work(options: argparse.Namespace) -> int:
    """Runs rows one after the other; ends after one that failed, for what it left
    behind must not fail the next one.
    """
    faulthandler.enable()  # a crash in C++ shows the line of Python
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    scale = TINY if options.tiny else CARD
    if options.work == "laws":
        repeatable()
    for name in options.rows.split(";"):
        os.environ["GPU_ROW"] = str(row_file(options.out, options.work, name))
        begun = time.time()
        os.environ["GPU_BEGUN"] = str(begun)
        keep({})
        try:
            found = PARTS[options.work].rows[name].run(scale)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            found = {"passed": False, "error": f"{type(error).__name__}: {lines[0][:500]}"}
            found["traceback"] = traceback.format_exc()[-6000:]
        keep(found | {"seconds": time.time() - begun, "ended": True})
        if "error" in found:
            return 1
        forget()
    return 0


def row_file(out: Path, part: str, name: str) -> Path:
    return out / "rows" / f"{part} {name}.json".replace("/", "-")


# --- a part ---------------------------------------------------------------------------------------


class Run:
    """One call of the command, whose results join those of earlier calls."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.results = options, {"tiny": options.tiny, "runs": [], "parts": {}}
        path = options.out / "results.json"
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier.get("tiny") == options.tiny and "runs" in earlier:
                self.results = earlier
        command = shlex.join(["benchmarks/gpu.py", *sys.argv[1:]])
        self.run = {"command": command, "result": "not ended"} | machine()
        self.results["runs"].append(self.run)
        self.index = len(self.results["runs"]) - 1
        self.began = time.time()

    @property
    def num_cards(self) -> int:
        return len(self.run["cards"])

    def rows_of(self, part: str) -> dict[str, Row]:
        """What is to be done of a part."""
        rows, asked = PARTS[part].rows, self.options.rows
        if asked:
            return {name: row for name, row in rows.items() if name in asked.split(";")}
        return {
            name: row
            for name, row in rows.items()
            if self.options.again or not self.has_passed(part, name)
        }

    def has_passed(self, part: str, name: str) -> bool:
        """Whether an earlier call has measured this row with the same code on the same
        machine.
        """
        row = self.results["parts"].get(part, {}).get(name, {})
        if not row.get("passed") or "error" in row or part == "tests":
            return False
        of = self.results["runs"][row["run"]]
        same = all(of[key] == self.run[key] for key in ("commit", "cards", "power", "versions"))
        return bool(same) and not self.run["commit"].endswith(("-dirty", "unknown"))

    def record(self, part: str, name: str, row: dict[str, Any]) -> None:
        self.results["parts"].setdefault(part, {})[name] = (
            {"seconds": 0.0} | row | {"run": self.index}
        )

    def write(self) -> None:
        replace_file(self.options.out / "results.json", json.dumps(self.results, indent=1))
        replace_file(self.options.out / "report.md", page(self.results))

    def part(self, name: str, until: float) -> None:
        """Runs the lanes of a part beside each other, as many as the cores allow, until
        its time is over.
        """
        rows = self.rows_of(name)
        self.run["result"] = f"not ended, {time.time() - self.began:.0f} s so far"
        for row in rows:
            self.record(name, row, {"not_run": "its turn did not come"})
        of_lane: dict[str, list[str]] = {}
        for row in rows:
            of_lane.setdefault(rows[row].lane, []).append(row)
        most = max(1, (os.cpu_count() or 1) // CORES_PER_LANE)
        waiting, running = (
            [self.lane(name, lane, names, until) for lane, names in of_lane.items()],
            list[Lane](),
        )
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    running.append(waiting.pop(0))
                changed = False
                for lane in running:
                    for row, found in lane.poll():
                        self.record(name, row, found)
                        changed = True
                        if "ended" in found:
                            print(
                                f"{name}: {row}: {verdict(found)} ({found['seconds']:.0f} s)",
                                flush=True,
                            )
                running = [lane for lane in running if not lane.is_done]
                if changed:
                    self.write()
                if time.time() > until:
                    waiting.clear()
                time.sleep(0.05)
        except KeyboardInterrupt:
            for lane in running:
                for row, found in lane.end("interrupted in it"):
                    self.record(name, row, found)
            raise
        finally:
            self.write()

    def lane(self, part: str, lane: str, names: list[str], until: float) -> Lane:
        out = self.options.out
        command = [
            sys.executable,
            __file__,
            "--work",
            part,
            "--out",
            str(out),
            *["--tiny"] * self.options.tiny,
        ]
        limits = {
            name: SECONDS_TINY if self.options.tiny else PARTS[part].rows[name].seconds
            for name in names
        }
        files = {name: row_file(out, part, name) for name in names}
        is_large = part == "speed" or lane.startswith("graph")
        environment = os.environ | {
            "GPU_UNTIL": str(until),
            "TORCHINDUCTOR_CACHE_DIR": str(
                out / "compiled" / ("speed" if is_large else f"{part}-{lane}")
            ),
        }
        if lane == "beside":
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return Lane(f"{part}-{lane}", command, limits, files, environment, until)


def interrupt(*_: object) -> NoReturn:
    """Ends the run once: a second signal must not disturb what cleans up and writes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def options_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="fzero's laws and speed on a card.")
    for name, part in PARTS.items():
        parser.add_argument(
            f"--{name}", dest="parts", action="append_const", const=name, help=part.about
        )
    parser.add_argument("--rows", default="", help="names of rows, joined by ;")
    parser.add_argument(
        "--again",
        action="store_true",
        help="also rows that have passed at this commit on this machine",
    )
    parser.add_argument(
        "--seconds", type=float, help="for the whole call, in place of its parts' own"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--tiny", action="store_true", help="on the processor, with small models")
    parser.add_argument("--work", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.out = options.out.resolve()
    known = {row for part in PARTS.values() for row in part.rows}
    if unknown := [name for name in options.rows.split(";") if options.rows and name not in known]:
        parser.error(
            f"--rows: no row is called {unknown[0]!r}; the rows are {'; '.join(sorted(known))}"
        )
    wanted = options.parts or PARTS
    options.parts = [name for name in PARTS if name in wanted]
    if options.rows:
        options.parts = [name for name in PARTS if {*PARTS[name].rows} & {*options.rows.split(";")}]
    return options


def main() -> int:
    options = options_of()
    sys.path.insert(0, str(ROOT))
    site = options.out / "site"
    if site.exists() and options.work is None:
        shutil.rmtree(site)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and (trouble := install(missing, site)):
        print(f"gpu: {trouble}")
        return 2
    # Of the laws, the matrix products must give the same bits each time.
    os.environ |= {"GPU_OUT": str(options.out), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    if options.work:
        return work(options)
    os.environ["GPU_RUN"] = uuid.uuid4().hex  # marks the processes that rows start
    shutil.rmtree(options.out / "rows", ignore_errors=True)
    (options.out / "rows").mkdir(parents=True)
    forget_compiled(options.out / "compiled")
    run = Run(options)
    if not (run.num_cards or options.tiny):
        print(
            "gpu: this machine has no card that torch sees; --tiny runs all parts on the processor"
        )
        return 2
    for number in SIGNALS:
        signal.signal(number, interrupt)
    is_whole = False
    with suppress(KeyboardInterrupt):
        run_parts(run)
        is_whole = True
    if not is_whole:
        end_all(f"GPU_RUN={os.environ['GPU_RUN']}")
        forget_compiled(options.out / "compiled")
    run.run["result"] = (
        f"{'ended' if is_whole else 'interrupted'} after {time.time() - run.began:.0f} s"
    )
    run.write()
    with suppress(OSError):  # a terminal that ended
        print((options.out / "report.md").read_text(), flush=True)
    rows = [
        row
        for part in run.results["parts"].values()
        for row in part.values()
        if row["run"] == run.index
    ]
    failed = any(row.get("passed") is False or "error" in row for row in rows)
    return int(failed) if is_whole else 130


def run_parts(run: Run) -> None:
    """Each part has its own seconds; with all of them, a share, and what earlier ones
    leave.
    """
    names, options = run.options.parts, run.options
    asked = sum(PARTS[name].seconds for name in names)
    total = options.seconds or (SECONDS_TINY if options.tiny else min(asked, TOTAL))
    until = run.began + total
    for index, name in enumerate(names):
        later = sum(PARTS[x].seconds for x in names[index + 1 :]) * total / asked
        run.part(name, until - later)


if __name__ == "__main__":
    sys.exit(main())
