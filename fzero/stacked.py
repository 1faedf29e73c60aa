"""Ranks as a dimension: what `InGraph` does for one rank, for all of them at once.

`each(function)` is `torch.vmap` over the leading dimension of ranks. Inside it a tensor is one rank's, and a collective is
an operation on that dimension: sums are made in rank order, as real ranks make them.

Random numbers are each rank's own: an operator that draws some is run for one rank after the other, on that rank's
random state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sharding import reference

T = TypeVar("T")
aten = torch.ops.aten


class VmapError(ValueError):
    """A model does something that `torch.vmap` cannot do for all ranks at once."""


class _OverRanks(torch.autograd.Function):
    """A collective inside of `torch.vmap`: a function of what all ranks hold."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        raise AssertionError(f"{name}: of a tensor that is no rank's own")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, name: str) -> tuple[Tensor, int | None]:
        assert in_dims[0] is not None
        return _COLLECTIVES[name](x.movedim(in_dims[0], 0))


_COLLECTIVES: dict[str, Callable[[Tensor], tuple[Tensor, int | None]]] = {
    "all_gather": lambda x_WS: (reference.all_gather(x_WS)[0], None),
    "reduce_scatter": lambda x_WP: (reference.reduce_scatter(x_WP, "sum"), 0),
    "all_reduce": lambda x_WP: (reference.all_reduce(x_WP, "sum").clone(), 0),  # each rank may write into its own
    "stack": lambda x_W: (x_W.clone(), None),
}
"""What each rank gets, and in which dimension the ranks are; None where all get the same."""


class _InTurn(torch.autograd.Function):
    """A function that writes into what it is given, run inside of `torch.vmap` for one rank after the other."""

    @staticmethod
    def forward(anchor: Tensor, function: Callable[..., None], *tensors: Tensor) -> Tensor:
        raise AssertionError("of tensors that are no rank's own")

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


def over_ranks(x: Tensor, name: str) -> Tensor:
    """A collective of what all ranks hold, inside of `torch.vmap`.

    A capture must take it as it is (`torch._dynamo.allow_in_graph`): it would trace `forward`, not the rule for `vmap`.
    """
    result: Tensor = _OverRanks.apply(x, name)  # type: ignore[no-untyped-call]
    return result


class Stacked:
    """All `size` ranks of an axis, for a step's functions; see `fzero.collectives.InGraph`."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.random: RandomByRank | None = None
        self._index: Tensor | None = None

    def each(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function` on every rank: of stacked tensors, and giving stacked tensors."""

        def on_ranks(*args: Any) -> T:
            def one(index: Tensor, *own: Any) -> T:
                self._index = index
                result = function(*own)
                self._index = None  # a graph would return what is left here
                return result

            ranks = torch.arange(self.size)
            in_dims = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, args)
            on_all = torch.vmap(one, in_dims=(0, *in_dims), randomness="different")
            result: T = on_all(ranks, *args)
            return result

        return on_ranks

    def all_gather(self, shard_S: Tensor) -> Tensor:
        return self._collective("all_gather", shard_S)

    def reduce_scatter(self, full_P: Tensor) -> Tensor:
        return self._collective("reduce_scatter", full_P)

    def all_reduce(self, full_P: Tensor) -> Tensor:
        return self._collective("all_reduce", full_P)

    def stack(self, x: Tensor) -> Tensor:
        return self._collective("stack", x)

    def own(self, full_P: Tensor) -> Tensor:
        assert self._index is not None
        return full_P.view(self.size, -1).index_select(0, self._index.view(1)).view(-1)

    def write_own(self, full_P: Tensor, shard_S: Tensor) -> None:
        assert self._index is not None
        is_own = torch.arange(self.size)[:, None].eq(self._index)
        full_P.copy_(torch.where(is_own, shard_S, full_P.view(self.size, -1)).view(-1))

    def drawing(self) -> AbstractContextManager[Any]:
        """Around what draws random numbers: of each rank's own where there is a state of them."""
        return self.random or nullcontext()

    def in_turn(self, function: Callable[..., None], *args: Any) -> None:
        """`function`, which writes into its arguments, on one rank after the other where nothing is captured.

        So kernels run that `torch.vmap` has no rule for.
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
            _InTurn.apply(self._index, on_a_rank, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]

    def place(self, numel: int) -> Any:
        assert self._index is not None
        return self._index * numel

    def _collective(self, name: str, x: Tensor) -> Tensor:
        return over_ranks(x, name)


class RandomByRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operators that draw random numbers for all ranks draw each rank's from its own state.

    Attributes:
        rng: the random state of each rank on the CPU, which goes on.
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
    """Raises VmapError for a graph of all ranks that draws random numbers: it would draw others than real ranks do."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _RANDOM:
            raise VmapError(f"{node.target} draws random numbers in a graph of all ranks at once")


_OF_A_SHAPE = {aten.rand, aten.randn, aten.randint}
_RANDOM = {
    *_OF_A_SHAPE, aten.bernoulli, aten.bernoulli_, aten.native_dropout, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.normal_, aten.uniform_, aten.exponential_, aten.geometric_, aten.cauchy_,
    aten.log_normal_, aten.random_, aten.multinomial, aten.normal, aten.poisson, aten.rrelu_with_noise,
}  # fmt: skip
