"""NorMuon, SOAP and Shampoo, each written for a stack of matrices
(`fzero.optim.whole_matrices`).

Shape letters: n matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.optim.matrix import orthogonalise
from fzero.optim.transforms import check_betas, check_range, is_traced
from fzero.optim.whole_matrices import MatrixOptimizer, MatrixTransform, matrix_transform
from sharding import TensorSpec


class NorMuonState(NamedTuple):
    """`rows`: the mean square of each row of orthogonalised momenta, (n, R)."""

    rows: Any


def normuon(
    *,
    momentum: float = 0.95,
    beta2: float = 0.95,
    ns_steps: int = 5,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    **rules: Any,
) -> MatrixOptimizer:
    """NorMuon (Li et al., arXiv:2510.05491, algorithm 1): Muon whose rows are divided by
    the root of their mean square over updates.

    A step has the root mean square 0.2 · lr, as Adam's has about.

    Args:
        momentum, beta2: weights of the past in the means of gradients, and of squares.
        rules: `parts`, `takes` and `others` of `matrix_transform`.
    """
    check_range("normuon", eps=eps, ns_steps=ns_steps)
    check_betas("normuon", (momentum, beta2))

    def init(stack: Tensor) -> NorMuonState:
        return NorMuonState(stack.new_zeros(stack.shape[:2]))

    def update(stack: Tensor, state: NorMuonState, counts: Tensor) -> tuple[Tensor, NorMuonState]:
        direction = orthogonalise(stack, num_steps=ns_steps).to(state.rows.dtype)
        rows = state.rows.lerp(direction.square().mean(dim=2), 1 - beta2)
        direction = direction / (rows.sqrt() + eps)[..., None]
        norm = direction.square().sum(dim=(1, 2), keepdim=True).sqrt()
        length = 0.2 * math.sqrt(direction[0].numel())
        return direction * (length / norm.clamp(min=eps)), NorMuonState(rows)

    def specs(matrix: TensorSpec) -> NorMuonState:
        return NorMuonState(replace(matrix, shape=matrix.shape[:1]))

    return matrix_transform(
        MatrixTransform(init, update, specs),
        name="normuon",
        momentum=momentum,
        weight_decay=weight_decay,
        sends="bfloat16",
        **rules,
    )


class SoapState(NamedTuple):
    """The state of `soap`.

    Attributes:
        exp_avg: the mean of gradients (n, R, C).
        exp_avg_sq: the mean of their squares in the rotated space (n, R, C).
        left, right: the means of G·Gᵀ (n, R, R) and Gᵀ·G (n, C, C).
        left_basis, right_basis: their eigenvectors, as columns.
    """

    exp_avg: Any
    exp_avg_sq: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


def soap(
    *,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    frequency: int = 10,
    weight_decay: float = 0.0,
    **rules: Any,
) -> MatrixOptimizer:
    """SOAP (Vyas et al., arXiv:2409.11321, algorithm 3): Adam in the eigenbasis of
    Shampoo's preconditioners.

    After the first update, and after every `frequency` more, the bases take one step of
    the power iteration (a QR decomposition). They start as the standard basis. The
    moments are corrected for their start at zero, as in Adam.

    Args:
        betas: weights of the past in the means of gradients, and of squares and
            products.
        frequency: the number of updates between changes of the bases.
        rules: `parts`, `takes` and `others` of `matrix_transform`.
    """
    check_range("soap", eps=eps)
    check_betas("soap", betas)
    if not isinstance(frequency, int) or frequency < 1:
        raise ValueError(
            f"soap: frequency must be an integer of at least 1, got {frequency!r}; 10 is usual"
        )

    def init(stack: Tensor) -> SoapState:
        rows, columns = (_eyes(stack, size) for size in stack.shape[1:])
        zeros = torch.zeros_like
        return SoapState(zeros(stack), zeros(stack), zeros(rows), zeros(columns), rows, columns)

    def update(stack: Tensor, state: SoapState, counts: Tensor) -> tuple[Tensor, SoapState]:
        left, right = state.left_basis, state.right_basis
        first = state.exp_avg.lerp(stack, 1 - betas[0])
        rotated = left.mT @ stack @ right
        second = state.exp_avg_sq.lerp(rotated.square(), 1 - betas[1])
        # In double, because float32 keeps only three digits of 1 - 0.999.
        corrections = [(1 - beta ** counts.double())[:, None, None] for beta in betas]
        mean = (left.mT @ first @ right) / corrections[0].to(stack.dtype)
        root = (second / corrections[1].to(stack.dtype)).sqrt() + eps
        direction = left @ (mean / root) @ right.mT
        grams = (
            state.left.lerp(stack @ stack.mT, 1 - betas[1]),
            state.right.lerp(stack.mT @ stack, 1 - betas[1]),
        )
        is_due = (counts - 1) % frequency == 0
        if is_traced() or bool(is_due.any()):
            left, right = (
                torch.where(is_due[:, None, None], torch.linalg.qr(gram @ basis).Q, basis)
                for gram, basis in zip(grams, (left, right), strict=True)
            )
        return direction, SoapState(first, second, *grams, left, right)

    def specs(matrix: TensorSpec) -> SoapState:
        rows, columns = (replace(matrix, shape=(size, size)) for size in matrix.shape)
        return SoapState(matrix, matrix, rows, columns, rows, columns)

    return matrix_transform(
        MatrixTransform(init, update, specs),
        name="soap",
        weight_decay=weight_decay,
        work=lambda rows, columns: (rows + columns) ** 3,
        **rules,
    )


class ShampooState(NamedTuple):
    """`left`, `right`: the sums of G·Gᵀ (n, R, R) and Gᵀ·G (n, C, C)."""

    left: Any
    right: Any


def shampoo(
    *, eps: float = 1e-4, momentum: float | None = None, weight_decay: float = 0.0, **rules: Any
) -> MatrixOptimizer:
    """Shampoo (Gupta et al., arXiv:1802.09568, algorithm 1): the gradient times the
    inverse fourth roots of the sums of its products with itself, L^-1/4 · G · R^-1/4.

    Args:
        eps: the preconditioners start as `eps` times the identity.
        momentum: the weight of the past in a running mean of gradients, which is used
            instead of them.
        rules: `parts`, `takes` and `others` of `matrix_transform`.
    """
    check_range("shampoo", eps=eps)

    def init(stack: Tensor) -> ShampooState:
        return ShampooState(*(eps * _eyes(stack, size) for size in stack.shape[1:]))

    def update(stack: Tensor, state: ShampooState, counts: Tensor) -> tuple[Tensor, ShampooState]:
        left, right = state.left + stack @ stack.mT, state.right + stack.mT @ stack
        direction = _inverse_fourth_root(left) @ stack @ _inverse_fourth_root(right)
        return direction, ShampooState(left, right)

    def specs(matrix: TensorSpec) -> ShampooState:
        return ShampooState(*(replace(matrix, shape=(size, size)) for size in matrix.shape))

    return matrix_transform(
        MatrixTransform(init, update, specs),
        name="shampoo",
        momentum=momentum,
        weight_decay=weight_decay,
        work=lambda rows, columns: rows**3 + columns**3,
        **rules,
    )


def _eyes(stack: Tensor, size: int) -> Tensor:
    """The identity of a size, for each matrix of a stack."""
    eye = torch.eye(size, dtype=stack.dtype, device=stack.device)
    return eye.expand(len(stack), -1, -1).clone()


def _inverse_fourth_root(gram: Tensor) -> Tensor:
    """X^-1/4 of symmetric positive matrices (n, A, A)."""
    values, vectors = torch.linalg.eigh(gram)
    smallest = torch.finfo(gram.dtype).tiny
    roots = values.clamp(min=smallest).pow(-0.25)
    found: Tensor = (vectors * roots[..., None, :]) @ vectors.mT
    return found
