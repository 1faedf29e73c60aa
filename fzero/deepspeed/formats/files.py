"""The files of a DeepSpeed checkpoint, read without running code.

    DIR/latest                                              the name of the newest checkpoint
    DIR/global_step500/
        mp_rank_00_model_states.pt counters, names and shapes, module buffers; ZeRO 0-2:
        parameters zero_pp_rank_R_mp_rank_00_model_states.pt ZeRO 3: the same of rank R,
        with its shards of frozen parameters
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt rank R's masters and optimizer
        state
    DIR/latest_universal
    DIR/global_step500_universal/
        mp_rank_00_model_states.pt (or as for ZeRO 3)
        zero/optimizer_state.pt                             loss scale, optimizer groups
        zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt  full tensors

All are pickles of torch.save. They are read with its restricted loader, which makes
tensors and containers; DeepSpeed's own few classes become stand-ins with attributes but
no behaviour. DeepSpeed is never imported. Tensors are memory-mapped, so that only the
elements used are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.checkpoint.folders import CheckpointError, latest_of
from fzero.common.pickles import load_tensors
from fzero.common.plain_values import UnsafePickleError

WORD = "import_deepspeed"
LATEST = ("latest", "latest_universal")
MODEL = "mp_rank_00_model_states.pt"
MODEL_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER_OF_RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt")
ELSEWHERE = {
    "layer_*_expert_*": "a mixture of experts (deepspeed.moe)",
    "expp_rank_*": "a mixture of experts (deepspeed.moe)",
    "layer_*-model_*": "a pipeline (PipelineModule)",
    "*mp_rank_01*": "tensor or pipeline parallelism",
    "offloaded_tensors": "optimizer state on NVMe, which stayed in DeepSpeed's swap files",
}
"""Files that identify unsupported checkpoints."""
KEYS_ELSEWHERE = {
    "num_experts": "a mixture of experts (deepspeed.moe)",
    **dict.fromkeys(
        ("ds_autoep_layers", "autoep_layers", "folding", "ds_zero_partition_groups"),
        "a mixture of experts (AutoEP)",
    ),
}
WEIGHTS_ALONE = (
    "save the whole weights in the job that trained it (torch.save of a state dict), and "
    "take these: fzero.load_weights"
)


# --- pickles --------------------------------------------------------------------------------------


class PlainObject:
    """A stand-in for an object of DeepSpeed, with its attributes."""


class ZeroStage(int):
    """A stand-in for DeepSpeed's ZeroStageEnum."""


ALLOWED: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": PlainObject,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": PlainObject,
    "deepspeed.utils.tensor_fragment.fragment_address": PlainObject,
}
"""The classes that are allowed in a checkpoint besides those that torch considers safe,
each with its stand-in.
"""


def read(path: Path) -> Any:
    """The contents of a file; its tensors are memory-mapped.

    Raises:
        CheckpointError: it is missing, truncated, or needs a class that is not allowed;
            the message has file and class.
    """
    try:
        return load_tensors(path, mmap=True, known=ALLOWED)
    except UnsafePickleError as error:
        raise CheckpointError(
            f"{WORD}: {path} must hold tensors, numbers, strings and containers of these, and "
            f"{error}; save the checkpoint again without it (in client_state, say)"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{WORD}: {path} must be a whole file of torch.save, and {error}; copy it again, or "
            f"take another checkpoint"
        ) from error


# --- folders --------------------------------------------------------------------------------------


def find(dir: Path) -> Path:
    """The folder of one checkpoint: `dir` itself, or the one that its `latest` names.
    Raises a CheckpointError without one.
    """
    for latest in LATEST:
        if (dir / latest).is_file():
            folder = dir / latest_of(dir, latest)
            if not folder.is_dir():
                raise CheckpointError(
                    f"{WORD}: {dir / latest} must name a folder beside it, and {folder.name!r} is "
                    f"not there; copy it, or pass the folder of another checkpoint"
                )
            return folder
    if is_one(dir):
        return dir
    raise CheckpointError(
        f"{WORD}: {dir} must hold a file 'latest' or 'latest_universal', or be one checkpoint of "
        f"DeepSpeed's with {MODEL!r} or such files of ranks, and has neither; pass the folder that "
        f"was given to save_checkpoint"
    )


def is_one(folder: Path) -> bool:
    """Whether a folder looks like one checkpoint of DeepSpeed's."""
    return any((folder / name).is_file() for name in (MODEL, MODEL_OF_RANK.format(0)))


def is_deepspeeds(dir: Path) -> bool:
    """Whether a folder looks like one that DeepSpeed saved to. (fzero also writes a
    `latest`.)
    """
    latest = next((name for name in LATEST if (dir / name).is_file()), None)
    return is_one(dir) or (latest is not None and is_one(dir / latest_of(dir, latest)))


def optimizer_files(folder: Path) -> dict[int, Path]:
    """The files of masters and optimizer state, by rank."""
    found = ((OPTIMIZER.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in sorted(found, key=lambda x: x[1]) if match}


def check_ranks(folder: Path, found: Mapping[int, Path], world_size: int) -> None:
    """Raises unless there is a file of each rank, and no other."""
    missing = [rank for rank in range(world_size) if rank not in found]
    if missing:
        name = found[min(found)].name.replace(f"pp_rank_{min(found)}_", f"pp_rank_{missing[0]}_")
        raise CheckpointError(
            f"{WORD}: {folder} must hold the files of all {world_size} ranks that saved it, and "
            f"{name!r} is missing ({len(missing)} such files); copy it from the node where that "
            f"rank ran"
        )
    if len(found) > world_size:
        raise CheckpointError(
            f"{WORD}: {folder} must hold the files of the {world_size} ranks that saved it, and "
            f"also has {found[max(found)].name!r}: one of another save, it seems; remove those "
            f"that are older"
        )


def check_folder(folder: Path) -> None:
    """Raises where the files are those of a job with more than data parallelism."""
    for pattern, what in ELSEWHERE.items():
        other = next(folder.glob(pattern), None)
        if other is not None:
            raise _elsewhere(other, what)


def check_model(path: Path, model: Mapping[str, Any]) -> None:
    """Raises where the model's file is from a job with more than data parallelism."""
    for key, what in KEYS_ELSEWHERE.items():
        if model.get(key) is not None:
            raise _elsewhere(f"{path} with {key!r}", what)
    degrees = model.get("checkpoint_parallel_dimensions") or {}
    if model.get("mp_world_size", 1) > 1 or any(
        degree > 1 for degree in degrees.values() if isinstance(degree, int)
    ):
        raise _elsewhere(path, f"{model.get('mp_world_size')} model-parallel ranks")
    if not isinstance(model.get("module"), Mapping):
        raise _elsewhere(path, "a pipeline, whose modules are elsewhere")


def _elsewhere(where: object, what: str) -> CheckpointError:
    return CheckpointError(
        f"{WORD}: a checkpoint must hold all state of a job of data parallelism alone, and {where} "
        f"is of {what}; {WEIGHTS_ALONE}"
    )
