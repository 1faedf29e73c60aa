"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the ranks that share
sequences, and an object of the kind that `initialize(mpu=…)` takes.
"""

from __future__ import annotations

from fzero.comms.process_group import job, world_group
from fzero.deepspeed.engine import sequences


def _all_rank() -> int:
    return job().rank


def _all_size() -> int:
    return job().size


def _zero() -> int:
    return 0


def _one() -> int:
    return 1


get_sequence_parallel_rank, get_sequence_parallel_world_size = sequences.rank, sequences.size
get_sequence_parallel_group = sequences.group
get_sequence_data_parallel_rank, get_sequence_data_parallel_world_size = _all_rank, _all_size
get_sequence_data_parallel_group = world_group
get_data_parallel_rank, get_data_parallel_world_size = sequences.data_rank, sequences.num_data_ranks
get_model_parallel_rank, get_model_parallel_world_size = _zero, _one


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Divides the tokens of samples among every `sequence_parallel_size` neighbouring
    ranks. *Collective:* every rank.

    Raises:
        ConfigError: the size does not divide the ranks.
    """
    sequences.divide(sequence_parallel_size)


def destroy_sequence_parallel() -> None:
    """Gives each rank samples of its own again."""
    sequences.end()


def get_model_parallel_group() -> None:
    """None: there is no model parallelism."""
