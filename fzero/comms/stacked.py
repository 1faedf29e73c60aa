"""All ranks of a mesh as a dimension of tensors: the collectives of `TracedAxis`, for all ranks at once.

`Stacked.each(function)` is `torch.vmap` over the leading dimension of ranks. Inside it a tensor is that of one
rank, and a collective of a `StackedAxis` is an operation on the dimension of ranks. Sums are made in rank order, as by ranks in
processes.

Each rank has its own random state: an operator that draws random numbers runs for one rank after the other, on the state of
that rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.comms.axes import WORLD
from fzero.comms.traced import in_order
from sharding import Mesh

T = TypeVar("T")
aten = torch.ops.aten


class VmapError(ValueError):
    """A model does something that `torch.vmap` cannot do for all ranks at once."""


class _OverRanks(torch.autograd.Function):
    """A collective inside of `torch.vmap`: a function of the tensors of all ranks."""

    @staticmethod
    def forward(x: Tensor, name: str, size: int, stride: int) -> Tensor:
        raise AssertionError(f"{name}: the tensor has no dimension of ranks")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, name: str, size: int, stride: int
    ) -> tuple[Tensor, int | None]:
        assert in_dims[0] is not None
        x_W = x.movedim(in_dims[0], 0)
        return _COLLECTIVES[name](x_W.reshape(x_W.shape[0] // (size * stride), size, stride, *x_W.shape[1:]))


def _all_gather(x_ARBS: Tensor) -> tuple[Tensor, int | None]:
    return _to_all(x_ARBS.movedim(1, 2).flatten(2, 3), x_ARBS.shape[1])


def _reduce_scatter(x_ARBP: Tensor) -> tuple[Tensor, int | None]:
    majors, num_ranks, minors, numel = x_ARBP.shape
    shards_ABRS = in_order(x_ARBP.unbind(1)).reshape(majors, minors, num_ranks, numel // num_ranks)
    return shards_ABRS.movedim(2, 1).flatten(0, 2), 0


def _all_reduce(x_ARBP: Tensor) -> tuple[Tensor, int | None]:
    total_ABP = in_order(x_ARBP.unbind(1))
    return total_ABP.unsqueeze(1).expand_as(x_ARBP).flatten(0, 2).clone(), 0  # each rank may write into its copy


def _stack(x_ARB: Tensor) -> tuple[Tensor, int | None]:
    return _to_all(x_ARB.movedim(1, 2), x_ARB.shape[1])


def _to_all(x_AB: Tensor, num_ranks: int) -> tuple[Tensor, int | None]:
    """A result that is equal on all ranks along the axis."""
    if x_AB.shape[:2] == (1, 1):
        return x_AB[0, 0].clone(), None
    return x_AB.unsqueeze(1).expand(-1, num_ranks, *x_AB.shape[1:]).flatten(0, 2), 0


def _all_to_all(x_ARBRN: Tensor) -> tuple[Tensor, int | None]:
    return x_ARBRN.transpose(1, 3).flatten(0, 2), 0


_COLLECTIVES: dict[str, Callable[[Tensor], tuple[Tensor, int | None]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "stack": _stack,
}
"""Each returns the results of the ranks, and the dimension of ranks in them; None if all results are equal.

Three dimensions of a tensor stand for ranks: A for axes before that of the collective, R for this axis, B for axes after it."""


class _InTurn(torch.autograd.Function):
    """A function that writes into its arguments, run inside of `torch.vmap` for one rank after the other."""

    @staticmethod
    def forward(anchor: Tensor, function: Callable[..., None], *tensors: Tensor) -> Tensor:
        raise AssertionError("the tensors have no dimension of ranks")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        anchor: Tensor,
        function: Callable[..., None],
        *tensors: Tensor,
    ) -> tuple[Tensor, None]:
        for rank in range(info.batch_size):
            pairs = zip(tensors, in_dims[2:], strict=True)
            function(*(x if dim is None else x.select(dim, rank) for x, dim in pairs))
        return anchor.new_empty(0), None


def over_ranks(x: Tensor, name: str, size: int, stride: int) -> Tensor:
    """A collective inside of `torch.vmap`, among groups of `size` ranks that are `stride` apart.

    A capture must not trace into it (`torch._dynamo.allow_in_graph`): it would trace `forward`, not the rule for `vmap`.
    """
    result: Tensor = _OverRanks.apply(x, name, size, stride)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class StackedAxis:
    """The collectives of `fzero.comms.traced.TracedAxis` along one axis, for all ranks at once.

    Args:
        size: the number of ranks along it.
        stride: the difference of two neighbours' ranks.
        name: the mesh axis.
    """

    size: int
    stride: int = 1
    name: str = WORLD

    @classmethod
    def of(cls, mesh: Mesh, name: str) -> Self:
        """The collectives along an axis of a mesh.

        >>> StackedAxis.of(Mesh.of(node=2, data=4), "node")
        StackedAxis(size=2, stride=4, name='node')
        """
        after = mesh.names[mesh.names.index(name) + 1 :]
        return cls(mesh.axis_size(name), math.prod(map(mesh.axis_size, after)), name)

    def all_gather(self, shard_S: Tensor) -> Tensor:
        return self._collective("all_gather", shard_S)

    def reduce_scatter(self, full_P: Tensor) -> Tensor:
        return self._collective("reduce_scatter", full_P)

    def all_reduce(self, full_P: Tensor) -> Tensor:
        return self._collective("all_reduce", full_P)

    def all_to_all(self, rows_WN: Tensor) -> Tensor:
        return self._collective("all_to_all", rows_WN)

    def stack(self, x: Tensor) -> Tensor:
        return self._collective("stack", x) if self.size > 1 else x[None]

    def index(self, ranks_W: Tensor) -> Tensor:
        """The index of each of the ranks along this axis."""
        return ranks_W // self.stride % self.size

    def _collective(self, name: str, x: Tensor) -> Tensor:
        return over_ranks(x, name, self.size, self.stride) if self.size > 1 else x


class Stacked:
    """All ranks of a mesh, in a graph of all ranks; `fzero.comms.mesh.OneRank` is the same for one rank.

    Args:
        mesh: the mesh of the ranks.
        axes: the axes of the finest division into shards, major first.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[str]) -> None:
        self.mesh, self.size = mesh, mesh.size
        self._axes = tuple(map(self.axis, axes))
        self.random: RandomByRank | None = None
        self._shard: Tensor | None = None

    def axis(self, name: str) -> StackedAxis:
        """An axis of the mesh, for collectives inside of `each`."""
        return StackedAxis.of(self.mesh, name)

    def each(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function` on every rank: takes and returns stacked tensors."""

        def on_ranks(*args: Any) -> T:
            def one(shard: Tensor, *own: Any) -> T:
                self._shard = shard
                result = function(*own)
                self._shard = None  # a graph would return a tensor that is left here
                return result

            ranks, shards = torch.arange(self.size), torch.zeros(self.size, dtype=torch.int64)
            for axis in self._axes:
                shards = shards * axis.size + axis.index(ranks)
            in_dims = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, args)
            on_all = torch.vmap(one, in_dims=(0, *in_dims), randomness="different")
            result: T = on_all(shards, *args)
            return result

        return on_ranks

    def own(self, flat: Tensor, numel: int) -> Tensor:
        """Each rank's shard of `numel` elements: a copy of a slice of a flat tensor that holds several shards in order."""
        rows = flat.view(-1, numel)
        return rows.index_select(0, self._row(rows).view(1)).view(-1)

    def write_own(self, flat: Tensor, shard_S: Tensor) -> None:
        """Writes each rank's shard of such a tensor."""
        rows = flat.view(-1, shard_S.numel())
        is_own = torch.arange(rows.shape[0])[:, None].eq(self._row(rows))
        flat.copy_(torch.where(is_own, shard_S, rows).view(-1))

    def drawing(self) -> AbstractContextManager[Any]:
        """A context for code that draws random numbers: each rank draws from its own state, if there are such states."""
        return self.random or nullcontext()

    def in_turn(self, function: Callable[..., None], *args: Any) -> None:
        """Runs `function`, which writes into its arguments, on one rank after the other, unless it is captured.

        This also runs kernels for which `torch.vmap` has no rule.
        """
        if torch.compiler.is_compiling():
            function(*args)
            return
        leaves, treespec = pytree.tree_flatten(args)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def on_a_rank(*tensors: Tensor) -> None:
            own = dict(zip(places, tensors, strict=True))
            function(*pytree.tree_unflatten([own.get(place, leaf) for place, leaf in enumerate(leaves)], treespec))

        with torch.no_grad():
            _InTurn.apply(self._shard, on_a_rank, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]

    def place(self, numel: int) -> Any:
        """The start of each rank's shard, if shards have `numel` elements."""
        assert self._shard is not None
        return self._shard * numel

    def _row(self, rows: Tensor) -> Tensor:
        assert self._shard is not None
        return self._shard % rows.shape[0]


class RandomByRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this mode, operators that draw random numbers for all ranks draw each rank's from its own state.

    Attributes:
        rng: the random state of each rank on the CPU; it advances with each draw.
    """

    def __init__(self, rng_W: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rng = [state.clone() for state in rng_W]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket not in _RANDOM:
            before = torch.get_rng_state()
            result = func(*args, **kwargs)
            if not torch.equal(torch.get_rng_state(), before):
                raise VmapError(f"{func} draws random numbers for all ranks at once")
            return result
        size = len(self.rng)
        for x in args:
            if isinstance(x, Tensor) and x.dim() and x.shape[0] != size:
                raise VmapError(f"{func} draws random numbers for a tensor of shape {tuple(x.shape)}")
        drawn = []
        for rank in range(size):
            own = [x[rank] if isinstance(x, Tensor) and x.dim() else x for x in args]
            if func.overloadpacket in _OF_A_SHAPE:  # (…, [W, …])
                place = next(i for i, x in enumerate(own) if isinstance(x, list | tuple))
                if not own[place] or own[place][0] != size:
                    raise VmapError(f"{func} draws the same random numbers for all ranks")
                own[place] = own[place][1:]
            torch.set_rng_state(self.rng[rank])
            drawn.append(func(*own, **kwargs))
            self.rng[rank] = torch.get_rng_state()
        if func._schema.is_mutable:
            return args[0]
        return pytree.tree_map(lambda *xs: torch.stack(xs), *drawn)


def check_draws_nothing(graph: torch.fx.Graph) -> None:
    """Raises VmapError for a graph of all ranks that draws random numbers: ranks in processes would draw other numbers."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _RANDOM:
            raise VmapError(f"{node.target} draws random numbers in a graph of all ranks at once")


_OF_A_SHAPE = {aten.rand, aten.randn, aten.randint}
_RANDOM = {
    *_OF_A_SHAPE, aten.bernoulli, aten.bernoulli_, aten.native_dropout, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.normal_, aten.uniform_, aten.exponential_, aten.geometric_, aten.cauchy_,
    aten.log_normal_, aten.random_, aten.multinomial, aten.normal, aten.poisson, aten.rrelu_with_noise,
}  # fmt: skip
