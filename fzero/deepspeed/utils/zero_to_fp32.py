"""`deepspeed.utils.zero_to_fp32`: the full fp32 weights of a checkpoint, an engine's or DeepSpeed's, in a single process."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fzero.checkpoint import folders
from fzero.checkpoint.deepspeed.files import is_deepspeeds
from fzero.checkpoint.deepspeed.load import convert_deepspeed
from fzero.checkpoint.weights import chunks_in


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The weights by their names, from the fp32 masters, on the CPU.

    Args:
        checkpoint_dir: the folder that was given to `save_checkpoint`.
        tag: of one checkpoint; None is the latest.
        exclude_frozen_parameters: must be False.
        lazy_mode: ignored: tensors are read at once.
    """
    if exclude_frozen_parameters:
        raise ValueError(
            "get_fp32_state_dict_from_zero_checkpoint: exclude_frozen_parameters must be False, got True; remove their names "
            "from the result"
        )
    base = Path(checkpoint_dir)
    folder = base if tag is None else base / tag
    if not is_deepspeeds(folder):
        if tag is None and (base / folders.LATEST).is_file():
            folder = base / folders.latest_of(base)
        return _weights(folder)
    with TemporaryDirectory(prefix=".fzero-", dir=checkpoint_dir) as beside:
        return _weights(convert_deepspeed(folder, Path(beside, "converted")).parent)


def _weights(dir: Path) -> dict[str, Tensor]:
    folder = folders.find(dir)
    contents = folders.read_contents(folder)
    found, read = chunks_in(folder, contents), dict[str, Tensor]()
    for name in dict.fromkeys(contents["names"].values()):
        x = found.full(next(key for key in (f"master.{name}", f"model.{name}") if key in found.stored))
        read[name] = x.float() if x.is_floating_point() else x
    return {key: read[name] for key, name in contents["names"].items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights to one file: `pytorch_model.bin`, or `model.safetensors` with `safe_serialization`.

    `fzero export` writes several files, with one tensor in memory at a time.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        from safetensors.torch import save_file

        save_file({name: x.clone() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(weights, folder / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """The model on the CPU, with the weights of a checkpoint."""
    weights: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(weights, strict=False)
    return model
