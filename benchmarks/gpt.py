"""What the contenders train: a plain byte-level GPT in two sizes, and text that every
rank can make for itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model and of one rank's batch: `num_rows` rows of `context`
    tokens.
    """

    width: int
    num_blocks: int
    num_heads: int
    context: int
    num_rows: int


SIZES = {
    # 10.9M parameters
    "small": Size(width=384, num_blocks=6, num_heads=6, context=128, num_rows=2),
    # 57.2M parameters
    "large": Size(width=768, num_blocks=8, num_heads=12, context=128, num_rows=2),
}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.join = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        # row, time, 3, head, feature
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """`model(tokens, targets)` returns the mean cross entropy, so that every contender
    calls it alike.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def first_values(module: nn.Module) -> None:
    """Values for the parameters of a module that was built without memory."""
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.02)


def make_batch(size: Size, *, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows that count up by a stride of their own, modulo the vocabulary: easy to
    learn, so the losses have to fall.
    """
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    first = torch.randint(VOCAB, (size.num_rows, 1), generator=generator)
    stride = torch.randint(1, 9, (size.num_rows, 1), generator=generator)
    rows = (first + stride * torch.arange(size.context + 1)) % VOCAB
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
