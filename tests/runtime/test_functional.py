"""`fzero.functional`: derivatives by sharded parameters are those of one process that
has all ranks' batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fzero


class Net(nn.Module):
    def __init__(self, repeats: bool | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        if self.repeats is None:
            hidden = self.b(hidden)
        else:
            hidden = checkpoint(self.b, hidden, use_reentrant=self.repeats)
        return self.c(torch.tanh(hidden))  # type: ignore[no-any-return]


def made(stage: int, repeats: bool | None = None, **how: Any) -> tuple[Net, fzero.TrainStep]:
    torch.manual_seed(0)
    model = Net(repeats)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero}
    step = fzero.make_train_step(model, cfg, loss_fn=mse, units=["a", "b", "c"], **how)
    return model, step


def mse(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batches(num_ranks: int) -> tuple[Tensor, Tensor]:
    """Rows (num_ranks, 4, 3) and labels (num_ranks, 4, 2)."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_ranks, 4, 3, generator=generator),
        torch.randn(num_ranks, 4, 2, generator=generator),
    )


def maml(loss: Any, params: Any, halves: list[Any]) -> Any:
    """The gradient of the loss after two inner steps, by the first parameters."""

    def outer(params: Any) -> Tensor:
        for _ in range(2):
            grads = torch.func.grad(loss)(params, *halves[0])
            params = {key: x - 0.1 * grads[key] for key, x in params.items()}
        return loss(params, *halves[1])  # type: ignore[no-any-return]

    return torch.func.grad(outer)(params)


def hvp(loss: Any, params: Any, halves: list[Any]) -> Any:
    slope = torch.func.grad(lambda p: loss(p, *halves[0]))
    return torch.func.jvp(slope, (params,), (params,))[1]


def reverse_hvp(loss: Any, params: Any, halves: list[Any]) -> Any:
    """By autograd, of a Hessian that is symmetric."""
    params = {key: x.detach().requires_grad_() for key, x in params.items()}
    own = list(params.values())
    grads = torch.autograd.grad(loss(params, *halves[0]), own, create_graph=True)
    products = torch.autograd.grad(grads, own, [x.detach() for x in own])
    return dict(zip(params, products, strict=True))


DERIVATIVES = {each.__name__: each for each in (maml, hvp, reverse_hvp)}


def expected_of(derivative: str, num_ranks: int) -> dict[str, Tensor]:
    """On one process, of the mean over all ranks."""
    model, _ = made(0)
    x, y = batches(num_ranks)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(model, params, (x,)) - y).square().mean()

    params = {name: x.detach() for name, x in model.named_parameters()}
    halves = [(x[:, :2].flatten(0, 1), y[:, :2].flatten(0, 1)), (x[:, 2:].flatten(0, 1), y[:, 2:].flatten(0, 1))]  # fmt: skip
    found: dict[str, Tensor] = DERIVATIVES[derivative](loss, params, halves)
    return found


def found_on_a_rank(derivative: str, stage: int) -> dict[str, Tensor]:
    _, step = made(stage)
    state = step.init()
    x, y = (tensor[step.rank] for tensor in batches(step.world_size))
    apply, params = fzero.functional(step, state)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (apply(params, x) - y).square().mean() / step.world_size

    halves = [(x[:2], y[:2]), (x[2:], y[2:])]
    shards = DERIVATIVES[derivative](loss, params, halves)
    assert {key: x.shape for key, x in shards.items()} == {
        key: x.shape for key, x in params.items()
    }
    # the derivative as weights, so that the step gathers it
    axis = step.runtime.ranks
    full = {}
    for buffer in step.plan.flat_buffers:
        flat = fzero.comms.all_gather(shards[buffer.key], axis)
        for name, start in zip(buffer.layout.names, buffer.layout.names, strict=True):
            lower, upper = buffer.layout.bounds(start)
            full[name] = flat[lower:upper].view(buffer.layout.shape(name))
    return full


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_on_one_rank_a_derivative_is_the_plain_ones(derivative: str, stage: int) -> None:
    torch.testing.assert_close(
        found_on_a_rank(derivative, stage), expected_of(derivative, 1), rtol=1e-6, atol=1e-7
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_on_real_ranks_it_is_that_of_their_mean(ranks: RankPool, num_ranks: int) -> None:
    assert ranks(num_ranks, _differ) == [[]] * num_ranks


def _differ() -> list[str]:
    found, num_ranks = [], torch.distributed.get_world_size()
    for derivative in DERIVATIVES:
        for stage in (0, 3):
            try:  # sums over ranks round
                torch.testing.assert_close(
                    found_on_a_rank(derivative, stage), expected_of(derivative, num_ranks),
                    rtol=1e-5, atol=1e-6,
                )  # fmt: skip
            except AssertionError as error:
                found.append(f"{derivative}, stage {stage}: {error}")
    return found


def test_a_function_of_the_model_gets_the_model_bound() -> None:
    _, step = made(3)
    state = step.init()
    x, y = (tensor[0] for tensor in batches(1))
    apply, params = fzero.functional(step, state, mse)
    torch.testing.assert_close(apply(params, (x, y)), step.evaluate(state, (x, y)))
    zeros = {key: torch.zeros_like(x) for key, x in params.items()}
    torch.testing.assert_close(apply(zeros, (x, y)), y.square().mean())


@pytest.mark.parametrize("repeats", [False, True])
def test_a_model_that_the_backward_would_run_again_is_refused(repeats: bool) -> None:
    _, step = made(3, repeats)
    apply, params = fzero.functional(step, step.init())
    params = {key: x.requires_grad_() for key, x in params.items()}
    with pytest.raises(ValueError, match=r"must not use torch\.utils\.checkpoint in apply"):
        apply(params, batches(1)[0][0].requires_grad_())
