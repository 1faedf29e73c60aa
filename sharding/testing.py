"""Hypothesis strategies for property tests of sharded code, one for each noun of the
package.

They serve the tests here and yours:

    @given(layouts())
    def test_a_shard_is_never_longer_than_the_buffer(layout): ...

A failure shrinks to small values. Edge cases are drawn, too: empty buffers, more ranks
than elements, zero-sized and 0-d parameters. Needs the extra `fzero[testing]`; only
`models`, `batches` and `state_trees` load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "sharding.testing and fzero.testing: need hypothesis, which is not installed; pip install "
        "'fzero[testing]'",
        name=error.name,
    ) from None

from sharding.layout import FlatLayout
from sharding.order import Order, declaration
from sharding.partition import Partition
from sharding.specs import DEVICE, Mesh, Partial, Placement, Replicated, Sharded, Spec, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from sharding.toy_models import ToyModel

BucketProblem = tuple[tuple[int, ...], int]
SPECS: tuple[Spec, ...] = (Replicated(), Sharded("data"), Partial("data"))


def world_sizes(max_world_size: int = 8) -> st.SearchStrategy[int]:
    """Numbers of ranks, from 1 on."""
    return st.integers(1, max_world_size)


def shapes(max_dims: int = 3, max_length: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, with `()` and lengths of 0."""
    return st.lists(st.integers(0, max_length), max_size=max_dims).map(tuple)


def partitions(
    max_numel: int = 100, max_world_size: int = 8, max_multiple_of: int = 8
) -> st.SearchStrategy[Partition]:
    """Partitions, also of empty buffers and among more ranks than elements."""
    numbers = (
        st.integers(0, max_numel),
        world_sizes(max_world_size),
        st.integers(1, max_multiple_of),
    )
    return st.builds(Partition, *numbers)


@st.composite
def layouts(
    draw: st.DrawFn,
    max_parameters: int = 6,
    max_world_size: int = 8,
    *,
    min_parameters: int = 1,
    max_multiple_of: int = 8,
    parameters: st.SearchStrategy[tuple[int, ...]] | None = None,
) -> FlatLayout:
    """Layouts of a few parameters, also zero-sized and 0-d ones; the names are in
    random order.

    `parameters` draws the shape of each parameter; the default is `shapes()`.

    >>> from hypothesis import find
    >>> find(layouts(), lambda layout: layout.numel > 0)
    FlatLayout(names=('p0',), shapes=((),), world_size=1, multiple_of=1)
    """
    parameter_shapes = draw(
        st.lists(
            shapes() if parameters is None else parameters,
            min_size=min_parameters,
            max_size=max_parameters,
        )
    )
    names = draw(st.permutations([f"p{index}" for index in range(len(parameter_shapes))]))
    world_size, multiple_of = (
        draw(world_sizes(max_world_size)),
        draw(st.integers(1, max_multiple_of)),
    )
    return FlatLayout(tuple(names), tuple(parameter_shapes), world_size, multiple_of)


@st.composite
def layout_pairs(draw: st.DrawFn, max_world_size: int = 8) -> tuple[FlatLayout, FlatLayout]:
    """Two layouts of the same parameters: in the same or another order, on other
    numbers of ranks, with other padding.

    >>> from hypothesis import find
    >>> old, new = find(layout_pairs(), lambda pair: pair[0].names != pair[1].names)
    >>> old.names, new.names
    (('p0', 'p1'), ('p1', 'p0'))
    """
    old = draw(layouts(max_world_size=max_world_size, min_parameters=0))
    indices = draw(st.permutations(range(len(old.names))))
    order = draw(st.sampled_from([declaration(len(indices)), Order(tuple(indices))]))
    world_size, multiple_of = draw(world_sizes(max_world_size)), draw(st.integers(1, 8))
    return old, FlatLayout(order.apply(old.names), order.apply(old.shapes), world_size, multiple_of)


@st.composite
def meshes(draw: st.DrawFn, max_world_size: int = 16, max_axes: int = 3) -> Mesh:
    """Meshes of one or more axes; "data" is one of them, at any position.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: len(mesh.axes) == 2 and mesh.size == 2)
    Mesh(axes=(('data', 1), ('node', 2)))
    """
    num_axes = draw(st.integers(1, max_axes))
    names = draw(
        st.permutations(
            ["data", "node", *(f"axis{index}" for index in range(2, num_axes))][:num_axes]
        )
    )
    axes: list[tuple[str, int]] = []
    ranks_left = max_world_size
    for name in names:
        axes.append((name, draw(st.integers(1, ranks_left))))
        ranks_left //= axes[-1][1]
    return Mesh(tuple(axes))


def orders(max_length: int = 10) -> st.SearchStrategy[Order]:
    """Permutations, also the empty one."""
    lengths = st.integers(0, max_length)
    return lengths.flatmap(lambda length: st.permutations(range(length))).map(
        lambda indices: Order(tuple(indices))
    )


def bucket_problems(max_items: int = 12, max_numel: int = 20) -> st.SearchStrategy[BucketProblem]:
    """Arguments of `plan_buckets`: the elements of each item, and a cap that some of
    them may exceed.
    """
    numels = st.lists(st.integers(0, max_numel), max_size=max_items).map(tuple)
    return st.tuples(numels, st.integers(1, 2 * max_numel))


def tensor_specs(
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16"), specs: Sequence[Spec] = SPECS
) -> st.SearchStrategy[TensorSpec]:
    """Specs of tensors of any shape, with one of `specs`, in the memory of the device
    or of the host.
    """
    return st.builds(
        TensorSpec,
        shape=shapes(),
        dtype=st.sampled_from(dtypes),
        spec=st.sampled_from(specs),
        placement=st.sampled_from([DEVICE, Placement("host"), Placement("host", pinned=True)]),
        multiple_of=st.integers(1, 4),
    )


class Pair(NamedTuple):
    """A node of a tree that is neither a dict nor a list."""

    left: Any
    right: Any


def spec_trees(
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16"),
) -> st.SearchStrategy[Any]:
    """Trees of tensors' specs, of any nesting; also empty trees and None."""
    return st.recursive(
        tensor_specs(dtypes) | st.none(),
        lambda inner: (
            st.dictionaries(st.sampled_from(["w", "b", "0"]), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=5,
    )


class StateTree(NamedTuple):
    """The content of a checkpoint: a tree of tensors, and a tree of their specs with
    the same structure.
    """

    tensors: Any
    specs: Any


def state_trees(
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16"),
) -> st.SearchStrategy[StateTree]:
    """Trees of full tensors, all of whose elements differ, with their specs.

    >>> from hypothesis import find
    >>> tree = find(state_trees(), lambda tree: isinstance(tree.specs, TensorSpec))
    >>> tree.tensors, tree.specs.shape
    (tensor(0.), ())
    """
    return spec_trees(dtypes).map(lambda specs: StateTree(distinct_tensors(specs), specs))


def distinct_tensors(specs: Any, *, first: int = 0) -> Any:
    """A full tensor for each spec of a tree. The elements count up from `first`, so
    that a misplaced one shows.

    >>> distinct_tensors([TensorSpec((2,), "float32"), TensorSpec((), "int64")], first=3)
    [tensor([3., 4.]), tensor(5)]
    """
    import optree
    import torch

    from sharding.views import torch_dtype

    count = first

    def one(spec: TensorSpec) -> Tensor:
        nonlocal count
        count += spec.numel
        return (
            torch.arange(count - spec.numel, count).to(torch_dtype(spec.dtype)).reshape(spec.shape)
        )

    return optree.tree_map(one, specs)


@st.composite
def overflow_patterns(
    draw: st.DrawFn, max_steps: int = 8, max_world_size: int = 4, *, min_steps: int = 0
) -> tuple[tuple[bool, ...], ...]:
    """Overflows by step and rank: `pattern[step][rank]`. One rank with an overflow
    makes all ranks skip the step.

    >>> from hypothesis import find
    >>> pattern = find(
    ...     overflow_patterns(),
    ...     lambda pattern: any(any(ranks) and not all(ranks) for ranks in pattern),
    ... )
    >>> sum(map(sum, pattern))
    1
    """
    world_size = draw(world_sizes(max_world_size))
    ranks = st.tuples(*[st.booleans()] * world_size)
    return tuple(draw(st.lists(ranks, min_size=min_steps, max_size=max_steps)))


@st.composite
def batches(
    draw: st.DrawFn,
    features: int,
    max_samples: int = 8,
    *,
    multiple_of: int = 1,
    dtype: str = "float32",
) -> Tensor:
    """Batches (B, F) of normal numbers; B is a multiple of `multiple_of`, so that so
    many ranks divide a batch equally.
    """
    import torch

    from sharding.views import torch_dtype

    samples = multiple_of * draw(st.integers(1, max(max_samples // multiple_of, 1)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randn(samples, features, generator=generator, dtype=torch.float64).to(
        torch_dtype(dtype)
    )


@st.composite
def models(draw: st.DrawFn, max_blocks: int = 3, max_width: int = 6) -> ToyModel:
    """Small modules with repeated blocks; the parameters may be tied, frozen, 0-d,
    zero-sized, of any length, and of two dtypes.

    A model takes a float tensor (batch, `model.features`) and returns its loss, a mean
    over the batch. It pickles, and `make_toy_model(model.recipe)` builds it again with
    the same weights, so that it reaches other processes.

    >>> import torch
    >>> from hypothesis import find
    >>> model = find(models(), lambda model: len(model.blocks) == 1)
    >>> model(torch.zeros(2, model.features)).shape
    torch.Size([])
    """
    from sharding.toy_models import ToyRecipe, make_toy_model

    lengths = st.integers(1, max_width)
    tied: Literal["none", "ends", "blocks"] = draw(st.sampled_from(("none", "ends", "blocks")))
    hidden = draw(st.lists(lengths, max_size=max_blocks))
    recipe = ToyRecipe(
        features=draw(lengths),
        width=draw(lengths),
        # only equal blocks can be tied
        hidden=tuple(hidden[:1] * len(hidden) if tied == "blocks" else hidden),
        tied=tied,
        frozen=draw(st.sampled_from(("none", "inlet", "biases"))),
        norm=draw(st.booleans()),
        scale=draw(st.booleans()),
        empty=draw(st.booleans()),
        dtypes=draw(st.sampled_from((("float32",), ("float32", "float64"), ("float64",)))),
        seed=draw(st.integers(0, 2**16)),
    )
    return make_toy_model(recipe)
