"""A tiny Qwen3-ASR for tests: its config in both published layouts, a byte-level tokenizer, the reference with the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from aura_omni.models.layers import DenseKV
from aura_omni.models.qwen3 import DecoderConfig
from aura_omni.models.qwen3_asr import HF_LAYOUT, AsrConfig, Qwen3Asr
from aura_omni.models.weights import from_published, to_published

VOCABULARY = 1000
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<asr_text>",
)
IDS = {token: 300 + n for n, token in enumerate(CONTROL)}

AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 3,
    "d_model": 64,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "downsample_hidden_size": 32,
    "output_dim": 96,
    "n_window": 50,
    "n_window_infer": 800,
    "activation_function": "gelu",
    "scale_embedding": False,
}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "attention_bias": False,
    "hidden_act": "silu",
}
ORIGINAL = {
    "model_type": "qwen3_asr",
    "support_languages": ["Chinese", "English"],
    "thinker_config": {
        "model_type": "qwen3_asr",
        "audio_token_id": IDS["<|audio_pad|>"],
        "audio_config": {
            **AUDIO,
            "model_type": "qwen3_asr_audio_encoder",
            "max_source_positions": 1500,
            "conv_chunksize": 500,
        },
        "text_config": {
            **TEXT,
            "model_type": "qwen3",
            "rope_theta": 1_000_000,
            "rope_scaling": {
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
                "rope_type": "default",
                "type": "default",
            },
            "tie_word_embeddings": True,
        },
    },
}
CONVERTED = {
    "model_type": "qwen3_asr",
    "audio_token_id": IDS["<|audio_pad|>"],
    "audio_config": {**AUDIO, "model_type": "qwen3_asr_encoder", "max_position_embeddings": 13},
    "text_config": {
        **TEXT,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,  # as the converted files have it; the outer flag decides
    },
    "tie_word_embeddings": True,
}


def reference(config: Mapping[str, Any] = CONVERTED) -> Any:
    """The public implementation with random weights, large enough that greedy decoding wanders."""
    copy = json.loads(json.dumps({key: value for key, value in config.items() if key != "model_type"}))
    copy["pad_token_id"], copy["eos_token_id"] = IDS["<|endoftext|>"], [IDS["<|im_end|>"]]
    model = Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(**copy)).eval()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=random)
            if value.dim() == 1:
                value.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))
            else:
                value.copy_(noise * (0.2 if "embed" in name else 2.5 * value[0].numel() ** -0.5))
    return model


def network_of(model: Any) -> Qwen3Asr:
    """Ours with the reference's weights."""
    network = Qwen3Asr(AsrConfig.from_json(CONVERTED))
    from_published(network, HF_LAYOUT, model.state_dict())
    return network.requires_grad_(False).eval()


def clip(seconds: float, extra: int = 0, seed: int = 0) -> np.ndarray:
    """float32 at 16 kHz: a gliding tone with noise, of changing loudness."""
    n = round(seconds * 16_000) + extra
    t = np.arange(n) / 16_000
    random = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * (200 + 150 * seed + 400 * t) * t) * (0.3 + 0.25 * np.sin(3 * t))
    return (tone + 0.02 * random.standard_normal(n)).astype(np.float32)


def reference_inputs(samples: np.ndarray) -> dict[str, Tensor]:
    """One clip for the reference: mel padded to whole chunks, and its mask."""
    made = Qwen3ASRFeatureExtractor()(samples, sampling_rate=16_000, padding="longest", return_attention_mask=True)
    return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def byte_tokenizer(
    control: Mapping[str, int], vocab: Mapping[str, int] | None = None, merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """Byte-level BPE, of single bytes unless a vocabulary is given; control tokens get the ids asked for."""
    words = dict(vocab) if vocab else {character: n for n, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab={**words, **control}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def write_checkpoint(
    folder: Path, network: Qwen3Asr, *, config: Mapping[str, Any], extra: Mapping[str, Tensor] | None = None
) -> None:
    """A checkpoint folder in the layout that config stands for."""
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer(IDS).save(str(folder / "tokenizer.json"))
    tensors = to_published(network, AsrConfig.from_json(config).layout) | dict(extra or {})
    save_file(tensors, str(folder / "model.safetensors"))


def dense(config: DecoderConfig, capacity: int) -> DenseKV:
    shape = (config.layers, 1, capacity, config.kv_heads, config.head_dim)
    return DenseKV(*shape, dtype=torch.float32, device=torch.device("cpu"))


class Side:
    """KeyValues of sequences of different lengths: one DenseKV each, rows of a step one sequence after another."""

    def __init__(self, caches: Sequence[DenseKV], counts: Sequence[int]) -> None:
        self.caches, self.counts = caches, list(counts)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(self.caches, q.split(self.counts), k.split(self.counts), v.split(self.counts), strict=True)
        return torch.cat([cache.attend(layer, *rows) for cache, *rows in parts])

    def advance(self) -> None:
        for cache in self.caches:
            cache.advance()
