"""Model classes of transformers from tiny configurations: `TABLE` has (class,
configuration, batch) by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY, ROWS, ONE = 31, 4, "single_label_classification"


class Row(NamedTuple):
    """A model class.

    Attributes:
        model: the class's name; `config` that of its configuration, with `fields`.
        batch: the inputs of a step.
    """

    model: str
    config: str
    fields: dict[str, Any]
    batch: Callable[[int], dict[str, Tensor]]

    def make(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**self.fields)
        config._attn_implementation = "eager"
        model: nn.Module = getattr(transformers, self.model)(config)
        return model


def _ids(step: int, length: int = 9, first: int = 3) -> Tensor:
    return torch.randint(
        first, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(step)
    )


def language(step: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(step), "labels": _ids(step)}


def translation(step: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(step), "labels": _ids(step + 100, 6)}


def masked_translation(step: int) -> dict[str, Tensor]:
    """With masks: some models make none where they find that they are compiled, and
    then fail under torch.compile, too.
    """
    masks = {"attention_mask": torch.ones(ROWS, 9), "decoder_attention_mask": torch.ones(ROWS, 6)}
    return translation(step) | masks


def labelled(step: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(step), "labels": _ids(step)[:, 0] % 3}


def pixels(step: int, size: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(ROWS, 3, size, size, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 3, (ROWS,), generator=generator)}


def larger_pixels(step: int) -> dict[str, Tensor]:
    return pixels(step, 32)


def spectrum(step: int) -> dict[str, Tensor]:
    features = torch.randn(ROWS, 8, 20, generator=torch.Generator().manual_seed(step))
    return {"input_features": features, "labels": _ids(step, 6)}


D = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KV = D | {"num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
B = D | STILL
V = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 3,
    "problem_type": ONE,
    **STILL,
}
SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_cache": False,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "use_cache": False,
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = KV | {"num_local_experts": 2, "num_experts_per_tok": 1}


def _named(
    prefix: str, fields: dict[str, Any], head: str = "ForCausalLM", batch: Any = language
) -> Row:
    return Row(prefix + head, f"{prefix}Config", fields, batch)


_ROWS = [
    *(
        _named(name, KV)
        for name in (
            "Llama",
            "Mistral",
            "Qwen2",
            "Qwen3",
            "Gemma",
            "Gemma2",
            "Phi",
            "Phi3",
            "StableLm",
            "Starcoder2",
            "Olmo",
            "Olmo2",
            "Cohere",
            "Granite",
            "Helium",
            "Glm",
            "SmolLM3",
            "Ministral",
            "Arcee",
            "Nemotron",
            "Glm4",
        )
    ),
    _named("SeedOss", KV | {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    _named("GPTNeoX", D | {"use_cache": False}),
    _named("GPT2", GPT, "LMHeadModel"),
    _named("GPTBigCode", GPT),
    _named("GPTJ", GPT | {"rotary_dim": 4}),
    _named("CodeGen", GPT | {"rotary_dim": 4, "n_head": 4}),
    _named("OpenAIGPT", GPT | {"afn": "gelu"}, "LMHeadModel"),
    _named(
        "OPT", D | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "use_cache": False}
    ),
    _named("Bloom", D | {"n_layer": 2, "n_head": 2, "hidden_dropout": 0.0, "use_cache": False}),
    _named("Falcon", D | {"hidden_dropout": 0.0, "use_cache": False}),
    _named(
        "Mpt",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 32,
            "use_cache": False,
        },
    ),
    _named("Mixtral", EXPERTS),
    _named(
        "Mamba",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "state_size": 4,
            "use_cache": False,
        },
    ),
    _named(
        "Rwkv",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "use_cache": False},
    ),
    *(
        _named(name, B, "ForMaskedLM")
        for name in (
            "Bert",
            "Roberta",
            "Electra",
            "XLMRoberta",
            "Ernie",
            "MegatronBert",
            "RoFormer",
            "Camembert",
        )
    ),
    _named("Albert", B | {"embedding_size": 8}, "ForMaskedLM"),
    _named(
        "DistilBert",
        D
        | {
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "ForMaskedLM",
    ),
    _named(
        "MobileBert",
        B | {"embedding_size": 8, "true_hidden_size": 8, "intra_bottleneck_size": 8},
        "ForMaskedLM",
    ),
    _named(
        "DebertaV2", B | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "ForMaskedLM"
    ),
    _named(
        "Funnel",
        {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "num_decoder_layers": 1,
        },
        "ForMaskedLM",
    ),
    _named("FNet", B, "ForMaskedLM"),
    _named(
        "Bert", B | {"num_labels": 3, "problem_type": ONE}, "ForSequenceClassification", labelled
    ),
    _named("T5", T5, "ForConditionalGeneration", translation),
    _named("MT5", T5, "ForConditionalGeneration", translation),
    _named("UMT5", T5, "ForConditionalGeneration", translation),
    _named("LongT5", T5 | {"local_radius": 3}, "ForConditionalGeneration", masked_translation),
    _named(
        "SwitchTransformers",
        T5 | {"num_experts": 2, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
        "ForConditionalGeneration",
        masked_translation,
    ),
    *(
        _named(name, SEQ, "ForConditionalGeneration", masked_translation)
        for name in ("Bart", "MBart", "Pegasus", "Blenderbot", "M2M100", "PegasusX")
    ),
    _named("Marian", SEQ, "MTModel", translation),
    _named(
        "Whisper",
        SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32},
        "ForConditionalGeneration",
        spectrum,
    ),
    *(
        _named(name, V, "ForImageClassification", pixels)
        for name in ("ViT", "DeiT", "Beit", "ViTMSN", "Dinov2", "PoolFormer")
    ),
    _named(
        "ConvNext",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "num_labels": 3,
            "problem_type": ONE,
        },
        "ForImageClassification",
        larger_pixels,
    ),
    _named(
        "ResNet",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_labels": 3,
            "problem_type": ONE,
        },
        "ForImageClassification",
        larger_pixels,
    ),
    _named(
        "Swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 3,
            "problem_type": ONE,
            "drop_path_rate": 0.0,
            **STILL,
        },
        "ForImageClassification",
        pixels,
    ),
    _named(
        "MobileNetV2",
        {
            "image_size": 32,
            "depth_multiplier": 0.25,
            "num_labels": 3,
            "problem_type": ONE,
            "classifier_dropout_prob": 0.0,
        },
        "ForImageClassification",
        larger_pixels,
    ),
    _named(
        "PoolFormer",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_labels": 3,
            "drop_path_rate": 0.0,
            "problem_type": ONE,
        },
        "ForImageClassification",
        larger_pixels,
    ),
]
TABLE = {row.model: row for row in _ROWS}
