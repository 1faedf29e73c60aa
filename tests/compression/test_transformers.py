"""A model of Transformers: compressed, cleaned, saved and read by its own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import settings, technique

import fzero
from fzero.checkpoint import save_16bit_model
from fzero.compression import clean, compression_of, shrunk


@pytest.mark.long
def test_a_bert_is_compressed_saved_and_read_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "vocab_size": 32,
    }
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model: Any = BertForSequenceClassification(config)
    qkv = [["self.query", "self.key", "self.value"]]
    techniques = {
        "weight_quantization": technique(
            {"target_bits": 4}, ["encoder"], quantize_weight_in_forward=True
        ),
        "sparse_pruning": technique(
            {"dense_ratio": 0.5}, ["intermediate"], method="l1", schedule_offset=0
        ),
        "row_pruning": technique(
            {"dense_ratio": 0.5},
            ["intermediate.dense"],
            [[r"layer\.\d+\.output.dense"]],
            method="topk",
            schedule_offset=0,
        ),
        "head_pruning": technique(
            {"dense_ratio": 0.5},
            ["attention.output.dense"],
            qkv,
            method="topk",
            num_heads=4,
            schedule_offset=0,
        ),
    }
    batch = {"input_ids": torch.arange(24).reshape(2, 12), "labels": torch.tensor([0, 1])}
    step = fzero.make_train_step(model, settings(techniques, 3))
    state, _ = step(step.init(), batch)
    expected = step.evaluate(state, batch)
    weights = step.gather(state)
    small = shrunk(model, clean(weights, compression_of(step))).eval()
    with torch.no_grad():
        # heads follow from the sizes of the matrices
        torch.testing.assert_close(small(**batch).loss, expected)
    own = small.get_submodule("bert.encoder.layer.0.attention.self")
    assert own.num_attention_heads == 2 and own.all_head_size == 8
    # Without related modules shapes stay, so that the library reads the files.
    del techniques["row_pruning"], techniques["head_pruning"]
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    step = fzero.make_train_step(model, settings(techniques, 3))
    state, _ = step(step.init(), batch)
    plain = BertForSequenceClassification(config)
    cleaned = fzero.make_train_step(plain, settings({}, 1))
    out = cleaned.init(clean(step.gather(state), compression_of(step)))
    config.save_pretrained(tmp_path)
    save_16bit_model(out, tmp_path, step=cleaned, dtype="float32")
    read = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(read(**batch).loss, step.evaluate(state, batch))
