"""Optimizers whose update depends on full parameters: LAMB, Adafactor and Muon as
transforms of flat buffers.

They are transforms like those of `fzero.optim.transforms`, with one more argument,
`contents`. It says which parameters the flat tensor holds, and communicates with the
ranks that hold the rest. Each docstring states the traffic of an update. Every rank
calls the collectives in the same order, whatever its shard holds. Stage 0 holds full
parameters, sends nothing and gives the same bits (see `fzero.optim.fragments`).

Shape letters: N elements of the flat tensor, W ranks, K partial sums of one shard, R
and C row and column statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Generic, Literal, NamedTuple

import torch
from torch import Tensor

from fzero.optim.fragments import Grid, ShardContents, boxes_of, grids_of
from fzero.optim.transforms import (
    Leaf,
    Transform,
    check_betas,
    check_range,
    no_steps,
    step_spec,
)
from fzero.optim.whole_matrices import MatrixTransform, owned_transform
from sharding import TensorSpec


class LambState(NamedTuple, Generic[Leaf]):
    """`step` counts updates (0-d float32); the moments have the parameter's shape and
    dtype.
    """

    step: Leaf
    exp_avg: Leaf
    exp_avg_sq: Leaf


def lamb(
    lr: float,
    *,
    contents: ShardContents,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    bias_correction: bool = True,
) -> Transform:
    """LAMB (You et al., arXiv:1904.00962, algorithm 2): Adam's direction, as long as
    the parameter times `lr`.

    The direction of a parameter, weight decay included, is multiplied by the trust
    ratio ‖parameter‖ / ‖direction‖. The ratio is clamped to [min_coeff, max_coeff]
    (DeepSpeed's names and values), and is 1 if a norm is 0. The moments are corrected
    for their bias as in Adam and in the paper (not by a factor of `lr`), unless
    `bias_correction` is False.

    *Collective:* an update stacks the partial sums of two norms for each parameter, in
    float64.
    """
    check_range(
        "lamb", lr=lr, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff, max_coeff=max_coeff
    )
    check_betas("lamb", betas)
    if min_coeff > max_coeff:
        raise ValueError(
            f"lamb: min_coeff must be at most max_coeff, got {min_coeff} > {max_coeff}; exchange "
            f"them"
        )

    def init(param: Tensor) -> LambState[Tensor]:
        contents.check("lamb", param)
        return LambState(no_steps(param), torch.zeros_like(param), torch.zeros_like(param))

    def update(
        grad: Tensor, param: Tensor, state: LambState[Tensor]
    ) -> tuple[Tensor, Tensor, LambState[Tensor]]:
        step = state.step.add_(1)
        # In double, because float32 keeps only three digits of 1 - 0.999.
        corrections = [1 - beta ** step.double() if bias_correction else 1.0 for beta in betas]
        state.exp_avg.lerp_(grad, 1 - betas[0])
        state.exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        scratch = state.exp_avg_sq.div(corrections[1]).sqrt_().add_(eps)
        direction = torch.div(state.exp_avg, corrections[0], out=grad).div_(scratch)
        if weight_decay:
            direction.add_(param, alpha=weight_decay)
        norms = contents.add_up(
            torch.cat([contents.squares(param), contents.squares(direction)], dim=1)
        ).sqrt_()
        param_norms, direction_norms = norms.chunk(2)
        is_ratio = (param_norms > 0) & (direction_norms > 0)
        ratios = torch.where(
            is_ratio, (param_norms / direction_norms).clamp(min_coeff, max_coeff), 1.0
        )
        _step(param, direction, ratios * lr, contents)
        return grad, param, LambState(step, state.exp_avg, state.exp_avg_sq)

    def specs(param: TensorSpec) -> LambState[TensorSpec]:
        return LambState(step_spec(param), param, param)

    return Transform(init, update, specs)


class AdafactorState(NamedTuple, Generic[Leaf]):
    """The state of `adafactor`.

    Attributes:
        step: counts updates (0-d float32).
        row_var, col_var: means of squared gradients over each row (R,) and column (C,)
            of all matrices, in the order of the layout, on every rank; None if the
            buffer holds no matrix.
        variance: second moments of parameters of fewer than two dims, in the shape of
            the flat tensor; None if there are none.
    """

    step: Leaf
    row_var: Leaf | None
    col_var: Leaf | None
    variance: Leaf | None


def adafactor(
    lr: float,
    *,
    contents: ShardContents,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Transform:
    """`torch.optim.Adafactor` (Shazeer and Stern, arXiv:1804.04235): second moments of
    a matrix as a product of two vectors.

    A parameter of more than two dims is a stack of matrices in the last two dims. A
    buffer that also holds parameters of fewer than two dims keeps a second moment as
    long as the full buffer: give them a buffer of their own.

    *Collective:* an update sends two stacks of sums: R + C sums and one for each
    parameter, in the parameter's dtype; then one for each parameter, in float64.
    """
    check_range("adafactor", lr=lr, weight_decay=weight_decay, eps_1=eps[0] or 0.0, eps_2=eps[1])
    if not (beta2_decay <= 0 and d >= 1):
        raise ValueError(
            f"adafactor: needs beta2_decay <= 0 and d >= 1, got {beta2_decay} and {d}; -0.8 and "
            f"1.0 are usual"
        )
    grids = grids_of(contents.layout)
    num_rows = sum(grid.matrices * grid.rows for grid in grids.values())
    num_columns = sum(grid.matrices * grid.columns for grid in grids.values())
    has_vectors = any(len(shape) < 2 for shape in contents.layout.shapes)

    def init(param: Tensor) -> AdafactorState[Tensor]:
        contents.check("adafactor", param)
        row_var, col_var = (param.new_zeros(n) if grids else None for n in (num_rows, num_columns))
        return AdafactorState(
            no_steps(param), row_var, col_var, torch.zeros_like(param) if has_vectors else None
        )

    def update(
        grad: Tensor, param: Tensor, state: AdafactorState[Tensor]
    ) -> tuple[Tensor, Tensor, AdafactorState[Tensor]]:
        step = state.step.add_(1)
        count = step.double()  # powers of a float32 would be wrong in the seventh digit
        weight = (count**beta2_decay).to(param.dtype)
        smallest = torch.finfo(param.dtype).eps if eps[0] is None else eps[0]
        numels = torch.tensor(
            [max(numel, 1) for numel in contents.layout.numels], device=param.device
        )

        sums = _row_and_column_sums(grad, contents, grids, num_rows, num_columns)
        total = contents.add_up(torch.cat([sums, contents.squares(param).to(sums.dtype)], dim=1))
        row_sums, column_sums, param_squares = torch.split(
            total, [num_rows, num_columns, len(numels)]
        )
        if state.row_var is not None and state.col_var is not None:
            for grid in grids.values():
                grid.all_rows(row_sums).div_(grid.columns)
                grid.all_columns(column_sums).div_(grid.rows)
            state.row_var.lerp_(row_sums, weight)
            state.col_var.lerp_(column_sums, weight)
            _divide_matrices(grad, state.row_var, state.col_var, contents, grids, smallest)
        if state.variance is not None:
            _divide_vectors(grad, state.variance, contents, grids, weight, smallest)
        if weight_decay:
            param.mul_(1 - lr * weight_decay)
        largest = contents.add_up(contents.squares(grad)).div_(numels).sqrt_().div_(d).clamp_(min=1)
        sizes = param_squares.double().div_(numels).sqrt_().clamp_(
            min=eps[1]
        ) * count.rsqrt().clamp(max=lr)
        _step(param, grad, sizes.div_(largest), contents)
        return grad, param, AdafactorState(step, state.row_var, state.col_var, state.variance)

    def specs(param: TensorSpec) -> AdafactorState[TensorSpec]:
        rows, columns = (
            replace(step_spec(param), shape=(n,), dtype=param.dtype)
            for n in (num_rows, num_columns)
        )
        row_var, col_var = (rows, columns) if grids else (None, None)
        return AdafactorState(step_spec(param), row_var, col_var, param if has_vectors else None)

    return Transform(init, update, specs)


def _divide_vectors(
    grad: Tensor,
    variance: Tensor,
    contents: ShardContents,
    grids: dict[int, Grid],
    weight: Tensor,
    smallest: float,
) -> None:
    """Divides the gradients of parameters that are no matrices by the roots of their
    second moments, after updating these.
    """
    for part in contents.parts:
        if part.index not in grids:
            vector = part.of(grad)
            moments = part.of(variance).lerp_(vector.square(), weight)
            vector.mul_(moments.clamp(min=smallest**2).rsqrt_())


def _row_and_column_sums(
    grad: Tensor, contents: ShardContents, grids: dict[int, Grid], num_rows: int, num_columns: int
) -> Tensor:
    """The squares of the gradient, summed over rows and columns, for each shard of the
    tensor: (len(ranks), R + C).
    """
    sums = grad.new_zeros(len(contents.ranks), num_rows + num_columns)
    for part, grid, box in boxes_of(contents.parts, grids):
        squares = part.box_of(grad, box).square()
        grid.rows_of(box, sums[part.row, :num_rows]).add_(squares.sum(dim=2, keepdim=True))
        grid.columns_of(box, sums[part.row, num_rows:]).add_(squares.sum(dim=1, keepdim=True))
    return sums


def _divide_matrices(
    grad: Tensor,
    row_var: Tensor,
    col_var: Tensor,
    contents: ShardContents,
    grids: dict[int, Grid],
    smallest: float,
) -> None:
    """Divides the gradients of matrices by the roots of their second moments, which are
    products of two vectors.
    """
    means = {
        i: grid.all_rows(row_var).mean(dim=1).clamp_(min=smallest) for i, grid in grids.items()
    }
    for part, grid, box in boxes_of(contents.parts, grids):
        mean = grid.matrices_of(box, means[part.index])
        estimate = grid.rows_of(box, row_var) * grid.columns_of(box, col_var)
        part.box_of(grad, box).mul_(estimate.div_(mean).clamp_(min=smallest**2).rsqrt_())


def muon(
    lr: float,
    *,
    contents: ShardContents,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_method: Literal["standard", "gram"] = "standard",
    eps: float = 1e-7,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
    parts: Mapping[str, int] = {},
) -> Transform:
    """`torch.optim.Muon` (Jordan et al., kellerjordan.github.io/posts/muon): a matrix
    moves by its orthogonalised momentum.

    A parameter of more than two dims becomes a matrix of its first dim by all others,
    as is usual for convolutions. `parts` cuts parameters into blocks of rows (heads),
    each a matrix of its own.

    *Collective:* as `fzero.optim.whole_matrices.owned_transform`; the momentum is sent
    in bfloat16, in which the steps compute, and so is the result.

    Raises:
        ValueError: a parameter is not a matrix, or a value is out of range.
    """
    check_range("muon", eps=eps, ns_steps=ns_steps)
    if adjust_lr_fn not in ("original", "match_rms_adamw"):
        raise ValueError(
            f"muon: adjust_lr_fn must be 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}; "
            f"choose one"
        )
    is_standard = ns_method == "standard"
    return owned_transform(
        "muon",
        newton_schulz(ns_steps, ns_method, eps),
        lr,
        contents=contents,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        scale=_step_original if adjust_lr_fn == "original" else _step_as_adam,
        send_dtype=torch.bfloat16 if is_standard else None,
        reply_dtype=torch.bfloat16 if is_standard else None,
        parts=parts,
    )


def _step_original(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))


def _step_as_adam(rows: int, columns: int) -> float:
    return math.sqrt(0.04 * max(rows, columns))


@cache  # equal transforms must be one object, so that buffers share stacks
def newton_schulz(
    num_steps: int = 5, method: Literal["standard", "gram"] = "standard", eps: float = 1e-7
) -> MatrixTransform:
    """The transform without a state that orthogonalises; see `orthogonalise`."""
    steps = orthogonalise if method == "standard" else orthogonalise_gram

    def update(stack: Tensor, state: Any, counts: Tensor) -> tuple[Tensor, Any]:
        return steps(stack, num_steps=num_steps, eps=eps), state

    return MatrixTransform(lambda stack: (), update, lambda spec: ())


def orthogonalise(stack: Tensor, *, num_steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Matrices with the same singular vectors and with singular values of about 1, by
    Newton-Schulz steps in bfloat16.

    The quintic a·x + b·x³ + c·x⁵ lifts small singular values fastest, and brings all to
    about [0.7, 1.2] (Jordan, see `muon`).

    Args:
        stack: (n, R, C), any dtype.
        num_steps: more steps lift smaller singular values.
        eps: the norm's smallest value as a divisor.

    Returns:
        (n, R, C), bfloat16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315

    def steps(x: Tensor) -> Tensor:
        """Of (…, A, B), with A at most B."""
        add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
        for _ in range(num_steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    x = stack.to(torch.bfloat16, copy=True)
    x = x.mT if stack.shape[-2] > stack.shape[-1] else x
    x.div_(torch.stack([matrix.norm() for matrix in x]).clamp(min=eps)[:, None, None])
    # A processor gains nothing from batches, and rounds a product of a batch in another way.
    x = torch.stack([*map(steps, x)]) if x.is_cpu else steps(x)
    return x.mT if stack.shape[-2] > stack.shape[-1] else x


def orthogonalise_gram(stack: Tensor, *, num_steps: int = 5, eps: float = 1e-7) -> Tensor:
    """As `orthogonalise`, with the steps on the small matrix X·Xᵀ (DeepSpeed's
    `ns_method: "gram"`).

    A step of Newton-Schulz multiplies X by a polynomial of X·Xᵀ, so that the
    polynomials are multiplied first (A·A instead of A·B elements), and X once. In half
    precision the product is applied after two steps, and the rest starts anew, for
    stability. A square matrix has no shorter side, and takes the steps themselves.

    Returns:
        (n, R, C), fp16, or fp32 on the CPU.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = stack.shape[-2] > stack.shape[-1]
    x: Tensor = stack.to(torch.float32 if stack.device.type == "cpu" else torch.float16, copy=True)
    x = x.mT if is_tall else x
    x = x / (torch.stack([matrix.norm() for matrix in x]) + eps)[:, None, None]
    is_square = x.shape[-2] == x.shape[-1]
    restarts = range(num_steps) if is_square else (0, 2)
    gram: Tensor = x @ x.mT
    product: Tensor | None = None
    for step in range(num_steps):
        if step in restarts and product is not None:
            x = product @ x
            gram, product = x @ x.mT, None
        factor = b * gram + c * gram @ gram
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if step + 1 < num_steps and step + 1 not in restarts:
            gram = factor @ gram @ factor
    x = x if product is None else product @ x
    return x.mT if is_tall else x


def _step(param: Tensor, direction: Tensor, sizes: Tensor, contents: ShardContents) -> None:
    """Subtracts from every parameter its direction times its size; overwrites the
    direction.
    """
    for part in contents.parts:
        part.of(param).sub_(part.of(direction).mul_(sizes[part.index]))
