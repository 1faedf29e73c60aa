"""All ranks of a mesh as a dimension of tensors.

`Stacked.map(function)` is `torch.vmap` over the leading dimension of ranks. Inside it,
a tensor belongs to one rank, and a collective along a `StackedAxis` is an operation on
the dimension of ranks (`fzero.comms.primitives`). Sums are made in rank order, as in a
job of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim
from torch._functorch.autograd_function import custom_function_call
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.common.random_states import order_in_memory, random_states, set_random_states
from fzero.comms import primitives
from fzero.comms.axes import WORLD
from sharding import DATA, Mesh

T = TypeVar("T")
aten = torch.ops.aten


class VmapError(ValueError):
    """A model does something that `torch.vmap` cannot do for all ranks at once."""


class _InTurn(torch.autograd.Function):
    """A function that writes into its arguments, run inside of `torch.vmap` for one
    rank after the other.
    """

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
            # Each rank may write into a tensor that is the same on all, such as a gradient in
            # stage 0.
            function(*(x.clone() if dim is None else x.select(dim, rank) for x, dim in pairs))
        return anchor.new_empty(0), None


class _Attention(torch.autograd.Function):
    """Attention of all ranks in one call of the kernel; `torch.vmap` would call it for
    each rank, and copy.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        raise AssertionError("the tensors have no dimension of ranks")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, int]:
        """The ranks become a part of the batch: (W, B, H, T, D) is (W·B, H, T, D)."""
        size = info.batch_size

        def folded(x: Tensor, dim: int | None) -> Tensor:
            return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        out = _attend(
            folded(q, in_dims[0]), folded(k, in_dims[1]), folded(v, in_dims[2]), **options
        )
        return out.view(size, -1, *out.shape[1:]), 0


_attend = torch.nn.functional.scaled_dot_product_attention


class _AsOneRank(TorchFunctionMode):
    """Inside of `torch.vmap`, tensors answer and train as those of one rank.

    - Whether a tensor has a gradient is asked of the tensor of all ranks, through which
      the backward goes. So backward hooks are seen, and refused, because they would get
      the gradients of all ranks at once.
    - The padding of an embedding has no gradient: `torch.vmap` keeps that on rank 0
      only.
    - The noise of a dropout fills the memory of one rank's tensor in order;
      `torch.vmap` fills it as its dimensions are.
    - Attention without a mask tensor and without dropout is `_Attention`, unless it is
      captured.
    - Operators that take functions (`torch.cond`, `map`) are refused: `torch.vmap` has
      no rule for most, and its rule for `torch.cond` returns another structure.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_GRADIENTS:
            (x,) = args
            # but not a tensor of torch.func.grad, which answers for itself
            while is_batchedtensor(x):
                x = get_unwrapped(x)
            return func(x)
        if isinstance(func, HigherOrderOperator) and func is not custom_function_call:
            operator: str = func.name()  # type: ignore[no-untyped-call]
            raise VmapError(
                f"the model must not call the operator {operator.removesuffix('_impl')} of "
                f"torch, for which vmap has no rule or another result, and did"
            )
        if func is _embed:
            return _embedded(*args, **kwargs)
        if func is _drop and is_batchedtensor(args[0]):
            return _dropped(*args, **kwargs)
        options = {
            name: value for name, value in kwargs.items() if name not in ("attn_mask", "dropout_p")
        }
        is_plain = (
            len(args) == 3 and kwargs.get("attn_mask") is None and not kwargs.get("dropout_p")
        )
        is_plain = is_plain and not torch.compiler.is_compiling()
        if func is _attend and is_plain and all(x.dim() == 4 and is_batchedtensor(x) for x in args):
            return _Attention.apply(*args, options)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


_embed, _drop = torch.nn.functional.embedding, torch.nn.functional.dropout
_OF_GRADIENTS = [getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")]


def _embedded(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """`torch.nn.functional.embedding` on one rank."""
    out = _embed(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return out
    return torch.where((input == padding_idx % weight.shape[0])[..., None], out.detach(), out)


def _dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout` on one rank."""
    order = (
        order_in_memory(get_unwrapped(input).select(maybe_get_bdim(input), 0))
        if training and p
        else None
    )
    if order is None:
        return _drop(input, p, training, inplace)
    back = sorted(range(len(order)), key=order.__getitem__)
    dropped = _drop(input.permute(order), p, training, inplace).permute(back)
    return input if inplace else dropped


@dataclass(frozen=True, slots=True)
class StackedAxis(primitives.OverRanks):
    """One axis of a mesh whose ranks are a dimension of tensors, inside of
    `Stacked.map`.

    Args:
        stride: the difference of two neighbours' ranks.
        ranks: all ranks of the mesh.
    """

    size: int
    stride: int = 1
    name: str = WORLD
    ranks: Stacked | None = field(default=None, repr=False)

    @classmethod
    def of(cls, mesh: Mesh, name: str, ranks: Stacked | None = None) -> Self:
        """An axis of a mesh.

        >>> StackedAxis.of(Mesh.of(node=2, data=4), "node")
        StackedAxis(size=2, stride=4, name='node')
        """
        after = mesh.names[mesh.names.index(name) + 1 :]
        return cls(mesh.axis_size(name), math.prod(map(mesh.axis_size, after)), name, ranks)

    @property
    def rank(self) -> Tensor:
        """The index of this rank along the axis: 0-d int64 inside of `Stacked.map`."""
        if self.ranks is None:
            raise ValueError(
                f"StackedAxis {self.name!r}: it has no ranks; take it from a Stacked: "
                f"ranks.axis(name)"
            )
        return self.index(self.ranks.rank)

    def index(self, ranks_W: Tensor) -> Tensor:
        """The index of each of the ranks along this axis."""
        return ranks_W // self.stride % self.size


class Stacked:
    """All ranks of a mesh in this process, as a dimension of tensors;
    `fzero.comms.mesh.OneRank` is for one rank.

    Args:
        mesh: the mesh of the ranks, or their number on the one axis "data".
        axes: the axes of the finest division into shards, major first; by default all
            axes of the mesh.

    Attributes:
        random: the random states of the ranks, if each rank draws from its own state.

    >>> ranks = Stacked(2)
    >>> axis = ranks.axis("data")
    >>> ranks.map(lambda shard: primitives.all_gather(shard, axis))(torch.tensor([[1, 2], [3, 4]]))
    tensor([[1, 2, 3, 4],
            [1, 2, 3, 4]])
    """

    def __init__(self, mesh: Mesh | int, axes: Sequence[str] | None = None) -> None:
        self.mesh = Mesh.of(**{DATA: mesh}) if isinstance(mesh, int) else mesh
        self.size = self.mesh.size
        self._axes = tuple(map(self.axis, self.mesh.names if axes is None else axes))
        self.random: RandomByRank | None = None
        self._now: tuple[Tensor, Tensor] | None = None

    def axis(self, name: str = DATA) -> StackedAxis:
        """An axis of the mesh, for collectives inside of `map`."""
        return StackedAxis.of(self.mesh, name, self)

    @property
    def rank(self) -> Tensor:
        """The number of this rank, 0-d int64. `torch.vmap` batches it at the level of
        the ranks, and at no other one.
        """
        return self._numbers()[0]

    def map(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function` on every rank: takes and returns trees of stacked tensors. Other
        leaves are the same on all ranks.
        """

        def on_ranks(*args: Any) -> T:
            others: list[Any] = []

            def one(rank: Tensor, shard: Tensor, *own: Any) -> list[Tensor]:
                before, self._now = self._now, (rank, shard)
                try:
                    leaves, treespec = pytree.tree_flatten(function(*own))
                finally:
                    # otherwise a graph would return the tensors that are left here
                    self._now = before
                others[:] = [
                    treespec,
                    *((None, True) if isinstance(x, Tensor) else (x, False) for x in leaves),
                ]
                return [x for x in leaves if isinstance(x, Tensor)]

            device = next(
                (
                    x.device
                    for x in pytree.tree_leaves(args)
                    if isinstance(x, Tensor) and not x.is_cpu
                ),
                None,
            )
            # on the device of the tensors that they index
            ranks = torch.arange(self.size, device=device)
            shards = torch.zeros_like(ranks)
            for axis in self._axes:
                shards = shards * axis.size + axis.index(ranks)
            in_dims = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, args)
            on_all = torch.vmap(one, in_dims=(0, 0, *in_dims), randomness="different")
            with _AsOneRank():
                tensors = iter(on_all(ranks, shards, *args))
            treespec, *leaves = others
            result: T = treespec.unflatten(
                next(tensors) if is_tensor else x for x, is_tensor in leaves
            )
            return result

        return on_ranks

    def shard_of(self, flat: Tensor, numel: int) -> Tensor:
        """Each rank's shard of `numel` elements: a copy of a slice of a flat tensor
        that holds several shards in order.
        """
        rows = flat.view(-1, numel)
        return rows.index_select(0, self._row(rows).view(1)).view(-1)

    def write_shard(self, flat: Tensor, shard_S: Tensor) -> None:
        """Writes each rank's shard into a flat tensor like that of `shard_of`."""
        rows = flat.view(-1, shard_S.numel())
        is_own = torch.arange(rows.shape[0], device=rows.device)[:, None].eq(self._row(rows))
        flat.copy_(torch.where(is_own, shard_S, rows).view(-1))

    def random_per_rank(self) -> AbstractContextManager[Any]:
        """A context for code that draws random numbers: each rank draws from its own
        state, if there are such states.
        """
        return self.random or nullcontext()

    def rank_by_rank(self, function: Callable[..., None], *args: Any) -> None:
        """Runs `function`, which writes into its arguments, on one rank after the
        other, unless it is captured.

        This also runs kernels for which `torch.vmap` has no rule.
        """
        if torch.compiler.is_compiling():
            return function(*args)
        leaves, treespec = pytree.tree_flatten(args)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def on_a_rank(*tensors: Tensor) -> None:
            own = dict(zip(places, tensors, strict=True))
            function(
                *pytree.tree_unflatten(
                    [own.get(place, leaf) for place, leaf in enumerate(leaves)], treespec
                )
            )

        with torch.no_grad():
            _InTurn.apply(self._numbers()[1], on_a_rank, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]

    def shard_start(self, numel: int) -> Any:
        """The start of each rank's shard, if shards have `numel` elements."""
        return self._numbers()[1] * numel

    def _row(self, rows: Tensor) -> Tensor:
        return self._numbers()[1] % rows.shape[0]

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """The numbers of this rank and of its shard."""
        if self._now is None:
            raise ValueError(
                "Stacked: a rank has a number inside of map() only; call "
                "ranks.map(function)(tensors)"
            )
        return self._now


class RandomByRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, an operator that draws random numbers for all ranks runs for each rank,
    on the rank's own states in `rng`.
    """

    def __init__(self, rng: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.rng = [
            dict(zip(rng, states, strict=True)) for states in zip(*rng.values(), strict=True)
        ]
        """By rank and device type."""

    @property
    def stacked(self) -> dict[str, Tensor]:
        """The states of all ranks, by device type."""
        return {kind: torch.stack([of_rank[kind] for of_rank in self.rng]) for kind in self.rng[0]}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket in _RANDOM and kwargs.get("generator") is not None:
            raise VmapError(
                f"{func} draws from a generator of the model's own, of which every rank has one"
            )
        if func.overloadpacket not in _RANDOM:
            before = random_states(self.device)
            result = func(*args, **kwargs)
            if not all(
                torch.equal(now, before[kind]) for kind, now in random_states(self.device).items()
            ):
                raise VmapError(f"{func} draws random numbers for all ranks at once")
            return result
        size = len(self.rng)
        for x in args:
            if isinstance(x, Tensor) and x.dim() and x.shape[0] != size:
                raise VmapError(
                    f"{func} draws random numbers for a tensor of shape {tuple(x.shape)}"
                )
        drawn = []
        for rank in range(size):
            own = [x[rank] if isinstance(x, Tensor) and x.dim() else x for x in args]
            if func.overloadpacket in _OF_A_SHAPE:  # (…, [W, …])
                place = next(i for i, x in enumerate(own) if isinstance(x, list | tuple))
                if not own[place] or own[place][0] != size:
                    raise VmapError(f"{func} draws the same random numbers for all ranks")
                own[place] = own[place][1:]
            set_random_states(self.rng[rank], self.device)
            drawn.append(func(*own, **kwargs))
            self.rng[rank] = random_states(self.device)
        if func._schema.is_mutable:
            return args[0]
        return pytree.tree_map(lambda *xs: torch.stack(xs), *drawn)


def check_draws_nothing(graph: torch.fx.Graph) -> None:
    """Raises VmapError if a graph of all ranks draws random numbers: ranks in processes
    would draw other numbers.
    """
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _RANDOM:
            raise VmapError(f"{node.target} draws random numbers in a graph of all ranks at once")


_OF_A_SHAPE = {aten.rand, aten.randn, aten.randint}
_RANDOM = {
    *_OF_A_SHAPE,
    aten.bernoulli,
    aten.bernoulli_,
    aten.native_dropout,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.normal_,
    aten.uniform_,
    aten.exponential_,
    aten.geometric_,
    aten.cauchy_,
    aten.log_normal_,
    aten.random_,
    aten.multinomial,
    aten.normal,
    aten.poisson,
    aten.rrelu_with_noise,
}
