"""`LossRules` beside PyTorch's own clipping, and the random state of a step."""

from __future__ import annotations

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Plain, config, make, vectors

import fzero
from fzero.runtime.finish import LossRules
from fzero.simulation import stacked, unstacked


@given(
    norm=st.sampled_from([0.0, 1e-8, 1e-6, 3e-5, 0.5, 2.0]), clip=st.sampled_from([1e-6, 1e-3, 1.0])
)
def test_the_clip_factor_is_that_of_clip_grad_norm(norm: float, clip: float) -> None:
    rules = LossRules(
        world_size=1, predivide=1, is_mean=True, clip=clip, is_inf=False, scales_loss=False
    )
    one = torch.ones((), dtype=torch.float64)
    found = rules.factor(one * norm, one, torch.tensor(False), None)
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.full_like(param, norm)
    torch.nn.utils.clip_grad_norm_([param], clip)
    assert found is not None
    torch.testing.assert_close(found * norm, param.grad[0], rtol=1e-12, atol=0)


class Masked(nn.Module):
    """The loss is the mask of a dropout, in digits of the number two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20))

    def forward(self, x: Tensor) -> Tensor:
        return (
            nn.functional.dropout(self.weight, 0.5) / 2 * 2.0 ** -torch.arange(20)
        ).sum() + 0 * x.sum()


def test_dropout_differs_between_steps_and_ranks_and_is_the_same_from_the_same_state() -> None:
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    ranks = fzero.simulate(
        fzero.make_train_step(make(Masked), keys | {"gradient_clipping": 0.0}, donate=False),
        2,
        by="lockstep",
    )
    state = ranks.init()
    assert not torch.equal(*(rng["cpu"] for rng in (s.rng for s in unstacked(state, 2))))
    alone = fzero.simulate(
        fzero.make_train_step(make(Masked), keys, donate=False), 1, by="lockstep"
    )
    first = stacked(
        [unstacked(alone.init(), 1)[0]._replace(rng=rank.rng) for rank in unstacked(state, 2)][:1]
    )
    second = stacked(
        [unstacked(alone.init(), 1)[0]._replace(rng=rank.rng) for rank in unstacked(state, 2)][1:]
    )
    of_rank = [alone(s, torch.zeros(1, 1))[1].loss for s in (first, second)]
    assert of_rank[0] != of_rank[1]
    losses = []
    now = state
    for _ in range(3):
        now, metrics = ranks(now, torch.zeros(2, 1))
        losses.append(metrics.loss.item())
    assert len(set(losses)) == 3 and losses[0] == pytest.approx(sum(of_rank).item() / 2, abs=1e-7)
    assert ranks(state, torch.zeros(2, 1))[1].loss == losses[0]


def test_a_unit_that_is_reduced_twice_in_a_backward_loses_nothing_of_its_hook_s_error() -> None:
    """What arrived and what the hooks still hold is the exact sum: the second reduction
    takes over the error of the first.
    """

    class Twice(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.requires_grad_()
            for block in (*self.blocks[:2], *self.blocks[1:]):
                # whose backward runs and completes each visit for itself
                x = checkpoint(block, x, use_reentrant=True)
            return nn.functional.mse_loss(x, y)

    hook = fzero.comms.error_feedback(fzero.comms.compressed(fzero.comms.quantize(4, 32)))
    keys = config(2, optimizer={"type": "SGD", "params": {"lr": 0.0}}, clip=0.0)
    batch = optree.tree_map(lambda x: torch.stack(x.chunk(2)), vectors(0))

    def grads(**options: object) -> tuple[fzero.TrainState[Tensor], fzero.simulation.LockstepRanks]:
        ranks = fzero.simulate(
            fzero.make_train_step(make(Twice), keys, **options), 2, by="lockstep"
        )  # type: ignore[arg-type]
        return ranks(ranks.init(), batch)[0], ranks

    exact, _ = grads()
    through, ranks = grads(reduce_hook=hook)
    assert optree.tree_leaves(through.hook_states)
    for buffer in ranks.plan.flat_buffers:
        errors = [
            x
            for x in optree.tree_leaves(through.hook_states[buffer.key])
            if x.shape[-1] == buffer.padded_numel
        ]
        error_P = torch.stack(errors).sum(dim=(0, 1))
        arrived_P = through.grads[buffer.key].flatten()
        torch.testing.assert_close(
            arrived_P + error_P, exact.grads[buffer.key].flatten(), rtol=1e-5, atol=1e-6
        )
