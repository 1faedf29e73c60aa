"""Predicted pipelines: costs of layers, stages that fit, the command line, and the
picture.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fzero
from fzero.__main__ import main
from fzero.common.timelines import draw_timelines
from fzero.config.config import ConfigError
from fzero.estimation import estimate_layers, fit, plan_pipeline
from fzero.estimation.models import NamedModel, PlainGPT, named, sample_of
from fzero.estimation.pipelines import PipelinePlanner
from fzero.pipeline import (
    LayerCost,
    LayerSpec,
    PipelineModule,
    TiedLayerSpec,
    interleaved,
    plan_order,
    predict,
)
from fzero.pipeline.timeline import drawn, stored_over_time
from fzero.plans.machine_model import MachineModel
from fzero.profiling import measure_layers
from sharding import Mesh


def gpt(depth: int = 8) -> PlainGPT:
    with torch.device("meta"):
        return PlainGPT(depth, 128, 256)


@cache
def planner() -> PipelinePlanner:
    model = gpt()
    return PipelinePlanner(model, None, sample_of(model, 2, 64))


def test_costs_of_layers_add_up_to_those_of_the_trace() -> None:
    made, machine = planner(), MachineModel()
    layers = made.traced.of(1)
    assert layers.names == ("embedding", *(f"blocks.{i}" for i in range(8)), "norm..head")
    assert sum(layers.numels) == sum(p.numel() for p in made.traced.model.parameters())
    work = [one for event in made.traced.trace.events for one in event.work]
    seconds = sum(one.seconds(machine) for one in work)
    # a sum in another order
    assert sum(cost.seconds for cost in layers.costs) == pytest.approx(seconds)
    blocks = layers.costs[2:8]  # the backward of the first block includes that of the embedding
    assert len(set(blocks)) == 1
    # bf16 of 2 rows of 64 tokens
    assert {cost.output_nbytes for cost in layers.costs[:9]} == {2 * 64 * 128 * 2}


def test_the_peak_without_stages_is_that_of_the_trace() -> None:
    made = planner()
    alone = made.planned(1, 1, micro_batches=3)
    most = alone.nbytes - alone.timeline.state[0]
    # What is stored at the most, and the most that a layer holds besides: the two need not be at
    # one time.
    assert made.traced.trace.nbytes <= most <= 1.001 * made.traced.trace.nbytes
    assert alone.bubble == 0
    assert alone.timeline.sent == (0,)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zero_bubble", "interleaved:2"])
def test_a_planned_pipeline_has_the_parts_of_the_model(order: str) -> None:
    planned = planner().planned(4, 16, micro_batches=8, order=order)
    assert planned.layers.data == 4
    assert sum(planned.numel(stage) for stage in range(4)) == sum(planned.layers.numels)
    assert sum(planned.timeline.state) == sum(cost.state_nbytes for cost in planned.layers.costs)
    ideal = planned.order.micro_batches * sum(cost.seconds for cost in planned.layers.costs) / 4
    assert planned.timeline.seconds > ideal
    assert planned.bubble == pytest.approx(
        1 - ideal / planned.timeline.seconds
    )  # all stages compute all, and nothing else
    reported = str(planned)
    assert "4 stages × 4 data ranks = 16 ranks, 8 micro-batches" in reported
    assert f"Bubble {planned.bubble:.1%}" in reported
    assert (
        json.loads(json.dumps(planned.as_dict()))["by_stage"][0]["in_flight"]
        == planned.order.in_flight[0]
    )


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    made = planner()
    found = made.planned(3, 3, micro_batches=4)
    other = made.planned(3, 3, micro_batches=4, bounds=[0, 7, 8, 10])
    # messages take most of the time here
    slowest = [max(map(one.timeline.busy, range(3))) for one in (found, other)]
    assert slowest[0] < slowest[1]
    assert other.bounds == (0, 7, 8, 10)


def test_pipelines_that_cannot_be_are_refused_in_words() -> None:
    model, made = gpt(), planner()
    with pytest.raises(
        ConfigError, match=r"must be 0, 1 or 3 with a pipeline, got 2.*set stage to 1"
    ):
        plan_pipeline(
            model, {"zero_optimization": {"stage": 2}}, batch=None, stages=4, world_size=8
        )
    with pytest.raises(ConfigError, match="stages must divide the number of ranks, 9, got 4"):
        made.planned(4, 9)
    with pytest.raises(
        ConfigError, match=r"at most the number of layers, 10, got 16; use fewer stages"
    ):
        made.planned(16, 16)
    with pytest.raises(ValueError, match="nbytes must hold the largest part, which has at least"):
        made.planned(4, 8, device_nbytes=1e6)
    with pytest.raises(ValueError, match=r"mesh: must have no axis 'pipe'.*staged_plan"):
        fzero.plan(model, {}, mesh=Mesh.of(pipe=2, data=2))
    with pytest.raises(ValueError, match="bounds must be 5 integers"):
        made.planned(4, 8, bounds=[0, 10])


@pytest.mark.long
def test_fit_proposes_the_pipelines_that_fit_fastest_first() -> None:
    model = gpt()
    found = fit(model, world_size=8, device_nbytes=20e6, batch=sample_of(model, 2, 64))
    assert found.pipelines
    assert all(one.nbytes <= 20e6 for one in found.pipelines)
    assert [one.seconds for one in found.pipelines] == sorted(
        one.seconds for one in found.pipelines
    )
    assert {one.order.stages * one.layers.data for one in found.pipelines} == {8}
    # As many samples in a step.
    assert {one.order.micro_batches // one.order.stages for one in found.pipelines} == {1}
    assert {one.checkpoints for one in found.pipelines} == {False, True}
    assert "As a pipeline, with as many samples in a step" in str(found)
    assert found.as_dict()["pipelines"][0]["stages"] == found.pipelines[0].order.stages
    assert (
        fit(model, {"zero_optimization": {"stage": 2}}, world_size=8, device_nbytes=1e9).pipelines
        == ()
    )


def test_the_command_line_plans_and_draws_pipelines(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "stages.png"
    words = [
        "plan",
        "--model",
        "1M",
        "--world",
        "6",
        "--sequence",
        "32",
        "--pipe",
        "3",
        "--order",
        "gpipe",
        "--micro-batches",
        "5",
    ]
    assert main([*words, "--picture", str(picture)]) == 0
    assert "GPipe: 3 stages × 2 data ranks = 6 ranks, 5 micro-batches" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 5
    assert main([*words, "--fit", "1KB"]) == 1
    assert "nbytes must hold the largest part" in capsys.readouterr().err
    for wrong, text in (
        ("plan --model 1M --order gpipe", "--order is for a pipeline: give --pipe P"),
        ("plan --model 1M --pipe 2", "--pipe needs the work of each layer: give a batch"),
    ):
        with pytest.raises(SystemExit):
            main(wrong.split())
        assert text in capsys.readouterr().err


@pytest.mark.long
def test_seventy_billion_parameters_on_eight_stages_of_128_ranks() -> None:
    """1F1B with m = 64: bubble (p - 1)/(m + p - 1) = 9.9 % and what layers cannot
    divide; state 4 + 12/128 bytes a parameter.
    """
    found: NamedModel = named("70B")
    planned = plan_pipeline(
        found.model,
        stages=8,
        world_size=1024,
        batch=sample_of(found.model, 1, 4096),
        micro_batches=64,
    )
    assert 7 / 71 <= planned.bubble <= 7 / 71 + 0.03
    assert planned.order.in_flight == (8, 7, 6, 5, 4, 3, 2, 1)
    for stage in range(8):
        # padding
        assert planned.timeline.state[stage] / planned.numel(stage) == pytest.approx(
            4 + 12 / 128, rel=1e-3
        )
    assert planned.nbytes == planned.timeline.nbytes[0]
    assert sum(planned.numel(stage) for stage in range(8)) == found.num_params
    assert planned.timeline.sent[3] == 2 * 64 * 4096 * 8192 * 2  # 2 m (bytes of a boundary)


# --- layers of a PipelineModule -------------------------------------------------------------------


def head(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.T  # type: ignore[operator,union-attr]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def pipeline(**kwargs: Any) -> PipelineModule:
    layers = [
        TiedLayerSpec("embed", nn.Embedding, 50, 32),
        LayerSpec(nn.Linear, 32, 32),
        torch.tanh,
        LayerSpec(nn.Linear, 32, 1024),
        LayerSpec(nn.Linear, 1024, 32),
        TiedLayerSpec("embed", nn.Embedding, 50, 32, forward_fn=head),
    ]
    return PipelineModule(layers, **{"num_stages": 2, "loss_fn": loss_fn} | kwargs)


def test_estimated_costs_cut_a_pipeline() -> None:
    tokens = torch.empty(4, 16, dtype=torch.int64, device="meta")
    costs = estimate_layers(pipeline(), batch=(tokens, tokens))
    assert len(costs) == 6
    assert costs[2] == LayerCost(0.0, 0.0, output_nbytes=4 * 16 * 32 * 2)
    assert [cost.output_nbytes for cost in costs[:5]] == [4096, 4096, 4096, 4 * 16 * 1024 * 2, 4096]
    assert all(cost.forward > 0 and cost.stored_nbytes > 0 for cost in (costs[1], *costs[3:]))
    bounds = pipeline(partition_method=costs).partition(2)
    slowest = max(sum(cost.seconds for cost in costs[a:b]) for a, b in pairwise(bounds))
    assert slowest == min(
        max(sum(cost.seconds for cost in part) for part in (costs[:cut], costs[cut:]))
        for cut in range(1, 6)
    )
    with pytest.raises(ValueError, match="loss_fn: a planned pipeline must have one, got None"):
        estimate_layers(pipeline(loss_fn=None), batch=(tokens, tokens))


def test_measured_costs_are_those_of_the_layers() -> None:
    tokens = torch.arange(64).reshape(4, 16) % 50
    costs = measure_layers(pipeline(), (tokens, tokens))
    assert len(costs) == 6
    assert [cost.output_nbytes for cost in costs[:5]] == [8192, 8192, 8192, 4 * 16 * 1024 * 4, 8192]
    assert [cost.state_nbytes for cost in costs] == [
        16 * n for n in (1600, 1056, 0, 33792, 32800, 1600)
    ]
    assert costs[3].stored_nbytes == 8192  # its input
    assert costs[4].stored_nbytes == 4 * 16 * 1024 * 4
    assert all(cost.forward > 0 for cost in costs)
    assert pipeline(partition_method=costs).parts[-1] == 6


# --- pictures -------------------------------------------------------------------------------------


def test_the_picture_has_a_bar_for_every_event_and_what_is_stored() -> None:
    order = plan_order(interleaved(2), 2, 4)
    timeline = predict(order, [LayerCost(1, 2, stored_nbytes=10_000_000)] * 4)
    (axes,) = draw_timelines([drawn(timeline)], needed_by="a test").axes
    bars = list(axes.patches)
    assert len(bars) == sum(len(order.compute(stage)) for stage in range(2))
    assert sum(bar.get_width() for bar in bars) == pytest.approx(
        2 * timeline.seconds * (1 - timeline.bubble)
    )
    assert [text.get_text().split("\n")[1] for text in axes.get_yticklabels()] == ["50 MB", "30 MB"]
    for stage in range(2):
        assert (
            max(nbytes for _, nbytes in stored_over_time(timeline, stage)) == timeline.stored[stage]
        )
