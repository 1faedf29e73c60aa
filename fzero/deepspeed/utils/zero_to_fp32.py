"""`deepspeed.utils.zero_to_fp32`: the full weights of a checkpoint, an engine's or
DeepSpeed's, in a single process.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fzero.checkpoint import folders
from fzero.checkpoint.loading import opened
from fzero.common.optional import package
from fzero.deepspeed.formats.files import is_deepspeeds
from fzero.deepspeed.formats.load import convert_deepspeed

OUTPUT_DTYPE_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


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
        exclude_frozen_parameters: whether to leave out frozen parameters.
        lazy_mode: ignored: tensors are read at once.
    """
    base = Path(checkpoint_dir)
    folder = base if tag is None else base / tag
    if not is_deepspeeds(folder):
        if tag is None and (base / folders.LATEST).is_file():
            folder = base / folders.latest_of(base)
        return _weights(folder, without_frozen=exclude_frozen_parameters)
    with TemporaryDirectory(prefix=".fzero-", dir=checkpoint_dir) as beside:
        converted = convert_deepspeed(folder, Path(beside, "converted")).parent
        return _weights(converted, without_frozen=exclude_frozen_parameters)


def _weights(dir: Path, *, without_frozen: bool) -> dict[str, Tensor]:
    folder = folders.find(dir)
    contents, found = opened(folder)
    frozen = (
        {name for name, kept in contents.optimizer.items() if kept is None}
        if without_frozen
        else set()
    )
    names = {key: name for key, name in contents.names.items() if name not in frozen}
    read: dict[str, Tensor] = {}
    for name in dict.fromkeys(names.values()):
        x = found.full(
            next(key for key in (f"master.{name}", f"model.{name}") if key in found.stored)
        )
        read[name] = x.float() if x.is_floating_point() else x
    return {key: read[name] for key, name in names.items()}


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """The files of a folder whose names match, those with numbers in the order of
    these.

    Raises:
        FileNotFoundError: there are none, as in a checkpoint of fzero, whose tensors
            are in `*.distcp`.
    """
    found = glob.glob(os.path.join(checkpoint_dir, glob_pattern))
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return sorted(
        found,
        key=lambda name: [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)
        ],
    )


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """The file of rank 0's model states in a checkpoint of DeepSpeed, which has another
    name in stage 3.
    """
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    file = os.path.join(
        checkpoint_dir,
        ("zero_pp_rank_0_" if zero_stage == 3 else "") + "mp_rank_00_model_states.pt",
    )
    if not os.path.exists(file):
        raise FileNotFoundError(f"can't find model states file at '{file}'")
    return file


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """The files of optimizer states in a checkpoint of DeepSpeed."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """The files of model states in a checkpoint of DeepSpeed."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` with fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights as transformers reads them: `pytorch_model.bin`, or
    `model.safetensors` with `safe_serialization`.

    More bytes than `max_shard_size` ("5GB", "200MB"; None is one file) become several
    files with an index. `fzero export` does that with one tensor in memory at a time.

    Args:
        dtype: of floating tensors, also by its name ("bf16", "float16", …).
    """
    dtype = _dtype_of(dtype)
    if safe_serialization:
        package(
            "safetensors",
            needed_by="safe_serialization=True",
            instead="pass False, or use fzero export",
        )
    weights = {
        name: x.to(dtype) if x.is_floating_point() else x
        for name, x in get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters
        ).items()
    }
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    shards = _shards(weights, None if max_shard_size is None else _num_bytes(max_shard_size))
    if len(shards) == 1:
        _write(weights, folder / f"{stem}.{suffix}")
        return
    places: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        name = f"{stem}-{index:05d}-of-{len(shards):05d}.{suffix}"
        _write(shard, folder / name)
        places |= dict.fromkeys(shard, name)
    index_of = {
        "metadata": {"total_size": sum(x.nbytes for x in weights.values())},
        "weight_map": places,
    }
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index_of, indent=2))


def _dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of that name.

    >>> _dtype_of("torch.bfloat16"), _dtype_of(torch.float16)
    (torch.bfloat16, torch.float16)
    """
    found = OUTPUT_DTYPE_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if found is None:
        raise ValueError(
            f"dtype: must be one of {', '.join(sorted(OUTPUT_DTYPE_NAMES))}, got {dtype!r}; choose one"
        )
    return found


def _shards(weights: dict[str, Tensor], most: int | None) -> list[dict[str, Tensor]]:
    """The weights in order, in parts of at most `most` bytes; a larger tensor is a part
    of its own.
    """
    shards: list[dict[str, Tensor]] = [{}]
    nbytes = 0
    for name, x in weights.items():
        if most is not None and shards[-1] and nbytes + x.nbytes > most:
            shards.append({})
            nbytes = 0
        shards[-1][name] = x
        nbytes += x.nbytes
    return shards


def _num_bytes(size: str) -> int:
    """A number of bytes as Hugging Face writes it.

    >>> _num_bytes("5GB"), _num_bytes("200MiB")
    (5000000000, 209715200)
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B", str(size).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"max_shard_size: must be a size such as '5GB', got {size!r}; write a number and a unit"
        )
    power = " KMGT".index(match[2].upper() or " ")
    return int(match[1]) * int((1024 if match[3] else 1000) ** power)


def _write(weights: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({name: x.clone() for name, x in weights.items()}, path, {"format": "pt"})
    else:
        torch.save(weights, path)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """The model on the CPU, with the weights of a checkpoint."""
    weights: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(weights, strict=False)
    return model


def arguments_of(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> dict[str, Any]:
    """The arguments of a program that converts a checkpoint, by name."""
    parser.add_argument("checkpoint_dir", help="the folder that was given to save_checkpoint")
    parser.add_argument("output_dir", help="the folder of the weights, which is made")
    parser.add_argument("--max_shard_size", default="5GB", help="the size of the largest file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors files")
    parser.add_argument("-t", "--tag", help="of one checkpoint; the latest by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    given = vars(parser.parse_args(args))
    given.pop("debug")
    return given


def main(args: Sequence[str] | None = None) -> None:
    """The program `zero_to_fp32.py` of a folder of checkpoints, with DeepSpeed's
    arguments.
    """
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Writes the fp32 weights of a checkpoint."
    )
    convert_zero_checkpoint_to_fp32_state_dict(**arguments_of(parser, args))


if __name__ == "__main__":
    main()
