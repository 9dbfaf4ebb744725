"""Tiny random Qwen3-TTS models of the public qwen-tts-hf package, and the files they would be published with.

folder = write_tokenizer(tmp_path)                        # vocab.json, merges.txt, tokenizer_config.json
config = tts_config("custom_voice")                       # as config.json
model = reference_model(config, seed=0)                   # the package's Qwen3TTSForConditionalGeneration
ids = reference_tokenizer(folder)("<|im_start|>assistant\n...")["input_ids"]
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from tests.reference_package import import_qwen_tts

LANGUAGES = {
    "english": 2050,
    "german": 2053,
    "chinese": 2055,
    "japanese": 2058,
    "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}
SPEAKERS = {"serena": 3066, "vivian": 3065, "ryan": 3061, "eric": 2875, "dylan": 2878}
DIALECTS = {
    "serena": False,
    "vivian": False,
    "ryan": False,
    "eric": "sichuan_dialect",
    "dylan": "beijing_dialect",
}
_WORDS = ("assistant", "user", "Ġhello", "Ġworld", "the", "Ġthe", "ing", "ĊĊ", "Ġa", "Hello")
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All bytes and a few words, each grown letter by letter."""
    vocab = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return vocab, merges


def special_ids() -> dict[str, int]:
    vocab, _ = _vocabulary()
    return {token: len(vocab) + index for index, token in enumerate(SPECIALS)}


def write_tokenizer(folder: Path) -> Path:
    """A Qwen2 tokenizer as Qwen3-TTS ships it. `<think>` is an added token that is not special, as published."""
    vocab, merges = _vocabulary()
    added = {
        str(number): {
            "content": token,
            "special": "think" not in token,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for token, number in special_ids().items()
    }
    files = {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
        ),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def reference_tokenizer(folder: Path) -> Any:
    """What the package tokenizes with, from the same files."""
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer.from_pretrained(folder)


def tts_config(kind: str, *, size: str = "1b7", hidden: int = 64) -> dict[str, Any]:
    """config.json of a tiny model; kind is tts_model_type: "base", "custom_voice" or "voice_design".

    Codec ids and codec vocabulary are the published ones, all else is small. size "0b6" has equal widths in the Talker and its
    code predictor, and so no projection between them.
    """
    ids, (vocab, _) = special_ids(), _vocabulary()
    predictor_hidden = hidden if size == "0b6" else hidden // 2
    rope = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "attention_bias": False}
    talker = {
        **rope,
        "model_type": "qwen3_tts_talker",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "use_sliding_window": False,
        "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        "vocab_size": 3072,
        "text_vocab_size": len(vocab) + len(ids) + 5,
        "text_hidden_size": 48,
        "num_code_groups": 16,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_language_id": LANGUAGES,
        "spk_id": SPEAKERS if kind == "custom_voice" else {},
        "spk_is_dialect": DIALECTS if kind == "custom_voice" else {},
        "code_predictor_config": {
            **rope,
            "model_type": "qwen3_tts_talker_code_predictor",
            "hidden_size": predictor_hidden,
            "intermediate_size": 2 * predictor_hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rope_scaling": None,
            "vocab_size": 2048,
            "num_code_groups": 16,
        },
    }
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size,
        "tts_model_type": kind,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "assistant_token_id": vocab["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "talker_config": talker,
    }
    if kind == "base":
        config["speaker_encoder_config"] = {
            "enc_dim": hidden,
            "sample_rate": 24_000,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
        }
    return copy.deepcopy(config)


def randomise(model: torch.nn.Module, seed: int, spread: float = 0.1) -> None:
    """Matrices N(0, spread), biases N(0, 0.1), norm weights U(0.5, 1.5): no branch vanishes, no two rows are alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1 and name.endswith("weight"):
                value.uniform_(0.5, 1.5, generator=generator)
            else:
                value.normal_(0.0, spread if value.dim() > 1 else 0.1, generator=generator)


def reference_model(config: dict[str, Any], *, seed: int = 0, spread: float = 0.1) -> Any:
    """The package's whole model (without its speech tokenizer), float32 on the CPU, with random weights."""
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

    model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**copy.deepcopy(config))).eval()
    randomise(model, seed, spread)
    return model


def reference_ids(tokenizer: Any, kind: str, text: str) -> torch.Tensor:
    """Text inside the package's template -> ids int64 [1, n]; kind is "target", "reference" or "instruct"."""
    template = {
        "target": "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>assistant\n",
        "reference": "<|im_start|>assistant\n{}<|im_end|>\n",
        "instruct": "<|im_start|>user\n{}<|im_end|>\n",
    }[kind]
    return torch.tensor([tokenizer(template.format(text))["input_ids"]])


def write_checkpoint(
    folder: Path, config: dict[str, Any], model: Any, generation: dict[str, Any] | None = None
) -> Path:
    """The published files of one model (without speech_tokenizer/)."""
    from safetensors.torch import save_file

    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation or {}), encoding="utf-8")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    return folder
