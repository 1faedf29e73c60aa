"""Client optimizers that need whole parameters train as the class itself, on any number
of ranks, through checkpoints.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import fzero
from fzero import ConfigWarning
from fzero.optim.whole_params import check_shapes_do_not_matter, check_whole


class ByRow(torch.optim.Optimizer):
    """One second moment per row of a matrix: state of another shape than the parameter,
    and a Python number.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "rows": torch.zeros(len(param), device=param.device)}
                state["count"] += 1
                squares = param.grad.square().reshape(len(param), -1).mean(1)
                state["rows"].lerp_(squares, 1 - group["beta"])
                divisor = (state["rows"] / (1 - group["beta"] ** state["count"])).sqrt() + 1e-8
                param.sub_(group["lr"] * param.grad / divisor.view(-1, *[1] * (param.dim() - 1)))


class Together(ByRow):
    """Divides by the norm of all gradients: parameters depend on each other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        norm = sum(param.grad.square().sum() for param in params) ** 0.5
        for param in params:
            self.state[param]["norm"] = norm
            param.sub_(param.grad / norm)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _batch(index: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(index))


def _plainly(kind: Any) -> dict[str, Tensor]:
    model = _net()
    optimizer = kind(model.parameters(), lr=0.05)
    for index in range(4):
        optimizer.zero_grad()
        model(_batch(index)).square().mean().backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _with_engine(kind: Any, stages: tuple[int, int], folder: str) -> dict[str, Tensor]:
    """Two steps in one stage, and two in another."""
    for index, stage in enumerate(stages):
        model = _net()
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0,
            "zero_optimization": zero,
        }
        engine = fzero.initialize(
            model=model, optimizer=kind(model.parameters(), lr=0.05), config=config
        )[0]
        if index:
            engine.load_checkpoint(folder)
        for count in (2 * index, 2 * index + 1):
            half = (
                _batch(count)[2 * engine.global_rank :][:2]
                if engine.world_size == 2
                else _batch(count)
            )
            engine.backward(engine(half).square().mean())
            engine.step()
        engine.save_checkpoint(folder)
    plan = engine.train_step.plan
    if plan.world_size == 2:
        # each of four parameters has one owner; in stages 1 to 3 the state is divided
        owners = [owner for of_buffer in plan.owners.values() for owner in of_buffer]
        assert len(owners) == 4 and {*owners} == {0, 1}
        for leaf in optree.tree_leaves(plan.optimizer):
            assert leaf.shape == () or leaf.local_shape(2)[0] * (2 if stage else 1) == leaf.numel
    found: dict[str, Tensor] = engine.module_state_dict()
    return copy.deepcopy(found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [ByRow, torch.optim.Adafactor])
@pytest.mark.parametrize("stages", [(0, 3), (2, 1)])
def test_a_class_of_whole_parameters_trains_as_it_does_alone(
    ranks: RankPool, tmp_path: Path, kind: Any, stages: tuple[int, int]
) -> None:
    expected = _plainly(kind)
    for found in ranks(2, _with_engine, kind, stages, str(tmp_path)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def test_a_class_that_neither_divides_nor_steps_one_by_one_is_refused() -> None:
    model = _net()
    with pytest.raises(ValueError, match="Together: must be elementwise"):
        fzero.initialize(model=model, optimizer=Together(model.parameters()), config={})
    with pytest.raises(ValueError, match="must treat parameters one by one"):
        check_whole(Together, {})


def test_a_class_that_looks_at_shapes_is_not_taken_for_elementwise() -> None:
    with pytest.raises(
        ValueError, match="ByRow: must update a matrix as it updates the same elements"
    ):
        check_shapes_do_not_matter(ByRow, {})
    check_shapes_do_not_matter(torch.optim.AdamW, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        model = _net()
        fzero.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config={})
