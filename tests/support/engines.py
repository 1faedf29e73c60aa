"""What the tests of the engine share: a model whose loss is the script's, its data, and
the plain loop that is the oracle.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from devices import here
from torch import Tensor, nn
from training import adamw, make, part

import fzero

WIDTH, SAMPLES = 12, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 20),
            nn.Linear(20, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Gives what is no loss: a dict with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return {"logits": self.head(x), "hidden": hidden}

    def predict(self, x: Tensor) -> Tensor:
        return self(x)["logits"].argmax(-1)


def data(index: int, size: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    return here(
        (
            torch.randn(size, WIDTH, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
    )


def criterion(outputs: Mapping[str, Any], y: Tensor) -> Tensor:
    return (
        nn.functional.cross_entropy(outputs["logits"], y)
        + 0.1 * outputs["hidden"][0].square().mean()
    )


def settings(stage: int, **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return {"zero_optimization": zero, "gradient_clipping": 1.0, "optimizer": adamw, **keys}


def made(stage: int, model: Callable[[], nn.Module] = Net, **keys: Any) -> fzero.Engine:
    """An engine with the configuration's optimizer."""
    return fzero.initialize(model=make(model), config=settings(stage, **keys))[0]


def mine(engine: fzero.Engine, batch: Any) -> Any:
    return part(batch, engine.global_rank, engine.world_size)


def losses_of_steps(engine: fzero.Engine, num_steps: int = 3) -> list[float]:
    """Trains on this rank's part of `data`, as a script does; the loss of each step."""
    losses = []
    for index in range(num_steps):
        x, y = mine(engine, data(index))
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


Trained = tuple[list[float], dict[str, Tensor]]
"""Gradient norms, and weights at the end."""
Losses = Callable[[Callable[[Any], Any], int], list[Tensor]]
"""What a script does in one step: of a model and the step's number the losses, each to
go backward through by itself.
"""


def plainly(
    losses_of: Losses, num_steps: int, *, clip: float = 1.0, optimizer: Any = adamw
) -> Trained:
    """The oracle: one process and the global batch; gradient norms of each step, and
    the weights at the end.
    """
    module = make(Net)
    own = optimizer(module.parameters())
    norms = []
    for index in range(num_steps):
        torch.stack(losses_of(module, index)).sum().backward()
        # one that is not used has a gradient of zero, for ranks may differ in that
        for param in module.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))))
        own.step()
        own.zero_grad()
    return norms, copy.deepcopy(module.state_dict())


def assert_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 2e-5
) -> None:
    """Equal to the rounding of some steps of Adam: sums over ranks and micro-steps come
    in another order.
    """
    assert found.keys() == expected.keys()
    torch.testing.assert_close(dict(found), dict(expected), rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is logged: the real DeepSpeed does so when it is imported and
    when it reads a configuration.
    """
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
