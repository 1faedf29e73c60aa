"""The law of the table of `transformers_models`: `compile="step"` trains each class as
a plain loop does.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from test_models import quietly
from transformers_models import TABLE

import fzero

RATE, NUM_STEPS = 2.0**-4, 2
SEED = int(os.environ.get("ZOO_SEED", "0"))
DRAWN = random.Random(SEED).sample(sorted(TABLE), 12)
"""Inductor takes up to a minute for each; `make nightly` draws others."""

FAST = [
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "BertForMaskedLM",
    "ViTForImageClassification",
]


def curves(name: str, stage: int, backend: str) -> tuple[list[Any], list[Any]]:
    """The losses and norms of a plain loop, and those of a step."""
    row, expected, found = TABLE[name], list[Any](), list[Any]()
    torch.manual_seed(0)
    model = quietly(row.make)()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**row.batch(index)).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        expected.append((loss.item(), norm.item()))
        optimizer.step()
    torch.manual_seed(0)
    cfg = {
        "optimizer": {"type": "SGD", "params": {"lr": RATE}}, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    step = fzero.make_train_step(quietly(row.make)(), cfg, compile="step", compile_backend=backend)  # type: ignore[arg-type]
    state = step.init()
    for index in range(NUM_STEPS):
        state, metrics = step(state, row.batch(index))
        found.append((metrics.loss.item(), metrics.grad_norm.item()))
    return expected, found


def check(name: str, stage: int, backend: str) -> None:
    """Fused kernels round otherwise, by less than 1e-4 of a loss or norm here."""
    expected, found = curves(name, stage, backend)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAST)
def test_some_classes_train_as_plainly_in_one_graph(name: str) -> None:
    check(name, 3, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_class_trains_as_plainly_in_one_graph(name: str, stage: int) -> None:
    check(name, stage, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["T5ForConditionalGeneration", *(n for n in DRAWN if n != "T5ForConditionalGeneration")]
)
def test_drawn_classes_train_as_plainly_under_inductor(name: str) -> None:
    check(name, 3, "inductor")
