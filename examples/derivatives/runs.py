"""What the recipes of this folder share: a configuration, a rank's rows of a batch, and
a training loop on the ranks and as plain PyTorch.

    fzero --num_procs 2 examples/derivatives/penalties.py
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import nn

import fzero

LR = 0.1


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "SGD", "params": {"lr": LR}}
    return {"optimizer": optimizer, "gradient_clipping": 0, "zero_optimization": zero, **more}


def own_rows(batch: Any, step: fzero.TrainStep) -> Any:
    """The rows of a batch that are this rank's: every world_size-th part of them."""
    return optree.tree_map(lambda x: x.chunk(step.world_size)[step.rank], batch)


def on_ranks(
    model: nn.Module, loss_fn: Callable[..., Any], batches: list[Any], stage: int, **how: Any
) -> list[float]:
    """The losses of a training on all ranks."""
    step = fzero.make_train_step(model, config(stage), loss_fn=loss_fn, **how)
    state, losses = step.init(), []
    for batch in batches:
        state, metrics = step(state, own_rows(batch, step))
        losses.append(metrics.loss.item())
    return losses


def plainly(model: nn.Module, loss_fn: Callable[..., Any], batches: list[Any]) -> list[float]:
    """The same training in one process, without fzero."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for batch in batches:
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def show(name: str, make: Callable[[], tuple[nn.Module, Callable[..., Any], list[Any]]]) -> None:
    """Prints first and last loss of both."""
    print(f"{name}, plain: {ends(plainly(*make()))}")
    for stage in (0, 3):
        print(f"{name}, stage {stage}: {ends(on_ranks(*make(), stage))}")


def ends(losses: list[float]) -> str:
    return f"{losses[0]:.5f} → {losses[-1]:.5f}"
