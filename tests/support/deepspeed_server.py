"""A process that imports the real DeepSpeed, once, and forks ranks that train with it:
one request a line, one answer a line.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "CUDA_VISIBLE_DEVICES": "",
}

import deepspeed
import deepspeed.checkpoint.ds_to_universal as ds_to_universal
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_jobs import DECAY_FREE, batch, make

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or every run would compile it
type(deepspeed.get_accelerator()).is_fp16_supported = lambda accelerator: (
    True
)  # torch computes in fp16 on any CPU, slowly


def train(job: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Trains to a checkpoint and beyond; the losses after it, averaged over the ranks."""
    torch.manual_seed(0)
    model = make(has_scalar=job.get("has_scalar", False))
    if job.get("all"):
        model.requires_grad_()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: Any = [p for _, p in named]
    if job.get("groups"):
        free = [p for name, p in named if re.search(DECAY_FREE, name)]
        others = [p for name, p in named if not re.search(DECAY_FREE, name)]
        groups = [{"params": others}, {"params": free, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=dict(job["config"])
    )
    # which FP16_Optimizer makes with gradients of zero, for Adam to count
    if job.get("forgets_first_step"):
        engine.optimizer.optimizer.state.clear()
    start, stop = 0, job["before"] + job["after"]
    if "load" in job:
        _, client = engine.load_checkpoint(job["load"])
        start = client["next"]
    losses = []
    for number in range(start, stop):
        if number == job["before"] and "save" in job:
            engine.save_checkpoint(job["save"], client_state={"next": number, "words": ["a", "b"]})
        loss = engine(*batch(number % job.get("batches", stop), rank, world_size))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    if stop == job["before"] and "save" in job:
        engine.save_checkpoint(job["save"], client_state={"next": stop})
    reported = {
        "losses": losses[job["before"] - start if start < job["before"] else 0 :],
        "skipped": engine.skipped_steps,
        "scale": float(getattr(engine.optimizer, "cur_scale", 1.0))
        if "fp16" in job["config"]
        else 1.0,
    }
    engine.destroy()
    return reported


def convert(job: dict[str, Any]) -> None:
    """DeepSpeed's own tools: the whole weights, and a universal checkpoint."""
    if "weights" in job:
        torch.save(dict(get_fp32_state_dict_from_zero_checkpoint(job["input"])), job["weights"])
        return
    words = [
        "--input_folder",
        job["input"],
        "--output_folder",
        job["output"],
        "--inject_missing_state",
    ]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv = ["ds_to_universal", *words]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def serve_rank(
    rank: int, world_size: int, store: str, jobs: list[dict[str, Any]], out: int
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    answers: Any
    try:
        deepspeed.init_distributed(
            "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
        )
        answers = []
        for job in jobs:
            if "input" in job:
                if rank == 0:
                    convert(job)
                dist.barrier()
                answers.append(None)
            else:
                answers.append(train(job, rank, world_size))
        dist.destroy_process_group()
    except BaseException:
        answers = traceback.format_exc()
    if rank == 0 or isinstance(answers, str):
        os.write(out, json.dumps(answers).encode())
    os._exit(0)


def run(world_size: int, jobs: list[dict[str, Any]]) -> Any:
    store = str(Path(tempfile.mkdtemp()) / "store")
    reads, pids = [], []
    for rank in range(world_size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            serve_rank(rank, world_size, store, jobs, write)
        os.close(write)
        reads.append(read)
        pids.append(pid)
    answers = []
    for read, pid in zip(reads, pids):
        with os.fdopen(read, "rb") as pipe:
            answers.append(pipe.read())
        os.waitpid(pid, 0)
    shutil.rmtree(Path(store).parent)
    reported = [json.loads(answer) for answer in answers if answer]
    return next(
        (x for x in reported if isinstance(x, str)), reported[0] if reported else "no rank answered"
    )


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what DeepSpeed prints goes to stderr
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(run(request["world_size"], request["jobs"])) + "\n")
        answers.flush()
