"""`deepspeed.utils.groups`: every rank is data-parallel. Neighbours may share sequences
(`fzero.deepspeed.engine.sequences`); each other group has one rank.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fzero.comms.process_group import is_joined, job, world_group as _world
from fzero.deepspeed.engine import sequences

mpu: Any = None
mesh_device: Any = None


def _rank() -> int:
    return job().rank


def _zero() -> int:
    return 0


def _one() -> int:
    return 1


def _world_size() -> int:
    return job().size


def _all_ranks() -> list[int]:
    return list(range(_world_size()))


def _none() -> None:
    return None


def _empty() -> dict[str, Any]:
    return {}


_get_sequence_parallel_rank, _get_sequence_parallel_world_size = sequences.rank, sequences.size
_get_sequence_parallel_group = sequences.group
get_data_parallel_rank = _get_data_parallel_rank = sequences.data_rank
get_data_parallel_world_size = _get_data_parallel_world_size = sequences.num_data_ranks
_get_sequence_data_parallel_rank, _get_sequence_data_parallel_world_size = _rank, _world_size
get_data_parallel_group = _get_data_parallel_group = _get_sequence_data_parallel_group = (
    _clone_world_group
) = _world
_get_data_parallel_group_ranks = _all_ranks
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_broadcast_src_rank = _zero
get_tensor_model_parallel_src_rank = _rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = (
    _get_model_parallel_world_size
) = _one
_get_expert_model_parallel_world_size = _one
_get_zero_param_intra_parallel_group = _none
_get_expert_parallel_group_dict = _get_expert_data_parallel_group_dict = _empty


def get_model_parallel_group() -> NoReturn:
    """Raises: there is none."""
    raise RuntimeError(
        "groups.get_model_parallel_group: fzero has no model parallelism, and so no such group; "
        "ask get_model_parallel_world_size(), which is 1, first"
    )


get_tensor_model_parallel_group = get_model_parallel_group


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepts experts on all ranks only.

    Raises:
        ValueError: experts are divided among ranks.
    """
    if ep_size != 1:
        raise ValueError(
            f"groups.initialize: ep_size must be 1, got {ep_size}: fzero has no expert "
            f"parallelism; leave it out"
        )


def is_initialized() -> bool:
    """Whether the ranks have a process group."""
    return is_joined()
