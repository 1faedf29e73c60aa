"""`TorchCheckpointEngine`: `engine.checkpoint_engine`, with which scripts write and
read files of their own.

`engine.save_checkpoint` does not use it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.common.pickles import load_tensors
from fzero.common.plain_values import UnsafePickleError


@dataclass
class CheckpointCommitInfo:
    """What a script says of the files that it is about to write, or has written."""

    tag: str
    save_dir: str
    save_latest: bool


class TorchCheckpointEngine:
    """Files of torch.save, under DeepSpeed's names."""

    name = "TorchCheckpointEngine"

    def __init__(self, config_params: Any = None) -> None:
        """Takes DeepSpeed's configuration, of which it needs nothing."""

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: `save` needs no preparation."""

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        torch.save(state_dict, path)

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """The content of a file of torch.save.

        Raises:
            ValueError: it cannot be read, or names other classes than tensors and
                containers of plain values have.
        """
        try:
            return load_tensors(Path(path), map_location=map_location)
        except UnsafePickleError as error:
            raise ValueError(
                f"checkpoint_engine.load: {path} must hold tensors and plain values, and needs "
                f"{error}, which may run code; save plain values, or read a file that you trust "
                f"with torch.load(path, weights_only=False)"
            ) from None
        except ValueError as error:
            raise ValueError(f"checkpoint_engine.load: {path} {error}; take another file") from None

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """True: what `save` has written is complete when it returns."""
        return True

    def cleanup(self) -> None:
        """Does nothing: no file is open."""

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a rank writes what all have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """False: files are not written in the background."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """True: tensors that share memory share it in the file, whole."""
        return True
