"""The adapter of DeepSpeed.

Its loop is that of DeepSpeed's "Getting Started"; its checkpoints for another stage or
number of ranks are universal ones, as its tutorial makes them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fzero.testing.conformance.engine_trainer import EngineTrainer, config_of
from fzero.testing.conformance.training import Setup, System, Trainer


def deepspeed_config(setup: Setup) -> dict[str, Any]:
    """The configuration of a training; every key is one of its documentation."""
    zero = {
        # its defaults hold 2 GB of buckets, whatever the model
        "allgather_bucket_size": 2**16,
        "stage3_prefetch_bucket_size": 2**16,
        "overlap_comm": False,  # with it, stage 3 on CPUs does not repeat itself
        "memory_efficient_linear": False,  # its kernel computes in another order
        "use_multi_rank_bucket_allreduce": False,  # which sends more, in fewer messages
    }
    in_16_bits = setup.precision != "fp32" and setup.micro_steps > 1
    accumulates = {"data_types": {"grad_accum_dtype": "fp32"}} if in_16_bits else {}
    return config_of(
        setup,
        zero,
        zero_allow_untested_optimizer=True,
        communication_data_type="fp32",
        **accumulates,
    )


def make(setup: Setup, rank: int, world_size: int) -> Trainer:
    """`deepspeed.initialize`."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed  # type: ignore[import-untyped]

    # or every run would compile it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes in fp16 on any CPU, slowly
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda accelerator: True
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return EngineTrainer(
        setup, deepspeed_config(setup), deepspeed, rank, world_size, source=universal
    )


def universal(
    folder: Path, setup: Setup, rank: int, world_size: int
) -> tuple[Path, dict[str, Any]]:
    """A checkpoint that this job can load, and the keys that it needs for that: "Universal
    Checkpointing", where stage or ranks are others.
    """
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

    saved_stage, saved_size = json.loads((folder / "job.json").read_text())
    # in stage 0 each rank loads the whole state
    if saved_stage == setup.stage and (saved_size == world_size or not saved_stage):
        return folder, {}
    tag = (folder / "latest").read_text()
    out = folder / "universal"
    if rank == 0:
        words = ["--input_folder", str(folder / tag), "--output_folder", str(out / tag)]
        words += ["--inject_missing_state", "--num_extract_workers", "1"]
        words += ["--num_merge_workers", "1"]
        with patch.object(sys, "argv", ["ds_to_universal", *words]):
            ds_to_universal.main(ds_to_universal.parse_arguments())
        (out / "latest_universal").write_text(tag)
        (out / "latest").write_text(tag)
    torch.distributed.barrier()
    return out, {"checkpoint": {"load_universal": True}}


def version() -> str:
    return importlib.metadata.version("deepspeed")


DEEPSPEED = System("deepspeed", make, (0, 1, 2, 3), version, preload=("deepspeed",))
