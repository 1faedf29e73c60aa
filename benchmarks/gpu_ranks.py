"""The rows of `gpu.py` with several ranks: the laws between ranks, and the report of a
rank that does not come.

A row starts a job of one rank per card (NCCL; with `--tiny` two processes on gloo) by
`fzero run`, whose script is this file:

    python benchmarks/gpu_ranks.py JOB DEVICE      the program of each rank

Rank 0 of a job prints what it found as one line of JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MOST_RANKS = 8
SECONDS_TO_WAIT = {"cpu": 5, "cuda": 20}
"""How long a collective waits for a rank in `hang`; on CUDA a rank asks 10 seconds
before.
"""
FOUND = "found: "


def num_ranks(device: str) -> int:
    """The ranks of a job: one for each card, or two processes."""
    import torch

    return min(torch.cuda.device_count(), MOST_RANKS) if device == "cuda" else 2


def run_job(job: str, device: str, *flags: str, ranks: int = 0) -> tuple[int, str, dict[str, Any]]:
    """The exit code of a job, the last lines that it wrote, and what rank 0 found."""
    command = [
        sys.executable,
        "-m",
        "fzero",
        "run",
        "--num_procs",
        str(ranks or num_ranks(device)),
        *flags,
        __file__,
        job,
        device,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    found = [line.partition(FOUND)[2] for line in text.splitlines() if FOUND in line]
    return done.returncode, text, json.loads(found[-1]) if found else {}


def between_ranks(scale: Any) -> dict[str, Any]:
    """All stages in fp32 and bf16 between ranks: the bits of stage 0, and the weights
    of all ranks alike.
    """
    if num_ranks(scale.device) < 2:
        return {
            "not_run": (
                "needs two cards, for NCCL takes one rank for each card; this machine has one"
            )
        }
    code, text, found = run_job("laws", scale.device)
    return found or {"passed": False, "error": f"exit {code}: {_last_line(text)}"}


def hang(scale: Any) -> dict[str, Any]:
    """The last rank stays away from a step: the others must name it, and the job must
    end.

    NCCL takes one rank for each card, so with a single card the ranks are on the
    processor.
    """
    device = scale.device if num_ranks(scale.device) > 1 else "cpu"
    code, text, _ = run_job("hang", device, "--timeout", str(SECONDS_TO_WAIT[device]))
    missing = f"rank {num_ranks(device) - 1} "
    named = [
        line[line.index(missing) :]
        for line in text.splitlines()
        if missing in line and "has not come" in line
    ]
    row = {"ranks": f"{num_ranks(device)} on {device}"}
    row |= {"report": named[0][:300]} if named else {"error": f"exit {code}: {_last_line(text)}"}
    return {"passed": bool(named) and code != 0, "rows": [row]}


def absent(scale: Any) -> dict[str, Any]:
    """As `hang`, with NCCL on one card: the rank that stays away comes into the group
    and to no collective of it, so that its card is never asked for. (NCCL takes no two
    ranks on one card.)"""
    if not scale.on_card:
        return {"not_run": "needs a card"}
    code, text, _ = run_job(
        "absent", scale.device, "--timeout", str(SECONDS_TO_WAIT["cuda"]), ranks=2
    )
    named = [
        line[line.index("rank 1 ") :]
        for line in text.splitlines()
        if "rank 1 " in line and "has not come" in line
    ]
    row = (
        {"report": named[0][:300]}
        if named
        else {"error": f"exit {code}: {_last_line(text)}", "end": text[-1500:]}
    )
    return {"passed": bool(named) and code != 0, "rows": [row]}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it wrote nothing"])[-1][:300]


# --- the program of each rank ---------------------------------------------------------------------


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    import fzero

    job, device = sys.argv[1:]
    if job == "absent":
        group_of_one_card()
    elif device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    axis = fzero.join(device)
    found = {"laws": laws, "hang": stay_away, "absent": never_come}[job](
        axis.rank, axis.size, device
    )
    if axis.rank == 0:
        print(FOUND + json.dumps(found), flush=True)
    fzero.shutdown()


def group_of_one_card() -> None:
    """Two ranks in a group of NCCL with one card: a group that is bound to no card
    connects in its first collective, and only there would NCCL find that two ranks have
    one card, if both came to it."""
    from datetime import timedelta

    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("nccl", timeout=timedelta(seconds=float(os.environ["FZERO_TIMEOUT"])))


def laws(rank: int, size: int, device: str) -> dict[str, Any]:
    """Each rank trains on its own batches; stages 1 to 3 against stage 0, and this
    rank's weights against rank 0's.
    """
    import torch
    import torch.distributed as dist
    from gpu_scale import PRECISIONS, Laws, difference, small_training

    made = Laws()
    for precision in ("fp32", "bf16"):
        runs = [
            small_training(device, stage=stage, precision=PRECISIONS[precision], rank=rank)
            for stage in range(4)
        ]
        differences = [difference(run, runs[0]) for run in runs[1:]]
        sums = torch.stack(
            [sum(x.double().sum() for x in run["weights"].values()) for run in runs]
        ).to(device)
        every = [torch.empty_like(sums) for _ in range(size)]
        dist.all_gather(every, sums)
        for stage, most in enumerate(differences, 1):
            made.check(
                f"{size} ranks, {precision}, stage {stage}, difference from stage 0", most, 0
            )
        made.check(
            f"{size} ranks, {precision}, ranks whose weights differ",
            sum(not x.equal(sums) for x in every),
            0,
        )
    return made.result()


def stay_away(rank: int, size: int, device: str) -> dict[str, Any]:
    import time

    from gpu_scale import small_training

    small_training(device, stage=3, rank=rank, num_steps=2)
    if rank == size - 1:
        time.sleep(600)
    small_training(device, stage=3, rank=rank, num_steps=2)
    return {}


def never_come(rank: int, size: int, device: str) -> dict[str, Any]:
    import time

    from gpu_scale import small_training

    if rank == size - 1:
        time.sleep(600)
    small_training(device, stage=3, rank=rank, num_steps=1)
    return {}


if __name__ == "__main__":
    main()
