"""The sets of figures of docs/performance.md, one after the other, at the commit that
is checked out.

    python benchmarks/sets.py
        the usual ones, about half an hour, alone on the machine (`make figures`)
    python benchmarks/sets.py --all
        also those marked --only in the list
    python benchmarks/sets.py --only layouts,units
        some
    python benchmarks/sets.py --list
        their commands, and the seconds that each may take

A set is a command with a limit in seconds; one that takes longer is ended, and the next
one runs. Writes what each printed to OUT/NAME.txt, its numbers and pictures to
OUT/NAME, and date, commit and seconds of all to OUT/sets.json.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class FigureSet(NamedTuple):
    """A command of a benchmark and its limit. `has_out`: it takes `--out`; `is_usual`:
    it runs without `--only`; `env`: what it adds to the environment."""

    command: str
    seconds: int
    has_out: bool = True
    is_usual: bool = True
    env: str = ""


# glibc keeps what a step frees
KEEPS = "MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=2147483648"
LIBRARIES = "--contenders DDP,ZeroRedundancyOptimizer,FSDP2,DeepSpeed,fzero,floor"
SETS = {
    "small01": FigureSet(f"peers.py --sizes small --stages 0,1 --rounds 4 {LIBRARIES}", 300),
    "small23": FigureSet(f"peers.py --sizes small --stages 2,3 --rounds 4 {LIBRARIES}", 300),
    "large01": FigureSet(
        f"peers.py --sizes large --stages 0,1 --rounds 2 --steps-per-round 4 {LIBRARIES}", 420
    ),
    "large23": FigureSet(
        f"peers.py --sizes large --stages 2,3 --rounds 2 --steps-per-round 4 {LIBRARIES}", 420
    ),
    "bf16": FigureSet(f"peers.py --sizes small --dtype bf16 --rounds 4 {LIBRARIES}", 420),
    "compiled": FigureSet(
        "peers.py --sizes small --compile --stages 2,3 --rounds 3 --contenders 'FSDP2 + "
        "compile,fzero,fzero step,floor'",
        480,
    ),
    "alone": FigureSet(
        "peers.py --alone --sizes small --contenders 'bare,bare + compile,fzero,fzero step'", 180
    ),
    "units": FigureSet("units.py --rounds 2 --steps-per-round 5", 240),
    "simulate": FigureSet("simulate.py --ranks 64 --stages 0 1 3", 120, has_out=False, env=KEEPS),
    "layouts": FigureSet("layouts.py --rounds 2", 240),
    "optimizers": FigureSet("optimizers.py --rounds 5", 60),
    "plans": FigureSet("plans.py time --models GPT,Llama --stages 0,3 --variants plain", 300),
    "pipeline": FigureSet("pipeline.py --width 1536 --rounds 4", 150),
    "plans2": FigureSet(
        "plans.py time --models BERT,convnet --stages 0,3 --variants plain", 300, is_usual=False
    ),
    "plans3": FigureSet(
        "plans.py time --models GPT --dtypes bf16 --stages 2,3 --variants accumulated,host,files",
        300,
        is_usual=False,
    ),
    "activations": FigureSet(
        "plans.py memory --models GPT --dtypes bf16 --stages 0,2,3 --variants "
        "accumulated,host,files",
        300,
        is_usual=False,
    ),
    "units4": FigureSet(
        "units.py --ranks 4 --units 25,100 --rounds 2 --steps-per-round 3", 120, is_usual=False
    ),
    "scale": FigureSet("scale.py", 240, is_usual=False),
    "nvme": FigureSet("nvme.py", 120, is_usual=False),
    "offload": FigureSet("offload.py --millions 32", 150, is_usual=False),
    "offload1m": FigureSet("offload.py --millions 32 --block-numel 1048320", 150, is_usual=False),
    "alone57": FigureSet(
        "peers.py --alone --sizes large --contenders 'bare,bare + compile,fzero,fzero step'",
        180,
        is_usual=False,
    ),
}


def run(name: str, out: Path) -> dict[str, object]:
    """Runs one set; what came of it."""
    one, started = SETS[name], time.time()
    script, *arguments = shlex.split(one.command)
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    command += ["--out", str(out / name)] if one.has_out else []
    env = (
        os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | dict(x.split("=") for x in one.env.split())
    )
    ended = False
    with (out / f"{name}.txt").open("w") as file:
        # ranks end with it
        how = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        with subprocess.Popen(command, cwd=ROOT, env=env, **how) as running:
            try:
                running.wait(one.seconds)
            except subprocess.TimeoutExpired:
                ended = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
    result = f"ended after {one.seconds} s" if ended else f"exit {running.returncode}"
    return {"command": one.command, "seconds": round(time.time() - started), "result": result}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", help=f"names, joined by commas, of: {', '.join(SETS)}")
    which.add_argument("--all", action="store_true", help="every set")
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--out", type=Path, default=Path("out/sets"))
    given = parser.parse_args()
    every = given.all or given.list
    names = (
        given.only.split(",")
        if given.only
        else [name for name, one in SETS.items() if one.is_usual or every]
    )
    if unknown := set(names) - set(SETS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(SETS)}")
    if given.list:
        for name in names:
            where = "" if SETS[name].is_usual else "  (--only)"
            command = f"{SETS[name].env} python benchmarks/{SETS[name].command}".strip()
            print(f"{name:11} {SETS[name].seconds:4} s  {command}{where}")
        most = sum(
            SETS[name].seconds for name in names if SETS[name].is_usual or given.only or given.all
        )
        print(
            f"at most {most / 60:.0f} "
            f"minutes{'' if given.only or given.all else ' without those marked --only'}"
        )
        return 0
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    path, results = given.out / "sets.json", {}
    if path.exists():
        results = json.loads(path.read_text())
    for name in names:
        found = run(name, given.out) | {
            "commit": commit.stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
        }
        results[name] = found
        path.write_text(json.dumps(results, indent=1))
        print(
            f"{name}: {found['result']}, {found['seconds']} s, in {given.out / name}.txt",
            flush=True,
        )
    return int(any(results[name]["result"] != "exit 0" for name in names))


if __name__ == "__main__":
    sys.exit(main())
