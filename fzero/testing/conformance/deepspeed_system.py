"""The adapter of DeepSpeed.

Its loop is that of DeepSpeed's "Getting Started"; its checkpoints for another stage or
number of ranks are universal ones, as its tutorial makes them.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from fzero.testing.conformance.engine_trainer import EngineTrainer
from fzero.testing.conformance.training import Setup, System, Trainer


def config_of(setup: Setup) -> dict[str, Any]:
    """The configuration of a training; every key is one of its documentation."""
    fp16 = {
        "enabled": setup.precision == "fp16",
        "initial_scale_power": setup.scale_power,
        "loss_scale_window": setup.scale_window,
        "hysteresis": 1,
        "min_loss_scale": 1e-3,
    }
    zero = {
        "stage": setup.stage,
        "stage3_param_persistence_threshold": 0,
        "overlap_comm": False,  # with it, stage 3 on CPUs does not repeat itself
        "memory_efficient_linear": False,  # its kernel computes in another order
    }
    return {
        "gradient_clipping": setup.clip,
        "gradient_accumulation_steps": setup.micro_steps,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": setup.precision == "bf16"},
        "fp16": fp16,
        "communication_data_type": "fp32",
        **({} if setup.precision == "fp32" else {"data_types": {"grad_accum_dtype": "fp32"}}),
    }


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
    return EngineTrainer(setup, config_of(setup), deepspeed, rank, world_size)


def version() -> str:
    return importlib.metadata.version("deepspeed")


DEEPSPEED = System("deepspeed", make, (0, 1, 2, 3), version, preload=("deepspeed",))
