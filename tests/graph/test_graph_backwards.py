"""A backward inside the backward of a captured step trains as in a plain loop, and
leaves no gradient elsewhere in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero

AOT = {"compile": "step", "compile_backend": "aot_eager"}


def losses(model: nn.Module, x: Tensor, stage: int, **how: Any) -> list[tuple[float, float]]:
    """Loss and norm of three steps."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.0625}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    step = fzero.make_train_step(model, cfg, **how)
    state, found = step.init(), list[tuple[float, float]]()
    for _ in range(3):
        state, metrics = step(state, x.clone())
        found.append((metrics.loss.item(), metrics.grad_norm.item()))
    return found


class Rerun(torch.autograd.Function):
    """Runs a module again in its backward, which trains the module by a backward of its
    own (as reversible nets do).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), grads)
        return x.grad, None


def hooked(model: Any, x: Tensor) -> Tensor:
    """A hook runs a module again, and trains it there."""

    def again(grad: Tensor) -> None:
        with torch.enable_grad():
            model.a(x).sum().backward()

    out = model.b(model.a(x))
    out.register_hook(again)
    return out  # type: ignore[no-any-return]


REENTRANT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a leaf": lambda model, x: model.b(checkpoint(model.a, x.requires_grad_(), use_reentrant=True)),
    "in between": lambda model, x: checkpoint(model.b, model.a(x), use_reentrant=True),
    "inside another": lambda model, x: checkpoint(
        lambda y: model.b(checkpoint(model.a, y, use_reentrant=True)),
        model.b(x),
        use_reentrant=False,
    ),
    "around another": lambda model, x: checkpoint(
        lambda y: model.b(checkpoint(model.a, y, use_reentrant=False)),
        x.requires_grad_(),
        use_reentrant=True,
    ),
    "a function of a leaf": lambda model, x: model.b(Rerun.apply(x.requires_grad_(), model.a)),  # type: ignore[no-untyped-call]
    "a function, twice": lambda model, x: Rerun.apply(
        model.a(Rerun.apply(model.b(x), model.a)), model.b
    ),  # type: ignore[no-untyped-call]
    "a hook": hooked,
}


class Backwards(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.a, self.b, self.head = use, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, x))).square().mean()  # type: ignore[no-any-return]


def plain_losses(model: nn.Module, x: Tensor) -> list[tuple[float, float]]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0625), list[tuple[float, float]]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x.clone())
        loss.backward()
        norm = nn.utils.get_total_norm(
            [param.grad for param in model.parameters() if param.grad is not None]
        )
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", REENTRANT)
def test_a_backward_inside_the_backward_of_a_graph_trains(way: str, stage: int) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    expected = plain_losses(Backwards(REENTRANT[way]), x)
    for how in ({}, AOT):  # norms are summed in another order
        torch.testing.assert_close(
            losses(Backwards(REENTRANT[way]), x, stage, **how), expected, rtol=1e-5, atol=1e-6
        )


def test_a_gradient_that_a_graph_leaves_in_another_tensor_is_an_error() -> None:
    held = torch.ones(4, requires_grad=True)
    model = Backwards(lambda model, x: model.a(x) * held)
    with pytest.raises(
        fzero.CompileError, match=r"leaves a gradient in the .grad of a tensor of shape \(4,\)"
    ):
        losses(model, torch.randn(4, 4), 0, **AOT)
