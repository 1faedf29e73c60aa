"""Specs and placements: how a tensor is divided among ranks, and in which memory it
lives.

A spec relates a tensor to the axes of a mesh: every rank holds all of it
(`Replicated`), its own shard (`Sharded`), or a summand of it (`Partial`, as for
unreduced gradients). A placement names the memory. `TensorSpec` combines both with
shape and dtype, so that shard lengths and bytes can be computed without a tensor.
`Mesh` names the axes of the ranks. A ZeRO stage is a table of specs, and offload is a
table of placements (ZeRO section 5, ZeRO-Infinity section 5).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from sharding.checks import check_at_least, check_index, check_shape
from sharding.dtypes import ITEMSIZES, itemsize
from sharding.partition import Partition


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the full tensor."""


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Sharded:
    """Every rank along some axes holds one shard of the flattened tensor, which is
    divided along the first axis first.

    Along two axes of sizes L and N, the rank at (l, n) holds shard `l * N + n`. So
    ranks that differ only along the second axis hold neighbouring shards, which
    together are shard l of `Sharded(first axis)`.

    Args:
        axes: the names of the axes, the major one first.

    >>> Sharded("data")
    Sharded('data')
    >>> Sharded("data", "node").axes
    ('data', 'node')
    """

    axes: tuple[str, ...]

    def __init__(self, *axes: str) -> None:
        object.__setattr__(self, "axes", axes)
        if not axes:
            raise ValueError(
                "Sharded: axes must name at least one axis, got none; use Replicated() for none"
            )
        for axis in axes:
            _check_axis_name("Sharded", axis)
        _check_differ("Sharded", axes)

    @property
    def axis(self) -> str:
        """The name of the axis, if there is only one."""
        if len(self.axes) > 1:
            raise ValueError(f"Sharded: axis is for one axis, got {self.axes}; use axes")
        return self.axes[0]

    def __repr__(self) -> str:
        return f"Sharded({', '.join(map(repr, self.axes))})"


@dataclass(frozen=True, slots=True, repr=False)
class Partial:
    """Every rank along `axis` holds a summand of the full shape; the sum or mean of
    these is the tensor.

    >>> Partial("data")
    Partial('data')
    """

    axis: str

    def __post_init__(self) -> None:
        _check_axis_name("Partial", self.axis)

    @property
    def axes(self) -> tuple[str]:
        """The axis in a tuple, as in `Sharded`."""
        return (self.axis,)

    def __repr__(self) -> str:
        return f"Partial({self.axis!r})"


Spec: TypeAlias = Replicated | Sharded | Partial


@dataclass(frozen=True, slots=True)
class Placement:
    """The memory that a tensor lives in: of the accelerator, of the host (pinned or
    not), or a file on NVMe.

    Memory of another kind is a subclass that says when a device computes with it, and
    puts tensors there. It passes `kind="host"`, under which plans count its bytes, and
    its tensors are tensors of the CPU.

    Args:
        kind: `device`, `host` or `nvme`.
        pinned: whether tensors that a step copies are in page-locked host memory, so
            that copies overlap compute; host only.
        path: the folder of the files; for nvme only, where it is required.

    >>> Placement("host", pinned=True).kind
    'host'
    >>> Placement("nvme")
    Traceback (most recent call last):
    ...
    ValueError: Placement: path is required when kind is 'nvme', got None; pass the folder for the files
    """

    kind: Literal["device", "host", "nvme"] = "device"
    pinned: bool = False
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("device", "host", "nvme"):
            raise ValueError(
                f"Placement: kind must be 'device', 'host' or 'nvme', got {self.kind!r}; pass one "
                f"of these"
            )
        if self.pinned and self.kind != "host":
            raise ValueError(
                f"Placement: pinned is for kind 'host' only, got pinned=True with kind "
                f"{self.kind!r}; drop pinned"
            )
        if self.kind == "nvme" and not self.path:
            raise ValueError(
                f"Placement: path is required when kind is 'nvme', got {self.path!r}; pass the "
                f"folder for the files"
            )
        if self.kind != "nvme" and self.path is not None:
            raise ValueError(
                f"Placement: path is for kind 'nvme' only, got {self.path!r} with kind "
                f"{self.kind!r}; drop path"
            )
        if self.kind == "device" and self.is_away:
            raise ValueError(
                f"Placement: kind must not be 'device' where a card does not compute with the "
                f"memory, got {self!r}; pass kind='host', and put tensors in memory of the host"
            )

    @property
    def in_file(self) -> bool:
        """Whether the tensor is no memory, but a file."""
        return self.kind == "nvme"

    @property
    def is_away(self) -> bool:
        """Whether a card, which has memory of its own, computes with a copy.

        >>> [placement.is_away for placement in (DEVICE, Placement("host"))]
        [False, True]
        """
        return not self.is_here("cuda")

    def is_here(self, device: str) -> bool:
        """Whether a device of this type computes with the memory itself: its own; for a
        CPU, also the host's.

        >>> [Placement("host").is_here(device) for device in ("cuda", "cpu")]
        [False, True]
        """
        return self.kind == "device" or (self.kind == "host" and device == "cpu")

    def put(self, x: Any, *, may_pin: bool = False) -> Any:
        """A copy of a torch.Tensor in this memory of the host; not called where
        `is_here` is true.

        It may not be a view of a larger tensor: views count their changes together, so
        a write to another view would look like a change of the parameters.

        Args:
            may_pin: whether there is a card, and a step copies the tensor to or from
                it.
        """
        return x.new_empty(x.shape, device="cpu", pin_memory=self.pinned and may_pin).copy_(x)

    def holds(self, x: Any, *, may_pin: bool = False) -> bool:
        """Whether a tensor is where `put` would put it."""
        return bool(x.device.type == "cpu" and x.is_pinned() == (self.pinned and may_pin))


DEVICE = Placement()


@lru_cache(4096)  # many flat buffers have few different ones, and are asked for them often
def _partition(numel: int, world_size: int, multiple_of: int) -> Partition:
    return Partition(numel, world_size, multiple_of)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one full tensor is divided and placed.

    Args:
        shape: the shape of the full tensor, on any world size.
        dtype: the name of its dtype, such as `"float32"`.
        spec: its relation to the mesh.
        placement: the memory that it lives in.
        multiple_of: the length of every shard is a multiple of this, for a sharded
            tensor.

    >>> tensor = TensorSpec((3, 5), "float32", Sharded("data"), multiple_of=2)
    >>> tensor.local_shape(world_size=4), tensor.local_nbytes(world_size=4)
    ((4,), 16)
    >>> TensorSpec((3, 5), "float32").local_shape(world_size=4)
    (3, 5)
    >>> TensorSpec((3, 5), "float32", Sharded("data")).local_shape(Mesh.of(node=2, data=4))
    (4,)
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec = Replicated()
    placement: Placement = DEVICE
    multiple_of: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_shape("TensorSpec", "shape", self.shape)
        check_at_least("TensorSpec", "multiple_of", self.multiple_of, 1)
        if self.dtype not in ITEMSIZES:
            known = ", ".join(sorted(ITEMSIZES))
            raise ValueError(
                f"TensorSpec: dtype must be the name of a known dtype, got {self.dtype!r}; pass "
                f"one of {known}"
            )
        if not isinstance(self.spec, Spec):
            raise ValueError(
                "TensorSpec: spec must be Replicated(), Sharded(axis) or Partial(axis), "
                f"got {self.spec!r}; pass one of these"
            )

    @property
    def numel(self) -> int:
        """Elements of the full tensor; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    def partition(self, world_size: "int | Mesh") -> Partition:
        """The partition of the flattened tensor among `world_size` ranks, or among the
        ranks of a mesh along its axes.

        >>> TensorSpec((3, 5), "float32", Sharded("data")).partition(world_size=4)
        Partition(numel=15, world_size=4, multiple_of=1)
        >>> TensorSpec((3, 5), "float32", Sharded("data", "node")).partition(
        ...     Mesh.of(node=2, data=4)
        ... )
        Partition(numel=15, world_size=8, multiple_of=1)
        """
        num_shards = self.num_shards(world_size) if isinstance(world_size, Mesh) else world_size
        return _partition(self.numel, num_shards, self.multiple_of)

    def num_shards(self, mesh: "Mesh") -> int:
        """The number of different shards on the ranks of a mesh; 1 if it is not
        sharded.
        """
        return (
            math.prod(map(mesh.axis_size, self.spec.axes)) if isinstance(self.spec, Sharded) else 1
        )

    def local_shape(self, world_size: "int | Mesh") -> tuple[int, ...]:
        """The shape that one rank holds: `(S,)` if sharded, otherwise the full shape.
        Arguments as for `partition`.
        """
        if isinstance(self.spec, Sharded):
            return (self.partition(world_size).shard_numel,)
        return self.shape

    def local_nbytes(self, world_size: "int | Mesh") -> int:
        """The bytes that one rank holds, padding included. Arguments as for
        `partition`.
        """
        return math.prod(self.local_shape(world_size)) * itemsize(self.dtype)


DATA = "data"
"""The name of the axis that a state is sharded over."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks with named axes, in row-major order: consecutive ranks are
    neighbours along the last axis.

    Args:
        axes: the name and size of each axis; one of them is "data".

    >>> mesh = Mesh.of(node=2, data=4)
    >>> mesh.size, mesh.names, mesh.axis_size("data")
    (8, ('node', 'data'), 4)
    >>> mesh.coordinate(6)
    {'node': 1, 'data': 2}
    >>> mesh.peers(6, "data"), mesh.peers(6, "node")
    ((4, 5, 6, 7), (2, 6))
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple((name, size) for name, size in self.axes))
        for name, size in self.axes:
            _check_axis_name("Mesh", name)
            check_at_least("Mesh", f"the size of axis {name!r}", size, 1)
        _check_differ("Mesh", self.names)
        if "data" not in self.names:
            raise ValueError(
                f"Mesh: an axis must be named 'data', got {self.names}; add ('data', 1) if nothing "
                f"else fits"
            )

    @classmethod
    def of(cls, **sizes: int) -> "Mesh":
        """The mesh with these axes, in this order."""
        return cls(tuple(sizes.items()))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(name for name, _ in self.axes)

    def axis_size(self, name: str) -> int:
        """The number of ranks along the axis `name`."""
        for axis, size in self.axes:  # asked for often, and there are few
            if axis == name:
                return size
        raise ValueError(
            f"Mesh: unknown axis {name!r}; this mesh has {', '.join(map(repr, self.names))}"
        )

    def coordinate(self, rank: int) -> dict[str, int]:
        """The index of `rank` along each axis.

        >>> Mesh.of(node=2, data=4).coordinate(5)
        {'node': 1, 'data': 1}
        """
        check_index("Mesh", "rank", rank, self.size)
        indices: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, indices[name] = divmod(rank, size)
        return {name: indices[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`, the inverse of `coordinate(rank)`.

        >>> Mesh.of(node=2, data=4).rank({"node": 1, "data": 1})
        5
        """
        for name in coordinate:
            self.axis_size(name)
        rank = 0
        for name, size in self.axes:
            if name not in coordinate:
                raise ValueError(
                    f"Mesh: coordinate {dict(coordinate)} has no index along axis {name!r}; add one"
                )
            check_index("Mesh", f"index along axis {name!r}", coordinate[name], size)
            rank = rank * size + coordinate[name]
        return rank

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in order, with `rank`
        itself.

        >>> Mesh.of(node=2, data=4).peers(5, "node")
        (1, 5)
        """
        coordinate = self.coordinate(rank)
        return tuple(
            self.rank({**coordinate, axis: index}) for index in range(self.axis_size(axis))
        )

    def shard_of(self, rank: int, spec: Sharded) -> int:
        """The index of the shard that `rank` holds of a tensor with that spec.

        >>> mesh = Mesh.of(node=2, data=4)
        >>> mesh.shard_of(5, Sharded("data")), mesh.shard_of(5, Sharded("data", "node"))
        (1, 3)
        """
        coordinate, shard = self.coordinate(rank), 0
        for axis in spec.axes:
            shard = shard * self.axis_size(axis) + coordinate[axis]
        return shard


def _check_differ(owner: str, names: tuple[str, ...]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"{owner}: axis names must differ, got {repeated[0]!r} twice in {names}; rename one"
        )


def _check_axis_name(owner: str, name: str) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{owner}: axis must be a name, got {name!r}; pass the name of a mesh axis, such as "
            f"'data'"
        )
