"""The ranks of this process's job that share the tokens of samples, for the names of
DeepSpeed that ask before there is an engine (`fzero.sequence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fzero.comms.axes import ProcessAxis
from fzero.comms.mesh import SEQ
from fzero.comms.process_group import along, job, once_more
from fzero.config.config import ConfigError
from fzero.model.transforms import Changes, ModelTransform, TransformedStep
from sharding import Mesh


@dataclass(frozen=True)
class OwnExchange:
    """The transform of a model that exchanges tokens and heads itself
    (`DistributedAttention`). It changes nothing.
    """

    def __call__(self, spec: TransformedStep) -> Changes:
        return Changes(name="sequence_parallel_size", splits_samples=True, is_exact=True)


@dataclass
class Division:
    """How this process's job divides tokens.

    Attributes:
        axis: the ranks that share samples with this one; None before `divide`.
        transform: makes the attention of an engine's model.
    """

    axis: ProcessAxis | None = None
    transform: ModelTransform = OwnExchange()

    @property
    def size(self) -> int:
        return 1 if self.axis is None else self.axis.size

    @property
    def rank(self) -> int:
        return 0 if self.axis is None else self.axis.rank

    @property
    def group(self) -> Any:
        return None if self.axis is None else self.axis.group


NOW = Division()
"""The division of this process."""


def rank() -> int:
    """The index of this rank among those that share its sequences."""
    return NOW.rank


def size() -> int:
    """The number of ranks that share a sequence."""
    return NOW.size


def group() -> Any:
    """The group of the ranks that share this rank's sequences; None where it has its own."""
    return NOW.group


def data_rank() -> int:
    """The index of this rank's batches."""
    return job().rank // NOW.size


def num_data_ranks() -> int:
    """The number of ranks, or groups that share sequences, with different batches."""
    return job().size // NOW.size


def mesh_of(size: int) -> Mesh:
    """The mesh of all ranks, of which every `size` neighbours share samples."""
    return Mesh.of(**{"data": job().size // size, SEQ: size})


def divide(size: int, transform: ModelTransform | None = None) -> None:
    """Divides the tokens of samples among every `size` neighbouring ranks. *Collective*
    for the first call: every rank.

    Raises:
        ConfigError: `size` does not divide the ranks.
    """
    world = job()
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world.size % size:
        raise ConfigError(
            f"sequence_parallel_size: must divide the {world.size} ranks of the job, got {size!r}; "
            f"take a number that does"
        )
    NOW.axis = None
    if size > 1:
        # a group of their own, also where these are all ranks: ZeRO's collectives have another
        axis = once_more(along(replace(world, name="data"), mesh_of(size), SEQ))
        assert isinstance(axis, ProcessAxis)
        NOW.axis = axis
    if transform is not None:
        NOW.transform = transform


def end() -> None:
    """Gives each rank samples of its own again."""
    NOW.axis, NOW.transform = None, OwnExchange()


KEYS = ("sequence_parallel_size", "data_parallel_size")
"""The keys of a configuration by which an engine is asked for shared samples."""


def without_keys(source: Any) -> tuple[Any, dict[str, int]]:
    """A configuration without `KEYS`, and those that it has.

    Raises:
        ConfigError: one of them is no positive integer.
    """
    if not isinstance(source, Mapping):
        return source, {}
    given = {key: source[key] for key in KEYS if source.get(key) not in (None, "auto")}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{key}: must be a number of ranks, at least 1, got {value!r}; pass 2, say"
            )
    return {key: value for key, value in source.items() if key not in KEYS}, given


def check_asked(
    mpu: Any, mesh_param: Sequence[int] | None, keys: Mapping[str, int] | None = None
) -> int:
    """The number of ranks that share samples in an engine, as `initialize` is asked.

    Args:
        keys: those of the configuration (`without_keys`).

    Raises:
        ConfigError: `mpu`, `mesh_param` and `keys` differ, or do not fit the ranks.
    """
    keys = keys or {}
    ask = getattr(mpu, "get_sequence_parallel_world_size", None)
    named = (keys.get(KEYS[0]), None if ask is None else ask(), *(mesh_param or (1, 1))[1:])
    asked = {int(x) for x in named if x}
    num_data = keys.get(KEYS[1])
    if num_data is not None and num_data * max(asked) != job().size:
        raise ConfigError(
            f"{KEYS[1]}: must be the {job().size} ranks of the job, divided by the {max(asked)} "
            f"that share a sequence, got {num_data}; leave it out"
        )
    if mesh_param is not None and mesh_param[0] * mesh_param[1] != job().size:
        raise ConfigError(
            f"mesh_param: must be (data-parallel ranks, ranks that share a sequence), whose "
            f"product is the {job().size} ranks of the job, got {tuple(mesh_param)}; leave it out"
        )
    sizes = asked - {1} or {1}
    if len(sizes) > 1:
        raise ConfigError(
            f"mesh_param: must share sequences among as many ranks as mpu and the key {KEYS[0]!r}, "
            f"got {sorted(sizes)}; leave one of them out"
        )
    size = sizes.pop()
    if size != NOW.size:
        divide(size)
    return size
