"""Lanczos and conjugate gradients on vectors that are divided among the ranks.

A vector is a dict of flat tensors (`fzero.curvature.space(step)`): each rank holds its
part, and works on it alone. The ranks meet in the matrix' product, and in `space.dot`.
"""

from collections.abc import Callable

import optree
import torch
from torch import Tensor

from fzero.curvature import VectorSpace

Vector = dict[str, Tensor]
Product = Callable[[Vector], Vector]


def plus(a: Vector, factor: float, b: Vector) -> Vector:
    """a + factor · b."""
    return optree.tree_map(lambda x, y: x + factor * y, a, b)


def times(factor: float, a: Vector) -> Vector:
    return optree.tree_map(lambda x: factor * x, a)


def lanczos(product: Product, space: VectorSpace, start: Vector, num: int) -> tuple[float, Vector]:
    """The largest eigenvalue of a symmetric matrix, and its eigenvector, from `num`
    products. The basis is kept orthogonal, which rounding would spoil.
    """
    basis = [times(1 / float(space.dot(start, start).sqrt()), start)]
    diagonal, beside = [], []
    for index in range(num):
        w = product(basis[-1])
        diagonal.append(float(space.dot(w, basis[-1])))
        for q in [*basis, *basis]:  # twice is enough
            w = plus(w, -float(space.dot(w, q)), q)
        length = float(space.dot(w, w).sqrt())
        if index + 1 == num or length < 1e-6 * abs(diagonal[0]):
            break
        beside.append(length)
        basis.append(times(1 / length, w))
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(small + torch.diag(off, 1) + torch.diag(off, -1))
    found = times(float(vectors[0, -1]), basis[0])
    for weight, q in zip(vectors[1:, -1].tolist(), basis[1:], strict=True):
        found = plus(found, weight, q)
    return float(values[-1]), found


def conjugate_gradients(
    product: Product, space: VectorSpace, b: Vector, num: int, tolerance: float = 1e-6
) -> Vector:
    """x with A x = b, for a positive definite A, from at most `num` products."""
    x, r = times(0.0, b), b
    p, square = r, float(space.dot(b, b))
    first = square
    for _ in range(num):
        if square <= tolerance**2 * first:
            break
        a_p = product(p)
        step = square / float(space.dot(p, a_p))
        x, r = plus(x, step, p), plus(r, -step, a_p)
        before, square = square, float(space.dot(r, r))
        p = plus(r, square / before, p)
    return x
