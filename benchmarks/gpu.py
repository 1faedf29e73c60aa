"""Everything that needs a card, in one command: fzero's laws on it, its speed beside peers, and the largest model that trains.

    make gpu                                    all parts, at most ten minutes on one card
    make gpu ARGS="--parts 'stages;checkpoint'"   some of them
    python benchmarks/gpu.py --tiny             every part on this machine's processor, to see that it runs

It takes the Python that calls it, downloads nothing, and names the package that is missing. Each part is a process of its own
with a time limit, so one that fails ends no other. After each part `results.json` and `report.md` are written anew, so that an
interrupted run keeps what it has measured.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_parts import CARD, PARTS, RANKS, TINY, TOTAL

NEEDED = ("torch", "numpy", "optree", "einops", "pydantic", "rich", "hjson")
TIMES_TINY = 6
"""By what the limits of parts grow with `--tiny`."""


def machine() -> dict[str, Any]:
    import torch

    card = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "card": card and f"{card.name}, {card.total_memory / 2**30:.0f} GiB",
        "cards": torch.cuda.device_count(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def forget_compiled(folder: Path) -> None:
    """Removes what was compiled: a compiler that was killed leaves locks and empty files, on which later ones wait or fail."""
    shutil.rmtree(folder / "compiled", ignore_errors=True)


def run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part in a process of its own."""
    if name not in PARTS:
        return {"passed": False, "error": "no part has this name"}
    limit = PARTS[name][1]  # of a card; a processor, which others may use, compiles for longer
    seconds = TIMES_TINY * limit if options.tiny else min(limit, options.until - time.time())
    if seconds < 5:
        return {"not_run": f"no time left of {TOTAL} s"}
    if name == "DeepSpeed 2" and importlib.util.find_spec("deepspeed") is None:
        return {"not_run": "deepspeed is not installed"}
    if name in RANKS and options.cards < 2:
        return {"not_run": f"needs two cards, and this machine has {options.cards}"}
    answer = options.out / "part.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", name, "--out", str(options.out)]
    command += ["--tiny"] * options.tiny
    # In a session of its own, so that the ranks and compilers that it starts end with it.
    stderr = None
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as part:
        try:
            with suppress(subprocess.TimeoutExpired):
                stderr = part.communicate(timeout=seconds)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)
    if stderr is None:
        forget_compiled(options.out)
        return {"passed": False, "error": f"took more than {seconds:.0f} s"}
    if not answer.exists():
        return {"passed": False, "error": (stderr.strip() or f"exit {part.returncode}").splitlines()[-1][:500]}
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def verdict(part: dict[str, Any]) -> str:
    """One word or line about a part."""
    if "tokens_per_second" in part:
        return f"{part['tokens_per_second']:.0f} tokens/s"
    return part.get("not_run") or part.get("error") or ("passed" if part["passed"] else "failed")


def page(results: dict[str, Any]) -> str:
    """The results as a page in Markdown."""
    lines = [f"# fzero on {results['machine']['card'] or 'no card'}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in results["machine"].items()), ""]
    speed = {name: part for name, part in results["parts"].items() if "tokens_per_second" in part}
    for name, part in results["parts"].items():
        if name not in speed:
            lines.append(f"- **{name}**: {verdict(part)} ({part['seconds']:.0f} s)")
            failed = (row for row in part.get("laws", ()) if not row["passed"])
            lines += [f"  - failed: {row['name']}: {row['found']:.3g}, at most {row['most']:.3g}" for row in failed]
            lines += [f"  - {row}" for row in part.get("rows", ())]
    if not speed:
        return "\n".join(lines) + "\n"
    plain = speed.get("plain, compiled", {}).get("tokens_per_second")
    names = ("tokens/s", "times plain", "model FLOP/s used", "peak MiB", "ms")
    lines += ["", f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for name, part in speed.items():
        ratio = f"{part['tokens_per_second'] / plain:.2f}" if plain else ""
        peak = "" if part["peak_mib"] is None else f"{part['peak_mib']:.0f}"
        cells = (f"{part['tokens_per_second']:.0f}", ratio, f"{part['used']:.2f}", peak, f"{part['ms']:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(results: dict[str, Any], folder: Path) -> None:
    """Both files anew; parts that were not reached are named."""
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "report.md").write_text(page(results))


def main() -> int:
    parser = argparse.ArgumentParser(description="fzero's laws and speed on a card.")
    parser.add_argument("--parts", help=f"names, joined by ;, of: {'; '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--tiny", action="store_true", help="on the processor, in seconds")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu: {sys.executable} must have {', '.join(missing)}; pip install {' '.join(missing)}, or set PYTHON=")
        return 2
    compiled = options.out.resolve() / "compiled"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor", "TORCH_EXTENSIONS_DIR": f"{compiled}/extensions"}
    os.environ["GPU_OUT"] = str(options.out.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    if options.part:
        result = PARTS[options.part][0](TINY if options.tiny else CARD)
        (options.out / "part.json").write_text(json.dumps(result))
        return 0
    results: dict[str, Any] = {"machine": machine(), "parts": {}}
    if not (results["machine"]["card"] or options.tiny):
        print("gpu: this machine has no card that torch sees; --tiny runs all parts on the processor")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    forget_compiled(options.out)
    options.until = time.time() + TOTAL
    options.cards = 2 if options.tiny else results["machine"]["cards"]
    names = options.parts.split(";") if options.parts else list(PARTS)
    results["parts"] = {name: {"not_run": "interrupted before it", "seconds": 0.0} for name in names}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        for name in names:
            start = time.time()
            results["parts"][name] = {"not_run": "interrupted in it", "seconds": 0.0}
            part = run_part(name, options)
            results["parts"][name] = part | {"seconds": time.time() - start}
            write(results, options.out)
            print(f"{name}: {verdict(part)}", flush=True)
    write(results, options.out)
    print((options.out / "report.md").read_text())
    return int(any(part.get("passed") is False for part in results["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
