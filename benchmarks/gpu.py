"""Everything that needs a card, in one command: fzero's laws on it, its speed beside peers, and the largest model that trains.

    make gpu                                    all parts, at most ten minutes on one card
    make gpu ARGS="--parts 'stages;checkpoint'"   some of them
    python benchmarks/gpu.py --tiny             every part on this machine's processor, to see that it runs

It takes the Python that calls it, downloads nothing, and names the package that is missing. Each part is a process of its own,
so one that fails ends no other. Its limit is its own seconds in `PARTS` and what earlier parts have left of theirs.
`results.json` and `report.md` are written anew before and after each part, so that an interrupted run keeps what it has measured.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from gpu_parts import CARD, PARTS, PLAIN, TINY, TOTAL, keep, replace_file

NEEDED = ("torch", "numpy", "optree", "einops", "pydantic", "rich", "hjson")
VERSIONS = {"torch": ("2.11", "2.12", "2.13"), "python": ("3.11", "3.12", "3.13")}
PACKAGES = ("numpy", "optree", "einops", "pydantic", "triton", "deepspeed")
GOALS = {PLAIN: 1.0, "DeepSpeed 2": 1.3}
"""How many times the tokens per second of a contender fzero should train."""
ROOT = Path(__file__).parents[1]
SECONDS_TINY = 900
"""Of each part with `--tiny`: a processor, which others may use, compiles for minutes."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def machine() -> dict[str, Any]:
    """Where and with what the parts run, with names for a reader."""
    import torch

    commit = ""
    with suppress(OSError):  # git is not installed
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "cards": [f"{card.name}, {card.total_memory / 2**30:.1f} GiB" for card in cards],
        "system": {
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "memory": f"{memory / 2**30:.1f} GiB",
            "CUDA": torch.version.cuda or "torch is built without CUDA",
        },
        "versions": versions,
    }


def forget_compiled(folder: Path) -> None:
    """Removes what was compiled: a compiler that was killed leaves locks and empty files, on which later ones wait or fail."""
    shutil.rmtree(folder / "compiled", ignore_errors=True)


def not_possible(name: str, options: argparse.Namespace) -> str | None:
    """Why a part cannot run here, if it cannot."""
    if name == "DeepSpeed 2" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if name == "between ranks" and options.cards < 2:
        return f"needs two cards, and this machine has {options.cards}"
    return None


def run_part(name: str, later: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One part in a process of its own, before the parts `later`."""
    if name not in PARTS:
        return {"passed": False, "error": "no part has this name"}
    if reason := not_possible(name, options):
        return {"not_run": reason}
    seconds: float = SECONDS_TINY
    if not options.tiny:
        kept_free = sum(PARTS[x][1] for x in later if x in PARTS and not not_possible(x, options))
        seconds = options.until - kept_free - time.time()
    answer = options.out / "part.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", name, "--out", str(options.out), "--seconds", str(seconds)]
    command += ["--tiny"] * options.tiny
    stderr = None
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as part:
        try:
            with suppress(subprocess.TimeoutExpired):
                stderr = part.communicate(timeout=seconds)[1]
        finally:
            end_all()
    result: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {"passed": False}
    if stderr is None:
        forget_compiled(options.out)
        return result | {"error": f"took more than {seconds:.0f} s"}
    if part.returncode or not answer.exists():
        lines = stderr.strip().splitlines() or ["it wrote nothing"]
        return result | {"error": f"exit {part.returncode}: {lines[-1][:500]}"}
    return result


def started() -> list[int]:
    """The processes that parts have started and that are there: they have this run's mark in their environment."""
    mark, found = f"GPU_RUN={os.environ['GPU_RUN']}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_all() -> None:
    """Ends all that a part has started, also what has a session or a process group of its own: ranks, and compilers of ninja."""
    until = time.time() + 10
    while (left := started()) and time.time() < until:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def verdict(part: dict[str, Any]) -> str:
    """One line about a part."""
    if "not_run" in part:
        return f"not run: {part['not_run']}"
    found = "passed" if part["passed"] else "failed"
    if "tokens_per_second" in part:
        found = f"{part['tokens_per_second']:.0f} tokens/s" + ("" if part["passed"] else ", loss is no number")
    return f"{found}, {part['error']}" if "error" in part else found


def page(results: dict[str, Any]) -> str:
    """The results as a page in Markdown."""
    found, parts = results["machine"], results["parts"]
    versions = found["versions"]
    others = [f"{key} {x}" for key, of in VERSIONS.items() for x in of if not versions[key].startswith(f"{x}.")]
    lines = [f"# fzero on {'; '.join(found['cards']) or 'a processor'}", ""]
    lines += [f"{found['date']}, commit {found['commit']}; {results['result']}.", ""]
    if results["tiny"]:
        lines += ["`--tiny`: small models on the processor. The speeds show that each part runs, and nothing else.", ""]
    lines += [f"- {key}: {value}" for key, value in found["system"].items()]
    lines += [f"- versions: {', '.join(f'{key} {value}' for key, value in versions.items())}"]
    lines += [f"- not run: the other versions that fzero supports ({', '.join(others)})", "", "## Parts", ""]
    for name, part in parts.items():
        checks = f"{len(part['laws'])} checks, " if "laws" in part else ""
        lines.append(f"- **{name}**: {verdict(part)} ({checks}{part['seconds']:.0f} s)")
        failed = (row for row in part.get("laws", ()) if not row["passed"])
        lines += [f"  - failed: {row['name']}: {row['found']:.3g}, at most {row['most']:.3g}" for row in failed]
        lines += [f"  - {', '.join(f'{key}: {_short(x)}' for key, x in row.items())}" for row in part.get("rows", ())]
    return "\n".join([*lines, *speed_table(parts, {} if results["tiny"] else GOALS)]) + "\n"


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def speed_table(parts: dict[str, Any], goals: dict[str, float]) -> list[str]:
    """The lines about the contenders that were measured, and how fzero stands to the `goals`."""
    speed = {name: part for name, part in parts.items() if "tokens_per_second" in part}
    if not speed:
        return []
    of = next(iter(speed.values()))
    lines = ["", "## Speed", ""]
    lines += [
        f"A GPT of {of['parameters'] / 1e6:,.1f} M parameters in bf16 with AdamW on one device, {of['tokens']:,} tokens a step; "
        f"the median of {of['num_steps']} steps after the one that compiles. `FLOP/s used`: those of the model (6 per parameter "
        "and token, and causal attention), over the rate of one large bf16 matrix product in the same process. "
        "`peak`: the most memory that tensors took on the card.",
        "",
    ]
    names = (
        "tokens/s",
        "times plain",
        "step, ms",
        "FLOP/s used",
        "product, TFLOP/s",
        "peak, MiB",
        "first step, s",
        "last loss",
    )
    lines += [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    plain = speed.get(PLAIN, {}).get("tokens_per_second")
    for name, part in speed.items():
        cells = (
            f"{part['tokens_per_second']:,.0f}",
            f"{part['tokens_per_second'] / plain:.2f}" if plain else "–",
            f"{part['ms']:.1f}",
            f"{part['used']:.2f}",
            f"{part['product_flops'] / 1e12:.3g}",
            "–" if part["peak_mib"] is None else f"{part['peak_mib']:,.0f}",
            f"{part['first_step_s']:.1f}",
            f"{part['loss']:.3f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    own = max((part["tokens_per_second"] for name, part in speed.items() if name.startswith("fzero")), default=None)
    for name, goal in goals.items():
        if own and name in speed:
            ratio = own / speed[name]["tokens_per_second"]
            lines += ["", f"The fastest of fzero over {name}: {ratio:.2f} (goal: at least {goal:.1f})."]
    return lines


def write(results: dict[str, Any], folder: Path) -> None:
    """Both files anew; parts that were not reached are named."""
    replace_file(folder / "results.json", json.dumps(results, indent=1))
    replace_file(folder / "report.md", page(results))


def interrupt(*_: object) -> NoReturn:
    """Ends the run once: a second signal must not disturb what cleans up and writes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="fzero's laws and speed on a card.")
    parser.add_argument("--parts", help=f"names, joined by ;, of: {'; '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--tiny", action="store_true", help="on the processor, with small models")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.until = time.time() + (options.seconds or TOTAL)
    sys.path.insert(0, str(ROOT))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu: {sys.executable} must have {', '.join(missing)}; pip install {' '.join(missing)}, or set PYTHON=")
        return 2
    compiled = options.out.resolve() / "compiled"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor", "TORCH_EXTENSIONS_DIR": f"{compiled}/extensions"}
    os.environ["GPU_OUT"] = str(options.out.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if options.part:
        os.environ["GPU_UNTIL"] = str(options.until)
        keep(PARTS[options.part][0](TINY if options.tiny else CARD))
        return 0
    os.environ["GPU_RUN"] = uuid.uuid4().hex  # marks the processes that parts start
    results: dict[str, Any] = {"machine": machine(), "tiny": options.tiny, "parts": {}}
    if not (results["machine"]["cards"] or options.tiny):
        print("gpu: this machine has no card that torch sees; --tiny runs all parts on the processor")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    forget_compiled(options.out)
    options.cards = 2 if options.tiny else len(results["machine"]["cards"])
    names = list(dict.fromkeys(options.parts.split(";") if options.parts else PARTS))
    results["parts"] = {name: {"not_run": "interrupted before it", "seconds": 0.0} for name in names}
    for number in SIGNALS:
        signal.signal(number, interrupt)
    began, is_whole = time.time(), False
    with suppress(KeyboardInterrupt):
        for index, name in enumerate(names):
            start = time.time()
            results["parts"][name] = {"not_run": "interrupted in it", "seconds": 0.0}
            results["result"] = f"not ended, {start - began:.0f} s so far"
            write(results, options.out)
            part = run_part(name, names[index + 1 :], options)
            results["parts"][name] = part | {"seconds": time.time() - start}
            print(f"{name}: {verdict(part)}", flush=True)
        is_whole = True
    if not is_whole:
        end_all()
        forget_compiled(options.out)
    results["result"] = f"{'ended' if is_whole else 'interrupted'} after {time.time() - began:.0f} s"
    write(results, options.out)
    with suppress(OSError):  # a terminal that ended
        print((options.out / "report.md").read_text(), flush=True)
    failed = any(part.get("passed") is False or "error" in part for part in results["parts"].values())
    return int(failed) if is_whole else 130


if __name__ == "__main__":
    sys.exit(main())
