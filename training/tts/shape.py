"""The dimensions of the small speaker: the published JSON files, and networks built from them.

Everything is expressed in the published configuration, so that what is trained here is what the server builds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from aura_omni.models.codec import CodecConfig, CodecDecoder
from aura_omni.models.codec_encoder import CodecEncoder, CodecEncoderConfig
from aura_omni.models.qwen3_tts import Talker, TalkerConfig
from aura_omni.models.speaker_encoder import SpeakerEncoder, SpeakerEncoderConfig
from aura_omni.nano import published
from aura_omni.nano.published import TINY, Json, Text
from aura_omni.stages.tokenizer import QWEN_SPLIT
from training.tts import contour

ACOUSTIC_BOOKS = contour.BOOKS  # books 1..4 say something; the rest are zero
BOOK_ROWS = contour.ROWS
SPEAKER_IDS = {"ryan": 2_160, "vivian": 2_161, "uncle_fu": 2_162}
CODEC_IDS = 2_176  # codes of book 0, control ids, languages, speakers: what is trained
# What is published: the last 1,024 ids of the vocabulary are never drawn (but for eos), so the 2,048 codes need as many behind them.
PUBLISHED_CODEC_IDS = 3_072
TEXT_PIECES = 1_500

SIZES = replace(
    TINY,
    talker=Text(256, 768, 6, 4, 2, 64, (12, 10, 10)),
    predictor=Text(128, 256, 1, 4, 2, 32, (6, 5, 5)),
    talker_text=128,
    codec_latent=192,
    codec_width=192,
    codec_layers=3,
    codec_heads=6,
    codec_head_dim=32,
    codec_decoder=256,
    codec_book=64,
    codec_filters=16,
    speaker_channels=(64, 64, 64, 64, 192),
    max_new_frames=512,
)


def talker_files(
    ids: dict[str, int], vocabulary: int, *, kind: str = "custom_voice", codec_ids: int = CODEC_IDS
) -> dict[str, Json]:
    files = published.tts_files(SIZES, ids, vocabulary, kind=kind)
    config = files["config.json"]
    config["tts_model_size"] = "0b6"  # takes no instructions
    talker = config["talker_config"]
    talker["vocab_size"] = codec_ids
    talker["code_predictor_config"]["vocab_size"] = BOOK_ROWS
    talker["codec_language_id"] = {"english": published.LANGUAGES["english"]}
    if kind == "custom_voice":
        talker["spk_id"] = dict(SPEAKER_IDS)
        talker["spk_is_dialect"] = dict.fromkeys(SPEAKER_IDS, False)
    files["generation_config.json"] |= {
        "temperature": 0.5,
        "top_k": 10,
        "repetition_penalty": 1.0,
        "subtalker_temperature": 0.5,
        "subtalker_top_k": 10,
    }
    return files


def codec_files() -> dict[str, Json]:
    files = published.speech_tokenizer_files(SIZES)
    files["config.json"]["encoder_config"]["num_quantizers"] = 16  # none beyond those that are used
    return files


def speaker_encoder() -> SpeakerEncoder:
    ids = dict.fromkeys([*published.CONTROL_TOKENS, *published.AUDIO_TOKENS, "assistant"], 0)
    return SpeakerEncoder(SpeakerEncoderConfig.from_json(talker_files(ids, 1, kind="base")["config.json"]))


def talker(vocabulary: int) -> Talker:
    ids = dict.fromkeys([*published.CONTROL_TOKENS, *published.AUDIO_TOKENS, "assistant"], 0)
    return Talker(TalkerConfig.from_json(talker_files(ids, vocabulary)["config.json"]))


def codec() -> tuple[CodecDecoder, CodecEncoder]:
    config: dict[str, Any] = codec_files()["config.json"]
    return CodecDecoder(CodecConfig.from_json(config)), CodecEncoder(CodecEncoderConfig.from_json(config))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Lower-case byte-pair pieces, split as the published tokenizer splits, with its control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=TEXT_PIECES, initial_alphabet=alphabet, show_progress=False)
    roles = ["system", "user", "assistant"] * max(100, len(texts) // 20)  # each must become one piece
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    names = (*published.CONTROL_TOKENS, *published.PLAIN_ADDED_TOKENS, *published.AUDIO_TOKENS)
    special = {*published.CONTROL_TOKENS, *published.AUDIO_TOKENS}
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=name in special) for name in names])
    return tokenizer


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    names = (*published.CONTROL_TOKENS, *published.PLAIN_ADDED_TOKENS, *published.AUDIO_TOKENS, "assistant")
    found = {name: tokenizer.token_to_id(name) for name in names}
    return {name: number for name, number in found.items() if number is not None}
