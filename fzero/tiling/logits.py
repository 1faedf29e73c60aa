"""`Logits`: the output of a linear head that is not computed.

A model that divides, caps, casts, cuts or reshapes its logits and passes them to
`F.cross_entropy` gets the loss by `linear_cross_entropy`. Any other use is an error that
names it.

Shape letters: D width, V vocabulary.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.tiling.cross_entropy import linear_cross_entropy

Numbers = (int, float)


@dataclass(frozen=True, eq=False)
class Logits:
    """The values `outer · f(scale · (hidden · weightᵀ + bias))`, where f is tanh or
    nothing.

    Attributes:
        hidden: (…, D).
        weight, bias: (V, D) and (V,), the head's.
        name: the head, for messages.
        chunks: `shards` or `chunk_tokens` of the loss.
        scale, outer: numbers.
        is_capped: whether f is tanh.
        is_class_second: whether the dimension of V stands behind the first, as for
            `F.cross_entropy` of (batch, V, tokens).
        dtype: the one that the model has asked for.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    name: str
    chunks: Mapping[str, int]
    dtype: torch.dtype
    scale: builtins.float = 1.0
    outer: builtins.float = 1.0
    is_capped: bool = False
    is_class_second: bool = False

    # --- what a model asks of a tensor ------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """As of the logits."""
        *before, _ = self.hidden.shape
        vocabulary = self.weight.shape[0]
        if self.is_class_second:
            return torch.Size((before[0], vocabulary, *before[1:]))
        return torch.Size((*before, vocabulary))

    @property
    def device(self) -> torch.device:
        """The head's."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        """Whether a loss of them has gradients."""
        return self.hidden.requires_grad or self.weight.requires_grad

    def dim(self) -> int:
        """Dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Elements that the logits would have."""
        return self.shape.numel()

    # --- operators --------------------------------------------------------------------------------

    def float(self) -> Logits:
        """In fp32; sums of a loss are so always."""
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Logits:
        """In another dtype; on the same device."""
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.dtype):
                return replace(self, dtype=x)
        return self

    def contiguous(self) -> Logits:
        """Itself."""
        return self

    def __mul__(self, other: Any) -> Logits:
        if isinstance(other, Tensor) and other.dim() == 0 and not self.is_capped:
            bias = None if self.bias is None else self.bias * other
            return replace(self, hidden=self.hidden * other, bias=bias)
        if not isinstance(other, Numbers):
            self._refuse("a product with a tensor")
        if self.is_capped:
            return replace(self, outer=self.outer * other)
        return replace(self, scale=self.scale * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Logits:
        if isinstance(other, Numbers) and self.is_capped:
            return replace(self, outer=self.outer / other)
        if isinstance(other, Numbers):
            return replace(self, scale=self.scale / other)
        inverse: Logits = self * (1 / other)
        return inverse

    def tanh(self) -> Logits:
        """Capped; once."""
        if self.is_capped:
            self._refuse("a second tanh")
        return replace(self, is_capped=True)

    def view(self, *shape: Any) -> Logits:
        """Tokens in other dimensions; V stays the last."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self.is_class_second or sizes[-1] not in (self.shape[-1], -1) or not len(sizes) > 1:
            self._refuse(f"view{tuple(sizes)}, which divides the classes")
        width = self.hidden.shape[-1]
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], width))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        """Tokens in one dimension."""
        if self.is_class_second or end_dim % self.ndim == self.ndim - 1:
            self._refuse(f"flatten({start_dim}, {end_dim}), which divides the classes")
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def transpose(self, dim0: int, dim1: int) -> Logits:
        """(batch, tokens, V) to (batch, V, tokens), or back."""
        if self.ndim != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
            self._refuse(f"transpose({dim0}, {dim1})")
        return replace(self, is_class_second=not self.is_class_second)

    def permute(self, *dims: Any) -> Logits:
        """As `transpose`."""
        order = tuple(dims[0]) if len(dims) == 1 else dims
        if self.ndim != 3 or tuple(dim % 3 for dim in order) != (0, 2, 1):
            self._refuse(f"permute{order}")
        return self.transpose(1, 2)

    def __getitem__(self, index: Any) -> Logits:
        of_tokens = self._index_of_tokens(index if isinstance(index, tuple) else (index,))
        return replace(self, hidden=self.hidden[of_tokens])

    def _index_of_tokens(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """An index that leaves all classes."""
        used = sum(
            x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1
            for x in index
            if x is not None and x is not Ellipsis
        )
        reaches_classes = any(x is Ellipsis for x in index) or used >= self.ndim
        is_all = isinstance(index[-1], slice) and index[-1] == slice(None)
        if self.is_class_second or (reaches_classes and index[-1] is not Ellipsis and not is_all):
            self._refuse("an index of classes")
        return index

    # --- the loss ---------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        mine: Logits = next(x for x in (*args, *kwargs.values()) if isinstance(x, cls))
        if func is F.cross_entropy:
            return mine._cross_entropy(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if func in (torch.Tensor.mul, torch.Tensor.__mul__, torch.mul):
            left, right = args[:2]
            product: Logits = mine * (right if left is mine else left)
            return product
        if args and args[0] is mine and name in _METHODS:
            return getattr(mine, name)(*args[1:], **kwargs)
        return mine._refuse(f"torch's {name}")

    def _cross_entropy(
        self,
        input: Any,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Any:
        if weight is not None or size_average is not None or reduce is not None:
            self._refuse("F.cross_entropy with weight, size_average or reduce")
        if reduction not in ("mean", "sum") or target.is_floating_point() or input is not self:
            self._refuse(f"F.cross_entropy with reduction={reduction!r} or probabilities")
        hidden, bias = self.hidden, self.bias
        # outer · tanh(scale · z) = outer · tanh((scale · outer) · z / outer)
        scale = self.scale * self.outer if self.is_capped else self.scale
        if scale != 1:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return linear_cross_entropy(
            hidden, self.weight, target, bias=bias, ignore_index=ignore_index,
            label_smoothing=label_smoothing, reduction=reduction,  # type: ignore[arg-type]
            softcap=self.outer if self.is_capped else None, **self.chunks,  # type: ignore[arg-type]
        )  # fmt: skip

    def _refuse(self, got: str) -> NoReturn:
        raise ValueError(
            f"tiled_head: the logits of {self.name!r} may be scaled, capped by one tanh, cast, cut "
            f"by tokens and passed to F.cross_entropy (mean or sum), got {got}; compute this "
            f"outside of the step, or leave tiled_head out"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # questions of copy, pickle and the like
            raise AttributeError(name)
        self._refuse(f".{name}")


_METHODS = frozenset(
    ["float", "to", "contiguous", "tanh", "view", "reshape", "flatten", "transpose", "permute"]
)
"""Those of `Logits` that have a function of torch, too."""
