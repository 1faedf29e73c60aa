"""Sequences that several ranks share: a model whose tokens see each other by attention
alone, its batches, and the plain loop that is the oracle.

All is in fp64, in which ranks that share a sequence differ from one rank by 1e-15 at the
most (sums of gradients in another order), far below what one lost or doubled token
makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from sharding import Mesh

VOCABULARY, WIDTH, HEADS, SAMPLES, NUM_STEPS, RATE = 29, 16, 4, 4, 3, 0.3
IGNORED = -100
MESH = Mesh.of(data=2, seq=2)
Batch = dict[str, Any]


class Block(nn.Module):
    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + F.gelu(self.up(x))


class LM(nn.Module):
    """A language model that gets the positions of its tokens."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(is_causal=is_causal) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """PyTorch's own encoder, which sees tokens on both sides, but no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, kept: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~kept)
        return self.head(x)


def in_fp64(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def sum_and_count(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    kept = (batch["kept"],) if "kept" in batch else ()
    logits, labels = model(batch["input_ids"], batch["position_ids"], *kept), batch["shift_labels"]
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return losses, (labels != IGNORED).sum()


def batch(step: int, length: int, *, pads: bool = False) -> Batch:
    """The global batch of a step; all labels of the second half of a sample are ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, length), generator=generator)
    labels = tokens.clone()
    labels[:, :2], labels[1, length // 2 :] = IGNORED, IGNORED
    positions = torch.arange(length).expand(SAMPLES, -1).contiguous()
    made: Batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if pads:
        kept = torch.ones(SAMPLES, length, dtype=torch.bool)
        kept[0, -3:], labels[0, -3:] = False, IGNORED
        made["kept"] = kept
    return made


def shifted(whole: Batch) -> Batch:
    """The batch as one rank's loss function gets it."""
    labels = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
    return {**{key: x for key, x in whole.items() if key != "labels"}, "shift_labels": labels}


def rows(whole: Batch, part: int, num_parts: int) -> Batch:
    return {
        key: x.chunk(num_parts)[part] if isinstance(x, Tensor) else x for key, x in whole.items()
    }


class Curve(NamedTuple):
    losses: list[float]
    weights: Mapping[str, Tensor]


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def plain(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> Curve:
    """`loss_of` returns the loss of a model in a step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for number in range(NUM_STEPS):
        loss = loss_of(model, number)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return Curve(losses, {key: x.detach().clone() for key, x in model.state_dict().items()})


def mean_of_tokens(length: int, **how: Any) -> Callable[[nn.Module, int], Tensor]:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        losses, count = sum_and_count(model, shifted(batch(number, length, **how)))
        return losses / count

    return loss_of


def trained(step: Any, batch_of: Callable[[int], Any]) -> Curve:
    state, losses = step.init(), []
    for number in range(NUM_STEPS):
        state, metrics = step(state, batch_of(number))
        losses.append(metrics.loss.item())
    return Curve(losses, step.gather(state))


def of_all_ranks(whole: Batch, mesh: Mesh = MESH) -> Batch:
    """The batch of simulated ranks: those of one group have the same rows."""
    size = mesh.axis_size("seq")
    parts = [rows(whole, rank // size, mesh.size // size) for rank in range(mesh.size)]
    return {
        key: torch.stack([part[key] for part in parts]) if isinstance(x, Tensor) else x
        for key, x in whole.items()
    }


def make(
    model: nn.Module, stage: int, mesh: Any = MESH, *, simulates: bool = True, **how: Any
) -> fzero.TrainStep:
    given = {"transforms": [fzero.sequence.ulysses("seq")], "loss_fn": sum_and_count, **how}
    axis = fzero.comms.AbstractAxis.of(mesh, backend="gloo") if simulates else mesh
    return fzero.make_train_step(model, settings(stage), mesh=axis, **given)


def check(found: Curve, expected: Curve) -> None:
    # metrics hold losses in fp32
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), atol=0, rtol=1e-6
    )
    for name, x in found.weights.items():
        torch.testing.assert_close(x, expected.weights[name], atol=1e-14, rtol=1e-12)
