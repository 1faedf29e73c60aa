"""DeepSpeed's hybrid engine and rollouts: the same tokens as a plain model, and
training that does not notice.
"""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_generating import ChatLinear, gpt2, greedy, ids, settings
from torch import nn

import fzero
from fzero import ConfigError, ConfigWarning
from fzero.deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from fzero.deepspeed.runtime.rollout import (
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)


def _engine(stage: int, model: Any = None, **hybrid: Any) -> Any:
    block = {"hybrid_engine": {"enabled": True, **hybrid}}
    return fzero.initialize(model=model or gpt2(), config={**settings(stage), **block})[0]


def _loop(stage: int, pinned: bool, generates: bool) -> Any:
    engine = _engine(stage, pin_parameters=pinned)
    assert isinstance(engine, DeepSpeedHybridEngine)
    tokens, expected = [], []
    for index in range(3):
        if generates:
            engine.eval()
            num_new = 3 + (engine.train_step.rank if pinned else 0)
            tokens.append(greedy(engine.module, ids(index), num_new))
            plain = gpt2()
            plain.load_state_dict(engine.module_state_dict())
            expected.append(greedy(plain, ids(index), num_new))
        engine.train()
        batch = ids(10 + 2 * index + engine.train_step.rank)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    return tokens, expected, engine.module_state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_module_generates_a_plain_models_tokens_and_training_does_not_notice(
    ranks: RankPool, stage: int, pinned: bool
) -> None:
    without = ranks(2, _loop, stage, pinned, False)[0][2]
    for tokens, expected, weights in ranks(2, _loop, stage, pinned, True):
        assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))
        assert all(torch.equal(weights[name], without[name]) for name in without)


def test_eval_reports_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    engine = _engine(1)
    engine.eval()
    assert "end to end" not in capsys.readouterr().out  # nothing was generated yet
    engine.generate(ids(1), max_new_tokens=2, pad_token_id=0)
    engine.train()
    engine.eval()
    found = (
        r"end to end .* s: gather .* s \(\d+%\), generate .*, training .*, other .*; .* "
        r"samples per second"
    )
    assert re.search(found, capsys.readouterr().out)


def test_limits_and_wrong_values_are_named() -> None:
    engine = _engine(1, max_out_tokens=8)
    with pytest.raises(
        ValueError, match=r"hybrid_engine.max_out_tokens: must be at least .* answer, 9, got 8"
    ):
        engine.generate(ids(1), max_new_tokens=5)
    with pytest.raises(
        ConfigError,
        match=r"hybrid_engine.inference_tp_size: must be 1, got 2: no rank is tensor-parallel",
    ):
        _engine(1, inference_tp_size=2)
    with pytest.warns(ConfigWarning, match="enable_cuda_graph: has no effect"):
        _engine(1, enable_cuda_graph=True)
    with pytest.raises(
        ValueError, match=r"engine.generate: the module must have `generate`, and is a Linear"
    ):
        _engine(1, nn.Linear(2, 2)).generate(ids(1))


def test_a_copy_of_the_module_has_its_own_generate() -> None:
    engine = _engine(1)
    other = copy.deepcopy(engine.module)
    assert "generate" not in other.__dict__ or other.generate.__self__ is other
    assert torch.equal(greedy(other, ids(1)), greedy(engine.module, ids(1)))


def test_a_module_has_its_own_generate_again_after_destroy() -> None:
    engine = _engine(1)
    expected = greedy(engine.module, ids(1))
    engine.destroy()
    assert torch.equal(greedy(engine.module, ids(1)), expected)


def test_lora_is_merged_in_copies_alone() -> None:
    engine = _engine(1, nn.Sequential(ChatLinear(8), ChatLinear(8)))
    before = engine.module_state_dict()
    engine.fuse_lora_weight()
    assert engine.is_lora_fused and len(engine.all_lora_params) == 2
    assert engine.all_lora_params[0][3] is engine.module[0].weight
    engine.unfuse_lora_weight_non_pinned()
    assert not engine.is_lora_fused
    engine.fuse_lora_weight()
    engine.unfuse_lora_weight()
    assert not engine.is_lora_fused
    layers = [engine.module[0], engine.module[1]]
    assert [[id(p) for p in own] for own in engine.layer_params] == [
        [id(p) for p in one.parameters()] for one in layers
    ]
    assert [len(own) for own in engine.layer_lora_params] == [3, 3]
    assert engine.layer_lora_params[1][:2] == [
        layers[1].lora_right_weight,
        layers[1].lora_left_weight,
    ]
    engine.retake_inference_cache()
    engine.release_inference_cache()
    with pytest.raises(
        RuntimeError, match=r"^engine.prepare_shared_prefill: .* num_return_sequences=3"
    ):
        engine.prepare_shared_prefill(2, 3, 4)
    assert all(
        torch.equal(value, before[name]) for name, value in engine.module_state_dict().items()
    )


# --- rollouts -------------------------------------------------------------------------------------


def _rolled(stage: int) -> Any:
    engine = _engine(stage)
    tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=0)
    rollout = build_rollout(
        SimpleNamespace(engine="hybrid_engine", enable_profiling=True), engine, tokenizer
    )
    torch.manual_seed(3 + engine.train_step.rank)
    request = RolloutRequest(ids(1), torch.ones_like(ids(1)))
    drawn = rollout.generate(request, SamplingConfig(8, n_samples_per_prompt=3))
    likeliest = rollout.generate(request, SamplingConfig(4, temperature=0))
    assert rollout.get_last_profile()["num_generated_tokens"] == likeliest.input_ids[:, 4:].numel()
    rollout.sync_weights(1)
    rollout.shutdown()
    return drawn, likeliest, engine.module.training


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rollout_answers_each_prompt_and_ends_at_the_first_end(
    ranks: RankPool, stage: int
) -> None:
    found: list[tuple[RolloutBatch, RolloutBatch, bool]] = ranks(2, _rolled, stage)
    for drawn, likeliest, trains in found:
        assert trains and drawn.batch_size == 6 and likeliest.batch_size == 2
        assert torch.equal(drawn.input_ids[:, :4], ids(1).repeat_interleave(3, 0))
        for row, mask, start in zip(
            drawn.input_ids, drawn.attention_mask, drawn.response_start_idx, strict=True
        ):
            answer, kept = row[start:], mask[start:].bool()
            assert kept[0] and (answer[~kept] == 0).all() and not (answer[kept][:-1] == 0).any()
    # ranks draw different samples
    assert not torch.equal(found[0][0].input_ids, found[1][0].input_ids)
    assert torch.equal(found[0][1].input_ids, found[1][1].input_ids)


def test_what_a_rollout_does_not_use_is_said() -> None:
    cfg = SimpleNamespace(engine="hybrid_engine", use_graph_capture=True, use_shared_prefill=True)
    with pytest.warns(ConfigWarning, match="has no effect") as warned:
        made = build_rollout(cfg, _engine(1), SimpleNamespace(pad_token_id=0, eos_token_id=None))
    assert [str(w.message).partition(":")[0] for w in warned] == [
        "use_graph_capture",
        "use_shared_prefill",
    ]
    assert made.use_graph_capture and not made.enable_profiling  # type: ignore[attr-defined]


def test_wrong_shapes_of_a_rollout_are_named() -> None:
    with pytest.raises(ValueError, match=r"RolloutRequest.prompt_ids: must have two dimensions"):
        RolloutRequest(torch.zeros(3), torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"RolloutBatch.response_start_idx: must have shape \(2,\)"
    ):
        RolloutBatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"RolloutConfig.engine: must be 'hybrid_engine', got 'vllm'"
    ):
        build_rollout(RolloutConfig("vllm"), _engine(1), SimpleNamespace(pad_token_id=0))
