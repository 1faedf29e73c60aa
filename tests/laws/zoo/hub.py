"""Tiny models of transformers: each class with its own defaults, but for the sizes in
SMALL and what a row adds.

A row of a table below is the name of a class and what its configuration needs beside
SMALL. The names of the tables say which batch the class takes. UNBUILT has the classes
that were tried and are not here, with the reason.
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
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "n_embed",
            "emb_dim",
            "embed_dim",
            "embedding_size",
            "d_embed",
            "word_embed_proj_dim",
            "projection_dim",
        ),
        WIDTH,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "n_inner",
            "d_inner",
            "hidden_dim",
            "ffn_hidden_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "feed_forward_size",
        ),
        24,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
            "num_encoder_layers",
            "num_decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "n_shared_experts", "n_group", "topk_group"), 1
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "d_head",
            "attention_head_dim",
            "v_head_dim",
            "q_lora_rank",
            "kv_lora_rank",
        ),
        8,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "seq_length",
            "max_seq_len",
            "max_source_positions",
            "max_target_positions",
            "max_sequence_length",
        ),
        32,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "num_mel_bins"), 8
    ),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "time_step_rank", "patch_size"), 4
    ),
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "conv_kernel": 3,
    "image_size": IMAGE,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
"""The sizes of a tiny model, by the names that configurations of transformers have for
them.
"""

Row = Mapping[str, Any]
"""Fields of a configuration; None keeps the class's own default where SMALL would
change it.
"""


def tiny(config_class: Any, row: Row) -> Any:
    """A configuration of this class with the fields of SMALL that it has, the same for
    its parts, and those of `row`.
    """
    names = {
        *inspect.signature(config_class.__init__).parameters,
        *getattr(config_class, "attribute_map", {}),
    }
    fields = {name: value for name, value in SMALL.items() if name in names}
    for part, part_class in getattr(config_class, "sub_configs", {}).items():
        if getattr(part_class, "model_type", ""):
            fields[part] = tiny(part_class, row.get(part, {})).to_dict()
    fields |= {
        name: value
        for name, value in row.items()
        if not isinstance(value, Mapping) or name not in fields
    }
    return config_class(**{name: value for name, value in fields.items() if value is not None})


def text() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE),
        "labels": torch.randint(0, NUM_CLASSES, (ROWS,)),
    }


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

STAGES: Row = {"hidden_sizes": [8, 12], "depths": [1, 1], "embedding_size": 8}
FOUR: Row = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 12, 12]}
SPEECH: Row = {
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "num_feat_extract_layers": 2,
    "layerdrop": 0.0,
}
WINDOWS: Row = {
    "num_heads": [2, 2],
    "depths": [1, 1],
    "embed_dim": 8,
    "window_size": 2,
    "num_layers": None,
    "num_attention_heads": None,
}
FORECAST: Row = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}

PATCHED: Row = {
    "num_input_channels": 2,
    "context_length": 8,
    "prediction_length": 4,
    "patch_length": 2,
    "patch_stride": 2,
}

TEXT: dict[str, Row] = {
    **{f"{name}ForCausalLM": {} for name in CAUSAL.split()},
    **{f"{name}ForMaskedLM": {} for name in MASKED.split()},
    **{f"{name}ForConditionalGeneration": {} for name in CONDITIONAL.split()},
    **{name: {} for name in OTHER_TEXT.split()},
}
SPECIAL: dict[str, Row] = {
    "T5ForConditionalGeneration": {"decoder_start_token_id": 1},
    "LongT5ForConditionalGeneration": {"decoder_start_token_id": 1, "local_radius": 3},
    "SwitchTransformersForConditionalGeneration": {
        "decoder_start_token_id": 1,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "CodeGenForCausalLM": {"num_attention_heads": None, "n_head": 4, "rotary_dim": 4},
    "GPTJForCausalLM": {"n_head": 2, "rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "CTRLLMHeadModel": {"dff": 24},
    "FSMTForConditionalGeneration": {"src_vocab_size": 32, "tgt_vocab_size": 32},
    "DiffLlamaForCausalLM": {"num_key_value_heads": 2},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "BambaForCausalLM": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    "Qwen3NextForCausalLM": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "XmodForCausalLM": {"default_language": "en_XX", "languages": ["en_XX"]},
    "ProphetNetForConditionalGeneration": {},
    "BartForConditionalGeneration": {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3},
}
TEXT |= SPECIAL
IMAGE_CLASSES: dict[str, Row] = {
    **{f"{name}ForImageClassification": {} for name in IMAGES.split()},
    "ResNetForImageClassification": STAGES | {"layer_type": "basic"},
    "RegNetForImageClassification": STAGES | {"groups_width": 4},
    "ConvNextForImageClassification": {"num_stages": 2, **STAGES, "drop_path_rate": 0.3},
    "ConvNextV2ForImageClassification": {"num_stages": 2, **STAGES},
    "PoolFormerForImageClassification": FOUR
    | {"num_encoder_blocks": 4, "mlp_ratio": 2.0, "layer_scale_init_value": 0.1},
    "SwinForImageClassification": WINDOWS,
    "Swinv2ForImageClassification": WINDOWS,
    "DonutSwinForImageClassification": WINDOWS,
    "SegformerForImageClassification": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "drop_path_rate": 0.3,
    },
    "BitForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_groups": 2,
    },
    "DeiTForImageClassification": {},
    "Dinov2ForImageClassification": {"drop_path_rate": 0.3},
    "Dinov2WithRegistersForImageClassification": {},
    "IJepaForImageClassification": {},
    "FocalNetForImageClassification": {
        "embed_dim": 8,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.1, "min_depth": 4},
    "MobileViTForImageClassification": {
        "hidden_sizes": [8, 8, 8],
        "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8],
        "num_attention_heads": 2,
        "expand_ratio": 1.0,
    },
}
SPEAKERS = "Wav2Vec2 Hubert WavLM UniSpeech UniSpeechSat SEW Wav2Vec2Conformer Data2VecAudio"
AUDIO: dict[str, Row] = {
    **{f"{name}ForCTC": SPEECH for name in SPEAKERS.split()},
    # of the samples here, or a buffer grows
    "Wav2Vec2ConformerForCTC": SPEECH | {"max_source_positions": 64},
}
SERIES: dict[str, Row] = {
    "TimeSeriesTransformerForPrediction": FORECAST
    | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "InformerForPrediction": FORECAST,
}
PATCHES: dict[str, Row] = {
    "PatchTSTForPrediction": PATCHED,
    "PatchTSMixerForPrediction": PATCHED,
}
PAIRS: dict[str, Row] = {"CLIPModel": {}, "AltCLIPModel": {}}


def audio() -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(ROWS, SAMPLES),
        "labels": torch.randint(3, VOCABULARY, (ROWS, 2)),
    }


def series() -> dict[str, Tensor]:
    past, future = 10, 4
    return {
        "past_values": torch.randn(ROWS, past), "past_time_features": torch.randn(ROWS, past, 1),
        "past_observed_mask": torch.ones(ROWS, past), "future_values": torch.randn(ROWS, future),
        "future_time_features": torch.randn(ROWS, future, 1),
    }  # fmt: skip


def patches() -> dict[str, Tensor]:
    return {"past_values": torch.randn(ROWS, 8, 2), "future_values": torch.randn(ROWS, 4, 2)}


def pairs() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE)}


TABLES = (
    (TEXT, text),
    (IMAGE_CLASSES, images),
    (AUDIO, audio),
    (SERIES, series),
    (PATCHES, patches),
    (PAIRS, pairs),
)

UNBUILT: dict[str, str] = {
    "needs fields of its configuration that agree with each other, and has no row for them": """
        ASTForAudioClassification AXK2ForCausalLM CohereCompassForCausalLM CvtForImageClassification
        DbrxForCausalLM DeepseekV32ForCausalLM DepthProForDepthEstimation DinatForImageClassification
        Dots3NoteForCausalLM Emu3ForCausalLM EsmcForMaskedLM GLPNForDepthEstimation Gemma3nForCausalLM
        Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM GitForCausalLM Glm4MoeLiteForCausalLM
        GlmMoeDsaForCausalLM GraniteMoeHybridForCausalLM GraniteSpeech5ForCTC HieraForImageClassification
        LevitForImageClassification Lfm2MoeForCausalLM LiltForSequenceClassification LongcatFlashForCausalLM
        MoshiForCausalLM MusicgenForCausalLM MusicgenMelodyForCausalLM
        Nemotron3_5TranscribeForConditionalGeneration NeoMMEForMaskedLM PvtForImageClassification
        PvtV2ForImageClassification Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM SEWDForCTC
        Sapiens2ForSemanticSegmentation Siglip2ForImageClassification Zamba2ForCausalLM ZambaForCausalLM
        ZayaForCausalLM
    """,
    "has parts of more than 300,000 elements, whose sizes SMALL does not name": """
        AudioFlamingo3ForConditionalGeneration BltForCausalLM CHMv2ForDepthEstimation
        CanineForSequenceClassification CpmAntForCausalLM DPTForSemanticSegmentation DeepseekV4ForCausalLM
        DepthAnythingForDepthEstimation EfficientNetForImageClassification EncoderDecoderModel FuyuForCausalLM
        Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
        Gemma4UnifiedForConditionalGeneration GlmAsrForConditionalGeneration GotOcr2ForConditionalGeneration
        GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
        HGNetV2ForImageClassification Inkling2ForCausalLM InklingForCausalLM KimiLinearForCausalLM
        LayoutLMv3ForSequenceClassification LukeForMaskedLM MarkupLMForSequenceClassification
        MiniMaxM3VLForCausalLM MobileNetV2ForImageClassification MobileViTV2ForImageClassification
        ModernVBertForMaskedLM MossTranscribeDiarizeForConditionalGeneration
        MusicFlamingoForConditionalGeneration NemotronHForCausalLM PPLCNetForImageClassification
        PerceiverForMaskedLM Phi4MultimodalForCausalLM PromptDepthAnythingForDepthEstimation
        Qwen2AudioForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3_5ForCausalLM
        Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM RoCBertForCausalLM ShieldGemma2ForImageClassification
        SwiftFormerForImageClassification T5Gemma2ForConditionalGeneration TextNetForImageClassification
        Tipsv2DptForSemanticSegmentation UltraVBertForMaskedLM UperNetForSemanticSegmentation
        VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration
        VoxtralRealtimeForConditionalGeneration ZoeDepthForDepthEstimation
    """,
    "needs a library that is not installed (timm, detectron2)": """
        Gemma3nForConditionalGeneration LayoutLMv2ForSequenceClassification TimmWrapperForImageClassification
    """,
    "takes inputs of other shapes or names than the batches here": """
        ImageGPTForImageClassification LasrForCTC Mistral4ForSequenceClassification ParakeetForCTC
        Wav2Vec2BertForCTC
    """,
    (
        "draws seeds from the machine's clock and noise in its forward, so that no two runs "
        "are alike"
    ): """
        ReformerModelWithLMHead
    """,
    "takes seconds for a forward, whatever its size": """
        FalconH1ForCausalLM
    """,
}
"""Classes that were tried and are not here, by the reason."""

LAYER_DROP = "where ranks skip units each for itself, stage 3 may send a gradient in two parts"
KNOWN: dict[str, dict[str, str]] = {
    "BartForConditionalGeneration": {"rounds": LAYER_DROP},
    "InformerForPrediction": {"rounds": LAYER_DROP},
}
"""What is known of some of them: fields of a Case."""

HUB: dict[str, Case] = {
    name: _case(name, row, batch, **KNOWN.get(name, {}))
    for rows, batch in TABLES
    for name, row in rows.items()
}
