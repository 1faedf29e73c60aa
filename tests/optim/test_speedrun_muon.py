"""The optimizer of a public speedrun as a transform of whole matrices, beside a loop of
one process that does the same by hand.

It is the one of nanochat (github.com/karpathy/nanochat, `nanochat/optim.py` of 2026):
Nesterov momentum, rows of equal length (arXiv:2603.28254), five steps of Polar Express
(arXiv:2505.16932), the norm of an orthogonal matrix (arXiv:2602.21545), NorMuon's
variances along the longer side (arXiv:2510.05491), and weight decay only where it
agrees with the step. Both versions here are code of our own, in fp32, for the algorithm
as that file has it: its order of operations, and its constants.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from test_simulate import for_ranks
from torch import Tensor
from training import VOCABULARY, Odd, config, make, tokens, train_plainly

import fzero
from fzero.testing import check_matrix_transform
from sharding import TensorSpec

POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The polynomials of Polar Express for five steps, of its paper's table."""
LR, DECAY, NUM_STEPS = 0.02, 0.2, 50


# --- the transform ----------------------------------------------------------------------------


class State(NamedTuple):
    variances: Tensor  # (n, R), or (n, C) of wide matrices


def speedrun_muon() -> Any:
    def length(x: Tensor) -> Tensor:
        return x.norm(dim=(1, 2), keepdim=True)

    def init(stack: Tensor) -> State:
        return State(stack.new_zeros(len(stack), max(stack.shape[1:])))

    def update(stack: Tensor, state: State, counts: Tensor) -> tuple[Tensor, State]:
        _, rows, columns = stack.shape
        x = stack * (length(stack) / rows**0.5) / stack.norm(dim=2, keepdim=True).clamp(min=1e-6)
        x = x / (1.01 * length(x) + 1e-6)
        x = x.mT if rows > columns else x
        for a, b, c in POLAR:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.mT if rows > columns else x
        x = x * min(rows, columns) ** 0.5 / length(x).clamp(min=1e-6)
        along = 2 if rows >= columns else 1
        squares = x.square().mean(dim=along)
        variances = state.variances.lerp(squares, 0.1)
        scaled = x * variances.clamp(min=1e-10).rsqrt().unsqueeze(along)
        return scaled * length(x) / length(scaled).clamp(min=1e-10), State(variances)

    def specs(matrix: TensorSpec) -> State:
        return State(replace(matrix, shape=(max(matrix.shape),)))

    return fzero.optim.matrix_transform(
        fzero.optim.MatrixTransform(init, update, specs),
        name="speedrun_muon",
        momentum=0.95,
        nesterov=True,
        scale=lambda rows, columns: max(1.0, rows / columns) ** 0.5,
        apply=lambda w, x, rate: w - rate * x - rate * DECAY * w * (x * w >= 0),
        others=lambda lr: fzero.adamw(lr, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
    )


# --- by hand, in one process ------------------------------------------------------------------


class ByHand(torch.optim.Optimizer):
    """One matrix at a time, with the singular side chosen as in the public loop: tall
    matrices are multiplied from the right.
    """

    def __init__(self, params: list[Any]) -> None:
        is_matrix = [p.dim() == 2 and p.numel() > 0 and len(p) != VOCABULARY for p in params]
        both = (
            [p for p, m in zip(params, is_matrix, strict=True) if m == matrices]
            for matrices in (True, False)
        )
        super().__init__([{"params": own} for own in both], {})
        rest = self.param_groups[1]["params"]
        self.adam = torch.optim.AdamW(
            rest, lr=LR, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, foreach=False
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.adam.step()
        for p in self.param_groups[0]["params"]:
            state, is_tall = self.state[p], p.shape[0] >= p.shape[1]
            if not state:
                state["mean"], state["second"] = torch.zeros_like(p), 0.0
            state["mean"] = 0.95 * state["mean"] + 0.05 * p.grad
            g = 0.05 * p.grad + 0.95 * state["mean"]
            g = g / g.norm(dim=1, keepdim=True).clamp(min=1e-6) * g.norm() / len(g) ** 0.5
            g = g / (g.norm() * 1.01 + 1e-6)
            for a, b, c in POLAR:
                small = g.T @ g if is_tall else g @ g.T
                poly = b * small + c * small @ small
                g = a * g + (g @ poly if is_tall else poly @ g)
            g = g / g.norm() * min(g.shape) ** 0.5
            mean = g.square().mean(dim=int(is_tall), keepdim=True)
            state["second"] = 0.9 * state["second"] + 0.1 * mean
            new = g / state["second"].clamp(min=1e-10).sqrt()
            new = new * (g.norm() / new.norm())
            rate = LR * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.sub_(rate * new + rate * DECAY * p * (new * p >= 0))


def test_the_transform_has_at_most_40_lines_and_keeps_its_laws() -> None:
    lines = [line for line in inspect.getsource(speedrun_muon).splitlines() if line.strip()]
    assert len(lines) <= 40
    check_matrix_transform(speedrun_muon(), world_sizes=(2,))


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 3)])
def test_a_public_optimizer_of_a_speedrun_has_the_losses_of_its_loop(
    stage: int, world_size: int
) -> None:
    expected, _ = train_plainly(
        Odd, lambda index: tokens(index % 2), ByHand, num_steps=NUM_STEPS, clip=0.0
    )
    adam = {"type": "AdamW", "params": {"lr": LR}}
    step = fzero.make_train_step(
        make(Odd), config(stage, clip=0.0, optimizer=adam), transform=speedrun_muon()
    )
    ranks = fzero.simulate(step, world_size, by="lockstep")
    state, losses = ranks.init(), []
    for index in range(NUM_STEPS):
        state, metrics = ranks(state, for_ranks(tokens(index % 2), world_size))
        losses.append(metrics.loss.item())
    wanted = [loss for loss, _ in expected]
    assert losses[0] > 4 * losses[-1]
    # Other orders of sums and products, in fp32, and 50 updates that each go on from the last.
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)
