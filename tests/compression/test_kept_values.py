"""Compressed values are computed once in a step where there is room for them, and plans
count their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from compressing import ALL, data, net, settings, technique, trained
from torch import Tensor

import fzero
from fzero.estimation import compare_plans
from fzero.runtime.param_views import ParamViews

QUANTIZED = {
    "weight_quantization": technique({"start_bits": 4, "target_bits": 4}, ["mlp", "value", "head"])
}
NO_ROOM = {"stage3_max_live_parameters": 2 * 400}
"""Holds two gathered units."""


def _watched(
    monkeypatch: pytest.MonkeyPatch, stage: int, num_micro: int, zero: Mapping[str, Any]
) -> tuple[list[str], int, list[float]]:
    """The names whose values were computed in one step, the most bytes of values at
    once, and the losses of two.
    """
    computed, most = list[str](), [0]
    compute, of = ParamViews._computed, ParamViews.of

    def counted(
        self: ParamViews, names: list[str], full: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        computed.extend(names)
        return compute(self, names, full)

    def measured(
        self: ParamViews, unit: Any, full: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        found = of(self, unit, full)
        held = (x for values in self._by_unit.values() for x in values.values())
        most[0] = max(most[0], sum(x.numel() * x.element_size() for x in held))
        return found

    monkeypatch.setattr(ParamViews, "_computed", counted)
    monkeypatch.setattr(ParamViews, "of", measured)
    cfg = _config(stage, num_micro, zero)
    step = fzero.make_train_step(net(), cfg)
    state, losses = step.init(), []
    for index in range(2):
        computed.clear()
        state, metrics = step(state, data(index))
        losses.append(float(metrics.loss))
    monkeypatch.undo()
    return computed, most[0], losses


def _config(stage: int, num_micro: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {
        "train_micro_batch_size_per_gpu": 16 // num_micro,
        "gradient_accumulation_steps": num_micro,
    }
    cfg: dict[str, Any] = settings(QUANTIZED, stage, **sizes)
    return cfg | {"zero_optimization": {**cfg["zero_optimization"], **zero}}


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_value_is_computed_once_in_a_step(
    monkeypatch: pytest.MonkeyPatch, stage: int, num_micro: int
) -> None:
    computed, _, _ = _watched(monkeypatch, stage, num_micro, {})
    assert len(computed) == len(set(computed)) == 7  # 2 blocks with 3 weights each, and the head's


def test_without_room_a_value_is_computed_for_each_gather_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, most, losses = _watched(monkeypatch, 3, 1, NO_ROOM)
    _, kept, expected = _watched(monkeypatch, 3, 1, {})
    assert len(computed) > len(set(computed)) and most < kept
    assert losses == expected


@pytest.mark.parametrize("zero", [{}, NO_ROOM], ids=["room", "no room"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_planned_bytes_of_compressed_values_are_those_of_a_running_step(
    monkeypatch: pytest.MonkeyPatch, stage: int, zero: dict[str, Any]
) -> None:
    _, most, _ = _watched(monkeypatch, stage, 1, zero)
    model = net()
    planned = compare_plans(
        model, _config(stage, 1, zero), batch=data(0), loss_fn=lambda m, b: m(*b), device="cpu"
    )
    assert most == planned[planned.given].step.most("views") > 0


def test_a_model_without_compression_has_no_such_bytes() -> None:
    planned = compare_plans(
        net(), {"optimizer": {"type": "SGD"}, "train_micro_batch_size_per_gpu": 16}, batch=data(0)
    )
    assert all("views" not in row.held for one in planned.columns for row in one.step.rows)


@pytest.mark.parametrize("limit", [10**9, 1000])
def test_all_techniques_have_the_same_bits_with_and_without_room(limit: int) -> None:
    cfg = settings(ALL, 3, gradient_clipping=0)
    cfg["zero_optimization"] |= {"stage3_max_live_parameters": limit}
    step = fzero.make_train_step(net(), cfg)
    state, losses = step.init(), []
    for index in range(4):
        state, metrics = step(state, data(index))
        losses.append(float(metrics.loss))
    assert losses == trained(ALL, 0)[0]
