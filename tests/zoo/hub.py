"""Tiny models of transformers: each class with its own defaults, but for the sizes in SMALL and what a row adds.

A row of a table below is the name of a class and what its configuration needs beside SMALL. The names of the tables say
which batch the class takes. UNBUILT has the classes that were tried and are not here, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.case import IMAGE, LENGTH, NUM_CLASSES, ROWS, SAMPLES, VOCABULARY, WIDTH, Case

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "n_embed", "emb_dim", "embed_dim", "embedding_size", "d_embed",
         "word_embed_proj_dim", "projection_dim"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "hidden_dim", "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"), 24),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
         "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_source_positions",
         "max_target_positions", "max_sequence_length"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "num_mel_bins"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "time_step_rank", "patch_size"), 4),
    "vocab_size": VOCABULARY, "type_vocab_size": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "conv_kernel": 3, "image_size": IMAGE, "num_channels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
"""The sizes of a tiny model, by the names that configurations of transformers have for them."""

Row = Mapping[str, Any]
"""Fields of a configuration; None keeps the class's own default where SMALL would change it."""


def tiny(config_class: Any, row: Row) -> Any:
    """A configuration of this class with the fields of SMALL that it has, the same for its parts, and those of `row`."""
    names = {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "attribute_map", {})}
    fields = {name: value for name, value in SMALL.items() if name in names}
    for part, part_class in getattr(config_class, "sub_configs", {}).items():
        if getattr(part_class, "model_type", ""):
            fields[part] = tiny(part_class, row.get(part, {})).to_dict()
    fields |= {name: value for name, value in row.items() if not isinstance(value, Mapping) or name not in fields}
    return config_class(**{name: value for name, value in fields.items() if name not in row or row[name] is not None})


def text() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE), "labels": torch.randint(0, NUM_CLASSES, (ROWS,))}


def _case(name: str, row: Row, batch: Callable[[], dict[str, Tensor]], **known: str) -> Case:
    def make() -> tuple[nn.Module, Any]:
        import transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        model_class = getattr(transformers, name)
        with contextlib.redirect_stdout(io.StringIO()):  # some tell of their generation defaults
            model = model_class(tiny(model_class.config_class, row))
        return model.float(), batch()

    return Case(functools.wraps(_case)(make), **known)  # type: ignore[arg-type]


CAUSAL = """
AXK1 Afmoe Apertus Arcee AriaText BailingHybrid Bart Beam BigBird BigBirdPegasus BioGpt BitNet Blenderbot BlenderbotSmall
Bloom Camembert Cohere Cohere2 Cohere2Moe Cwm Data2VecText DeepseekV2 DeepseekV3 Doge Dots1 Electra Ernie Ernie4_5
Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconMamba FlexOlmo Flint GPTBigCode GPTNeoX GPTNeoXJapanese Gemma Gemma2 Gemma3
Gemma4Unified Glm Glm4 Glm4Moe GptOss Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 Helium HrmText
HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Jais2 Jamba JetMoe Kolibri1 Laguna Lfm2 Lfm3 Llama Llama4 MBart Mamba Marian
MegatronBert Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 Ministral Ministral3 Mistral Mixtral Mllama ModernBertDecoder Mpt
Mvp NanoChat Nemotron OPT Olmo Olmo2 Olmo3 OlmoHybrid Olmoe PLBart Pegasus Persimmon Phi Phi3 Phimoe ProphetNet Qwen2
Qwen2Moe Qwen3 Qwen3Moe RecurrentGemma RemBert RoFormer Roberta RobertaPreLayerNorm Rwkv SeedOss SmolLM3 SolarOpen StableLm
Starcoder2 TrOCR VaultGemma Whisper XGLM XLMRoberta XLMRobertaXL Youtu xLSTM
"""
MASKED = """
Albert ConvBert Deberta DebertaV2 DistilBert Esm EuroBert FNet Funnel Gte IBert JinaEmbeddingsV3 LayoutLM Longformer MPNet
MobileBert ModernBert Mra NomicBert Nystromformer SqueezeBert Tapas Ultrabert Yoso
"""
CONDITIONAL = "LED M2M100 MT5 NllbMoe PegasusX T5Gemma UMT5"
OTHER_TEXT = """
BertGenerationDecoder BertLMHeadModel GPT2LMHeadModel OpenAIGPTLMHeadModel XLMWithLMHeadModel XLNetLMHeadModel
FlaubertWithLMHeadModel SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText
"""
IMAGES = "Beit CLIP Data2VecVision MetaClip2 Siglip ViT ViTMSN"

TEXT: dict[str, Row] = {
    **{f"{name}ForCausalLM": {} for name in CAUSAL.split()},
    **{f"{name}ForMaskedLM": {} for name in MASKED.split()},
    **{f"{name}ForConditionalGeneration": {} for name in CONDITIONAL.split()},
    **{name: {} for name in OTHER_TEXT.split()},
}
IMAGE_CLASSES: dict[str, Row] = {f"{name}ForImageClassification": {} for name in IMAGES.split()}
TABLES = ((TEXT, text), (IMAGE_CLASSES, images))

KNOWN: dict[str, dict[str, str]] = {}
"""What is known of some of them: fields of a Case."""

HUB: dict[str, Case] = {
    name: _case(name, row, batch, **KNOWN.get(name, {})) for rows, batch in TABLES for name, row in rows.items()
}
