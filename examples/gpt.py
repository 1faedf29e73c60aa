"""The model of the demo: a byte-level GPT with 256 tokens and no tokenizer, in plain
PyTorch.

The model is independent of ranks and shards. Two habits make it easy to shard. Its
repeated blocks are in an `nn.ModuleList`; each block becomes a unit, gathered and
released separately. Every module with parameters has a `reset_parameters`, so that a
model built on the meta device, without memory, can be initialised unit by unit.

Shape letters: B sequences of a batch, T bytes of a sequence, D width, H heads, d width
of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256  # the vocabulary


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a GPT."""

    context: int  # bytes of a sequence
    width: int
    depth: int
    num_heads: int
    num_trigrams: int  # rows of the table of trigrams


SIZES = {
    "tiny": Size(context=32, width=32, depth=2, num_heads=2, num_trigrams=512),
    "small": Size(context=128, width=128, depth=4, num_heads=2, num_trigrams=8192),
    "medium": Size(context=256, width=384, depth=6, num_heads=6, num_trigrams=16384),
}


class Embedding(nn.Embedding):
    """One row per symbol; rows are normally distributed with the given standard
    deviation.
    """

    def __init__(self, num_rows: int, width: int, *, std: float) -> None:
        self.std = std  # set first: the constructor below calls reset_parameters
        super().__init__(num_rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def trigrams(tokens_BT: Tensor, num_trigrams: int) -> Tensor:
    """For each byte, a hash of it and the two before it: a row of a table, in which
    trigrams may collide.

    A token of a few bytes holds more information than a byte. One lookup gives a
    byte-level model a part of it.
    """
    one_before, two_before = F.pad(tokens_BT, (1, -1)), F.pad(tokens_BT, (2, -2))
    return (31337 * tokens_BT + 1009 * one_before + 23757 * two_before) % num_trigrams


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTd, k_BHTd, v_BHTd = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        y_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        return self.out(y_BHTd.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One layer, pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(size.width, bias=False)
        self.attention = Attention(size)
        self.norm_2 = nn.LayerNorm(size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        return x_BTD + self.down(F.relu(self.up(self.norm_2(x_BTD))).square())


class GPT(nn.Module):
    """A byte-level GPT that returns its own loss if it gets targets."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.byte = Embedding(NUM_BYTES, size.width, std=0.3)
        self.position = Embedding(size.context, size.width, std=0.3)
        self.trigram = Embedding(size.num_trigrams, size.width, std=0.3)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """The mean cross-entropy in nats per byte; without targets, the logits of the
        next byte at every position.
        """
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = (
            self.byte(tokens_BT)
            + self.position(positions_T)
            + self.trigram(trigrams(tokens_BT, self.size.num_trigrams))
        )
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        return (
            logits
            if targets_BT is None
            else F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        )

    @torch.no_grad()
    def generate(
        self, prompt: bytes, *, num_bytes: int, temperature: float, generator: torch.Generator
    ) -> bytes:
        """Continue a prompt, one sampled byte after the other."""
        text = list(prompt)
        for _ in range(num_bytes):
            logits = self(torch.tensor([text[-self.size.context :]]))[0, -1]
            probabilities = torch.softmax(logits / temperature, dim=-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text)
