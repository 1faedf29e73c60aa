"""Which inputs should a property test of sharded code try?

Hypothesis strategies, one for each noun of the package, for the tests here and for yours:

    @given(layouts())
    def test_a_shard_is_never_longer_than_the_buffer(layout): ...

A failure shrinks to small values. The edges are among what is drawn: empty buffers, more ranks than elements,
zero-sized and 0-d parameters. Needs the extra `fzero[testing]`; only `models` loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hypothesis import strategies as st

from sharding.layout import FlatLayout
from sharding.order import Order
from sharding.partition import Partition
from sharding.specs import Mesh

if TYPE_CHECKING:
    from sharding.toy_models import ToyModel

BucketProblem = tuple[tuple[int, ...], int]


def world_sizes(max_world_size: int = 8) -> st.SearchStrategy[int]:
    """Numbers of ranks, from 1 on.

    >>> from hypothesis import find
    >>> find(world_sizes(), lambda world_size: world_size > 2)
    3
    """
    return st.integers(1, max_world_size)


def shapes(max_dims: int = 3, max_length: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, `()` and those with a length of 0 among them.

    >>> from hypothesis import find
    >>> find(shapes(), lambda shape: 0 in shape)
    (0,)
    """
    return st.lists(st.integers(0, max_length), max_size=max_dims).map(tuple)


@st.composite
def partitions(draw: st.DrawFn, max_numel: int = 100, max_world_size: int = 8, max_multiple_of: int = 8) -> Partition:
    """Partitions, of empty buffers and among more ranks than elements, too.

    >>> from hypothesis import find
    >>> find(partitions(max_multiple_of=1), lambda partition: partition.padding > 0)
    Partition(numel=1, world_size=2, multiple_of=1)
    """
    return Partition(
        numel=draw(st.integers(0, max_numel)),
        world_size=draw(world_sizes(max_world_size)),
        multiple_of=draw(st.integers(1, max_multiple_of)),
    )


@st.composite
def layouts(
    draw: st.DrawFn,
    max_parameters: int = 6,
    max_world_size: int = 8,
    *,
    min_parameters: int = 1,
    max_multiple_of: int = 8,
) -> FlatLayout:
    """Layouts of a few parameters, zero-sized and 0-d ones among them; the names are not in alphabetical order.

    >>> from hypothesis import find
    >>> find(layouts(), lambda layout: layout.numel > 0)
    FlatLayout(names=('p0',), shapes=((),), world_size=1, multiple_of=1)
    """
    parameter_shapes = draw(st.lists(shapes(), min_size=min_parameters, max_size=max_parameters))
    names = draw(st.permutations([f"p{index}" for index in range(len(parameter_shapes))]))
    return FlatLayout(
        names=tuple(names),
        shapes=tuple(parameter_shapes),
        world_size=draw(world_sizes(max_world_size)),
        multiple_of=draw(st.integers(1, max_multiple_of)),
    )


@st.composite
def meshes(draw: st.DrawFn, max_world_size: int = 16, max_axes: int = 3) -> Mesh:
    """Meshes of one axis or more, "data" among them at any place.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: len(mesh.axes) == 2 and mesh.size == 2)
    Mesh(axes=(('data', 1), ('node', 2)))
    """
    num_axes = draw(st.integers(1, max_axes))
    names = draw(st.permutations(["data", "node", *(f"axis{index}" for index in range(2, num_axes))][:num_axes]))
    axes: list[tuple[str, int]] = []
    ranks_left = max_world_size
    for name in names:
        axes.append((name, draw(st.integers(1, ranks_left))))
        ranks_left //= axes[-1][1]
    return Mesh(tuple(axes))


def orders(max_length: int = 10) -> st.SearchStrategy[Order]:
    """Permutations, the empty one among them.

    >>> from hypothesis import find
    >>> find(orders(), lambda order: order != order.inverse())
    Order(indices=(1, 2, 0))
    """
    lengths = st.integers(0, max_length)
    return lengths.flatmap(lambda length: st.permutations(range(length))).map(lambda indices: Order(tuple(indices)))


def bucket_problems(max_items: int = 12, max_numel: int = 20) -> st.SearchStrategy[BucketProblem]:
    """Arguments of `plan_buckets`: the elements of each item, and a cap that some of them may exceed.

    >>> from hypothesis import find
    >>> find(bucket_problems(), lambda problem: max(problem[0], default=0) > problem[1])
    ((2,), 1)
    """
    numels = st.lists(st.integers(0, max_numel), max_size=max_items).map(tuple)
    return st.tuples(numels, st.integers(1, 2 * max_numel))


@st.composite
def models(draw: st.DrawFn, max_blocks: int = 3, max_width: int = 6) -> ToyModel:
    """Small modules with repeated blocks; the parameters may be tied, frozen, 0-d, zero-sized and of any length.

    A model takes a float tensor (batch, `model.features`) and returns its loss, a mean over the batch. It pickles, and
    `make_toy_model(model.recipe)` builds it again with the same weights, so that it reaches other processes.

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
        hidden=tuple(hidden[:1] * len(hidden) if tied == "blocks" else hidden),  # only equal blocks can be tied
        tied=tied,
        frozen=draw(st.sampled_from(("none", "inlet", "biases"))),
        norm=draw(st.booleans()),
        scale=draw(st.booleans()),
        empty=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return make_toy_model(recipe)
