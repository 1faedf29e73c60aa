"""The short pieces of code in the README, on the first page and in the concepts run,
with the names that a reader would have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis.stateful import rule
from pages import ROOT, Block, blocks
from torch import Tensor, nn
from torch.func import grad_and_value

import fzero
from fzero.testing import TrainingMachine
from sharding import Placement, Sharded

Names = dict[str, Any]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "concepts").glob("*.md")),
]


def fragments() -> list[tuple[Path, Block]]:
    return [
        (page, block)
        for page in PAGES
        for block in blocks(page.read_text())
        if block.language == "python"
    ]


class Model(nn.Module):
    """Returns its loss; its `encoder` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def outputs(self, x: Tensor) -> Tensor:
        for block in (self.encoder, *self.blocks):
            x = torch.tanh(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).square().mean()


def usual() -> Names:
    """What most pieces use; each gets a model, a step and a state of its own."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero}
    model, batch = Model(), torch.randn(4, 8)
    step = fzero.make_train_step(model, cfg)
    return {
        "fzero": fzero,
        "torch": torch,
        "optree": optree,
        "F": F,
        "nn": nn,
        "st": st,
        "rule": rule,
        "Placement": Placement,
        "TrainingMachine": TrainingMachine,
        "model": model,
        "cfg": cfg,
        "step": step,
        "state": step.init(),
        "batch": batch,
        "loader": [batch] * 100,
        "x": batch,
        "y": batch,
    }


def by_hand() -> Names:
    """The names of `step` in examples/anatomy_of_a_step.py, for stage 3 on one rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    import anatomy_of_a_step as anatomy

    model, axis = nn.Linear(1, 1), fzero.join()
    weights = {name: param.detach() for name, param in model.named_parameters()}
    params, state = anatomy.init(weights, 3, axis)
    full, params_spec, grads_spec, state_spec = (
        fzero.specs_of(weights, spec) for spec in (anatomy.FULL, *anatomy.STAGES[3])
    )
    return {
        **vars(anatomy),
        "grad_and_value": grad_and_value,
        "model": model,
        "axis": axis,
        "x": torch.ones(2, 1),
        "params": params,
        "state": state,
        "full": full,
        "params_spec": params_spec,
        "grads_spec": grads_spec,
        "state_spec": state_spec,
    }


def in_parts() -> Names:
    names = usual()
    model = names["model"]
    step = fzero.make_train_step(
        model, names["cfg"], loss_fn=lambda model, x: F.mse_loss(model.outputs(x), x)
    )
    return names | {
        "step": step,
        "state": step.init(),
        "criterion": F.mse_loss,
        "model": model.outputs,
    }


def stacked() -> Names:
    full = torch.arange(8.0)
    return usual() | {
        "specs": fzero.specs_of(full, Sharded("data")),
        "loss_fn": lambda x: x.sum(),
        "shards_W": full.view(4, 2),
    }


SETUPS: dict[str, Callable[[], Names]] = {
    "# move: gather, then shard": by_hand,
    "window = step.begin": in_parts,
    "ranks = fzero.comms.Stacked": stacked,
    "ema = ": lambda: (
        (names := usual())
        | {"ema": optree.tree_map(torch.clone, names["step"].weights(names["state"]))}
    ),
    "step = fzero.make_train_step(model, cfg)  # or": lambda: (
        usual() | {"batch": torch.randn(64, 2, 8)}
    ),
    "old = ": lambda: (
        (names := usual())
        | {
            "state": fzero.make_train_step(
                names["model"], names["cfg"] | {"zero_optimization": {"stage": 1}}
            ).init()
        }
    ),
    "hook = ": lambda: usual() | {"grads_P": torch.randn(256), "axis": fzero.join()},
    "placements = ": lambda: (
        (names := usual())
        | {"cfg": names["cfg"] | {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}}
    ),
    "class MyMachine": lambda: usual() | {"my_optimizer": fzero.sgd},
}
"""How a piece of code that begins so gets its names, if not as usual."""


@pytest.mark.long
@pytest.mark.parametrize("page, block", fragments(), ids=lambda value: getattr(value, "stem", ""))
def test_a_piece_of_code_runs(
    page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    zero = {"stage": 2}
    (tmp_path / "config.json").write_text(json.dumps({"zero_optimization": zero}))
    setup = next((make for start, make in SETUPS.items() if block.text.startswith(start)), usual)
    exec(compile(block.text, page.name, "exec"), setup())
