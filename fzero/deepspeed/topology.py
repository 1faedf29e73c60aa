"""Topologies: which rank is at which coordinate of named axes, under DeepSpeed's names;
and the grid, which answers for one rank.

Ranks are row-major over the axes. A mesh of fzero is the same thing (`sharding.Mesh`),
and `mesh_of` gives it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from fzero.comms.process_group import group_of, is_joined, job
from fzero.pipeline.module import PipelineModule
from sharding import Mesh
from sharding.checks import check_at_least


class ProcessTopology:
    """The coordinates of ranks on named axes, in row-major order: consecutive ranks are
    neighbours along the last axis.

    Args:
        axes: their names.
        dims: their lengths.

    >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    >>> (
    ...     topology.get_rank(pipe=1, data=0),
    ...     topology.get_coord(4),
    ...     topology.get_dim("data"),
    ...     topology.world_size(),
    ... )
    (3, ProcessCoord(pipe=1, data=1), 3, 6)
    >>> (
    ...     topology.get_axis_comm_lists("pipe"),
    ...     topology.filter_match(pipe=1),
    ...     topology.get_axis_list("data", 2),
    ... )
    ([[0, 3], [1, 4], [2, 5]], [3, 4, 5], [2, 5])
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes):
            raise ValueError(
                f"ProcessTopology: axes must be different names, one for each of dims, got "
                f"{list(axes)} and {list(dims)}; "
                "give each axis one length"
            )
        for axis, length in zip(axes, dims, strict=True):
            check_at_least("ProcessTopology", f"the length of axis {axis!r}", length, 1)
        self.axes, self.dims = axes, dims
        make: Callable[..., Any] = namedtuple
        self.ProcessCoord = make("ProcessCoord", axes)
        self._coords = tuple(
            self.ProcessCoord(*place) for place in product(*[range(length) for length in dims])
        )
        self.mapping = {coord: rank for rank, coord in enumerate(self._coords)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate, which names every axis."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank: must have a coordinate for each of the axes {list(self.axes)}, got "
                f"{sorted(coord_kwargs)}; "
                "use filter_match for several ranks"
            )
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ValueError(
                f"get_rank: coordinates must be inside "
                f"{dict(zip(self.axes, self.dims, strict=True))}, got {key}"
            )
        return self.mapping[key]

    def get_axis_names(self) -> Sequence[str]:
        """The names of the axes, the major one first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The coordinate of a rank as a part of file names.

        >>> PipeModelDataParallelTopology(2, 2, 1).get_rank_repr(3)
        'model_01'
        """
        omitted, coord = set(omit_axes), self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coord, axis):02d}"
            for axis in self.axes
            if axis not in omitted
        )

    def get_dim(self, axis: str) -> int:
        """The length of an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, a named tuple."""
        if not 0 <= rank < len(self._coords):
            raise ValueError(
                f"get_coord: rank must be at least 0 and below {len(self._coords)}, got {rank}"
            )
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The lists of ranks that differ along `axis` only; none if there is no such
        axis.
        """
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        places = product(*(range(self.get_dim(other)) for other in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks whose coordinates agree with those given."""
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one index of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages by data ranks; the data ranks of a stage are neighbours.

    >>> PipeDataParallelTopology(num_pp=2, num_dp=2).get_axis_comm_lists("data")
    [[0, 1], [2, 3]]
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages by data ranks by ranks that divide layers (tensor parallelism), of which
    fzero's pipelines take 1 only.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def mesh_of(topology: ProcessTopology) -> Mesh:
    """The mesh of a topology: the axes `pipe` and `data`, in its order.

    Raises:
        ValueError: another axis is longer than 1.

    >>> mesh_of(PipeDataParallelTopology(2, 4))
    Mesh(axes=(('pipe', 2), ('data', 4)))
    """
    axes = dict(zip(topology.axes, topology.dims, strict=True))
    if further := {
        axis: length for axis, length in axes.items() if axis not in ("pipe", "data") and length > 1
    }:
        raise ValueError(
            f"topology: axes other than 'pipe' and 'data' must have length 1, got {further}; fzero "
            f"does not divide layers among "
            "ranks (tensor parallelism): give these ranks to 'data'"
        )
    return Mesh.of(
        **{axis: length for axis, length in axes.items() if axis in ("pipe", "data")},
        **({} if "data" in axes else {"data": 1}),
    )


class PipelineParallelGrid:
    """The place of one rank in a topology, under the names of Megatron's `mpu` and
    DeepSpeed's grid.

    The process groups are made at their first use. *Collective* then, on the ranks of
    the group.

    Args:
        topology: of all ranks; without one, as many stages as DeepSpeed gives: the
            prime factors of the number of ranks go to stages and data ranks in turn.
        process_group: ignored, as in DeepSpeed.
        rank: this rank; the process's own if None.

    >>> grid = PipelineParallelGrid(PipeDataParallelTopology(2, 2), rank=3)
    >>> grid.stage_id, grid.data_parallel_id, grid.pp_group, grid.dp_group, grid.stage_to_global(0)
    (1, 1, [1, 3], [2, 3], 1)
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: Any = None,
        *,
        rank: int | None = None,
    ) -> None:
        own = job()
        is_given = rank is not None
        self.global_rank = own.rank if rank is None else rank
        self._topo = topology or PipeDataParallelTopology(*_stages_and_data(own.size))
        self.world_size = self._topo.world_size()
        if is_joined() and not is_given and self.world_size != own.size:
            raise ValueError(
                f"topology: must have as many ranks as the job, {own.size}, got {self.world_size}; "
                f"change its lengths or the job"
            )
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.dp_groups, self.pipe_groups = (
            self._topo.get_axis_comm_lists(axis) for axis in ("data", "pipe")
        )
        self._is_alone = is_given

    def _coordinate(self, axis: str) -> int:
        return getattr(self._topo.get_coord(self.global_rank), axis, 0)

    def _own(self, lists: list[list[int]]) -> list[int]:
        return next((ranks for ranks in lists if self.global_rank in ranks), [self.global_rank])

    def _group(self, ranks: list[int], name: str) -> Any:
        return None if self._is_alone or not is_joined() else group_of(None, tuple(ranks), name)

    @property
    def stage_id(self) -> int:
        """The stage of this rank."""
        return self._coordinate("pipe")

    @property
    def data_parallel_id(self) -> int:
        """The index of this rank among the ranks of its stage."""
        return self._coordinate("data")

    @property
    def is_first_stage(self) -> bool:
        """Whether the inputs go to this rank."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the labels go to this rank."""
        return self.stage_id == self.pipe_parallel_size - 1

    @property
    def pp_group(self) -> list[int]:
        """The ranks of this rank's pipeline, by stage."""
        return self._own(self.pipe_groups)

    @property
    def dp_group(self) -> list[int]:
        """The ranks of this rank's stage."""
        return self._own(self.dp_groups)

    @property
    def pp_proc_group(self) -> Any:
        """The process group of `pp_group`; None without a job."""
        return self._group(self.pp_group, "pipe")

    @property
    def dp_proc_group(self) -> Any:
        """The process group of `dp_group`; None without a job."""
        return self._group(self.dp_group, "data of a stage")

    @property
    def _model_ranks(self) -> list[int]:
        return (
            self._topo.get_axis_list("data", self.data_parallel_id)
            if "data" in self._topo.axes
            else list(range(self.world_size))
        )

    @property
    def ds_model_proc_group(self) -> Any:
        """The process group of the ranks that hold one copy of the model: those of one
        data index.
        """
        return self._group(self._model_ranks, "model")

    @property
    def p2p_groups(self) -> list[list[int]]:
        """For each rank, itself and the rank of the next stage; the last stage's next
        is the first.
        """
        rings = {rank: ranks for ranks in self.pipe_groups for rank in ranks}
        return [
            [rank, rings[rank][(rings[rank].index(rank) + 1) % len(rings[rank])]]
            for rank in range(self.world_size)
        ]

    def topology(self) -> ProcessTopology:
        """The topology of all ranks."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage with this rank's other coordinates, or with those
        given.
        """
        return self._topo.get_rank(
            **self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)._asdict()
        )

    def get_stage_id(self) -> int:
        """As `stage_id`."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """As `data_parallel_id`."""
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        """This rank in the job."""
        return self.global_rank

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> Any:
        """As `pp_proc_group`."""
        return self.pp_proc_group

    def get_data_parallel_world_size(self) -> int:
        """The number of data ranks of a stage."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """As `dp_proc_group`."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """As `dp_group`."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """The index of this rank among those that hold one copy of the model: its
        stage, without an axis `model`.
        """
        return self._model_ranks.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that hold one copy of the model."""
        return len(self._model_ranks)

    def get_model_parallel_group(self) -> Any:
        """As `ds_model_proc_group`."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """The index on the axis `model`; 0 without one."""
        return self._coordinate("model")

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """The length of the axis `model`; 1 without one."""
        return self.slice_parallel_size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> Any:
        """The process group along the axis `model`: this rank alone, without one."""
        return self._group(self._own(self._topo.get_axis_comm_lists("model")), "slice")


def _stages_and_data(world_size: int) -> tuple[int, int]:
    """
    >>> _stages_and_data(12)
    (6, 2)
    """
    sizes, number, prime = [1, 1], 0, 2
    while world_size > 1:
        if world_size % prime:
            prime += 1
            continue
        world_size //= prime
        sizes[number % 2] *= prime
        number += 1
    return sizes[0], sizes[1]


def topology_of(model: PipelineModule) -> ProcessTopology:
    """The axes of all ranks of a pipeline."""
    given = model.axes_of_ranks
    return given if isinstance(given, ProcessTopology) else PipeDataParallelTopology(*given.dims)


def grid_of(model: PipelineModule, *, rank: int | None = None) -> PipelineParallelGrid:
    """The grid of a pipeline for this rank of a job, or for another rank."""
    return PipelineParallelGrid(topology_of(model), rank=rank)
