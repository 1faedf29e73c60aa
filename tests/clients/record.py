"""Records the losses of the real DeepSpeed, with which test_clients.py compares
fzero's.

Run `python tests/clients/record.py [CASE:STAGE ...]` in an environment with the extra
`clients` and DeepSpeed; without cases it runs all cases. It writes what it found, with
the versions of all packages, to deepspeed_losses.json beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE / "deepspeed_losses.json"
PACKAGES = ("deepspeed", "torch", "transformers", "accelerate", "trl", "peft", "datasets")
NAMES = ("trainer", "accelerate", "sft", "sft_lora", "dpo", "grpo", "peft")
CASES = [f"{name}:{stage}" for name in NAMES for stage in (2, 3)]


def run(
    program: list[str], cases: list[str], folder: Path, path: list[str]
) -> dict[str, dict[str, object]]:
    """What the cases found with two ranks that `program` starts."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD", "LOCAL", "MASTER"))
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path),
    }
    # a lock that another run left would be waited for
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    command = [sys.executable, *program, str(HERE / "client_jobs.py"), str(folder), *cases]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    if ended.returncode:
        raise RuntimeError((ended.stdout + ended.stderr)[-8000:])
    found: dict[str, dict[str, object]] = json.loads((folder / "found.json").read_text())
    return found


def main(cases: list[str]) -> None:
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            "29731",
        ]
        found = run(torchrun, cases, Path(folder), [])
    assert found["of"] == "deepspeed", found["of"]
    kept = {
        case: {key: value for key, value in found[case].items() if key != "seconds"}
        for case in cases
    }
    losses = {**before.get("cases", {}), **kept}
    record = {
        "versions": {name: version(name) for name in PACKAGES},
        "cases": {case: losses[case] for case in sorted(losses)},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or CASES)
