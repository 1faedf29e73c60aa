"""The laws of optimizers that read full parameters: they match references, and give the
same bits for every partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from ranks import RankPool
from torch import Tensor

from fzero.comms import collectives
from fzero.comms.process_group import join
from fzero.optim.fragments import ShardContents
from fzero.optim.matrix import adafactor, lamb, muon, orthogonalise
from fzero.optim.transforms import Transform
from sharding import Replicated, Sharded, TensorSpec
from sharding.flat_runs import boxes
from sharding.layout import FlatLayout
from sharding.owners import OwnedBuffer, assign_owners, matrices_of
from sharding.testing import layouts, shapes
from sharding.views import dtype_name, flatten, take_shard, unflatten

Make = Callable[[ShardContents], Transform]
Tree = dict[str, Tensor]

NUM_STEPS = 3
LAMBS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2},
    "weight decay": {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3},
    "no bias correction": {"lr": 1e-2, "bias_correction": False},
    "narrow": {"lr": 1e-2, "max_coeff": 0.5, "min_coeff": 0.4},
}
ADAFACTORS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2},
    "weight decay": {"lr": 0.5, "weight_decay": 0.3, "eps": (1e-3, 0.5)},
    "decay": {"lr": 0.5, "beta2_decay": -0.3, "d": 2.0},
}
MUONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2},
    "weight decay": {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.5, "eps": 1e-3},
    "plain momentum": {"lr": 0.1, "nesterov": False, "ns_steps": 3},
    "as adam": {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"},
}
MAKERS: dict[str, Make] = {
    **{f"lamb, {n}": lambda contents, v=v: lamb(**v, contents=contents) for n, v in LAMBS.items()},
    **{
        f"adafactor, {n}": lambda contents, v=v: adafactor(**v, contents=contents)
        for n, v in ADAFACTORS.items()
    },
    **{f"muon, {n}": lambda contents, v=v: muon(**v, contents=contents) for n, v in MUONS.items()},
}
every_transform = pytest.mark.parametrize("name", MAKERS)


# --- ranks in threads -----------------------------------------------------------------------------


def owners_of(layout: FlatLayout, parts: dict[str, int] | None = None) -> tuple[int, ...] | None:
    """An owner for each matrix, where all parameters are matrices."""
    if any(len(shape) < 2 for shape in layout.shapes):
        return None
    return assign_owners(matrices_of(layout, parts=parts or {}), layout.world_size)


class Ranks:
    """W ranks in threads, each of which runs a function; they exchange tensors at a
    barrier.
    """

    def __init__(self, layout: FlatLayout, parts: dict[str, int] | None = None) -> None:
        self.layout = layout
        self.barrier = Barrier(layout.world_size, timeout=60)
        self.slots: list[tuple[str, Tensor]] = [("", torch.zeros(0))] * layout.world_size
        self.calls: list[list[str]] = [[] for _ in range(layout.world_size)]
        self.sent = [0] * layout.world_size
        self.splits: list[list[int]] = [[]] * layout.world_size
        self.parts = parts or {}

    def contents(self, rank: int) -> ShardContents:
        def exchange(x: Tensor, kind: str) -> list[Tensor]:
            self.calls[rank].append(kind)
            self.slots[rank] = (kind, x.clone())
            self.barrier.wait()
            kinds, world = zip(*self.slots, strict=True)
            self.barrier.wait()
            assert set(kinds) == {kind}, "the ranks are in different collectives"
            return list(world)

        def to_owners(x: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
            self.sent[rank] += sum(sent) - sent[rank]
            self.splits[rank] = sent
            arrived = zip(exchange(x, "exchange"), list(self.splits), strict=True)
            found = torch.cat([torch.split(of_rank, split)[rank] for of_rank, split in arrived])
            self.barrier.wait()  # the splits may change now
            assert len(found) == sum(received)
            return lambda: found

        return ShardContents(
            self.layout,
            (rank,),
            stack=lambda x: torch.cat(exchange(x, f"stack {tuple(x.shape)}")),
            owners=owners_of(self.layout, self.parts),
            places=tuple((0, shard) for shard in range(self.layout.world_size)),
            rank=rank,
            exchange=to_owners,
        )

    def run(self, work: Callable[[int, ShardContents], Any]) -> list[Any]:
        def guarded(rank: int) -> Any:
            try:
                return work(rank, self.contents(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.layout.world_size) as pool:
            return list(pool.map(guarded, range(self.layout.world_size)))


def run(transform: Transform, param: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """The parameter and the state after all gradients; works on copies."""
    param = param.clone()
    state = transform.init(param)
    for grad in grads:
        _, param, state = transform.update(grad.clone(), param, state)
    return param, state


def values(
    layout: FlatLayout, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tree, list[Tree]]:
    """Parameters, and gradients for each step, of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda scale: {  # noqa: E731
        name: scale * torch.randn(shape, generator=generator, dtype=dtype)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    return make(1.0), [make(scale) for scale in torch.logspace(-2, 1, NUM_STEPS).tolist()]


def run_full(
    make: Make, layout: FlatLayout, params: Tree, grads: Sequence[Tree]
) -> tuple[Tensor, Any]:
    transform = make(ShardContents.whole(layout))
    return run(transform, flatten(params, layout), [flatten(grad, layout) for grad in grads])


def cut_layouts(*, only_matrices: bool = False) -> st.SearchStrategy[FlatLayout]:
    """Layouts of a few parameters on 1-4 ranks: of up to four dims, zero-sized, 0-d,
    and much longer than a shard.
    """
    parameters = shapes(max_dims=4, max_length=6).filter(
        lambda shape: len(shape) >= 2 or not only_matrices
    )
    return layouts(5, 4, max_multiple_of=32, parameters=parameters)


def layouts_for(name: str) -> st.SearchStrategy[FlatLayout]:
    return cut_layouts(only_matrices=name.startswith("muon"))


MIXED = FlatLayout(
    ("w", "b", "scale", "none", "conv", "u"),
    ((7, 5), (5,), (), (0, 3), (3, 2, 3, 3), (4, 11)),
    world_size=4,
)
MATRICES = FlatLayout(
    ("w", "conv", "none", "u"), ((7, 5), (3, 2, 3, 3), (0, 3), (4, 11)), world_size=4
)


# --- the same bits however the buffer is cut ------------------------------------------------------


def check_same_bits(
    make: Make, layout: FlatLayout, seed: int, parts: dict[str, int] | None = None
) -> list[list[str]]:
    """Raises unless the updates of shards are shards of the full update; returns the
    calls of each rank.
    """
    params, grads = values(layout, seed)
    param_P, grads_P = flatten(params, layout), [flatten(grad, layout) for grad in grads]
    full, full_state = run(make(ShardContents.whole(layout)), param_P, grads_P)
    partition, ranks = layout.partition, Ranks(layout, parts)

    def work(rank: int, contents: ShardContents) -> tuple[Tensor, Any]:
        shards = [take_shard(grad, partition, rank) for grad in grads_P]
        return run(make(contents), take_shard(param_P, partition, rank), shards)

    spec = TensorSpec(
        (partition.padded_numel,), "float32", Sharded("data"), multiple_of=layout.multiple_of
    )
    placed = optree.tree_leaves(make(ShardContents.whole(layout)).specs(spec), none_is_leaf=True)
    for rank, (shard, state) in enumerate(ranks.run(work)):
        assert torch.equal(shard, take_shard(full, partition, rank))
        leaves = [optree.tree_leaves(tree, none_is_leaf=True) for tree in (state, full_state)]
        for own, of_all, where in zip(*leaves, placed, strict=True):
            if own is not None:
                is_cut = isinstance(where.spec, Sharded)
                of_tensor = where.partition(layout.world_size)
                assert torch.equal(own, take_shard(of_all, of_tensor, rank) if is_cut else of_all)
    return ranks.calls


@every_transform
@given(data=st.data(), seed=st.integers(0, 100))
def test_the_update_of_a_shard_is_the_shard_of_the_update_bit_for_bit(
    name: str, data: Any, seed: int
) -> None:
    calls = check_same_bits(MAKERS[name], data.draw(layouts_for(name)), seed)
    assert all(own == calls[0] for own in calls), (
        "every rank must call the collectives in the same order"
    )


@pytest.mark.covering(1)
@every_transform
@pytest.mark.parametrize("multiple_of", [1, 32])
def test_large_parameters_have_the_same_bits_on_three_ranks(name: str, multiple_of: int) -> None:
    """Long enough for the kernels' threads and vectors; the second matrix is cut twice."""
    layout = FlatLayout(
        ("a", "b", "c"), ((33, 41), (301, 257), (17, 129)), 3, multiple_of=multiple_of
    )
    check_same_bits(MAKERS[name], layout, seed=1)


def _update_own_shard(
    name: str, layout: FlatLayout, param_P: Tensor, grads_P: list[Tensor]
) -> Tensor:
    axis = join()
    contents = ShardContents(
        layout,
        (axis.rank,),
        stack=lambda partial: collectives.stack(partial[0], axis),
        owners=owners_of(layout),
        places=tuple((0, shard) for shard in range(layout.world_size)),
        rank=axis.rank,
        exchange=lambda *given: collectives.start_exchange(*given, axis).wait,
    )
    shards = [take_shard(grad, layout.partition, axis.rank) for grad in grads_P]
    return run(MAKERS[name](contents), take_shard(param_P, layout.partition, axis.rank), shards)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["lamb, defaults", "adafactor, defaults", "muon, defaults"])
def test_ranks_in_processes_have_the_bits_of_the_full_buffer(
    ranks: RankPool, name: str, world_size: int
) -> None:
    layout = replace(MATRICES, world_size=world_size, multiple_of=32)
    params, grads = values(layout)
    full, _ = run_full(MAKERS[name], layout, params, grads)
    grads_P = [flatten(grad, layout) for grad in grads]
    shards = ranks(world_size, _update_own_shard, name, layout, flatten(params, layout), grads_P)
    assert torch.equal(torch.cat(shards), full)


def test_ranks_in_threads_see_each_other_and_a_rank_that_does_not_come() -> None:
    layout = FlatLayout(("w",), ((4,),), 2)
    stacked = Ranks(layout).run(lambda rank, contents: contents.stack(torch.full((1, 2), rank)))
    assert all(torch.equal(x, torch.tensor([[0, 0], [1, 1]])) for x in stacked)
    with pytest.raises(Exception):  # noqa: B017 - a broken barrier, or the assertion
        Ranks(layout).run(lambda rank, contents: contents.stack(torch.zeros(1, 1 + rank)))


@every_transform
@given(
    data=st.data(),
    dtype=st.sampled_from(["float32", "float64"]),
    spec=st.sampled_from([Replicated(), Sharded("data")]),
)
def test_place_describes_exactly_what_init_makes(
    name: str, data: Any, dtype: str, spec: Any
) -> None:
    layout = data.draw(layouts_for(name))
    contents = (
        ShardContents(layout, (0,)) if spec == Sharded("data") else ShardContents.whole(layout)
    )
    transform = MAKERS[name](contents)
    param = TensorSpec(
        (layout.partition.padded_numel,), dtype, spec, multiple_of=layout.multiple_of
    )
    state = transform.init(
        torch.ones(param.local_shape(layout.world_size), dtype=getattr(torch, dtype))
    )
    tensors, structure = optree.tree_flatten(state, none_is_leaf=True)
    specs, placed_structure = optree.tree_flatten(transform.specs(param), none_is_leaf=True)
    assert structure == placed_structure
    for tensor, where in zip(tensors, specs, strict=True):
        assert (tensor is None) == (where is None)
        if tensor is not None:
            assert tuple(tensor.shape) == where.local_shape(layout.world_size)
            assert dtype_name(tensor.dtype) == where.dtype
            assert where.placement == param.placement


# --- the references -------------------------------------------------------------------------------


def reference_lamb(
    params: Tree,
    grads: Sequence[Tree],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    bias_correction: bool = True,
) -> Tree:
    """Algorithm 2 of You et al., arXiv:1904.00962, for one parameter after the other,
    with a clamped trust ratio.
    """
    new = {}
    for name, start in params.items():
        x, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for t, tree in enumerate(grads, 1):
            g = tree[name]
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            first, second = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1, 1)
            u = (m / first) / ((v / second).sqrt() + eps) + weight_decay * x
            norms = x.norm().item(), u.norm().item()
            ratio = min(max(norms[0] / norms[1], min_coeff), max_coeff) if all(norms) else 1.0
            x = x - lr * ratio * u
        new[name] = x
    return new


def reference_torch(
    make: Callable[..., torch.optim.Optimizer], params: Tree, grads: Sequence[Tree], **given: Any
) -> Tree:
    """torch.optim on each parameter; those without elements do not change."""
    owned = {name: torch.nn.Parameter(x.clone()) for name, x in params.items() if x.numel()}
    if owned:
        optimizer = make(owned.values(), **given)
        for tree in grads:
            for name, param in owned.items():
                param.grad = tree[name].clone()
            optimizer.step()
    return params | {name: param.detach() for name, param in owned.items()}


@pytest.mark.parametrize("given_values", LAMBS.values(), ids=LAMBS)
@given(layout=cut_layouts(), seed=st.integers(0, 100))
def test_lamb_is_the_formula_on_full_parameters(
    given_values: Any, layout: FlatLayout, seed: int
) -> None:
    params, grads = values(layout, seed, torch.float64)
    found, _ = run_full(
        lambda contents: lamb(**given_values, contents=contents), layout, params, grads
    )
    # Rounding of float64, after divisions by small roots.
    expected = reference_lamb(params, grads, **given_values)
    torch.testing.assert_close(unflatten(found, layout), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("given_values", ADAFACTORS.values(), ids=ADAFACTORS)
@given(layout=cut_layouts(), seed=st.integers(0, 100))
def test_adafactor_is_the_one_of_torch(given_values: Any, layout: FlatLayout, seed: int) -> None:
    params, grads = values(layout, seed, torch.float64)
    found, _ = run_full(
        lambda contents: adafactor(**given_values, contents=contents), layout, params, grads
    )
    # Rounding of float64: torch squares a norm, and fzero adds up squares.
    expected = reference_torch(torch.optim.Adafactor, params, grads, **given_values)
    torch.testing.assert_close(unflatten(found, layout), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("given_values", MUONS.values(), ids=MUONS)
@given(layout=cut_layouts(only_matrices=True), seed=st.integers(0, 100))
def test_muon_is_the_one_of_torch_on_the_parameters_as_matrices(
    given_values: Any, layout: FlatLayout, seed: int
) -> None:
    params, grads = values(layout, seed)
    found, _ = run_full(
        lambda contents: muon(**given_values, contents=contents), layout, params, grads
    )
    as_matrix = lambda x: x.reshape(x.shape[0], -1) if x.numel() else x  # noqa: E731
    flat_params, *flat_grads = (
        {n: as_matrix(x) for n, x in tree.items()} for tree in (params, *grads)
    )
    expected = reference_torch(
        torch.optim.Muon, flat_params, flat_grads, **{"weight_decay": 0.0} | given_values
    )
    # The operations are the same; a fused multiply-add may be compiled differently for other
    # strides, in fp32.
    found_tree = {n: as_matrix(x) for n, x in unflatten(found, layout).items()}
    torch.testing.assert_close(found_tree, expected, rtol=1e-6, atol=1e-6)


def test_in_float32_lamb_and_adafactor_keep_to_their_references_to_rounding() -> None:
    params, grads = values(MIXED)
    for make, expected in (
        (lambda contents: lamb(0.1, contents=contents), reference_lamb(params, grads, lr=0.1)),
        (
            lambda contents: adafactor(0.1, contents=contents),
            reference_torch(torch.optim.Adafactor, params, grads, lr=0.1),
        ),
    ):
        found, _ = run_full(make, MIXED, params, grads)
        # Three updates of up to 0.1·|p|, each with a few roundings of float32.
        torch.testing.assert_close(unflatten(found, MIXED), expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(found, flatten(params, MIXED))


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (40, 3), (1, 7)])
def test_orthogonalised_singular_values_are_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalise(matrix[None])[0].float()
    assert found.shape == shape
    singular = torch.linalg.svdvals(found)
    # The range after five steps of the quintic (kellerjordan.github.io/posts/muon: "Uniform(0.5,
    # 1.5)").
    assert singular.min() > 0.3 and singular.max() < 1.5
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    # The singular vectors do not change: the rotated matrix is diagonal, up to bfloat16 rounding.
    rotated = u.T @ found @ v.T
    assert (rotated - rotated.diag().diag()).abs().max() < 0.05


# --- what is sent, and what is kept ---------------------------------------------------------------


@given(layout=cut_layouts(only_matrices=True))
def test_muon_sends_each_matrix_to_its_owner_and_back(layout: FlatLayout) -> None:
    params, grads = values(layout)
    ranks, partition = Ranks(layout), layout.partition

    def work(rank: int, contents: ShardContents) -> Any:
        shards = [take_shard(flatten(grad, layout), partition, rank) for grad in grads]
        param = take_shard(flatten(params, layout), partition, rank)
        return run(MAKERS["muon, defaults"](contents), param, shards)

    ranks.run(work)
    matrices, places = matrices_of(layout), tuple((0, r) for r in range(layout.world_size))
    owned = OwnedBuffer(layout, matrices, owners_of(layout) or (), places)
    assert ranks.sent == [owned.num_sent(rank) * NUM_STEPS for rank in range(layout.world_size)]
    assert sum(ranks.sent) <= 2 * layout.numel * NUM_STEPS


def test_lamb_and_adafactor_send_sums_only() -> None:
    lengths = {
        "lamb, defaults": ["stack (1, 12)"],
        "adafactor, defaults": [f"stack (1, {7 + 5 + 3 * 2 * 3 * 2 + 4 + 11 + 6})", "stack (1, 6)"],
    }
    for name, expected in lengths.items():
        calls = check_same_bits(MAKERS[name], MIXED, seed=0)
        assert calls == [expected * NUM_STEPS] * 4


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix_and_all_of_a_vector() -> None:
    contents = ShardContents.whole(MATRICES)
    matrices = adafactor(0.1, contents=contents).init(torch.zeros(contents.numel))
    assert matrices.variance is None
    assert matrices.row_var.shape == (7 + 18 + 4,) and matrices.col_var.shape == (5 + 18 + 11,)
    vectors = FlatLayout(("b", "scale"), ((5,), ()), world_size=1)
    state = adafactor(0.1, contents=ShardContents.whole(vectors)).init(torch.zeros(6))
    assert state.row_var is None and state.col_var is None and state.variance.shape == (6,)


def test_boxes_cover_a_fragment_once_and_lie_on_the_grid() -> None:
    for rows, columns in ((1, 1), (2, 3), (3, 1), (1, 4)):
        size = rows * columns
        for start in range(2 * size + 1):
            for stop in range(start, 4 * size + 1):
                found = list(boxes(start, stop, (4, rows, columns)))
                covered = [i for box in found for i in range(box.start, box.start + box.numel)]
                assert covered == list(range(start, stop))
                assert len(found) <= 7
                for box in found:
                    matrices, box_rows, box_columns = box.sizes
                    assert matrices == 1 or (
                        box.start % size == 0 and (box_rows, box_columns) == (rows, columns)
                    )
                    assert box_rows == 1 or box_columns == columns
                    assert box.start % columns + box_columns <= columns


# --- bad values -----------------------------------------------------------------------------------

FULL = ShardContents.whole(MIXED)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lamb(-1.0, contents=FULL), "lamb: lr must be at least 0, got -1.0"),
        (lambda: lamb(0.1, betas=(0.9, 1.0), contents=FULL), "lamb: each of betas must be in"),
        (
            lambda: lamb(0.1, min_coeff=2.0, max_coeff=1.0, contents=FULL),
            "min_coeff must be at most max_coeff, got 2.0 > 1.0",
        ),
        (
            lambda: adafactor(0.1, d=0.5, contents=FULL),
            "needs beta2_decay <= 0 and d >= 1, got -0.8 and 0.5",
        ),
        (lambda: adafactor(0.1, beta2_decay=0.5, contents=FULL), "got 0.5 and 1.0"),
        (
            lambda: muon(0.1, contents=FULL),
            r"muon: parameter 'b' must be a matrix, got shape \(5,\)",
        ),
        (
            lambda: muon(0.1, momentum=-1, contents=ShardContents.whole(MATRICES)),
            "muon: momentum must be at least 0, got -1",
        ),
        (
            lambda: muon(0.1, adjust_lr_fn="no", contents=ShardContents.whole(MATRICES)),
            "adjust_lr_fn must be .*, got 'no'",
        ),  # type: ignore[arg-type]
        (
            lambda: ShardContents(MIXED, (0, 1)),
            r"ShardContents: ranks must be all 4 in order, or one of them, got \(0, 1\)",
        ),
        (lambda: ShardContents(MIXED, (4,)), r"got \(4,\)"),
        (
            lambda: lamb(0.1, contents=FULL).init(torch.zeros(3)),
            "lamb: the flat tensor must have .* got shape",
        ),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_zero_parameter_or_a_zero_gradient_moves_by_adams_step_or_not_at_all() -> None:
    layout = FlatLayout(("zero", "still"), ((2,), (2,)), 1)
    param, grad = torch.tensor([0.0, 0.0, 3.0, 4.0]), torch.tensor([1.0, -1.0, 0.0, 0.0])
    found, _ = run(lamb(0.5, contents=ShardContents.whole(layout)), param, [grad])
    # Adam's first direction is the sign of the gradient, up to eps = 1e-8.
    torch.testing.assert_close(found, torch.tensor([-0.5, 0.5, 3.0, 4.0]), rtol=1e-6, atol=0)
    assert math.isclose(found[2].item(), 3.0)
