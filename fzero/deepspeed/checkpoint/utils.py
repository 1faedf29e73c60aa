"""`deepspeed.checkpoint.utils`: tensors as torch.save should get them, and the names of
DeepSpeed's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """A copy of tensors in lists, tuples and dicts on a device; torch.save would write
    the whole memory behind a view.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True).contiguous()
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(x, device) for x in item)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(x, device) for x in item]
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(x, device) for key, x in item.items()})
    return item


def get_model_ckpt_name_for_rank(base_folder: str | Path, mp_rank_str: str) -> str:
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str | Path, dp_rank: int, mp_rank: int) -> str:
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))


def get_layer_ckpt_name_for_rank(base_folder: str | Path, layer_id: Any, tp_rank: int) -> str:
    return str(Path(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt"))
