"""MuonClip: Muon of each head, and the clip of queries and keys, beside a loop of one
process.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training import make, part

import fzero
from fzero.optim.matrix import newton_schulz, orthogonalise_gram, step_length
from fzero.resharding import QueryKey, clip_qk

WIDTH, HEADS, LENGTH, THRESHOLD, LR = 12, 3, 5, 0.35, 0.02


class Attention(nn.Module):
    """Attention with one weight for queries, keys and values; it keeps the largest logit
    of each head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.largest: Any = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1)
        )
        logits = q @ k.mT / math.sqrt(WIDTH / HEADS)
        self.largest = logits.detach().amax(dim=(0, 2, 3))
        mixed = (logits.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return nn.functional.mse_loss(self.out(mixed), y)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = 2 * torch.randn(2, 12, LENGTH, WIDTH, generator=generator)
    return x, y


def _by_hand(num_steps: int) -> tuple[dict[str, Tensor], int]:
    """Kimi K2's algorithm 1 on each head; also the number of clips."""
    model, num_clips = make(Attention), 0
    means = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index in range(num_steps):
        model.zero_grad()
        model(*data(index)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                means[name] = 0.95 * means[name] + 0.05 * p.grad
                step = 0.05 * p.grad + 0.95 * means[name]
                blocks = step.chunk(3 * HEADS if name == "qkv.weight" else 1)
                for rows, block in zip(p.chunk(len(blocks)), blocks, strict=True):
                    length = max(1.0, block.shape[0] / block.shape[1]) ** 0.5
                    rows.sub_(LR * length * orthogonalise_gram(block[None])[0])
            for head, largest in enumerate(model.largest):
                if largest > THRESHOLD:
                    num_clips += 1
                    for first in (0, WIDTH):
                        size = WIDTH // HEADS
                        rows = model.qkv.weight[first + head * size :][:size]
                        rows.mul_((THRESHOLD / largest) ** 0.5)
    return dict(model.state_dict()), num_clips


QK = QueryKey.of_fused("qkv.weight", num_heads=HEADS, num_rows=3 * WIDTH)


def _trained(stage: int, num_steps: int) -> dict[str, Tensor]:
    model = make(Attention)
    config = {
        "train_batch_size": 12,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    muon = fzero.optim.matrix_transform(
        newton_schulz(method="gram"),
        momentum=0.95,
        nesterov=True,
        scale=step_length("original"),
        parts={"qkv": 3 * HEADS},
    )
    step = fzero.make_train_step(model, config, transform=muon)
    state = step.init()
    for index in range(num_steps):
        state, _ = step(state, part(data(index), step.rank, step.world_size))
        state = clip_qk(step, state, {QK: model.largest}, threshold=THRESHOLD)
    return step.gather(state)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 3)])
def test_muon_of_each_head_with_the_clip_trains_as_a_loop_of_one_process(
    ranks: RankPool, world_size: int, stage: int
) -> None:
    expected, num_clips = _by_hand(6)
    assert 5 < num_clips < 6 * HEADS
    for found in ranks(world_size, _trained, stage, 6):
        for name, value in expected.items():
            # Sums over the batch in another order, in fp32.
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
            assert (value - make(Attention).state_dict()[name]).abs().max() > 0.05


def _first_logits(stage: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits before and after a clip, and the shared keys' factors."""
    model = make(Attention)
    step = fzero.make_train_step(
        model,
        {"train_batch_size": 12, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
    )
    state = step.init()
    x, y = part(data(0), step.rank, step.world_size)
    own = x.bfloat16(), y.bfloat16()
    step.evaluate(state, own)
    before = model.largest.float()
    state = clip_qk(step, state, {QK: before}, threshold=0.2)
    step.evaluate(state, own)
    return before, model.largest.float(), step.gather(state)["qkv.weight"]


def test_the_clip_brings_each_head_to_the_threshold_on_all_ranks(ranks: RankPool) -> None:
    results = ranks(2, _first_logits, 3)
    before, after = (torch.stack([r[i] for r in results]).amax(0) for i in (0, 1))
    assert (before > 0.2).all()
    torch.testing.assert_close(after, torch.full((HEADS,), 0.2), rtol=2**-6, atol=0)  # of bf16
    assert torch.equal(results[0][2], results[1][2])


def test_shared_keys_shrink_for_the_largest_logit_and_queries_by_the_rest() -> None:
    model = nn.ModuleDict({"q": nn.Linear(4, 8, bias=False), "k": nn.Linear(4, 4, bias=False)})
    step = fzero.make_train_step(model, {}, loss_fn=lambda m, x: m["q"](x).sum() + m["k"](x).sum())
    state = step.init()
    before = step.gather(state)
    before = {name: x.clone() for name, x in before.items()}
    attention = QueryKey("q.weight", "k.weight", num_heads=4, num_key_heads=2)
    logits = torch.tensor([400.0, 100.0, 50.0, 99.0])
    after = step.gather(clip_qk(step, state, {attention: logits}))
    ratio = {name: (after[name] / before[name]).mean(1) for name in before}
    assert torch.allclose(ratio["k.weight"], torch.tensor([0.5, 0.5, 1.0, 1.0]))
    assert torch.allclose(ratio["q.weight"], torch.tensor([0.5, 0.5, 2, 2, 1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("attention", "logits", "threshold", "message"),
    [
        (QK, torch.ones(2), 1.0, r"max_logits of 'qkv.weight' must have the shape \(3,\)"),
        (QK, torch.ones(3), 0.0, "threshold must be above 0, got 0.0"),
        (QueryKey("out.weight", "out.weight", 5), 9 * torch.ones(5), 1.0, "must be 5 equal heads"),
    ],
)
def test_bad_input_is_named(
    attention: QueryKey, logits: Tensor, threshold: float, message: str
) -> None:
    step = fzero.make_train_step(make(Attention), {})
    with pytest.raises(ValueError, match=message):
        clip_qk(step, step.init(), {attention: logits}, threshold=threshold)
    with pytest.raises(ValueError, match="num_key_heads must divide num_heads=3, got 2"):
        QueryKey("q", "k", 3, 2)
