"""The laws of optimizers that are written for one matrix: they match references of the
papers, keep their own laws, and give the same bits however the buffer is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_matrix_transforms import MATRICES, Tree, check_same_bits, run_full, values
from torch import Tensor

import fzero
from fzero.optim.fragments import ShardContents
from fzero.optim.matrix import orthogonalise
from fzero.optim.transforms import Transform
from fzero.optim.whole_matrices import MatrixOptimizer, MatrixTransform, check_matrices
from fzero.testing import check_matrix_transform
from sharding.layout import FlatLayout
from sharding.views import unflatten

OPTIMIZERS: dict[str, MatrixOptimizer] = {
    "normuon": fzero.optim.normuon(weight_decay=0.1),
    "soap": fzero.optim.soap(frequency=2),
    "shampoo": fzero.optim.shampoo(momentum=0.9),
    "by rows": fzero.optim.normuon(parts={"^w$": 7, "^u$": 2}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def _maker(name: str, lr: float = 0.01) -> Callable[[ShardContents], Transform]:
    return lambda contents: OPTIMIZERS[name](lr, contents, "matrix")


# --- the same bits --------------------------------------------------------------------------------


SQUARES = FlatLayout(("a", "b", "c"), ((6, 6), (4, 4), (6, 6)), world_size=3, multiple_of=32)
"""Gradients of full rank: the bases of SOAP are ambiguous where a product has no inverse."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", [MATRICES, SQUARES], ids=["matrices", "squares"])
@pytest.mark.parametrize("name", ["normuon", "soap", "shampoo"])
def test_the_update_of_a_shard_through_owners_is_the_shard_of_the_update(
    name: str, layout: FlatLayout
) -> None:
    calls = check_same_bits(_maker(name), layout, seed=0)
    assert all(own == calls[0] for own in calls) and calls[0]


def test_parts_of_a_matrix_have_owners_of_their_own() -> None:
    layout = FlatLayout(("w", "u"), ((7, 5), (4, 11)), world_size=3)
    check_same_bits(_maker("by rows"), layout, seed=0, parts={"w": 7, "u": 2})


# --- references -----------------------------------------------------------------------------------


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def _normuon(x: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    """Algorithm 1 of arXiv:2510.05491, with weight decay 0.1."""
    mean, rows = torch.zeros_like(x), torch.zeros(len(x), 1, dtype=x.dtype)
    for grad in grads:
        mean = 0.95 * mean + 0.05 * grad
        direction = orthogonalise(mean[None])[0].to(x.dtype)
        rows = 0.95 * rows + 0.05 * direction.square().mean(1, keepdim=True)
        direction = direction / (rows.sqrt() + 1e-8)
        length = 0.2 * direction.numel() ** 0.5 / direction.norm()
        x = x - lr * 0.1 * x - lr * length * direction
    return x


def _soap(x: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    """Algorithm 3 of arXiv:2409.11321; bases change after updates 1, 3, …"""
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    left, right = (torch.zeros(n, n, dtype=x.dtype) for n in x.shape)
    q_left, q_right = (torch.eye(n, dtype=x.dtype) for n in x.shape)
    for t, grad in enumerate(grads, 1):
        m = 0.95 * m + 0.05 * grad
        rotated = q_left.T @ grad @ q_right
        v = 0.95 * v + 0.05 * rotated**2
        first, second = m / (1 - 0.95**t), v / (1 - 0.95**t)
        step = (q_left.T @ first @ q_right) / (second.sqrt() + 1e-8)
        x = x - lr * q_left @ step @ q_right.T
        left = 0.95 * left + 0.05 * grad @ grad.T
        right = 0.95 * right + 0.05 * grad.T @ grad
        if t % 2 == 1:
            q_left, q_right = (
                torch.linalg.qr(left @ q_left).Q,
                torch.linalg.qr(right @ q_right).Q,
            )
    return x


def _shampoo(x: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    """Algorithm 1 of arXiv:1802.09568, on the mean of gradients."""
    left, right = (1e-4 * torch.eye(n, dtype=x.dtype) for n in x.shape)
    mean = torch.zeros_like(x)
    for grad in grads:
        mean = 0.9 * mean + 0.1 * grad
        left, right = left + mean @ mean.T, right + mean.T @ mean
        roots = []
        for gram in (left, right):
            w, u = torch.linalg.eigh(gram)
            roots.append(u @ (w**-0.25).diag() @ u.T)
        x = x - lr * roots[0] @ mean @ roots[1]
    return x


@pytest.mark.parametrize(
    ("name", "reference"), [("normuon", _normuon), ("soap", _soap), ("shampoo", _shampoo)]
)
def test_each_is_the_algorithm_of_its_paper(name: str, reference: Any) -> None:
    layout = SQUARES if name == "soap" else MATRICES
    params, grads = values(layout, dtype=torch.float64)
    found, _ = run_full(_maker(name), layout, params, grads)
    expected: Tree = {
        key: reference(_as_matrix(x), [_as_matrix(tree[key]) for tree in grads], 0.01)
        for key, x in params.items()
        if x.numel()
    }
    found_tree = {k: _as_matrix(x) for k, x in unflatten(found, layout).items() if x.numel()}
    # NorMuon's steps are in bfloat16, and a last bit of the momentum may become one of them, 2^-8
    # of a stride of about 0.2 · lr; the others are float64 throughout, with float32 counts.
    atol = 3e-5 if name == "normuon" else 1e-9
    torch.testing.assert_close(found_tree, expected, rtol=0, atol=atol)
    moved = max((expected[k] - _as_matrix(params[k])).abs().max().item() for k in expected)
    assert moved > 100 * atol


def test_parts_are_matrices_of_their_own() -> None:
    layout = FlatLayout(("qkv",), ((6, 4),), world_size=1)
    params, grads = values(layout)
    three = fzero.optim.normuon(parts={"qkv": 3})
    found, _ = run_full(lambda contents: three(0.01, contents, "matrix"), layout, params, grads)
    split = FlatLayout(("q", "k", "v"), ((2, 4),) * 3, world_size=1)
    cut = [dict(zip("qkv", tree["qkv"].split(2), strict=True)) for tree in (params, *grads)]
    alone = fzero.optim.normuon()
    expected, _ = run_full(lambda c: alone(0.01, c, "matrix"), split, cut[0], cut[1:])
    assert torch.equal(found, expected)
    whole, _ = run_full(lambda c: alone(0.01, c, "matrix"), layout, params, grads)
    assert not torch.allclose(whole, found, atol=1e-4)


# --- the laws of a user's own ---------------------------------------------------------------------


def _transform(**changed: Any) -> MatrixTransform:
    parts: dict[str, Any] = {
        "init": lambda x: (x.new_zeros(len(x)),),
        "update": lambda x, state, counts: (x.sign(), (state[0] + x.abs().sum((1, 2)),)),
        "specs": lambda spec: (replace(spec, shape=()),),
    }
    return MatrixTransform(**parts | changed)


def test_a_lawful_transform_passes() -> None:
    check_matrices(_transform())
    for optimizer in OPTIMIZERS.values():
        check_matrices(optimizer.matrix)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_laws_in_steps_hold_for_those_of_fzero(name: str) -> None:
    # the parts of "by rows" are of other parameters, and have no effect here
    check_matrix_transform(OPTIMIZERS[name], name=name, world_sizes=(3,))


def test_what_depends_on_the_rank_breaks_a_law_of_steps() -> None:
    def by_neighbours(x: Tensor, state: Any, counts: Tensor) -> tuple[Tensor, Any]:
        noise = torch.rand((), generator=_GENERATOR) if len(x) > 2 or x.shape[1] == 9 else 0.0
        return x + noise, state

    own = fzero.optim.matrix_transform(MatrixTransform(lambda x: (), by_neighbours, lambda s: ()))
    with pytest.raises(AssertionError, match=r"optimizer: all stages must give the same bits"):
        check_matrix_transform(own, world_sizes=(2,))
    with pytest.raises(ValueError, match="optimizer: must be an optimizer of whole matrices"):
        check_matrix_transform(own.matrix)  # type: ignore[arg-type]


_GENERATOR = torch.Generator().manual_seed(0)
kept: list[Tensor] = []


def _remembers(x: Tensor, state: Any, counts: Tensor) -> tuple[Tensor, Any]:
    kept.append(x)
    return x * len(kept), state


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"specs": lambda spec: (spec,)}, "specs must describe the state of one matrix"),
        ({"init": lambda x: (x.sum((1, 2)),)}, "init must depend on shapes alone"),
        ({"update": _remembers}, "update must keep everything in its state"),
        (
            {"update": lambda x, state, counts: (x / x.norm(), state)},
            "update must treat each matrix of a stack alone",
        ),
        ({"update": lambda x, state, counts: (x[0], state)}, "direction of the stack's shape"),
    ],
)
def test_a_broken_law_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_matrices(_transform(**changed))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _maker("normuon")(ShardContents.whole(FlatLayout(("b",), ((5,),), 1))),
            r"normuon: parameter 'b' must be a matrix, got shape \(5,\); give it to adamw",
        ),
        (
            lambda: _maker("by rows")(ShardContents.whole(FlatLayout(("w",), ((5, 2),), 1))),
            "normuon: parts: 7 must divide the 5 rows of parameter 'w'",
        ),
        (
            lambda: _maker("soap")(
                ShardContents(
                    FlatLayout(("w",), ((4, 2),), 2), (0,), owners=(3,), places=((0, 0), (0, 1))
                )
            ),
            "soap: OwnedBuffer: the owner of 'w' must be one of 2 ranks, got 3; .*another number",
        ),
        (lambda: fzero.optim.soap(frequency=0), "soap: frequency must be an integer of at least 1"),
        (lambda: fzero.optim.shampoo(eps=-1.0), "shampoo: eps must be at least 0, got -1.0"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
