"""The laws of training on models that nobody here wrote: tiny ones of transformers, and
a convnet with BatchNorm.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training import GLOBAL_BATCH, VOCABULARY, config, make, part, tokens, train, train_plainly

import fzero

Curve = list[tuple[float, float]]
Weights = dict[str, Tensor]
NUM_STEPS = 4
NUM_CLASSES = 5
# With an eps far above rounding, a gradient that differs in its last bits moves a weight by as
# little: Adam divides by the root of the second moment, and with the usual 1e-8 a gradient near
# zero is noise that becomes a whole step.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-3, fused=True)


def quietly(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Models tell of their generation defaults when they are built."""

    def made() -> nn.Module:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        with contextlib.redirect_stdout(io.StringIO()):
            return make_model()

    return made


def tiny(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Makes a model of a class of transformers."""

    def made() -> Any:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(**sizes))

    return quietly(made)


OF_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
WIDTHS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LANGUAGE_MODELS = {
    "llama": tiny("LlamaForCausalLM", num_key_value_heads=1, **OF_TEXT, **LAYERS, **WIDTHS),
    "gpt2": tiny(
        "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        **OF_TEXT,
    ),
    "bert": tiny("BertForMaskedLM", **OF_TEXT, **LAYERS, **WIDTHS, **NO_DROPOUT),
    "t5": tiny(
        "T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, **OF_TEXT,
    ),
}  # fmt: skip
MODELS = LANGUAGE_MODELS | {
    "resnet": tiny(
        "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2],
        layer_type="basic", num_labels=NUM_CLASSES,
    )
}  # fmt: skip


def text(step: int) -> dict[str, Tensor]:
    inputs, targets = tokens(step)
    return {"input_ids": inputs, "labels": targets}


def images(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, NUM_CLASSES, (GLOBAL_BATCH,), generator=generator)
    return {
        "pixel_values": torch.randn(GLOBAL_BATCH, 3, 16, 16, generator=generator),
        "labels": labels,
    }


def _data(name: str) -> Callable[[int], dict[str, Tensor]]:
    return images if name == "resnet" else text


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _train_all_stages(name: str) -> list[tuple[Curve, Weights]]:
    cfgs = [config(stage, optimizer=ADAMW) for stage in range(4)]
    return [train(MODELS[name], _data(name), cfg, num_steps=NUM_STEPS) for cfg in cfgs]


def _assert_close(found: tuple[Curve, Weights], plain: tuple[Curve, Weights]) -> None:
    # Rounding only, of fp32 sums that add in another order: 2^-23 of a loss near 4, some ten times
    # over.
    assert list(found[1]) == list(plain[1])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(plain[0]), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found[1], plain[1], rtol=2e-6, atol=2e-6)


def _assert_same_bits(results: list[tuple[Curve, Weights]]) -> None:
    first_curve, first_weights = results[0]
    for curve, weights in results:
        assert curve == first_curve
        assert all(torch.equal(weights[name], first_weights[name]) for name in first_weights)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_language_models_train_alike_in_all_stages_and_like_the_plain_loop(
    ranks: RankPool, world_size: int, name: str
) -> None:
    on_ranks = ranks(world_size, _train_all_stages, name)
    _assert_same_bits([result for results in on_ranks for result in results])
    plain = train_plainly(MODELS[name], text, adamw, num_steps=NUM_STEPS, loss_of=_loss)
    _assert_close(on_ranks[0][0], plain)


@pytest.mark.covering(0)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_convnet_with_batch_norm_trains_like_the_plain_loop_of_as_many_parts(
    ranks: RankPool, world_size: int
) -> None:
    on_ranks = ranks(world_size, _train_all_stages, "resnet")
    # running statistics among them
    _assert_same_bits([result for results in on_ranks for result in results])
    plain = train_plainly(
        MODELS["resnet"], images, adamw, num_steps=NUM_STEPS, loss_of=_loss, num_parts=world_size
    )
    _assert_close(on_ranks[0][0], plain)


def _running_means_of_the_first_norm(stage: int) -> Tensor:
    step = fzero.make_train_step(make(MODELS["resnet"]), config(stage))
    state, _ = step(step.init(), part(images(0), step.rank, step.world_size))
    return state.buffers["resnet.embedder.embedder.normalization.running_mean"]


@pytest.mark.parametrize("stage", [0, 3])
def test_running_means_see_the_global_batch(ranks: RankPool, stage: int) -> None:
    # The first norm is the only one whose input does not depend on other norms: each normalises its
    # own rank's batch.
    found = ranks(2, _running_means_of_the_first_norm, stage)
    assert torch.equal(found[0], found[1])
    whole = _running_means_of_the_first_norm(stage)  # this process is one rank alone
    assert whole.abs().max() > 1e-3
    # fp32: 12 or 2 · 6 images are averaged
    torch.testing.assert_close(found[0], whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_the_gathered_state_dict_is_the_models_own(name: str) -> None:
    model = make(MODELS[name])
    own = model.state_dict()
    step = fzero.make_train_step(model, config(3))
    gathered = step.gather(step.init())
    assert list(gathered) == list(own)
    assert all(torch.equal(gathered[key], own[key]) for key in own)
    trained = train(MODELS[name], _data(name), config(3), num_steps=1)[1]
    fresh = make(MODELS[name], seed=1)
    fresh.load_state_dict(trained, strict=True)
    assert all(torch.equal(tensor, trained[key]) for key, tensor in fresh.state_dict().items())
    assert any(not torch.equal(trained[key], own[key]) for key in own)


def _checkpointed(name: str) -> nn.Module:
    model = MODELS[name]()
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    return model


def _train_checkpointed(name: str) -> list[tuple[Curve, Weights]]:
    maker = functools.partial(_checkpointed, name)
    return [
        train(maker, text, config(stage, optimizer=ADAMW), num_steps=NUM_STEPS) for stage in (0, 3)
    ]


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_checkpointing_trains_alike_in_all_stages_and_like_the_plain_loop(
    ranks: RankPool, world_size: int, name: str
) -> None:
    on_ranks = ranks(world_size, _train_checkpointed, name)
    _assert_same_bits([result for results in on_ranks for result in results])
    maker = functools.partial(_checkpointed, name)
    _assert_close(
        on_ranks[0][0], train_plainly(maker, text, adamw, num_steps=NUM_STEPS, loss_of=_loss)
    )
    # Not to the bit: T5's own forward differs in its last bits while it checkpoints.
    _assert_close(
        on_ranks[0][0], train_plainly(MODELS[name], text, adamw, num_steps=NUM_STEPS, loss_of=_loss)
    )


def _llama_from_meta(seed: int) -> tuple[Weights, float]:
    with torch.device("meta"):
        model: Any = MODELS["llama"]()
    step = fzero.make_train_step(model, config(3), seed=seed)
    state = step.init(init_fn=model._init_weights)
    weights = step.gather(state)
    _, metrics = step(state, part(text(0), step.rank, step.world_size))
    return weights, metrics.loss.item()


@pytest.mark.long
def test_a_transformer_on_meta_is_filled_by_its_own_rule_alike_on_any_number_of_ranks(
    ranks: RankPool,
) -> None:
    weights, loss = _llama_from_meta(0)
    plain = make(MODELS["llama"])
    plain.load_state_dict(weights, strict=True)
    # fp32: the rotary tables are right, too
    assert loss == pytest.approx(_loss(plain, text(0)).item(), rel=1e-6)
    assert 0.01 < weights["lm_head.weight"].std() < 0.04  # transformers' initializer_range is 0.02
    for world_size in (2, 3):
        for found, _ in ranks(world_size, _llama_from_meta, 0):
            assert all(torch.equal(found[key], weights[key]) for key in weights)
    other, _ = _llama_from_meta(1)
    assert not torch.equal(other["lm_head.weight"], weights["lm_head.weight"])
