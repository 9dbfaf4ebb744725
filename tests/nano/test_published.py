"""The true-size family has the tensors of the published repositories, no more and no fewer."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import nn

from aura_omni.models.codec import DECODER_LAYOUT, CodecConfig, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT, CodecEncoder, CodecEncoderConfig
from aura_omni.models.qwen3_asr import AsrConfig, Qwen3Asr
from aura_omni.models.qwen3_tts import TALKER_LAYOUT, Talker, TalkerConfig
from aura_omni.models.qwen3_vl import LAYOUT, Qwen3VL, VLConfig
from aura_omni.models.speaker_encoder import SPEAKER_LAYOUT, SpeakerEncoder, SpeakerEncoderConfig
from aura_omni.models.weights import Layout, slots
from aura_omni.nano import published

IDS: defaultdict[str, int] = defaultdict(int)
VOCABULARY = 151936


def networks(name: str) -> list[tuple[nn.Module, Layout]]:
    with torch.device("meta"):
        if name == "asr":
            hearing = AsrConfig.from_json(published.asr_files(published.TRUE, IDS, VOCABULARY)["config.json"])
            return [(Qwen3Asr(hearing), hearing.layout)]
        if name == "aura":
            seeing = VLConfig.from_json(published.aura_files(published.TRUE, IDS, VOCABULARY)["config.json"])
            return [(Qwen3VL(seeing), LAYOUT)]
        if name == "speech_tokenizer":
            codec = published.speech_tokenizer_files(published.TRUE)["config.json"]
            decoder, encoder = (
                CodecDecoder(CodecConfig.from_json(codec)),
                CodecEncoder(CodecEncoderConfig.from_json(codec)),
            )
            return [(decoder, DECODER_LAYOUT), (encoder, ENCODER_LAYOUT)]
        config = published.tts_files(published.TRUE, IDS, VOCABULARY, kind=name)["config.json"]
        found: list[tuple[nn.Module, Layout]] = [(Talker(TalkerConfig.from_json(config)), TALKER_LAYOUT)]
        if name == "base":
            found.append((SpeakerEncoder(SpeakerEncoderConfig.from_json(config)), SPEAKER_LAYOUT))
        return found


@pytest.mark.parametrize(
    ("name", "tensors", "values"),
    [
        ("asr", 707, 2_038_052_480),  # without the head, which the files hold a second time
        ("aura", 750, 8_767_123_696),
        ("base", 480, 1_928_677_440),
        ("custom_voice", 404, 1_916_676_352),
        ("voice_design", 404, 1_916_676_352),
        ("speech_tokenizer", 496, 170_557_441),
    ],
)
def test_true_checkpoints_have_the_published_number_of_tensors_and_values(name: str, tensors: int, values: int) -> None:
    count = size = 0
    for network, layout in networks(name):
        count += sum(1 for _ in slots(network, layout))
        size += sum(value.numel() for value in network.state_dict().values())
    if name == "speech_tokenizer":
        unused = published.speech_tokenizer_unused(published.TRUE)
        count += len(unused)
        size += sum(math.prod(shape) for shape in unused.values())
    assert (count, size) == (tensors, values)
