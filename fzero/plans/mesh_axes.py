"""The axes of a job's mesh, and which quantity is sharded over which of them.

The axis `"data"` is the inner one: the state is sharded over it, as the stage says.
There are two cases for any other axis, such as `"node"`: the state is replicated over
it (hybrid sharding, MiCS), or gradients and optimizer state are sharded over it, too
(hpZ of ZeRO++). Sums are made along `"data"` first, and then along the other axes from
the last one of the mesh to the first.

Shape letters: W ranks, L of them along "data", N = W / L along "node".
"""

from __future__ import annotations

import math
import re

from fzero.comms.axes import WORLD
from fzero.comms.mesh import SEQ, is_several
from fzero.config.config import ConfigError
from fzero.config.zero import ZeroOptimization
from sharding import DATA, Mesh

NODE = "node"

PARTS_OF_MODEL = {
    "pipe": "the plan of a stage is make_train_step(…).plan, those of all stages "
    "fzero.resharding.staged_plan(step), and "
    "fzero.estimation.plan_pipeline predicts a pipeline",
}
"""The mesh axes along which ranks hold different parts of the model, each with where to
find the plans of these.
"""

OTHER_AXES = {
    "tensor parallelism": ("tensor", "tp", "model", "mp"),
    "context or sequence parallelism": (
        "context",
        "cp",
        "sequence",
        "seq",
        "sp",
        "ring",
        "ulysses",
    ),
    "expert parallelism": ("expert", "ep", "moe"),
    "a pipeline": ("pp", "pipeline", "stage"),
}
"""Names of axes that mean other parallelisms elsewhere, in lower case and without the
word parallel.
"""

OF_FZERO = {
    "a pipeline": "a pipeline's axis is 'pipe', for a PipelineModule",
    "context or sequence parallelism": f"the axis that divides the tokens is {SEQ!r}, with "
    f"transforms=[fzero.sequence.ulysses({SEQ!r})]",
}
"""The parallelisms among these that fzero has, each with its own axis."""


def other_parallelism(name: str) -> str | None:
    """The parallelism for which the name of an axis stands in other programs; None for
    any other name.

    >>> (
    ...     other_parallelism("Tensor_Parallel"),
    ...     other_parallelism("ep_size"),
    ...     other_parallelism("replica"),
    ... )
    ('tensor parallelism', 'expert parallelism', None)
    """
    word = re.sub(r"[^a-z]|parallel(ism)?|size|axis|dim|ranks?$", "", name.lower())
    return next(
        (what for what, names in OTHER_AXES.items() if word.removesuffix("s") in names), None
    )


def check_mesh(given: object) -> None:
    """Raises a ValueError unless `given` is a mesh of named axes that mean what their
    names say, or None.
    """
    if given is not None and not isinstance(given, Mesh):
        raise ValueError(
            f"mesh: must be a mesh of named axes, an axis of ranks (fzero.join(), "
            f"fzero.comms.AbstractAxis) or None, got {given!r}; pass sharding.Mesh.of(node=2, "
            f"data=4), say"
        )
    if given is not None and WORLD in given.names:
        raise ValueError(
            f"mesh: no axis may be named {WORLD!r}, which is the name of all ranks together in "
            f"CommRecord, got {given}; give the axis another name"
        )
    for name, size in given.axes if given is not None else ():
        if size > 1 and name != SEQ and (what := other_parallelism(name)):
            fix = OF_FZERO.get(what, f"fzero has no {what}")
            raise ValueError(
                f"mesh: every axis but {DATA!r} holds copies of the same state, with another part "
                f"of the batch on each (hybrid sharding), got {name!r} in {given}, which elsewhere "
                f"means {what}; name it {NODE!r} if copies are meant, else leave it out: {fix}"
            )
    if given is not None:
        folded(given)


def folded(mesh: Mesh) -> Mesh:
    """The mesh of the state, in which the axes "data" and "seq" are one: "data".

    Raises:
        ValueError: "seq" does not follow "data", or the layers are on several ranks.

    >>> folded(Mesh.of(node=2, data=4, seq=2)).axes
    (('node', 2), ('data', 8))
    """
    if SEQ not in mesh.names:
        return mesh
    if not PARTS_OF_MODEL.keys().isdisjoint(mesh.names):
        raise ValueError(
            f"mesh: a pipeline must have no axis {SEQ!r}, because its stages pass whole sequences "
            f"on, got {mesh}; leave one of the two axes out"
        )
    if mesh.names[mesh.names.index(SEQ) - 1 :][:2] != (DATA, SEQ):
        raise ValueError(
            f"mesh: the axis {SEQ!r} must follow {DATA!r}, because the ranks that share a sample "
            f"are neighbours, got {mesh}; pass Mesh.of(data=2, seq=2), say"
        )
    sizes = {name: size for name, size in mesh.axes if name != SEQ}
    return Mesh.of(**sizes | {DATA: mesh.axis_size(DATA) * mesh.axis_size(SEQ)})


def seq_size_of(mesh: Mesh | None) -> int:
    """The number of ranks that share the tokens of a sample."""
    return mesh.axis_size(SEQ) if mesh is not None and SEQ in mesh.names else 1


def sum_order(mesh: Mesh) -> tuple[str, ...]:
    """The axes in the order in which gradients are added up along them.

    >>> sum_order(Mesh.of(pod=2, node=2, data=4))
    ('data', 'node', 'pod')
    """
    return DATA, *(name for name in reversed(mesh.names) if name != DATA)


def shard_axes(mesh: Mesh, zero: ZeroOptimization) -> tuple[str, ...]:
    """The axes over which the optimizer state is sharded, major first. Its shards are
    the finest.

    >>> mesh = Mesh.of(node=2, data=4)
    >>> shard_axes(mesh, ZeroOptimization(stage=3))
    ('data',)
    >>> shard_axes(mesh, ZeroOptimization(stage=3, zero_hpz_partition_size=4))
    ('data', 'node')
    """
    if not zero.row.shards("params") or zero.zero_hpz_partition_size is None:
        return (DATA,)
    return DATA, *(name for name in sum_order(mesh)[1:] if mesh.axis_size(name) > 1)


def replicate_axes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of several ranks along which the shards (cut over `axes`) are
    replicated, in the order of the sums.

    >>> replicate_axes(Mesh.of(node=2, data=4), ("data",))
    ('node',)
    """
    return tuple(name for name in sum_order(mesh) if name not in axes and mesh.axis_size(name) > 1)


def mesh_of(zero: ZeroOptimization, world_size: int, given: Mesh | None = None) -> Mesh:
    """The mesh of a job of `world_size` ranks: the one given, or the one that the
    configuration means.

    Raises:
        ConfigError: the configuration's mesh does not divide the ranks, or is not the
            one given.
        ValueError: `world_size` is no positive integer, or the given mesh has another
            number of ranks.

    >>> mesh_of(ZeroOptimization(stage=3, mics_shard_size=4), 8).axes
    (('node', 2), ('data', 4))
    >>> mesh_of(ZeroOptimization(stage=3), 8).axes
    (('data', 8),)
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"world_size: must be a positive integer, got {world_size!r}; say how many ranks share "
            f"the model, or leave it out"
        )
    if given is not None and given.size != world_size:
        sizes = " × ".join(str(size) for _, size in given.axes)
        raise ValueError(
            f"mesh: its axes must hold all {world_size} ranks of the job, got {sizes} = "
            f"{given.size} in {given}; give axes whose sizes multiply to {world_size}"
        )
    key, num_shards = _named(zero)
    if num_shards is None:
        return given or Mesh(((DATA, world_size),))
    if num_shards > world_size:
        raise ConfigError(
            f"zero_optimization.{key}: must be at most the {world_size} ranks of the job, got "
            f"{num_shards}; lower it, or start more ranks"
        )
    if world_size % num_shards:
        sizes = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise ConfigError(
            f"zero_optimization.{key}: must divide the {world_size} ranks of the job, got "
            f"{num_shards}; take one of {sizes}"
        )
    if given is None:
        return Mesh(((NODE, world_size // num_shards), (DATA, num_shards)))
    if given.axis_size(DATA) != num_shards:
        raise ConfigError(
            f"zero_optimization.{key}: must be the size of the axis {DATA!r} where a mesh of "
            f"several axes is given, which is {given.axis_size(DATA)}, got {num_shards}; leave one "
            f"of them out"
        )
    return given


def _named(zero: ZeroOptimization) -> tuple[str, int | None]:
    """The key that sets the size of the axis "data", and its value; None where it has
    no effect.
    """
    if zero.zero_hpz_partition_size is not None and zero.row.shards("params"):
        return "zero_hpz_partition_size", zero.zero_hpz_partition_size
    return "mics_shard_size", zero.mics_shard_size if zero.row.shards("optimizer") else None


def describe(mesh: Mesh) -> str:
    """The number of ranks and the sizes of the axes, as text.

    >>> describe(Mesh.of(node=2, data=4)), describe(Mesh.of(data=4))
    ('8 ranks, node 2 × data 4', '4 ranks')
    """
    axes = " × ".join(f"{name} {size}" for name, size in mesh.axes)
    return f"{mesh.size} ranks" + (f", {axes}" if is_several(mesh) else "")


def num_ranks(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The number of ranks along `axes` together."""
    return math.prod(map(mesh.axis_size, axes))
