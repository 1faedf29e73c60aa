"""Transforms of PyTorch in a loss: each gives a scalar from a function and the point at
which it is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Tensor]
"""(point, rows of the batch) → outputs, one row for each."""


def size(tree: Any) -> Tensor:
    """The mean square of a tree's elements."""
    leaves: Any = optree.tree_leaves(tree)
    return torch.cat([leaf.reshape(-1) for leaf in leaves]).square().mean()


def value(f: Function, point: Any, x: Tensor) -> Tensor:
    return f(point, x).square().mean()


def ones(tree: Any) -> Any:
    return optree.tree_map(torch.ones_like, tree)


def grad(f: Function, point: Any, x: Tensor) -> Tensor:
    return size(torch.func.grad(partial(value, f))(point, x))


def grad_and_value(f: Function, point: Any, x: Tensor) -> Tensor:
    grads, found = torch.func.grad_and_value(partial(value, f))(point, x)
    return size(grads) + found


def vjp(f: Function, point: Any, x: Tensor) -> Tensor:
    out, pull = torch.func.vjp(lambda z: f(z, x), point)
    return size(pull(out)) + size(out)


def jvp(f: Function, point: Any, x: Tensor) -> Tensor:
    return size(torch.func.jvp(lambda z: f(z, x), (point,), (ones(point),)))


def jacfwd(f: Function, point: Any, x: Tensor) -> Tensor:
    return size(torch.func.jacfwd(lambda z: f(z, x).mean(0))(point))


def jacrev(f: Function, point: Any, x: Tensor) -> Tensor:
    return size(torch.func.jacrev(lambda z: f(z, x).mean(0))(point))


def hessian(f: Function, point: Any, x: Tensor) -> Tensor:
    return size(torch.func.hessian(lambda z: value(f, z, x))(point))


def vmap(f: Function, point: Any, x: Tensor) -> Tensor:
    several = optree.tree_map(lambda z: torch.stack([z, 0.5 * z]), point)
    return size(torch.func.vmap(f, in_dims=(0, None))(several, x))


def vmap_over_grad(f: Function, point: Any, x: Tensor) -> Tensor:
    """Per sample; where the point is the batch, for several batches."""
    if isinstance(point, Tensor):
        several = torch.stack([point, 0.5 * point])
        return size(torch.func.vmap(torch.func.grad(partial(value, f)), (0, None))(several, x))

    def of_row(z: Any, row: Tensor) -> Tensor:
        return value(f, z, row[None])

    return size(torch.func.vmap(torch.func.grad(of_row), (None, 0))(point, x))


def linearize(f: Function, point: Any, x: Tensor) -> Tensor:
    out, push = torch.func.linearize(lambda z: f(z, x), point)
    return size(out) + size(push(ones(point)))


def forward_over_reverse(f: Function, point: Any, x: Tensor) -> Tensor:
    slope = torch.func.grad(partial(value, f))
    return size(torch.func.jvp(lambda z: slope(z, x), (point,), (ones(point),)))


def reverse_over_forward(f: Function, point: Any, x: Tensor) -> Tensor:
    def along(z: Any) -> Tensor:
        return size(torch.func.jvp(lambda y: f(y, x), (z,), (ones(z),))[1])

    return size(torch.func.grad(along)(point))


def reverse_over_reverse(f: Function, point: Any, x: Tensor) -> Tensor:
    return size(torch.func.grad(lambda z: grad(f, z, x))(point))


def forward_over_forward(f: Function, point: Any, x: Tensor) -> Tensor:
    def along(z: Any) -> Tensor:
        out: Tensor = torch.func.jvp(lambda y: f(y, x), (z,), (ones(z),))[1]
        return out

    return size(torch.func.jvp(along, (point,), (ones(point),)))


def leaf(point: Any) -> Any:
    return point.clone().requires_grad_() if isinstance(point, Tensor) else point


def autograd_grad(f: Function, point: Any, x: Tensor) -> Tensor:
    point = leaf(point)
    found = value(f, point, x)
    return size(torch.autograd.grad(found, optree.tree_leaves(point), create_graph=True)) + found  # type: ignore[arg-type]


def autograd_twice(f: Function, point: Any, x: Tensor) -> Tensor:
    point = leaf(point)
    leaves: Any = optree.tree_leaves(point)
    first = torch.autograd.grad(value(f, point, x), leaves, create_graph=True)
    return size(torch.autograd.grad(size(first), leaves, create_graph=True))


def autograd_jacobian(f: Function, point: Any, x: Tensor) -> Tensor:
    leaves, spec = optree.tree_flatten(point)

    def of(*given: Tensor) -> Tensor:
        return f(spec.unflatten(given), x).mean(0)

    return size(torch.autograd.functional.jacobian(of, tuple(leaves), create_graph=True))


def autograd_hvp(f: Function, point: Any, x: Tensor) -> Tensor:
    leaves, spec = optree.tree_flatten(point)

    def of(*given: Tensor) -> Tensor:
        return value(f, spec.unflatten(given), x)

    found: Any = torch.autograd.functional.hvp(
        of, tuple(leaves), tuple(map(torch.ones_like, leaves)), create_graph=True
    )
    return size(found[1])


def checkpoint_inside(f: Function, point: Any, x: Tensor) -> Tensor:
    def saved(z: Any, x: Tensor) -> Tensor:
        return checkpoint(f, z, x, use_reentrant=False)  # type: ignore[no-any-return]

    return autograd_grad(saved, point, x)


def checkpoint_around(f: Function, point: Any, x: Tensor) -> Tensor:
    return checkpoint(autograd_grad, f, point, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpoint_around_jvp(f: Function, point: Any, x: Tensor) -> Tensor:
    return checkpoint(jvp, f, point, x, use_reentrant=False)  # type: ignore[no-any-return]


TRANSFORMS: dict[str, Callable[[Function, Any, Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        grad,
        grad_and_value,
        vjp,
        jvp,
        jacfwd,
        jacrev,
        hessian,
        vmap,
        vmap_over_grad,
        linearize,
        forward_over_reverse,
        reverse_over_forward,
        reverse_over_reverse,
        forward_over_forward,
        autograd_grad,
        autograd_twice,
        autograd_jacobian,
        autograd_hvp,
        checkpoint_inside,
        checkpoint_around,
        checkpoint_around_jvp,
    )
}


def of_inputs(model: nn.Module, transform: str, x: Tensor) -> Tensor:
    return TRANSFORMS[transform](lambda z, _: model(z), x, x)


def of_params(model: nn.Module, transform: str, x: Tensor) -> Tensor:
    def f(params: Any, rows: Tensor) -> Tensor:
        return functional_call(model, params, (rows,))  # type: ignore[no-any-return]

    return TRANSFORMS[transform](f, dict(model.named_parameters()), x)


OF = {"inputs": of_inputs, "params": of_params}


class Net(nn.Module):
    """Three units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


class Differentiated(nn.Module):
    """Its forward holds the transform."""

    def __init__(self, transform: str, of: str) -> None:
        super().__init__()
        self.net, self.transform, self.of = Net(), transform, of

    def forward(self, x: Tensor) -> Tensor:
        return OF[self.of](self.net, self.transform, x)
