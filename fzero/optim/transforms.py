"""Optimizers as transforms of flat buffers: the update of a gradient, a parameter and a state.

A transform is three pure functions, in the manner of optax, of one flat buffer. The buffer has any number N of elements:
in stage 0 it is a full buffer, in other stages a shard, and no transform knows which.

- `init(param_N)` makes the state, a NamedTuple of tensors.
- `update(grad_N, param_N, state)` returns the new gradient, parameter and state. Its arguments are *donated*: it may write into
  them and return them. Callers copy what they want to keep first (as `fzero.optimizer_update` does).
- `specs(param_spec)` returns, from the parameter's spec, how each tensor of the state is divided and where it lives.

A link of a `chain` that changes gradients (`scale`, say) returns the parameter unchanged. A link that changes the
parameter consumes the gradient. Both have one type, so that a fused kernel is a link like any other.

The transforms of `fzero.optim.adam_kernels` and `fzero.optim.optimizers` are elementwise: a shard of the update is the update
of a shard. Those of `fzero.optim.matrix` are not. `fzero.optim.elementwise` checks whether a transform is elementwise.

A learning rate may be a 0-d tensor. Then it is data in a captured graph and not a constant. Fused kernels cannot be
captured; a graph holds the same formula, operation by operation, for a compiler to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from sharding import Replicated, TensorSpec

Leaf = TypeVar("Leaf")
"""The type of the leaves of a state: tensors, or their specs."""


class Transform(NamedTuple):
    """The triple (init, update, specs), with an `update_skip_if` for kernels that can skip an update.

    A kernel that updates several buffers in one call adds the pair `fused`. Its second item is the function of lists, which
    writes in place and returns the states. Its first item is the `update` that it equals: if `update` is replaced by another
    function, `fused` no longer applies.
    """

    init: Callable[[Tensor], Any]
    update: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]]
    specs: Callable[[TensorSpec], Any]
    update_skip_if: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]] | None = None
    fused: tuple[Any, Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], list[Any]]] | None = None

    @property
    def is_fused(self) -> bool:
        """Whether one call updates several buffers."""
        return self.fused is not None and self.fused[0] is self.update

    def update_each(
        self, grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """The parameters and states after the updates of several buffers, in one call if there is a kernel for that."""
        if self.fused is not None and self.is_fused:
            return list(params), self.fused[1](grads, params, states)
        updated = [self.update(*of) for of in zip(grads, params, states, strict=True)]
        return [param for _, param, _ in updated], [state for _, _, state in updated]


def is_traced() -> bool:
    """Whether the code is captured in a graph or runs under `torch.vmap`, where fused kernels cannot run."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def skip_if(skip: Tensor, transform: Transform) -> Transform:
    """The transform whose update leaves parameter and state unchanged if `skip` is true (a 0-d bool).

    The host does not read `skip`: the choice is part of the data flow. A skipped gradient may hold any values, also NaN.
    """

    def update(grad: Tensor, param: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        if transform.update_skip_if is not None and not is_traced():
            return transform.update_skip_if(skip, grad, param, state)
        leaves, treespec = optree.tree_flatten(state)
        old = [param, *leaves]
        kept = [x.clone() for x in old]
        _, *new = transform.update(grad, param, state)
        chosen = [torch.where(skip, x, y) for x, y in zip(kept, [new[0], *treespec.flatten_up_to(new[1])], strict=True)]
        for x, value in zip(old, chosen, strict=True):
            x.copy_(value)
        return grad, param, state

    return Transform(transform.init, update, transform.specs)


def chain(*transforms: Transform) -> Transform:
    """The transforms one after the other; the state is the tuple of their states.

    >>> from fzero.optim.optimizers import scale, sgd
    >>> halved = chain(scale(0.5), sgd(lr=1.0))
    >>> grad, param = torch.tensor([4.0]), torch.tensor([10.0])
    >>> halved.update(grad, param, halved.init(param))[1]
    tensor([8.])
    """
    for index, transform in enumerate(transforms):
        check_transform_kind(f"chain[{index}]", transform)

    def init(param: Tensor) -> tuple[Any, ...]:
        return tuple(transform.init(param) for transform in transforms)

    def update(grad: Tensor, param: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        new_state = []
        for transform, old in zip(transforms, state, strict=True):
            grad, param, new = transform.update(grad, param, old)
            new_state.append(new)
        return grad, param, tuple(new_state)

    def specs(param: TensorSpec) -> tuple[Any, ...]:
        return tuple(transform.specs(param) for transform in transforms)

    return Transform(init, update, specs)


_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def separate(news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
    """The new values. One that shares memory with another old value is copied, because the old one may be written first."""
    return [
        new if is_in_place(new, old) or not any(new is x or _is_alias_of(new, x) for x in olds) else new.clone()
        for new, old in zip(news, olds, strict=True)
    ]


def is_in_place(new: Tensor, old: Tensor) -> bool:
    """Whether a new value has been written into the old tensor. A trace has no addresses to compare."""
    return new is old or (_is_alias_of(new, old) and new.storage_offset() == old.storage_offset())


Rate = float | Tensor
"""A number, or a 0-d tensor that holds it."""


def add_times(x: Tensor, y: Tensor, factor: Rate) -> Tensor:
    """Adds `factor * y` to `x`, in place. It rounds once if the factor is a number, twice (product, sum) if it is a tensor."""
    return x.add_(y.to(x.dtype) * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def lerp(x: Tensor, y: Tensor, weight: Rate) -> Tensor:
    """Sets `x` to `x + weight * (y - x)`, in place."""
    return x.lerp_(y, weight.to(x.dtype)) if isinstance(weight, Tensor) else x.lerp_(y, weight)


def run_fused(
    kernel: Callable[..., None], params: Sequence[Tensor], grads: Sequence[Tensor], *moments: Sequence[Tensor]
) -> None:
    """Calls a fused kernel of PyTorch, which writes parameters and moments in place.

    On the CPU such a kernel ignores strides and takes numel consecutive elements: it would pair wrong elements, and write
    past the end of an expanded tensor. So a tensor that is not contiguous goes through a copy.
    """
    written = [params, *moments]
    copies = [[x.contiguous() for x in tensors] for tensors in written]  # a contiguous tensor is not copied
    kernel(copies[0], [x.contiguous() for x in grads], *copies[1:])
    for tensors, dense in zip(written, copies, strict=True):
        for x, copy in zip(tensors, dense, strict=True):
            if copy is not x:
                x.copy_(copy)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and elements; a NaN equals a NaN of the same bits."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x, y) or torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def leaf_names(state: Any) -> list[str]:
    """The tensors of a state, each as the Python expression that reads it.

    >>> from fzero.optim.adam_kernels import AdamState
    >>> leaf_names(AdamState(torch.zeros(()), torch.zeros(1), torch.zeros(1)))
    ['state.step', 'state.exp_avg', 'state.exp_avg_sq']
    """
    return [accessor.codify("state") for accessor in optree.tree_accessors(state)]


def check_transform_kind(name: str, transform: object) -> None:
    """Raises unless `transform` is a transform, and not a function that makes one."""
    if not isinstance(transform, Transform) or not all(map(callable, transform[:3])):
        raise ValueError(
            f"{name}: must be a Transform of three functions, got {transform!r:.80}; pass fzero.adamw(1e-3), say"
        )


def _is_unknown(value: Rate) -> bool:
    """Whether a number is in a tensor that a trace does not read."""
    return isinstance(value, Tensor) and is_traced()


def check_betas(name: str, betas: tuple[Rate, float]) -> None:
    """Raises unless both are in [0, 1)."""
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(_is_unknown(beta) or 0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name}: each of betas must be in [0, 1), got {betas}; 0.9 for the first is usual")


def no_steps(param: Tensor) -> Tensor:
    """The count of updates before the first one: a float32, as in torch.optim, on the parameter's device."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def step_spec(param: TensorSpec) -> TensorSpec:
    """The spec of that count: every rank has it."""
    return replace(param, shape=(), dtype="float32", spec=Replicated(), multiple_of=1)


def check_range(name: str, **values: Rate) -> None:
    """Raises unless all are numbers of at least 0."""
    for field, value in values.items():
        if not _is_unknown(value) and not (isinstance(value, int | float | Tensor) and value >= 0):
            raise ValueError(f"{name}: {field} must be at least 0, got {value!r}; pass a number that is not negative")
