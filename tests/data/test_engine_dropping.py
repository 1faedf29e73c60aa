"""Random layer-token dropping through the engine, under DeepSpeed's names, and in
models of Transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_token_dropping import BATCH, LENGTH, SGD, Layer, Net, close, net, tokens, trained
from training import make

import fzero
from fzero.config.config import ConfigError, ConfigWarning
from fzero.data import RandomLTD, fixed_linear, theta
from fzero.deepspeed.runtime.data_pipeline.data_routing.helper import (
    convert_to_random_ltd,
    save_without_random_ltd,
)

BLOCK = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [2, 1],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "layer_token_lr_schedule": {"enabled": False},
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
    },
}


def settings(stage: int, **block: Any) -> dict[str, Any]:
    routing = {"enabled": True, "random_ltd": {**BLOCK, **block}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    efficiency = {"data_efficiency": {"enabled": True, "seed": 1234, "data_routing": routing}}
    return {
        "zero_optimization": zero,
        "optimizer": SGD,
        "gradient_clipping": 0,
        "train_batch_size": BATCH,
        **efficiency,
    }


def engine_of(stage: int = 0, **block: Any) -> Any:
    return convert_to_random_ltd(
        fzero.initialize(model=make(Net), config=settings(stage, **block))[0], Layer
    )


def run(engine: Any, first: int, last: int) -> list[float]:
    world, losses = engine.world_size, []
    for index in range(first, last):
        loss = engine(tokens(index).view(world, -1, LENGTH)[engine.global_rank])
        engine.backward(loss)
        engine.step()
        losses.append(engine.metrics.loss.item())
    return losses


def test_an_engine_trains_as_the_step_and_counts_layer_tokens() -> None:
    engine = engine_of()
    assert run(engine, 0, 6) == trained()
    scheduler = engine.random_ltd_scheduler
    assert (
        engine.random_ltd_enabled()
        and scheduler.get_random_ltd_layer_num() == 2
        and scheduler.model_layer_num == 4
    )
    kept = [2, 2, 4, 6, 8, 8]
    assert scheduler.get_current_seq() == 8
    assert scheduler.state["consumed_layer_tokens"] == sum(BATCH * (r * 2 + 8 * 2) for r in kept)
    assert save_without_random_ltd(engine).keys() == make(Net).state_dict().keys()


def test_a_resumed_engine_goes_on_with_the_tokens_and_their_count(tmp_path: Path) -> None:
    engine = engine_of(2)
    run(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    resumed = engine_of(3)
    resumed.load_checkpoint(tmp_path)
    assert resumed.random_ltd_scheduler.state_dict() == engine.random_ltd_scheduler.state_dict()
    assert run(resumed, 3, 6) == run(engine, 3, 6)
    assert resumed.random_ltd_scheduler.state_dict() == engine.random_ltd_scheduler.state_dict()


def _on_ranks(stage: int) -> list[float]:
    return run(engine_of(stage), 0, 4)


def test_the_batch_of_all_ranks_decides(ranks: RankPool) -> None:
    found = ranks(2, _on_ranks, 3)
    assert found[0] == found[1] and close(found[0], trained()[:4])


def test_an_overflow_counts_for_curricula_and_not_for_kept_tokens() -> None:
    """DeepSpeed's `global_steps` counts skipped steps; a state's counter of updates
    does not.
    """
    keys = settings(0) | {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    keys |= {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    engine = convert_to_random_ltd(fzero.initialize(model=make(Net), config=keys)[0], Layer)
    for factor in (1.0, float("inf"), 1.0):
        engine.data_arguments()
        engine.backward(engine.module(tokens(0)) * factor)
        engine.step()
    assert (engine.global_steps, engine.skipped_steps, int(engine.state.step)) == (3, 1, 2)
    assert engine.get_pld_theta() == theta(2, limit=0.5, gamma=0.1)
    assert (
        engine.random_ltd_scheduler.state["current_steps"] == 1
    )  # of the last forward: one update was applied before it


def test_what_is_forgotten_or_wrong_is_said() -> None:
    engine = fzero.initialize(model=make(Net), config=settings(0))[0]
    with pytest.warns(ConfigWarning, match="because convert_to_random_ltd was not called"):
        engine(tokens(0))
    with pytest.raises(
        ConfigError, match="must be of 0 … 3, the positions among the 4 modules of Layer, got 11"
    ):
        engine_of(random_ltd_layer_id=[1, 11])
    with pytest.raises(
        ConfigError,
        match="random_ltd_layer_num: must be the number of layers in random_ltd_layer_id, 2, got 3",
    ):
        engine_of(random_ltd_layer_num=3)
    with pytest.raises(ConfigError, match=r"layer_token_lr_schedule\.enabled: must be false"):
        engine_of(layer_token_lr_schedule={"enabled": True})
    with pytest.warns(
        ConfigWarning, match="no multiple of seq_per_step 4, so that 0 tokens are kept at first"
    ):
        numbers = {"require_steps": 2, "seq_per_step": 4}
        engine_of(random_ltd_schedule={"min_value": 2, "max_value": 8, "schedule_config": numbers})
    with pytest.raises(ConfigError, match="min_value: must be at most max_value, 8, got 9"):
        engine_of(random_ltd_schedule={"min_value": 9, "max_value": 8, "schedule_config": numbers})
    with pytest.raises(ValueError, match="order must be 'batch_seq' or 'seq_batch', got 'seq'"):
        RandomLTD([0], fixed_linear(4, 8, steps=2, multiple=4), order="seq")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers must name each layer once, got \[0, 0\]"):
        RandomLTD([0, 0], fixed_linear(4, 8, steps=2, multiple=4))
    with pytest.raises(ConfigError, match="total_layer_num: is required"):
        engine_of(total_layer_num=None)
    with pytest.raises(ConfigError, match="model must be the engine, got Net"):
        convert_to_random_ltd(net(None), Layer)  # type: ignore[arg-type]
    plain = fzero.initialize(model=make(Net), config={"optimizer": SGD})[0]
    with pytest.raises(
        ConfigError, match="needs data_efficiency, data_routing and random_ltd enabled"
    ):
        convert_to_random_ltd(plain, Layer)


def test_a_backward_through_several_forwards_that_runs_layers_again_says_so() -> None:
    model = make(Net)
    for group in model.groups:
        group.checkpoints = True
    engine = convert_to_random_ltd(fzero.initialize(model=model, config=settings(0))[0], Layer)
    with pytest.raises(RuntimeError, match=r"must be of one forward .*random_ltd.* got one of 2"):
        engine.backward(engine(tokens(0)) + engine(tokens(1)))


# --- models of Transformers -----------------------------------------------------------------------


def _gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), transformers.models.gpt2.modeling_gpt2.GPT2Block


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(
        config
    ), transformers.models.llama.modeling_llama.LlamaDecoderLayer


@pytest.mark.long
@pytest.mark.parametrize("make_model", [_gpt2, _llama])
@pytest.mark.parametrize("has_padding", [False, True])
def test_ordinary_models_train_with_dropped_tokens(make_model: Any, has_padding: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 31, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    if has_padding:
        mask[1, :4] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    losses: dict[Any, list[float]] = {}
    for lengths, again in ((None, False), (12, False), (6, False), (6, True)):
        torch.manual_seed(0)
        model, kind = make_model()
        if again:
            model.gradient_checkpointing_enable()
        if lengths is not None:
            schedule = fixed_linear(lengths, lengths, steps=1, multiple=1)
            RandomLTD(layers=[1], schedule=schedule, mask="attention_mask").wrap(model, kind)
        step = fzero.make_train_step(model, {"zero_optimization": {"stage": 3}, "optimizer": SGD})
        state, found = step.init(), []
        for _ in range(4):
            state, metrics = step(state, batch)
            found.append(metrics.loss.item())
        losses[lengths, again] = found
    assert losses[None, False] == losses[12, False]  # all tokens: the bits without
    assert losses[6, False] == losses[6, True] != losses[None, False]
    assert losses[6, False][-1] < losses[6, False][0]
