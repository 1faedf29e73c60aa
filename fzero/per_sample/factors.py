"""The gradient of each sample by one use of a parameter, and the dot products of such
gradients, mostly without making them.

The gradient of sample b by the weight of a linear layer is a sum of outer products over
tokens, Σ_t g_bt x_btᵀ, with inputs x and gradients g of the outputs. So

    ‖Σ_t g_bt x_btᵀ‖² = Σ_ts (g_bt · g_bs) (x_bt · x_bs)

needs two T × T tables per sample and no gradient (Goodfellow 2015, arXiv:1510.01799,
for T = 1; Li et al. 2021, arXiv:2110.05679, for tokens). Where T is large, the gradient
itself is smaller (Bu et al. 2022, arXiv:2205.10683). A row of an embedding is an outer
product with a one-hot vector.

Shape letters: B samples, T uses of a sample (tokens, places of an image), R rows and C
columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

BUDGET = 1 << 20
"""Elements of a table of several samples; more only where one sample, or one copy of
the parameter, has more.
"""


@dataclass(frozen=True, slots=True)
class Outer:
    """Gradients of samples that are sums of outer products.

    Attributes:
        rows: (B, T, R), or (B, T) int64: the numbers of one-hot rows.
        cols: (B, T, C).
        num_rows: R.
    """

    rows: Tensor
    cols: Tensor
    num_rows: int

    @property
    def numel(self) -> int:
        return self.num_rows * self.cols.shape[2]

    def of(self, samples: slice) -> Outer:
        return Outer(self.rows[samples], self.cols[samples], self.num_rows)

    @property
    def whole(self) -> Tensor:
        """The gradients (B, R · C)."""
        if self.rows.is_floating_point():
            return torch.einsum("btr,btc->brc", self.rows, self.cols).flatten(1)
        num, _, width = self.cols.shape
        found = self.cols.new_zeros(num, self.num_rows, width)
        place = self.rows[..., None].expand_as(self.cols)
        return found.scatter_add_(1, place, self.cols).flatten(1)


@dataclass(frozen=True, slots=True)
class Whole:
    """Gradients of samples, each in full.

    Attributes:
        grads: (B, numel).
    """

    grads: Tensor

    @property
    def numel(self) -> int:
        return self.grads.shape[1]

    def of(self, samples: slice) -> Whole:
        return Whole(self.grads[samples])

    @property
    def whole(self) -> Tensor:
        return self.grads


Use = Outer | Whole
"""The gradients of samples by one use of a parameter."""


def dot(a: Use, b: Use) -> Tensor:
    """The dot product of two gradients by the same parameter, for each sample (B,)
    float64. Beside its arguments it keeps as many elements as the parameter has, or
    `BUDGET`.

    >>> x, g = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    >>> use = Outer(g, x, 4)
    >>> torch.allclose(dot(use, use), use.whole.double().square().sum(1))
    True
    """
    num = len(a.cols if isinstance(a, Outer) else a.grads)
    by_tokens = isinstance(a, Outer) and isinstance(b, Outer) and tokens_of(a, b) < a.numel
    each = tokens_of(a, b) if by_tokens else 2 * a.numel  # type: ignore[arg-type]
    size = max(1, max(BUDGET, a.numel) // max(each, 1))
    found = [torch.zeros(0, dtype=torch.float64)]
    for start in range(0, num, size):
        own, other = a.of(slice(start, start + size)), b.of(slice(start, start + size))
        if by_tokens:
            assert isinstance(own, Outer) and isinstance(other, Outer)
            table = _rows(own.rows, other.rows) * (own.cols @ other.cols.transpose(1, 2))
            found.append(table.double().sum((1, 2)))
        else:
            found.append((own.whole.double() * other.whole.double()).sum(1))
    return torch.cat([x.to(found[-1].device) for x in found])


def tokens_of(a: Outer, b: Outer) -> int:
    """The elements of both tables of a sample."""
    return 2 * a.cols.shape[1] * b.cols.shape[1]


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """The dot products of the rows of two uses (B, T, T)."""
    if not a.is_floating_point() and not b.is_floating_point():
        return a[:, :, None] == b[:, None, :]
    if not b.is_floating_point():
        return a.gather(2, b[:, None, :].expand(-1, a.shape[1], -1))
    if not a.is_floating_point():
        return _rows(b, a).transpose(1, 2)
    return a @ b.transpose(1, 2)


# --- the formulas of layers -----------------------------------------------------------------------

Formula = Callable[[Any, Tensor, Tensor], Mapping[str, Use]]
"""The uses of a layer's parameters, by attribute, from the layer, its input (B, …) and
the gradient of its output (B, …), both at least fp32.
"""


def _tokens(x: Tensor, num_last: int = 1) -> Tensor:
    """(B, T, C) from (B, …, C), where the last `num_last` dimensions make C."""
    return x.flatten(-num_last).reshape(len(x), -1, x.shape[-num_last:].numel())


def _linear(layer: nn.Linear, x: Tensor, grad: Tensor) -> Mapping[str, Use]:
    rows = _tokens(grad)
    return {"weight": Outer(rows, _tokens(x), rows.shape[2]), "bias": Whole(rows.sum(1))}


def _embedding(layer: nn.Embedding, x: Tensor, grad: Tensor) -> Mapping[str, Use]:
    ids, cols = x.reshape(len(x), -1), _tokens(grad)
    if layer.padding_idx is not None:  # its row has no gradient
        cols = cols.masked_fill((ids == layer.padding_idx)[..., None], 0)
    return {"weight": Outer(ids, cols, layer.num_embeddings)}


def _layer_norm(layer: nn.LayerNorm, x: Tensor, grad: Tensor) -> Mapping[str, Use]:
    normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return _scaled(normal, grad, len(layer.normalized_shape))


def _rms_norm(layer: nn.RMSNorm, x: Tensor, grad: Tensor) -> Mapping[str, Use]:
    shape = list(layer.normalized_shape)
    return _scaled(F.rms_norm(x, shape, eps=layer.eps), grad, len(shape))


def _scaled(normal: Tensor, grad: Tensor, num_last: int) -> Mapping[str, Use]:
    """The uses of y = normal · weight + bias."""
    of_weight = _tokens(normal * grad, num_last).sum(1)
    return {"weight": Whole(of_weight), "bias": Whole(_tokens(grad, num_last).sum(1))}


def _group_norm(layer: nn.GroupNorm, x: Tensor, grad: Tensor) -> Mapping[str, Use]:
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
    sums = [(y * grad).flatten(2).sum(2) for y in (normal, torch.ones_like(normal))]
    return {"weight": Whole(sums[0]), "bias": Whole(sums[1])}


def _conv(layer: nn.Conv1d | nn.Conv2d, x: Tensor, grad: Tensor) -> Mapping[str, Use]:
    num, groups = len(x), layer.groups
    if x.dim() == 3:  # one more place, so that both are of images
        x, grad = x[:, :, None], grad[:, :, None]

    def pair(value: Sequence[int], first: int = 1) -> tuple[int, int]:
        return (value[0], value[1]) if len(value) == 2 else (first, value[0])

    assert not isinstance(layer.padding, str)
    parts: Tensor = F.unfold(
        x,
        pair(layer.kernel_size),
        dilation=pair(layer.dilation),
        padding=pair(layer.padding, 0),
        stride=pair(layer.stride),
    )  # (B, C · places of the kernel, T)
    rows = grad.flatten(2)
    bias = Whole(rows.sum(2))
    if groups == 1:
        weight: Use = Outer(rows.transpose(1, 2), parts.transpose(1, 2), rows.shape[1])
    else:
        by_group = torch.einsum(
            "bgrt,bgct->bgrc",
            rearrange(rows, "b (g r) t -> b g r t", g=groups),
            rearrange(parts, "b (g c) t -> b g c t", g=groups),
        )
        weight = Whole(by_group.reshape(num, -1))
    return {"weight": weight, "bias": bias}


FORMULAS: dict[Any, Formula] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
    nn.LayerNorm.forward: _layer_norm,
    nn.RMSNorm.forward: _rms_norm,
    nn.GroupNorm.forward: _group_norm,
    nn.Conv1d.forward: _conv,
    nn.Conv2d.forward: _conv,
}
"""By the forward of a class, so that a subclass with a forward of its own has none."""


def formula_of(module: nn.Module) -> Formula | None:
    """The formula of a module; None where there is none, so that its gradients must be
    made.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d) and (
        isinstance(module.padding, str) or module.padding_mode != "zeros"
    ):
        return None
    return FORMULAS.get(type(module).forward)
