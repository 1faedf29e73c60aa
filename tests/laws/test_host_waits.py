"""How often the host waits for the device in a step that has learned its order: never,
or a known number for a known reason.

On the pretended card a wait is an operator whose result the host reads, a copy that
blocks, or any other wait after which the compute stream has nothing left to do. On a
card PyTorch reports them (`set_sync_debug_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from devices import on_any_card, waits_of_the_host, where
from torch import Tensor, nn
from training import Odd, Plain, make, tokens, vectors

import fzero

BF16, FP16 = (
    {"bf16": {"enabled": True, "auto_cast": True}},
    {"fp16": {"enabled": True, "auto_cast": True}},
)
OVERFLOWS = {
    "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 40, "hysteresis": 1}
}
ALONE = {
    "bf16": BF16["bf16"] | {"bf16_master_weights_and_grads": True, "stochastic_rounding": True}
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16 alone": ALONE,
    "fp16": FP16,
    "fp16, overflows": OVERFLOWS,
    "autocast": {"torch_autocast": {"enabled": True}},
}


class Normed(Plain):
    """Has buffers that its forward changes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(self.norm(x.float()).to(x.dtype), 0.1), y)


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A sum of losses, and its weight."""
    x, y = batch
    return model(x, y) * len(x), torch.full((), float(len(x)), device=x.device)


def small(number: int) -> Any:
    return vectors(number, 8, 8)


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    keys: Mapping[str, Any] = NOTHING
    model: Callable[[], nn.Module] = lambda: Plain(8, 2)
    data: Callable[[int], Any] = small
    options: Mapping[str, Any] = NOTHING


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
CASES: dict[str, Case] = {
    "plain": Case(),
    "clipping": Case({"gradient_clipping": 0.1}),
    "a schedule": Case({"scheduler": WARMUP}),
    "accumulation": Case({"gradient_accumulation_steps": 4}),
    "all of these": Case(
        {"gradient_clipping": 0.1, "scheduler": WARMUP, "gradient_accumulation_steps": 2}
    ),
    "odd parameters": Case({"gradient_clipping": 1.0}, Odd, lambda number: tokens(number, 8)),
    "buffers and random numbers": Case({}, Normed),
    "a sum": Case({}, options={"loss_fn": weighted}),
    "kept state": Case({}, options={"donate": False}),
    "SGD": Case({"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}),
    "Lion": Case({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}),
    "Lamb": Case({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}),
    "Muon": Case({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}),
}
AdamW = {"type": "AdamW", "params": {"lr": 1e-2}}


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    with on_any_card():
        yield


def learned(stage: int, precision: str, case: Case, **options: Any) -> list[str]:
    """What the host waits for in the third step."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {"optimizer": AdamW, "zero_optimization": zero} | PRECISIONS[precision] | dict(case.keys)
    step = fzero.make_train_step(make(case.model), cfg, **case.options, **options)
    state, batch = step.init(), case.data(0)
    for _ in range(2):
        state, _ = step(state, batch)
    with waits_of_the_host() as found:
        step(state, batch)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(4))
def test_a_learned_step_never_waits_for_the_device(stage: int, precision: str, case: str) -> None:
    assert learned(stage, precision, CASES[case]) == []


# --- known numbers --------------------------------------------------------------------------------

ITEM, COPY = "aten._local_scalar_dense.default", "aten._to_copy.default"


def check(found: list[str], operator: str, number: int) -> None:
    """Raises unless the host has waited so often, for that operator. (On a pretended
    card each wait is listed twice if the device then has nothing left to do. A card
    also lists waits for copies between the memories, by whose events pinned memory is
    used again.)"""
    if where() == "cuda":
        assert len([line for line in found if "torch/cuda/streams.py" not in line]) == number, found
    else:
        assert set(found) <= {operator} and len(found) in (number, 2 * number), found


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("quantities", [("optimizer",), ("optimizer", "param")], ids=str)
def test_an_update_on_the_host_waits_for_the_numbers_that_it_multiplies_by(
    precision: str, quantities: tuple[str, ...]
) -> None:
    """The factor of the gradients, and whether the update is skipped: it needs the
    gradients then, anyway.
    """
    host = {f"offload_{quantity}": {"device": "cpu", "pin_memory": True} for quantity in quantities}
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0} | host}
    number = 1 if precision == "fp32" else 2
    check(learned(3, precision, Case(zero)), COPY, number)
    found = learned(3, precision, Case(zero | {"gradient_accumulation_steps": 4}))
    ends = [
        line for line in found if line == "Stream"
    ]  # of micro-batches: the device adds gradients to those in host memory
    assert where() == "cuda" or len(ends) == 3
    check([line for line in found if line != "Stream"], COPY, number)


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_learned_step_of_compiled_blocks_never_waits(stage: int, precision: str) -> None:
    how = {"compile": "block", "compile_backend": "inductor" if where() == "cuda" else "aot_eager"}
    assert learned(stage, precision, CASES["all of these"], **how) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_in_one_graph_waits_to_know_how_many_updates_were_skipped(precision: str) -> None:
    """It reads the learning rate when it begins; where a step may be skipped, that is
    when the one before has ended.
    """
    if where() != "cuda":
        pytest.skip("a capture makes tensors in C++, which are the processor's on a pretended card")
    check(
        learned(3, precision, CASES["all of these"], compile="step"),
        ITEM,
        0 if precision == "fp32" else 1,
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", ["plain", "all of these"])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_reads_an_overflow_while_the_device_updates(
    stage: int, precision: str, case: str
) -> None:
    """Its scheduler steps unless the update is skipped. The host waits for the backward
    then, but the device has work left.
    """
    keys = dict(CASES[case].keys) | PRECISIONS[precision]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {
        "optimizer": AdamW,
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": zero,
    } | keys
    engine, *_ = fzero.initialize(model=make(CASES[case].model), config=cfg)

    def update() -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch))
            engine.step()

    batch = small(0)
    for _ in range(2):
        update()
    with waits_of_the_host() as found:
        update()
    assert found == []
