"""Tiny models of the laws: odd sizes, so that no shard is even."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fzero.testing.conformance.laws import FEATURES

WIDTH, OUTPUTS = 7, 3


class Body(nn.Module):
    """Two blocks between two layers, for forwards (rows, FEATURES) → (rows, OUTPUTS)."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.outlet = nn.Linear(WIDTH, OUTPUTS)

    def hidden(self, x_BF: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x_BF.to(self.inlet.weight.dtype)))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Net(Body):
    """One layer after the other."""

    def forward(self, x_BF: Tensor) -> Tensor:
        y: Tensor = self.outlet(self.hidden(x_BF))
        return y


class TiedNet(nn.Module):
    """An embedding and a head that share their matrix; tokens are the signs of x."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, FEATURES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x_BF: Tensor) -> Tensor:
        x = self.embed(x_BF.argmax(1))
        for block in self.blocks:
            x = torch.tanh(block(x))
        y: Tensor = self.head(x)
        return y


class Around(nn.Module):
    """`Net` and a parameter `extra` of some kind; a subclass says in `used` how the
    forward uses it.
    """

    used: Callable[[], Tensor]

    def __init__(self, extra: Tensor) -> None:
        super().__init__()
        self.net = Net()
        self.blocks = self.net.blocks
        self.extra = nn.Parameter(extra)

    def forward(self, x_BF: Tensor) -> Tensor:
        y: Tensor = self.net(x_BF)
        return y * (1 + self.used().to(y.dtype))


class Repeated(Body):
    """One block is called three times in a forward."""

    def forward(self, x_BF: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x_BF))
        for index in (0, 1, 0, 0):
            x = torch.tanh(self.blocks[index](x))
        y: Tensor = self.outlet(x)
        return y


class Dropped(Body):
    """With dropout before the last layer."""

    def forward(self, x_BF: Tensor) -> Tensor:
        y: Tensor = self.outlet(F.dropout(self.hidden(x_BF), 0.5, self.training))
        return y


class Normed(Body):
    """With a BatchNorm, whose running means are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x_BF: Tensor) -> Tensor:
        y: Tensor = self.outlet(self.norm(self.hidden(x_BF)))
        return y


class Checkpointed(Body):
    """Each block under activation checkpointing."""

    re_entrant = False

    def forward(self, x_BF: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x_BF))
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.re_entrant))
        y: Tensor = self.outlet(x)
        return y


class ReEntrant(Checkpointed):
    """The older kind, which runs a backward inside a backward."""

    re_entrant = True


class Experts(Body):
    """A row runs through one of two blocks; rows of the first rank never reach the
    second.
    """

    def forward(self, x_BF: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x_BF))
        goes_on = x_BF[:, 0] > 10  # `rows_of_experts` marks rows so
        parts = [(index, expert) for index, expert in enumerate(self.blocks)]
        y = torch.zeros_like(x)
        for index, expert in parts:
            rows = (goes_on == bool(index)).nonzero()[:, 0]
            if len(rows):
                y = y.index_put((rows,), torch.tanh(expert(x[rows])))
        found: Tensor = self.outlet(y)
        return found
