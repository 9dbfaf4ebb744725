"""What a checkpoint can speak with, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from aura_omni.errors import BadVoice, CheckpointError
from aura_omni.flow import Audio, Voice
from aura_omni.stages.voices import Voices
from tests.reference_tts import LANGUAGES, SPEAKERS, tts_config


def voices(kind: str, **options: Any) -> Voices:
    return Voices.from_json(tts_config(kind, **options), "tiny", least_samples=1280)


def recording(seconds: float, rate: int = 24_000, key: bytes = b"k") -> Audio:
    """Noise with pauses."""
    at_s = np.arange(int(seconds * rate)) / rate
    samples = np.random.default_rng(0).standard_normal(len(at_s)) * (np.sin(20 * at_s) > 0) * 0.1
    return Audio(samples.astype(np.float32), rate, key)


SILENCE = Audio(np.zeros(72_000, np.float32), 24_000, b"s")
CUSTOM, DESIGN, BASE = voices("custom_voice"), voices("voice_design"), voices("base")


def test_a_voice_without_wishes_speaks_as_the_checkpoint_does() -> None:
    speaking = CUSTOM.resolve(Voice())
    assert (speaking.task, speaking.speaker_id, speaking.language_id) == ("CustomVoice", SPEAKERS["vivian"], None)
    assert speaking.non_streaming
    assert DESIGN.resolve(Voice(instruct="old")).non_streaming
    assert not BASE.resolve(Voice(ref_audio=recording(2), ref_text="hi")).non_streaming


def test_without_vivian_the_first_speaker_of_the_file_speaks() -> None:
    config = tts_config("custom_voice")
    del config["talker_config"]["spk_id"]["vivian"]
    assert Voices.from_json(config, "tiny").resolve(Voice()).speaker_id == SPEAKERS["serena"]


@pytest.mark.parametrize("name", ["ryan", "Ryan", " RYAN "])
def test_speakers_are_found_in_any_case(name: str) -> None:
    assert CUSTOM.resolve(Voice(speaker=name)).speaker_id == SPEAKERS["ryan"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("English", "english"),
        ("en", "english"),
        ("en-GB", "english"),
        ("zh_CN", "chinese"),
        ("JA", "japanese"),
        ("auto", None),
        ("Auto", None),
        ("", None),
        (None, None),
    ],
)
def test_languages_are_found_by_name_and_iso_code(name: str | None, expected: str | None) -> None:
    assert CUSTOM.resolve(Voice(language=name)).language_id == (LANGUAGES[expected] if expected else None)


def test_a_checkpoint_of_one_language_reads_every_text_in_it_and_is_told_none() -> None:
    english = dataclasses.replace(CUSTOM, languages={"english": LANGUAGES["english"]}, dialects={})
    speaking = english.resolve(Voice())
    assert (speaking.language, speaking.language_id) == ("english", None)
    assert CUSTOM.resolve(Voice()).language is None


@pytest.mark.parametrize(
    ("speaker", "language", "expected"),
    [
        ("eric", "auto", "sichuan_dialect"),
        ("eric", "zh", "sichuan_dialect"),
        ("dylan", None, "beijing_dialect"),
        ("eric", "english", "english"),
        ("ryan", "chinese", "chinese"),
    ],
)
def test_a_speaker_of_a_dialect_turns_chinese_into_it(speaker: str, language: str | None, expected: str) -> None:
    assert CUSTOM.resolve(Voice(speaker=speaker, language=language)).language_id == LANGUAGES[expected]


@pytest.mark.parametrize(
    ("who", "voice", "param", "message"),
    [
        (
            CUSTOM,
            Voice(task="Base"),
            "task",
            "^task is Base, which needs a speaker encoder .* is CustomVoice. Leave it out, or serve a Base checkpoint",
        ),
        (CUSTOM, Voice(task="VoiceDesign"), "task", "needs voices made from a description"),
        (BASE, Voice(task="CustomVoice"), "task", "needs named speakers"),
        (CUSTOM, Voice(speaker="bob"), "speaker", "'bob' is unknown; there are serena, vivian, ryan"),
        (CUSTOM, Voice(language="klingon"), "language", "'klingon' is unknown; there are auto, english, german"),
        (CUSTOM, Voice(language="fr"), "language", "'fr' is unknown"),
        (CUSTOM, Voice(language="beijing_dialect"), "language", "is unknown"),
        (
            CUSTOM,
            Voice(ref_audio=recording(2)),
            "ref_audio",
            "leave it out, or serve a Base checkpoint in the Talker and Code2Wav$",
        ),
        (CUSTOM, Voice(ref_text="hi"), "ref_text", r"^ref_text is given, but .* \(CustomVoice\) cannot clone a voice"),
        (DESIGN, Voice(instruct="x", x_vector_only=True), "x_vector_only", "^x_vector_only is given"),
        (DESIGN, Voice(), "instruct", "^instruct is missing"),
        (DESIGN, Voice(instruct="  "), "instruct", "^instruct is missing"),
        (
            DESIGN,
            Voice(instruct="x", speaker="ryan"),
            "speaker",
            "has no named speakers; leave it out and describe the voice in instruct, or",
        ),
        (
            BASE,
            Voice(speaker="ryan"),
            "speaker",
            "has no named speakers; leave it out and send ref_audio, or serve a CustomVoice checkpoint",
        ),
        (BASE, Voice(), "ref_audio", "^ref_audio is missing: .* as ref_text, or set x_vector_only to"),
        (
            BASE,
            Voice(ref_audio=recording(2)),
            "ref_text",
            "^ref_text is missing: .* of ref_audio, or set x_vector_only",
        ),
        (BASE, Voice(ref_audio=recording(2), ref_text=" "), "ref_text", "^ref_text is missing"),
        (BASE, Voice(ref_audio=recording(2), ref_text="hi", instruct="x"), "instruct", "does not follow instructions"),
        (
            BASE,
            Voice(ref_audio=recording(0.05), ref_text="x"),
            "ref_audio",
            "has 1,200 samples at 24,000 Hz; at least 1,280",
        ),
        (BASE, Voice(ref_audio=recording(0.05, 48_000), ref_text="x"), "ref_audio", "has 1,200 samples"),
        (BASE, Voice(ref_audio=recording(60.5, 8_000), ref_text="x"), "ref_audio", "60.50 s long; at most 60 s"),
        (BASE, Voice(ref_audio=recording(60.01), ref_text="x"), "ref_audio", "60.01 s long; at most 60 s"),
        (BASE, Voice(ref_audio=recording(60.001), ref_text="x"), "ref_audio", "60.01 s long; at most 60 s"),
        (BASE, Voice(ref_audio=SILENCE, ref_text="x"), "ref_audio", "nobody speaks in ref_audio"),
        (BASE, Voice(ref_audio=SILENCE, x_vector_only=True), "ref_audio", "nobody speaks in ref_audio"),
        (BASE, Voice(ref_audio=recording(2), ref_text="😀 …!"), "ref_text", "no letter or digit"),
    ],
)
def test_what_a_checkpoint_cannot_do_is_refused_by_name(who: Voices, voice: Voice, param: str, message: str) -> None:
    with pytest.raises(BadVoice, match=message) as error:
        who.resolve(voice)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("kind", "voice", "way_out"),
    [
        ("custom_voice", Voice(task="Base"), "Base checkpoint (nano:tts-base)"),
        ("custom_voice", Voice(ref_audio=recording(2)), "Base checkpoint (nano:tts-base)"),
        ("base", Voice(task="CustomVoice"), "CustomVoice checkpoint (nano:tts)"),
        ("base", Voice(task="VoiceDesign"), "VoiceDesign checkpoint in"),
    ],
)
def test_nano_names_the_checkpoint_of_nano_that_can_do_it(kind: str, voice: Voice, way_out: str) -> None:
    with pytest.raises(BadVoice) as refusal:
        Voices.from_json(tts_config(kind), "nano:tts").resolve(voice)
    assert way_out in refusal.value.message


def test_the_small_custom_voice_refuses_instructions() -> None:
    small = voices("custom_voice", size="0b6")
    assert small.resolve(Voice(instruct="")).instruct == ""
    with pytest.raises(BadVoice, match="does not follow instructions"):
        small.resolve(Voice(instruct="slowly"))
    assert CUSTOM.resolve(Voice(instruct="slowly")).instruct == "slowly"


def test_a_clone_uses_the_transcript_unless_told_not_to() -> None:
    voice = Voice(ref_audio=recording(2), ref_text="hi")
    assert BASE.resolve(voice).clone == "continue"
    assert BASE.resolve(Voice(ref_audio=recording(2), x_vector_only=True)).clone == "speaker"
    # Existing clients send the transcript in this mode too.
    assert BASE.resolve(Voice(ref_audio=recording(2), ref_text="hi", x_vector_only=True)).clone == "speaker"


def test_a_checkpoint_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tts_model_type 'other'"):
        Voices.from_json({**tts_config("base"), "tts_model_type": "other"}, "tiny")
    config = tts_config("custom_voice")
    config["talker_config"]["spk_id"] = {}
    with pytest.raises(CheckpointError, match="without speakers"):
        Voices.from_json(config, "tiny")


@pytest.mark.parametrize(
    ("text", "seconds", "numbers"),
    [
        ("It was the best of times. " * 40, 8.3, ("254 syllables", "8.3 s", "at most 128")),
        ("好" * 60, 3, ("60 syllables", "3.0 s", "at most 49")),
        ("Hello there.", 20, ("4 syllables", "20.0 s", "at most 12 s")),
        ("嗯", 7, ("1 syllable", "7.0 s", "at most 6 s")),
    ],
)
def test_a_transcript_that_cannot_be_of_its_recording_is_refused(
    text: str, seconds: float, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(BadVoice) as refusal:
        BASE.resolve(Voice(ref_audio=recording(seconds), ref_text=text))
    assert refusal.value.param == "ref_text"
    assert all(number in refusal.value.message for number in (*numbers, "x_vector_only")), refusal.value.message
    assert BASE.resolve(Voice(ref_audio=recording(seconds), ref_text=text, x_vector_only=True)).clone == "speaker"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("It was the best of times, it was the worst of times.", 2.2),  # fast
        ("It was the best of times, it was the worst of times.", 20),  # with long pauses
        ("今天天气很好，我们去公园吧。", 1.6),
        ("Yes.", 2),
        ("12 345 678", 3),
    ],
)
def test_transcripts_of_fast_and_slow_speech_are_taken(text: str, seconds: float) -> None:
    assert BASE.resolve(Voice(ref_audio=recording(seconds), ref_text=text)).clone == "continue"
