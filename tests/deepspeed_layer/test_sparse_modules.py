"""`SparseSelfAttention` and BERT: DeepSpeed's names, masks and layouts; equal to the
dense model under the layout's mask.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.attention import dense_mask, sparse_attention
from fzero.deepspeed import zero
from fzero.deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)
from fzero.deepspeed.ops.sparse_attention.sparse_attention_utils import MASKS

HEADS, BLOCK, WIDTH = 2, 4, 8


def inputs(length: int, *, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, HEADS, length, WIDTH, generator=generator) for _ in range(3)]


# --- configurations -------------------------------------------------------------------------------


def test_a_configuration_makes_deepspeeds_tensor() -> None:
    config = BigBirdSparsityConfig(HEADS, BLOCK, True, 2, 3, 1, seed=5)
    made = config.make_layout(8 * BLOCK)
    assert (
        made.dtype == torch.int64
        and made.shape == (HEADS, 8, 8)
        and set(made.unique().tolist()) == {0, 1}
    )
    assert made.equal(config.make_layout(8 * BLOCK)) and not made[0].equal(made[1])
    assert not made.equal(
        BigBirdSparsityConfig(HEADS, BLOCK, True, 2, 3, 1, seed=6).make_layout(8 * BLOCK)
    )
    config = VariableSparsityConfig(HEADS, BLOCK, local_window_blocks=[2])
    config.local_window_blocks = [8]  # options are attributes
    assert config.make_layout(8 * BLOCK).all() and config.num_layout_heads == 1


def test_what_a_configuration_cannot_make_is_refused() -> None:
    for make, says in (
        (
            lambda: FixedSparsityConfig(HEADS, num_local_blocks=4, num_global_blocks=3),
            "num_global_blocks: must divide",
        ),
        (
            lambda: FixedSparsityConfig(0),
            "FixedSparsityConfig.num_heads: must be at least 1, got 0",
        ),
        (lambda: DenseSparsityConfig(2, block=0), "block: must be at least 1"),
        (
            lambda: FixedSparsityConfig(HEADS, BLOCK).make_layout(30),
            "multiple of block, 4, got 30; .*pad_to_block_size",
        ),
        (
            lambda: LocalSlidingWindowSparsityConfig(HEADS, BLOCK, 9).make_layout(16),
            "at most the number of blocks, 4, got 9",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(
        TypeError,
        match=(
            "DenseSparsityConfig: has no option num_local_blocks; it has different_layout_per_head"
        ),
    ):
        DenseSparsityConfig(2, num_local_blocks=4)
    with pytest.raises(NotImplementedError, match="has no layout of its own"):
        SparsityConfig(HEADS).make_layout(32)


class Diagonal(SparsityConfig):
    """A kind of the user's own, as DeepSpeed's classes are written."""

    def make_layout(self, seq_len: int) -> Tensor:
        layout = self.setup_layout(seq_len)
        layout[0] = torch.eye(layout.shape[1])
        return self.check_and_propagate_first_head_layout(layout)


def test_a_kind_of_the_users_own_is_taken() -> None:
    attends = SparseSelfAttention(Diagonal(HEADS, BLOCK), max_seq_length=32)
    assert attends.layout.num_kept == 8 and attends.get_layout(16).equal(
        torch.eye(4).long().repeat(HEADS, 1, 1)
    )


# --- the module -----------------------------------------------------------------------------------


def test_shorter_sequences_have_the_corner_of_the_longest() -> None:
    attends = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK), max_seq_length=64, layer=3)
    assert attends.master_layout.shape == (HEADS, 16, 16)
    assert attends.get_layout(32).equal(attends.master_layout[:, :8, :8])
    other = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK), max_seq_length=64, layer=4)
    assert not other.master_layout.equal(attends.master_layout)
    with pytest.raises(
        ValueError, match=r"at most max_seq_length tokens, 64, got 68; pass .*max_seq_length=68"
    ):
        attends.get_layout(68)


def test_a_layout_of_deepspeeds_state_dict_is_taken() -> None:
    theirs = BigBirdSparsityConfig(HEADS, BLOCK, seed=9).make_layout(32)
    attends = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK), max_seq_length=64)
    outer = nn.ModuleDict({"attention": attends})
    assert not outer.state_dict()
    outer.load_state_dict({"attention.master_layout": theirs})
    assert attends.master_layout.equal(theirs) and attends.max_seq_length == 32


def test_masks_are_added_or_drop_keys_as_their_modes_say() -> None:
    q, k, v = inputs(16)
    config = FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=2)
    keys = torch.ones(2, 16)
    keys[0, 9:] = 0
    pairs, rpe = torch.ones(16, 16).tril(), torch.randn(2, HEADS, 16, 16)
    layout = config.layout(16)
    expected = sparse_attention(
        q, k, v, layout, block=BLOCK, key_mask=keys != 0, biases=[rpe, pairs.log()], backend="sdpa"
    )
    drops = SparseSelfAttention(config, key_padding_mask_mode="mul", max_seq_length=16)
    made = drops(
        q, k, v, rpe=rpe, key_padding_mask=keys[:, None, None].bool(), attn_mask=pairs[None, None]
    )
    torch.testing.assert_close(made, expected)
    adds = SparseSelfAttention(config, attn_mask_mode="add", max_seq_length=16)
    made = adds(
        q,
        k.transpose(2, 3),
        v,
        rpe=rpe,
        key_padding_mask=keys.log()[:, None, None],
        attn_mask=pairs.log(),
    )
    torch.testing.assert_close(made, expected)
    assert not list(drops.parameters())


def test_masks_of_other_shapes_and_dtypes_are_refused() -> None:
    q, k, v = inputs(16)
    attends = SparseSelfAttention(FixedSparsityConfig(HEADS, BLOCK), max_seq_length=16)
    for more, says in (
        (
            {"key_padding_mask": torch.ones(2, 1, 16, 16)},
            r"must have the shape \(B, L\) or .*got \(2, 1, 16, 16\)",
        ),
        (
            {"key_padding_mask": torch.ones(2, 16).bool()},
            "must be floating, got torch.bool; pass key_padding_mask_mode='mul'",
        ),
        ({"attn_mask": torch.ones(2, 16, 16)}, r"attn_mask must have the shape \(L, L\)"),
    ):
        with pytest.raises(ValueError, match=says):
            attends(q, k, v, **more)
    with pytest.raises(ValueError, match="attn_mask_mode must be 'add' or 'mul', got 'and'"):
        SparseSelfAttention(FixedSparsityConfig(HEADS), attn_mask_mode="and")  # type: ignore[arg-type]


def test_a_unidirectional_module_is_causal_by_blocks_as_upstream_and_says_so() -> None:
    q, k, v = inputs(16)
    config = LocalSlidingWindowSparsityConfig(HEADS, BLOCK)
    layout = config.layout(16)
    with pytest.warns(UserWarning, match="causal by blocks only"):
        made = SparseSelfAttention(config, max_seq_length=16)(q, k, v)
    torch.testing.assert_close(made, sparse_attention(q, k, v, layout, block=BLOCK, causal=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_tokens = SparseSelfAttention(config, max_seq_length=16, causal=True)(q, k, v)
        masked = SparseSelfAttention(config, max_seq_length=16)(
            q, k, v, attn_mask=torch.ones(16, 16).tril()
        )
    torch.testing.assert_close(by_tokens, sparse_attention(q, k, v, layout, block=BLOCK))
    torch.testing.assert_close(by_tokens, masked)


# --- BERT and RoBERTa -----------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, **more}))


def roberta(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**{**SMALL, "max_position_embeddings": 34, **more})
    )


def batch_of(length: int, *, padding: int = 0) -> dict[str, Tensor]:
    ids = torch.arange(2 * length).view(2, length) % 40 + 5
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [bert, roberta])
@pytest.mark.parametrize(
    "config", [DenseSparsityConfig(HEADS, BLOCK), BSLongformerSparsityConfig(HEADS, BLOCK)]
)
def test_the_sparse_model_is_the_dense_one_under_the_layouts_mask(
    make: Callable[[], Any], config: SparsityConfig
) -> None:
    batch = batch_of(32, padding=5)
    dense, sparse = make(), make()
    names = list(dense.state_dict())
    assert (
        SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
            sparse, 32, config
        )
        is sparse
    )
    assert list(sparse.state_dict()) == names
    mask = dense_mask(config.layout(32), BLOCK) & batch["attention_mask"][:, None, None].bool()
    expected = dense(**{**batch, "attention_mask": mask.expand(2, 1, 32, 32)})
    made = sparse(**batch)
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(made.logits[kept], expected.logits[kept], atol=1e-5, rtol=1e-5)
    made.logits[kept].square().sum().backward()
    expected.logits[kept].square().sum().backward()
    for (name, a), b in zip(sparse.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("make", [bert, roberta])
def test_positions_are_repeated(make: Callable[[], Any]) -> None:
    model = make()
    first = 2 if make is roberta else 0
    table = model.base_model.embeddings.position_embeddings
    old = table.weight.detach().clone()
    assert SparseAttentionUtils.extend_position_embedding(model, 80) is model
    new = table.weight
    assert (
        new.shape == (80 + first, 16)
        and table.num_embeddings == 80 + first
        and new[:first].equal(old[:first])
    )
    for start in (0, 32, 64):
        part = new[first + start : first + start + 32]
        assert part.equal(old[first : first + len(part)])
    assert model.config.max_position_embeddings == 80 + first
    assert model(**batch_of(80)).logits.shape == (2, 80, 50)
    with pytest.raises(ValueError, match="must be above the model's 80 positions, got 64"):
        SparseAttentionUtils.extend_position_embedding(model, 64)


def test_a_divided_model_is_extended_where_its_values_are() -> None:
    with zero.Init():
        model = bert()
    with pytest.raises(
        ValueError, match=r"is divided over the ranks \(zero.Init\); call it inside"
    ):
        SparseAttentionUtils.extend_position_embedding(model, 64)
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        SparseAttentionUtils.extend_position_embedding(model, 64)
    assert model.bert.embeddings.position_embeddings.weight.shape[0] == 64


def test_layers_have_random_blocks_of_their_own() -> None:
    model = bert()
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 32, BigBirdSparsityConfig(HEADS, BLOCK)
    )
    transformers.BertForMaskedLM(model.config)  # the configuration is that of any BERT
    first, second = (
        layer.attention.self.sparse_self_attention.layout for layer in model.bert.encoder.layer
    )
    assert first != second


def test_a_model_that_was_sent_to_another_process_finds_its_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    model, batch = bert(), batch_of(32, padding=3)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 32, FixedSparsityConfig(HEADS, BLOCK)
    )
    expected, sent = model(**batch).loss, pickle.dumps(model)
    monkeypatch.delitem(type(masks)._global_mapping, MASKS)  # as in a process that has not made it
    assert pickle.loads(sent)(**batch).loss == expected


def test_a_padded_batch_gives_the_outputs_of_the_batch() -> None:
    model, config = bert(), DenseSparsityConfig(HEADS, BLOCK)
    batch = batch_of(30)
    expected = model(input_ids=batch["input_ids"]).logits
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 32, config)
    with pytest.raises(
        ValueError, match=r"multiple of block, 4, got 30; pad the batch with .*pad_to_block_size"
    ):
        model(**batch)
    added, ids, mask, types, positions, embeds = SparseAttentionUtils.pad_to_block_size(
        BLOCK, batch["input_ids"], None, torch.zeros(2, 30).long(), None, None, 0, None
    )
    assert (added, positions, embeds) == (2, None, None) and mask is not None and mask.sum() == 60
    padded = model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    made = SparseAttentionUtils.unpad_sequence_output(added, padded)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
    embeds = model.bert.embeddings.word_embeddings(batch["input_ids"])
    added, ids, mask, *_, embeds = SparseAttentionUtils.pad_to_block_size(
        BLOCK,
        None,
        batch["attention_mask"],
        None,
        None,
        embeds,
        0,
        model.bert.embeddings.word_embeddings,
    )
    made = model(inputs_embeds=embeds, attention_mask=mask).logits[:, :-added]
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
    assert SparseAttentionUtils.pad_to_block_size(BLOCK, *[None] * 4, embeds, 0, None)[0] == 0


def test_other_models_and_heads_are_refused() -> None:
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    with pytest.raises(ValueError, match="must be a BERT or RoBERTa of transformers, got Linear"):
        replace(nn.Linear(2, 2), 32)
    with pytest.raises(ValueError, match="must be an encoder"):
        replace(bert(is_decoder=True), 32)
    with pytest.raises(ValueError, match="num_heads must be the model's 2, got 4"):
        replace(bert(), 32, FixedSparsityConfig(4))
    with pytest.raises(ValueError, match="multiple of block, 16, got 40"):
        replace(bert(), 40)
    tokenizer = type("Tokenizer", (), {"model_max_length": 32, "init_kwargs": {}})()
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 64).init_kwargs == {
        "model_max_length": 64
    }
    assert tokenizer.model_max_length == 64


# --- in all stages --------------------------------------------------------------------------------


SGD = {"type": "SGD", "params": {"lr": 0.5}}
STEPS = 2


def trained(stage: int, length: int, block: int) -> dict[str, Tensor]:
    """A rank's gathered weights after updates of a sparse BERT with extended positions,
    in one stage.
    """
    model = bert()
    SparseAttentionUtils.extend_position_embedding(model, length)
    config = BSLongformerSparsityConfig(HEADS, block)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, length, config
    )
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    cfg = {"zero_optimization": zero, "optimizer": SGD, "gradient_clipping": 0}
    step = fzero.make_train_step(model, cfg, loss_fn=lambda model, batch: model(**batch).loss)
    state, rank = step.init(), torch.distributed.get_rank()
    own = {name: x[rank : rank + 1] for name, x in batch_of(length, padding=length // 3).items()}
    for _ in range(STEPS):
        state, _ = step(state, own)
    return step.gather(state)


def trained_alone(length: int, block: int) -> dict[str, Tensor]:
    """The same by a plain loop over the dense model under the layout's mask."""
    model = bert()
    SparseAttentionUtils.extend_position_embedding(model, length)
    batch = batch_of(length, padding=length // 3)
    layout = BSLongformerSparsityConfig(HEADS, block).layout(length)
    batch["attention_mask"] = (
        dense_mask(layout, block) & batch["attention_mask"][:, None, None].bool()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return dict(model.state_dict())


def check_stages(ranks: Any, length: int, block: int, *, stages: Sequence[int]) -> None:
    first, *others = (ranks(2, trained, stage, length, block)[0] for stage in stages)
    for other in others:
        assert all(other[name].equal(first[name]) for name in first)
    expected = trained_alone(length, block)
    for name, weights in first.items():
        torch.testing.assert_close(weights, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_stage_3_trains_a_sparse_bert_as_a_plain_loop_trains_the_dense_one_under_the_mask(
    ranks: Any,
) -> None:
    check_stages(ranks, 64, 4, stages=[3])


@pytest.mark.long
def test_every_stage_trains_sequences_of_4096_tokens_to_the_same_bits(ranks: Any) -> None:
    check_stages(ranks, 4096, 64, stages=range(4))
