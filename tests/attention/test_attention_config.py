"""The block `sparse_attention` of the configuration: read as DeepSpeed reads it, and
asked for by the model's code.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.attention import Fixed
from fzero.config import Config, ConfigError, ConfigWarning
from fzero.deepspeed.ops.sparse_attention import (
    BSLongformerSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
)
from fzero.deepspeed.runtime.config import DeepSpeedConfig

MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "fixed": {
        "different_layout_per_head": False,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    },
    "variable": {
        "different_layout_per_head": False,
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
    },
    "bigbird": {
        "different_layout_per_head": False,
        "num_random_blocks": 0,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
    },
    "bslongformer": {
        "different_layout_per_head": False,
        "num_sliding_window_blocks": 3,
        "global_block_indices": [0],
        "global_block_end_indices": None,
    },
}
"""What DeepSpeed 0.19's reader returns for a mode alone, besides `mode` and `block`."""


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_read_with_deepspeeds_defaults(mode: str) -> None:
    read = DeepSpeedConfig({"train_batch_size": 4, "sparse_attention": {"mode": mode}})
    assert read.sparse_attention == {"mode": mode, "block": 16, **MODES[mode]}
    block = read.cfg.sparse_attention
    made = SparsityConfig.of(block, num_heads=2)
    assert made.pattern == block.pattern and made.make_layout(128).shape == (2, 8, 8)


def test_an_empty_block_is_the_fixed_pattern_and_none_is_none() -> None:
    cfg = Config.load({"sparse_attention": {}})
    assert cfg.sparse_attention is not None and cfg.sparse_attention.pattern == Fixed()
    assert (
        Config.load({}).sparse_attention is None
        and Config.load({"sparse_attention": None}).sparse_attention is None
    )
    assert DeepSpeedConfig({"train_batch_size": 4}).sparse_attention is None


def test_options_are_given_to_the_pattern() -> None:
    given = {
        "mode": "bslongformer",
        "block": 32,
        "num_sliding_window_blocks": 5,
        "global_block_indices": [0, 2],
    }
    made = SparsityConfig.of(Config.load({"sparse_attention": given}).sparse_attention, 3, seed=7)  # type: ignore[arg-type]
    assert isinstance(made, BSLongformerSparsityConfig) and (
        made.num_heads,
        made.block,
        made.seed,
    ) == (3, 32, 7)
    assert made.make_layout(320)[1, 6].tolist() == [1, 0, 1, 0, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"mode": "local"}, r"sparse_attention.mode: must be 'dense', .*, got 'local'"),
        ({"blok": 16}, "sparse_attention.blok: unknown key; did you mean 'block'?"),
        ({"block": 0}, "sparse_attention.block: must be at least 1, got 0"),
        (
            {"num_local_blocks": 4, "num_global_blocks": 3},
            "sparse_attention.num_global_blocks: must divide .*, 4, got 3",
        ),
        (
            {"mode": "variable", "global_block_end_indices": [0]},
            "sparse_attention.global_block_end_indices: must each be above",
        ),
        ("fixed", "sparse_attention: must be an object"),
    ],
)
def test_wrong_options_are_refused_by_their_name(block: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.load({"sparse_attention": block})


class Attends(nn.Module):
    """A model that may have sparse attention."""

    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(4, 4), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x)
        return (q if self.attention is None else self.attention(q, q, q)).square().mean()


def test_the_models_code_asks_for_the_block_and_where_nothing_asks_there_is_a_warning() -> None:
    cfg = Config.load(
        {"sparse_attention": {"block": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    with pytest.warns(
        ConfigWarning, match="no module of the model is a SparseSelfAttention"
    ) as reported:
        fzero.make_train_step(Attends(), cfg)
    assert reported[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        attention = SparseSelfAttention(
            SparsityConfig.of(cfg.sparse_attention, 2), max_seq_length=8
        )  # type: ignore[arg-type]
        step = fzero.make_train_step(Attends(attention), cfg)
    _, metrics = step(step.init(), torch.ones(1, 2, 8, 4))
    assert metrics.loss > 0


def test_options_of_another_mode_are_warned_of() -> None:
    cfg = Config.load(
        {"sparse_attention": {"mode": "bigbird", "attention": "unidirectional", "block": 2}}
    )
    attention = SparseSelfAttention(SparsityConfig.of(cfg.sparse_attention, 2), max_seq_length=8)  # type: ignore[arg-type]
    with pytest.warns(
        ConfigWarning,
        match="mode 'bigbird' has no option attention, which DeepSpeed does not read there either",
    ):
        fzero.make_train_step(Attends(attention), cfg)


def test_the_engine_warns_too() -> None:
    config = {"train_batch_size": 1, "sparse_attention": {}, "optimizer": {"type": "SGD"}}
    model = Attends()
    with pytest.warns(ConfigWarning, match="no module of the model is a SparseSelfAttention"):
        fzero.initialize(model=model, model_parameters=model.parameters(), config=config)
