"""The updates of equal flat buffers are traced once, and the graph is the one that
holds each update as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.graph import step_functions
from fzero.graph.repeats import Repeats

NUM_BLOCKS, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.linear = layer_idx, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) / (1 + self.layer_idx)


def equal() -> nn.Sequential:
    return nn.Sequential(*(Block(0) for _ in range(NUM_BLOCKS)))


def other_attributes() -> nn.Sequential:
    return nn.Sequential(*map(Block, range(NUM_BLOCKS)))


def a_shared_weight() -> nn.Sequential:
    model = equal()
    model[3].linear.weight = model[1].linear.weight
    return model


def a_hook() -> nn.Sequential:
    model = equal()
    model[2].register_forward_hook(lambda module, given, result: 3 * result)
    return model


def frozen_and_wider() -> nn.Sequential:
    model = equal()
    model[1].requires_grad_(False)
    model[2].linear = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))
    return model


MODELS = {
    made.__name__: made
    for made in (equal, other_attributes, a_shared_weight, a_hook, frozen_and_wider)
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
FP32: dict[str, Any] = {"gradient_clipping": 0.1}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True}}


def graph_of(
    make_model: Callable[[], nn.Module], stage: int, keys: dict[str, Any], optimizer: dict[str, Any]
) -> str:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": optimizer,
        "zero_optimization": zero,
        **keys,
    }
    dtype = torch.bfloat16 if "bf16" in keys else torch.float16 if "fp16" in keys else torch.float32
    step = fzero.make_train_step(
        make_model(), cfg, loss_fn=lambda m, x: m(x.to(dtype)).float().square().mean(), units=["?"],
        mesh=fzero.comms.AbstractAxis("data", 2),
    )  # fmt: skip
    (captured,) = step.trace(torch.randn(4, WIDTH))
    return "\n".join(
        f"{node.format_node()} {node.meta.get('custom')}" for node in captured.graph.nodes
    )


class Calls(Repeats):
    """Counts the calls that are traced."""

    num_traced = num_calls = 0

    def __call__(self, function: Callable[..., None], *args: Any, **how: Any) -> None:
        def counted(*tensors: Tensor) -> None:
            Calls.num_traced += 1
            function(*tensors)

        Calls.num_calls += 1
        super().__call__(counted, *args, **how)


class Always(Repeats):
    """Traces every call."""

    def __call__(self, function: Callable[..., None], tensors: Any, *, kind: object) -> None:
        super().__call__(function, tensors, kind=object())


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model", "stage", "keys", "optimizer"),
    [
        *((model, 3, BF16, ADAMW) for model in MODELS),
        ("equal", 0, FP32, ADAMW),
        ("equal", 1, FP16, ADAMW),
        (
            "equal",
            2,
            FP32,
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}},
        ),
        ("equal", 3, FP32, {"type": "Adagrad", "params": {"lr": 0.1}}),
    ],
)
def test_a_repeated_update_has_the_nodes_that_its_own_trace_has(
    model: str,
    stage: int,
    keys: dict[str, Any],
    optimizer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = MODELS[model], stage, keys, optimizer
    monkeypatch.setattr(step_functions, "Repeats", Always)
    expected = graph_of(*args)
    monkeypatch.setattr(step_functions, "Repeats", Calls)
    Calls.num_traced = Calls.num_calls = 0
    assert graph_of(*args) == expected
    num_kinds = {
        "equal": 1,
        "other_attributes": 1,
        "a_hook": 1,
        "a_shared_weight": 2,
        "frozen_and_wider": 2,
    }[model]
    assert (Calls.num_traced, Calls.num_calls) == (
        num_kinds,
        NUM_BLOCKS - (model == "frozen_and_wider"),
    )


def test_an_update_that_depends_on_its_buffer_is_traced_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounded = {"enabled": True, "bf16_master_weights_and_grads": True, "stochastic_rounding": True}
    monkeypatch.setattr(step_functions, "Repeats", Calls)
    Calls.num_traced = Calls.num_calls = 0
    graph_of(equal, 3, {"bf16": rounded}, ADAMW)
    assert Calls.num_traced == Calls.num_calls == NUM_BLOCKS
