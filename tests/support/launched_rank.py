"""What does a rank do in the tests of the launcher? `launched_rank.py SCENARIO FOLDER`;
each rank leaves files in FOLDER.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 600  # longer than any test; what still sleeps then has been left behind


def train(folder: Path, leaves: int | None = None) -> None:
    """Trains five steps; the rank `leaves` ends before the third, with code 0 and
    without a word.
    """
    import torch  # takes seconds, which other scenarios need not wait for

    import fzero

    me = fzero.launched()
    assert me is not None
    rank = me.rank

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    cfg = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    step = fzero.make_train_step(
        model, fzero.Config.load(cfg), loss_fn=lambda model, x: (model(x) - x).square().mean()
    )
    state, losses = step.init(), []
    for number in range(5):
        if number == 2 and rank == leaves:
            os._exit(0)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item().hex())
    (folder / f"losses.{rank}").write_text(" ".join(losses))


def main(scenario: str, folder: Path) -> None:
    if scenario == "train":
        return train(folder)
    if scenario == "own port":
        os.environ["MASTER_PORT"] = (folder / "port").read_text()
        return train(folder)
    if scenario == "rank 1 leaves":
        return train(folder, leaves=1)
    if scenario == "imports deepspeed":
        import deepspeed

        deepspeed.init_distributed()  # which knows mpirun's variables, too
        name = f"deepspeed.{deepspeed.comm.get_rank()}"
        return (folder / name).write_text(deepspeed.initialize.__module__) and None
    rank, world_size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    print(f"rank {rank} of {world_size} says hello", flush=True)
    if scenario == "environment":
        return (folder / f"environment.{rank}").write_text(
            "\n".join(f"{k}={v}" for k, v in os.environ.items())
        ) and None
    if scenario == "fails once":
        (folder / f"came.{rank}").touch()
        if not (folder / "failed").exists():
            while rank == 1 and not (folder / "came.0").exists():
                time.sleep(0.05)
            if rank == 1:
                (folder / "failed").touch()
                raise SystemExit(3)
            time.sleep(SECONDS)
        return None
    # Something that a rank has started, as loaders of data are.
    sleeper = [sys.executable, "-c", f"import time; time.sleep({SECONDS})", str(folder)]
    subprocess.Popen(sleeper, stderr=subprocess.DEVNULL, start_new_session=rank == 0)
    (folder / f"started.{rank}").touch()
    if scenario == "tells signals":

        def tell(number: int, frame: object) -> None:
            (folder / f"signal.{rank}").write_text(signal.Signals(number).name)
            raise SystemExit(0)

        signal.signal(signal.SIGINT, tell)
        signal.signal(signal.SIGTERM, tell)
        (folder / f"ready.{rank}").touch()
    if rank == 1 and scenario in ("exits", "is killed"):
        while not (folder / "started.0").exists():
            time.sleep(0.05)
        print("the reason is reported here", file=sys.stderr, flush=True)
        if scenario == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(7)
    time.sleep(SECONDS)
    return None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
