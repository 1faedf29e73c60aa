"""The rank of this process, as its launcher sets it: torchrun (and `fzero`), mpirun of
several kinds, or srun.

Each launcher sets environment variables of its own; `launched` reads them into one
value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

DEFAULT_PORT = 29500
AGENT_STORE = "FZERO_AGENT_STORE"
"""The job and the port for which fzero's agent keeps the store: `agent_store`."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank of a job, and the address where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    by: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{self.by}: rank {self.rank} is not among {self.world_size} ranks; check the "
                f"environment"
            )


# launcher, rank, world size, local rank; the first launcher whose rank and world size are both set
# is used
VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    (
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # The shell of sbatch or salloc also has SLURM_PROCID and SLURM_NTASKS; only ranks that srun
    # started have a step.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
LOCAL_SIZES = {
    "mpirun (Open MPI)": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun (MVAPICH)": "MV2_COMM_WORLD_LOCAL_SIZE",
}


def first_node(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    >>> first_node("gpu[007-009,12],login1"), first_node("a,b"), first_node("rack2-n[3]x")
    ('gpu007', 'a', 'rack2-n3x')
    """
    match = re.match(r"^([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def launched(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """The rank of this process in the job that started it, or None if no launcher did.

    >>> launched(
    ...     {
    ...         "OMPI_COMM_WORLD_RANK": "1",
    ...         "OMPI_COMM_WORLD_SIZE": "2",
    ...         "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    ...         "MASTER_ADDR": "node1",
    ...     }
    ... )
    RankInfo(rank=1, world_size=2, local_rank=0, master_addr='node1', master_port=29500, by='mpirun (Open MPI)')

    Raises:
        ValueError: there are several ranks on several hosts, and no variable names the
            host of rank 0.
    """
    for by, rank, world_size, local_rank in VARIABLES:
        if rank not in environment or world_size not in environment:
            continue
        num_ranks = int(environment[world_size])
        address = environment.get("MASTER_ADDR")
        if address is None and by == "srun":
            address = first_node(environment.get("SLURM_STEP_NODELIST", ""))
        if (
            address is None
            and environment.get(LOCAL_SIZES.get(by, world_size)) == environment[world_size]
        ):
            address = "127.0.0.1"  # all ranks are on one host
        if not address:
            raise ValueError(
                f"{by} started {num_ranks} ranks and MASTER_ADDR is not set: export it (with Open "
                f"MPI by -x MASTER_ADDR=host), "
                "as the host of rank 0"
            )
        port = int(environment.get("MASTER_PORT", DEFAULT_PORT))
        return RankInfo(
            int(environment[rank]),
            num_ranks,
            int(environment.get(local_rank, 0)),
            address,
            port,
            by,
        )
    return None


def agent_store(run_id: str, port: str) -> dict[str, str]:
    """The variable from which `follow_port` knows that an agent keeps the job's store."""
    return {AGENT_STORE: f"{run_id} {port}"}


def follow_port(environment: MutableMapping[str, str]) -> None:
    """Lets rank 0 keep the job's store where the script has set another MASTER_PORT
    than the launcher's.

    The agent listens at its own port only, and the ranks would wait for it at the
    script's.

    >>> environment = {
    ...     "TORCHELASTIC_RUN_ID": "a",
    ...     "MASTER_PORT": "29501",
    ...     **agent_store("a", "29500"),
    ... }
    >>> follow_port(environment)
    >>> environment["TORCHELASTIC_USE_AGENT_STORE"]
    'False'
    """
    run_id, port = (environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    known_id, _, known_port = environment.get(AGENT_STORE, "").partition(" ")
    if known_id == run_id and known_port not in ("", port):
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
