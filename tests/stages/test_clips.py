"""What happens to a clip before the network."""

from __future__ import annotations

import librosa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.flow import Audio
from aura_omni.stages.clips import at_speech_rate, media_key, split_long
from tests.asr_tiny import clip


def audio(samples: np.ndarray, rate: int = 16_000, key: bytes = b"a") -> Audio:
    return Audio(samples, rate, key)


@pytest.mark.reference
@pytest.mark.parametrize("rate", [8_000, 22_050, 24_000, 44_100, 48_000])
def test_resampling_equals_librosa(rate):
    samples = clip(0.7, 3)
    expected = librosa.resample(samples, orig_sr=rate, target_sr=16_000)
    made = at_speech_rate(audio(samples, rate))
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, expected)


def test_only_what_is_louder_than_full_scale_is_scaled():
    samples = clip(0.5)
    np.testing.assert_array_equal(at_speech_rate(audio(samples * 0.1)), samples * np.float32(0.1))
    loud = at_speech_rate(audio(samples * 8))
    assert np.abs(loud).max() == 1.0
    np.testing.assert_allclose(loud, samples / np.abs(samples).max(), atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_the_shortest_clips_have_a_sample(samples):
    assert len(at_speech_rate(audio(np.full(samples, 0.5, np.float32), 48_000))) == -(-samples // 3)


def test_a_clip_within_the_limit_is_not_touched():
    whole = audio(clip(2), 16_000)
    assert split_long(whole, limit_s=2.0) == (whole,)


@settings(max_examples=20, deadline=None)
@given(seconds=st.floats(10.5, 60), limit_s=st.floats(6, 20), seed=st.integers(0, 9))
def test_parts_are_the_clip_and_none_exceeds_the_limit_by_more_than_the_search(seconds, limit_s, seed):
    samples = np.random.default_rng(seed).uniform(-1, 1, round(seconds * 16_000)).astype(np.float32)
    parts = split_long(audio(samples), limit_s=limit_s)
    np.testing.assert_array_equal(np.concatenate([part.samples for part in parts]), samples)
    assert all(0 < part.duration_s <= limit_s + 5.0 for part in parts)
    assert len({part.key for part in parts}) == len(parts)


def test_a_cut_falls_into_the_pause():
    samples = np.random.default_rng(1).uniform(-1, 1, 30 * 16_000).astype(np.float32)
    samples[192_000:194_400] *= 0.01  # 12.00 s to 12.15 s
    first, *_ = split_long(audio(samples), limit_s=10.0)
    assert 12.0 <= first.duration_s < 12.15
    at = len(first.samples)
    window = np.abs(samples[192_000:194_400])
    assert abs(samples[at]) <= np.sort(window)[30]  # the least of some 100 ms of the pause


def test_parts_of_a_clip_at_another_rate_are_at_16_khz():
    samples = clip(6)  # taken as 8 kHz: 12 s
    parts = split_long(audio(samples, 8_000), limit_s=6.0)
    assert {part.rate for part in parts} == {16_000}
    np.testing.assert_array_equal(np.concatenate([p.samples for p in parts]), at_speech_rate(audio(samples, 8_000)))


def test_keys_differ_by_content_rate_length_and_options():
    samples = clip(0.5)
    keys = [
        media_key(audio(samples), "asr"),
        media_key(audio(samples, key=b"b"), "asr"),
        media_key(audio(samples, 8_000), "asr"),
        media_key(audio(samples[:-1]), "asr"),
        media_key(audio(samples), "0:8000"),
    ]
    assert len(set(keys)) == len(keys)
    assert media_key(audio(samples.copy()), "asr") == keys[0]


@pytest.mark.parametrize("limit_s", [0.4, 2.0, 30.0])
def test_a_part_exceeds_a_short_limit_by_a_quarter_at_most(limit_s):
    samples = np.random.default_rng(1).normal(0, 0.1, 16_000 * 70).astype(np.float32)
    parts = split_long(audio(samples), limit_s=limit_s)
    assert max(part.duration_s for part in parts) <= limit_s + min(5.0, limit_s / 4) + 0.001
