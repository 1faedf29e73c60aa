"""The random numbers of a captured step are those of the eager step: a table of what
draws, by the memory of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fzero

AOT = {"compile": "step", "compile_backend": "aot_eager"}

MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, ::2],
    "transposed, in 16 bits": lambda x: x.bfloat16().transpose(0, 1),
    "transposed, in fp64": lambda x: x.double().transpose(0, 1),
}

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of most": lambda x: F.dropout(x, 0.8),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x.flatten(0, 1), 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x.flatten(0, 2).softmax(-1), 3, True),
    "randn_like": lambda x: torch.randn_like(x),
    "rand_like": lambda x: torch.rand_like(x),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randn_like, contiguous": lambda x: torch.randn_like(x, memory_format=torch.contiguous_format),
    "randperm": lambda x: torch.randperm(x.shape[-1]) * x,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli(p)": lambda x: x.detach().bernoulli(0.4),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_().clamp(-9, 9),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "normal": lambda x: torch.normal(x, 0.5),
    "normal of two": lambda x: torch.normal(x, x.sigmoid()),
    "poisson": lambda x: torch.poisson(5 * x.sigmoid()),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.3, is_causal=True
    ),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
}


class Draws(nn.Module):
    """Keeps one number of each row of the table, in which every element has another
    weight, in a buffer.
    """

    def __init__(self, of_memory: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_memory, self.a = of_memory, nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(len(DRAWS), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        drawn = [draw(self.of_memory(self.a(x))).double() for draw in DRAWS.values()]
        weights = [
            torch.linspace(0.1, 1.7, y.numel(), dtype=y.dtype).reshape(y.shape) for y in drawn
        ]
        sums = torch.stack([(y * weight).sum() for y, weight in zip(drawn, weights, strict=True)])
        self.seen.copy_(sums.detach())
        return self.a(x).square().mean() + 1e-3 * sums.mean().float()  # type: ignore[no-any-return]


class Modules(nn.Module):
    """Modules that draw by themselves: a layer three times or three layers, attention,
    and a recurrent one.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList([*layers, layers[0], layers[0]])
        self.attention, self.lstm = nn.MultiheadAttention(8, 2, 0.3), nn.LSTM(8, 8, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.attention(x, x, x)[0] + self.attention(x, x, x, need_weights=False)[0]
        return self.lstm(x)[0][..., :3].square().mean()  # type: ignore[no-any-return]


def trained(
    model: nn.Module, x: Tensor, stage: int, **how: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps, and the buffers after them."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.0625}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    step = fzero.make_train_step(model, cfg, **how)
    state, losses = step.init(), list[float]()
    for _ in range(3):
        state, metrics = step(state, x)
        losses.append(metrics.loss.item())
    return losses, state.buffers


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("memory", "stage"), [*((memory, 0) for memory in MEMORY), ("transposed", 3)]
)
def test_a_graph_draws_the_numbers_of_the_eager_step(memory: str, stage: int) -> None:
    x = torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(1))
    (losses, eager), (graphs, captured) = (
        trained(Draws(MEMORY[memory]), x, stage, **how)
        for how in ({}, AOT)  # type: ignore[arg-type]
    )
    # another drawn number changes a sum by 1e-2
    same = torch.isclose(captured["seen"], eager["seen"], rtol=1e-4)
    assert same.all(), [
        name for name, is_same in zip(DRAWS, same.tolist(), strict=True) if not is_same
    ]
    # operators of a graph round differently
    torch.testing.assert_close(graphs, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0])
def test_modules_that_draw_do_so_alike_in_a_graph(stage: int) -> None:
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    eager, captured = (trained(Modules(), x, stage, **how)[0] for how in ({}, AOT))  # type: ignore[arg-type]
    torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-6)
