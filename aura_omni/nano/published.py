"""The JSON files of a published checkpoint folder, for given dimensions.

One description serves two families: the tiny one that tests and a first start use, and the true-size one that benchmarks
use. Keys and nesting are those of the published repositories; token ids come from the tokenizer that lies beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]

# In published order: id of <|endoftext|> is the size of the plain vocabulary, the rest follow.
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
AURA_TOKENS = ("<|silent|>",)
# 151669.. of the audio models; the names between 151676 and 151704 are unused rows.
AUDIO_TOKENS = (
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_spare|>",
    "<|audio_pad|>", *(f"<blank{number}>" for number in range(1, 28)), "<asr_text>", "<timestamp>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """Dimensions of a Qwen3 decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sections: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything that differs between a tiny and a true checkpoint of one family."""

    asr: Text
    asr_audio_layers: int
    asr_audio_width: int
    asr_audio_heads: int
    asr_conv_channels: int
    aura: Text
    vision_layers: int
    vision_width: int
    vision_heads: int
    vision_intermediate: int
    vision_deepstack: tuple[int, ...]
    vision_positions: int
    talker: Text
    predictor: Text
    talker_text: int  # width of the Talker's text embedding
    speaker_channels: tuple[int, ...]  # of the speaker encoder
    codec_latent: int
    codec_width: int
    codec_layers: int
    codec_heads: int
    codec_head_dim: int
    codec_decoder: int
    codec_book: int  # codebook width
    codec_filters: int  # of the encoder
    max_new_frames: int
    # Fewest and most pixels of an image, and of all frames of a clip together.
    image_pixels: tuple[int, int] = (65536, 16777216)
    video_pixels: tuple[int, int] = (4096, 25165824)


TRUE = Sizes(
    asr=Text(2048, 6144, 28, 16, 8, 128, (24, 20, 20)),
    asr_audio_layers=24, asr_audio_width=1024, asr_audio_heads=16, asr_conv_channels=480,
    aura=Text(4096, 12288, 36, 32, 8, 128, (24, 20, 20)),
    vision_layers=27, vision_width=1152, vision_heads=16, vision_intermediate=4304, vision_deepstack=(8, 16, 24), vision_positions=2304,
    talker=Text(2048, 6144, 28, 16, 8, 128, (24, 20, 20)),
    predictor=Text(1024, 3072, 5, 16, 8, 128, (24, 20, 20)),
    talker_text=2048, speaker_channels=(512, 512, 512, 512, 1536),
    codec_latent=1024, codec_width=512, codec_layers=8, codec_heads=16, codec_head_dim=64, codec_decoder=1536, codec_book=512, codec_filters=64,
    max_new_frames=8192,
)  # fmt: skip

TINY = Sizes(
    asr=Text(64, 128, 2, 4, 2, 16, (4, 2, 2)),
    asr_audio_layers=2, asr_audio_width=64, asr_audio_heads=4, asr_conv_channels=16,
    aura=Text(64, 128, 4, 4, 2, 16, (4, 2, 2)),
    vision_layers=4, vision_width=64, vision_heads=4, vision_intermediate=128, vision_deepstack=(0, 1, 2), vision_positions=64,
    talker=Text(64, 128, 2, 4, 2, 16, (4, 2, 2)),
    predictor=Text(32, 64, 1, 4, 2, 16, (4, 2, 2)),
    talker_text=48, speaker_channels=(32, 32, 32, 32, 96),
    codec_latent=64, codec_width=32, codec_layers=2, codec_heads=4, codec_head_dim=8, codec_decoder=64, codec_book=32, codec_filters=4,
    # Random weights rarely choose the end of speech, so the tiny Talker's own generation_config.json bounds it: 2 s.
    max_new_frames=25,
)  # fmt: skip

# The trained AURA of the package. Its pixel limits keep a chunk within 300 tokens, which two CPU cores see in time.
NANO = replace(
    TINY,
    aura=Text(256, 512, 5, 4, 2, 64, (12, 10, 10)),
    vision_layers=5, vision_width=160, vision_heads=5, vision_intermediate=480, vision_deepstack=(2,), vision_positions=144,
    image_pixels=(65536, 147456), video_pixels=(4096, 614400),
)  # fmt: skip

LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071, "spanish": 2054, "japanese": 2058,
    "korean": 2064, "french": 2061, "russian": 2069,
}  # fmt: skip
DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873, "sohee": 2864, "eric": 2875,
    "dylan": 2878,
}  # fmt: skip


def _decoder(text: Text, **more: Any) -> Json:
    return {
        "attention_bias": False,
        "head_dim": text.head_dim,
        "hidden_act": "silu",
        "hidden_size": text.hidden,
        "intermediate_size": text.intermediate,
        "num_attention_heads": text.heads,
        "num_hidden_layers": text.layers,
        "num_key_value_heads": text.kv_heads,
        "rms_norm_eps": 1e-6,
        **more,
    }


def tokenizer_config(added: Mapping[str, int], special: Collection[str]) -> Json:
    """tokenizer_config.json; added: every added token with its id, special: those that are no text."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(number): {"content": name, "special": name in special, "normalized": False}
            for name, number in added.items()
        },
    }


def asr_files(sizes: Sizes, ids: Mapping[str, int], vocabulary: int) -> dict[str, Json]:
    """Qwen3-ASR in its original layout."""
    return {
        "config.json": {
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": "qwen3_asr",
            "support_languages": ["Chinese", "English"],
            "thinker_config": {
                "model_type": "qwen3_asr",
                "audio_token_id": ids["<|audio_pad|>"],
                "audio_start_token_id": ids["<|audio_start|>"],
                "audio_end_token_id": ids["<|audio_end|>"],
                "audio_config": {
                    "model_type": "qwen3_asr_audio_encoder",
                    "d_model": sizes.asr_audio_width,
                    "encoder_layers": sizes.asr_audio_layers,
                    "encoder_attention_heads": sizes.asr_audio_heads,
                    "encoder_ffn_dim": 4 * sizes.asr_audio_width,
                    "num_mel_bins": 128,
                    "max_source_positions": 1500,
                    "n_window": 50,
                    "n_window_infer": 800,
                    "conv_chunksize": 500,
                    "downsample_hidden_size": sizes.asr_conv_channels,
                    "output_dim": sizes.asr.hidden,
                    "activation_function": "gelu",
                    "scale_embedding": False,
                },
                "text_config": _decoder(
                    sizes.asr,
                    model_type="qwen3",
                    vocab_size=vocabulary,
                    max_position_embeddings=65536,
                    rope_theta=1_000_000,
                    rope_scaling={
                        "rope_type": "default",
                        "mrope_section": list(sizes.asr.sections),
                        "interleaved": True,
                        "mrope_interleaved": True,
                    },
                    tie_word_embeddings=True,
                ),
            },
        },
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [ids["<|endoftext|>"], ids["<|im_end|>"]],
            "pad_token_id": ids["<|im_end|>"],
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "dither": 0.0,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
    }


def aura_files(sizes: Sizes, ids: Mapping[str, int], vocabulary: int) -> dict[str, Json]:
    """AURA, which has the layout of Qwen3-VL."""
    pixels = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "config.json": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": False,
            "text_config": _decoder(
                sizes.aura,
                model_type="qwen3_vl_text",
                vocab_size=vocabulary,
                max_position_embeddings=262144,
                rope_theta=5_000_000,
                rope_scaling={
                    "rope_type": "default",
                    "mrope_section": list(sizes.aura.sections),
                    "mrope_interleaved": True,
                },
            ),
            "vision_config": {
                "model_type": "qwen3_vl",
                "deepstack_visual_indexes": list(sizes.vision_deepstack),
                "depth": sizes.vision_layers,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": sizes.vision_width,
                "in_channels": 3,
                "intermediate_size": sizes.vision_intermediate,
                "num_heads": sizes.vision_heads,
                "num_position_embeddings": sizes.vision_positions,
                "out_hidden_size": sizes.aura.hidden,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        "generation_config.json": {
            "do_sample": True,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
        },
        "preprocessor_config.json": {
            **pixels,
            "size": {"shortest_edge": sizes.image_pixels[0], "longest_edge": sizes.image_pixels[1]},
        },
        "video_preprocessor_config.json": {
            **pixels,
            "size": {"shortest_edge": sizes.video_pixels[0], "longest_edge": sizes.video_pixels[1]},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 768,
        },
    }


def tts_files(sizes: Sizes, ids: Mapping[str, int], vocabulary: int, *, kind: str) -> dict[str, Json]:
    """Qwen3-TTS 12 Hz; kind is "base", "custom_voice" or "voice_design"."""
    config: Json = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": kind,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "talker_config": _decoder(
            sizes.talker,
            model_type="qwen3_tts_talker",
            vocab_size=3072,
            text_hidden_size=sizes.talker_text,
            text_vocab_size=vocabulary,
            max_position_embeddings=32768,
            position_id_per_seconds=13,
            num_code_groups=16,
            rope_theta=1_000_000,
            rope_scaling={"interleaved": True, "mrope_section": list(sizes.talker.sections), "rope_type": "default"},
            codec_bos_id=2149,
            codec_eos_token_id=2150,
            codec_pad_id=2148,
            codec_think_id=2154,
            codec_nothink_id=2155,
            codec_think_bos_id=2156,
            codec_think_eos_id=2157,
            codec_language_id={**LANGUAGES, **DIALECTS} if kind == "custom_voice" else dict(LANGUAGES),
            spk_id=dict(SPEAKERS) if kind == "custom_voice" else {},
            spk_is_dialect={
                name: {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}.get(name, False) for name in SPEAKERS
            }
            if kind == "custom_voice"
            else {},
            code_predictor_config=_decoder(
                sizes.predictor,
                model_type="qwen3_tts_talker_code_predictor",
                vocab_size=2048,
                num_code_groups=16,
                max_position_embeddings=65536,
                rope_theta=1_000_000,
                rope_scaling=None,
                layer_types=["full_attention"] * sizes.predictor.layers,
                tie_word_embeddings=False,
            ),
        ),
    }
    if kind == "base":
        channels = list(sizes.speaker_channels)
        config["speaker_encoder_config"] = {"enc_dim": sizes.talker.hidden, "sample_rate": 24000}
        if channels != [512, 512, 512, 512, 1536]:  # the published file leaves its defaults out
            config["speaker_encoder_config"] |= {
                "enc_channels": channels,
                "enc_attention_channels": channels[0] // 4,
                "enc_se_channels": channels[0] // 4,
            }
    return {
        "config.json": config,
        "generation_config.json": {
            "do_sample": True,
            "top_k": 50,
            "top_p": 1.0,
            "temperature": 0.9,
            "repetition_penalty": 1.05,
            "subtalker_dosample": True,
            "subtalker_top_k": 50,
            "subtalker_top_p": 1.0,
            "subtalker_temperature": 0.9,
            "max_new_tokens": sizes.max_new_frames,
        },
        "preprocessor_config.json": {"processor_class": "Qwen3TTSProcessor", "padding_side": "left"},
    }


def speech_tokenizer_files(sizes: Sizes) -> dict[str, Json]:
    """The codec that lies in the `speech_tokenizer` folder of a Qwen3-TTS checkpoint."""
    return {
        "config.json": {
            "architectures": ["Qwen3TTSTokenizerV2Model"],
            "model_type": "qwen3_tts_tokenizer_12hz",
            "encoder_valid_num_quantizers": 16,
            "input_sample_rate": 24000,
            "output_sample_rate": 24000,
            "decode_upsample_rate": 1920,
            "encode_downsample_rate": 1920,
            "encoder_config": {
                "model_type": "mimi",
                "frame_rate": 12.5,
                "sampling_rate": 24000,
                "audio_channels": 1,
                "num_filters": sizes.codec_filters,
                "kernel_size": 7,
                "residual_kernel_size": 3,
                "last_kernel_size": 3,
                "num_residual_layers": 1,
                "dilation_growth_rate": 2,
                "compress": 2,
                "upsampling_ratios": [8, 6, 5, 4],
                "hidden_size": sizes.codec_width,
                "num_hidden_layers": sizes.codec_layers,
                "num_attention_heads": sizes.codec_heads // 2,
                "num_key_value_heads": sizes.codec_heads // 2,
                "head_dim": 2 * sizes.codec_width // sizes.codec_heads,
                "intermediate_size": 4 * sizes.codec_width,
                "hidden_act": "gelu",
                "norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "layer_scale_initial_scale": 0.01,
                "sliding_window": 250,
                "max_position_embeddings": 8000,
                "codebook_size": 2048,
                "codebook_dim": sizes.codec_book // 2,
                "vector_quantization_hidden_dimension": sizes.codec_book // 2,
                "num_quantizers": 32,
                "num_semantic_quantizers": 1,
                "pad_mode": "constant",
                "use_causal_conv": True,
                "trim_right_ratio": 1.0,
                "upsample_groups": sizes.codec_width,
                "use_conv_shortcut": False,
            },
            "decoder_config": {
                "latent_dim": sizes.codec_latent,
                "codebook_dim": sizes.codec_book,
                "codebook_size": 2048,
                "decoder_dim": sizes.codec_decoder,
                "hidden_act": "silu",
                "hidden_size": sizes.codec_width,
                "intermediate_size": 2 * sizes.codec_width,
                "layer_scale_initial_scale": 0.01,
                "max_position_embeddings": 8000,
                "head_dim": sizes.codec_head_dim,
                "num_attention_heads": sizes.codec_heads,
                "num_hidden_layers": sizes.codec_layers,
                "num_key_value_heads": sizes.codec_heads,
                "num_quantizers": 16,
                "num_semantic_quantizers": 1,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000,
                "semantic_codebook_size": 4096,
                "sliding_window": 72,
                "upsample_rates": [8, 5, 4, 3],
                "upsampling_ratios": [2, 2],
                "vector_quantization_hidden_dimension": 512,
            },
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "sampling_rate": 24000,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
    }


def speech_tokenizer_unused(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in the codec's published file that speaking and listening do without."""
    book, width = sizes.codec_book // 2, sizes.codec_width
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("rvq_first", "rvq_rest"):
        shapes[f"decoder.quantizer.{part}.input_proj.weight"] = (book, 2 * book, 1)
    for kind, layers, used in (("semantic", 1, 1), ("acoustic", 31, 15)):
        quantizer = f"encoder.quantizer.{kind}_residual_vector_quantizer"
        shapes[f"{quantizer}.output_proj.weight"] = (width, book, 1)
        for layer in range(layers):
            codebook = f"{quantizer}.layers.{layer}.codebook"
            shapes[f"{codebook}.initialized"] = (1,)
            if layer >= used:
                shapes[f"{codebook}.cluster_usage"] = (2048,)
                shapes[f"{codebook}.embed_sum"] = (2048, book)
    return shapes
