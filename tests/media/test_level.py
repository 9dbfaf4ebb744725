"""What the level of a recording says about speech, before any model hears it."""

from __future__ import annotations

import numpy as np
import pytest

from aura_omni.media.audio import decode_audio
from aura_omni.media.level import has_energy, may_be_speech
from tests.asr_tiny import clip
from tests.family import DATA


def heard(samples: np.ndarray) -> bool:
    return has_energy(samples, 16_000)


def speechlike(seconds: float) -> np.ndarray:
    """Bursts of noise at -21 dBFS with pauses, as loud and as broken up as a recorded sentence."""
    n = round(seconds * 16_000)
    bursts = np.random.default_rng(0).standard_normal(n) * (np.sin(2 * np.pi * 3 * np.arange(n) / 16_000) > 0)
    return (bursts * 10 ** (-21 / 20) / np.sqrt(np.square(bursts).mean())).astype(np.float32)


def test_silence_and_a_constant_offset_have_no_energy():
    assert not heard(np.zeros(80_000, np.float32))
    assert not heard(np.full(80_000, 0.4, np.float32))
    dither = np.random.default_rng(0).integers(-1, 2, 80_000) / 32768
    assert not heard(dither.astype(np.float32))


def test_speech_attenuated_by_45_decibels_heard():
    quiet = np.round(speechlike(2) * 10 ** (-45 / 20) * 32768) / 32768  # as a 16-bit file holds it
    assert heard(quiet.astype(np.float32))
    assert heard(quiet.astype(np.float32) + np.float32(0.4))


def test_a_word_in_a_minute_of_silence_heard():
    samples = np.zeros(60 * 16_000, np.float32)
    samples[500_000:508_000] = speechlike(0.5)
    assert heard(samples)


@pytest.mark.parametrize("milliseconds", [0, 1, 10, 50])
def test_a_click_has_no_energy(milliseconds):
    assert not heard(clip(1)[: 16 * milliseconds])
    with_silence = np.zeros(16_000, np.float32)
    with_silence[: 16 * min(milliseconds, 10)] = 0.5
    assert not heard(with_silence)


def hiss(seconds: float = 5.0, rate: int = 16_000) -> np.ndarray:
    return (0.1 * np.random.default_rng(1).standard_normal(round(seconds * rate))).astype(np.float32)


def tone(seconds: float = 5.0, rate: int = 16_000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
@pytest.mark.parametrize("sound", [hiss, tone])
def test_a_steady_sound_is_no_speech_however_loud(sound, rate):
    for gain in (0.01, 1.0):
        assert has_energy(gain * sound(rate=rate), rate)
        assert not may_be_speech(gain * sound(rate=rate), rate)
    inside = np.concatenate([np.zeros(rate, np.float32), sound(rate=rate), np.zeros(rate, np.float32)])
    assert not may_be_speech(inside, rate)


def test_speech_is_heard_alone_clipped_or_in_noise_louder_than_itself():
    recording = decode_audio((DATA / "human_a.wav").read_bytes(), max_s=60)
    speech = recording.samples / np.sqrt(np.square(recording.samples).mean())
    noise = np.random.default_rng(2).standard_normal(len(speech))
    for samples in (speech, np.clip(speech, -0.5, 0.5), speech + 2 * noise, 10 ** (-45 / 20) * speech):
        assert may_be_speech(0.1 * samples.astype(np.float32), recording.rate)


def test_a_word_in_a_long_steady_noise_is_heard():
    samples = hiss(60)
    samples[500_000:508_000] += 3 * speechlike(0.5)
    assert may_be_speech(samples, 16_000)


def test_a_clip_shorter_than_a_second_is_heard_even_if_it_is_steady():
    assert may_be_speech(tone(0.9), 16_000)
