"""Long recordings come apart at their pauses, in order, whole, and a few seconds at a time."""

from __future__ import annotations

import io
import tracemalloc
import wave
from collections.abc import Sequence

import numpy as np
import pytest

from aura_omni.errors import BadMedia
from aura_omni.media import recording
from aura_omni.media.audio import decode_audio
from aura_omni.media.level import SLOT_S, levels, slot_samples
from aura_omni.media.recording import LEAST_S, LONGEST_S, Recording, Segment
from tests.family import DATA

RATE = 8_000


def sound(seconds: float, level: float = 0.2) -> np.ndarray:
    """Something like speech: noise with four syllables a second."""
    n = round(seconds * RATE)
    noise = np.random.default_rng(n).standard_normal(n)
    return level * noise * (0.3 + np.abs(np.sin(4 * np.pi * np.arange(n) / RATE))) / 3


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE))


def file_of(*parts: np.ndarray, rate: int = RATE) -> io.BytesIO:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((32_767 * np.clip(np.concatenate(parts), -1, 1)).astype("<i2").tobytes())
    return file


def cut(*parts: np.ndarray, max_s: float = 10_000.0) -> list[Segment]:
    return list(Recording().segments(file_of(*parts), max_s=max_s))


def times(segments: Sequence[Segment]) -> list[tuple[float, float]]:
    return [(segment.start_s, segment.end_s) for segment in segments]


def test_segments_end_at_pauses_and_their_times_are_those_of_the_sound() -> None:
    segments = cut(sound(6), silence(0.6), sound(9), silence(1.0), sound(7))
    assert times(segments) == [
        (pytest.approx(start, abs=0.03), pytest.approx(end, abs=0.03))
        for start, end in [(0, 6), (6.6, 15.6), (16.6, 23.6)]
    ]


def test_a_short_pause_and_a_pause_before_five_seconds_cut_nothing() -> None:
    assert len(cut(sound(6), silence(0.2), sound(6), silence(0.2), sound(6))) == 1
    assert len(cut(sound(2), silence(0.8), sound(2), silence(0.8), sound(2))) == 1


def test_nothing_shorter_than_five_seconds_is_left_over() -> None:
    assert len(cut(sound(6), silence(0.6), sound(2))) == 1


def test_a_recording_that_is_short_stays_as_it_is() -> None:
    data = (DATA / "human_a.wav").read_bytes()
    reading = Recording()
    (segment,) = reading.segments(io.BytesIO(data), max_s=60)
    whole = decode_audio(data, max_s=60)
    np.testing.assert_array_equal(segment.audio.samples, whole.samples)
    assert segment.audio.key == whole.key
    assert reading.duration_s == whole.duration_s
    assert 0.4 < segment.start_s < 0.7
    assert segment.end_s <= whole.duration_s


def test_no_sample_is_lost_or_doubled_where_nobody_pauses() -> None:
    whole = sound(100)
    segments = cut(whole)
    assert all(LEAST_S <= segment.audio.duration_s <= LONGEST_S for segment in segments)
    joined = np.concatenate([segment.audio.samples for segment in segments])
    np.testing.assert_array_equal(joined, decode_audio(file_of(whole).getvalue(), max_s=200).samples)


def test_long_silence_is_in_no_segment_and_later_times_are_right() -> None:
    segments = cut(silence(100), sound(6), silence(70), sound(8), silence(40))
    assert times(segments) == [
        (pytest.approx(100, abs=0.05), pytest.approx(106, abs=0.05)),
        (pytest.approx(176, abs=0.05), pytest.approx(184, abs=0.05)),
    ]
    assert all(segment.audio.duration_s < 10 for segment in segments)


def test_pauses_are_found_in_a_noisy_room() -> None:
    hum = 0.004 * np.random.default_rng(3).standard_normal(round(21 * RATE))
    spoken = np.concatenate([sound(6), silence(0.7), sound(6), silence(0.7), sound(7.6)])
    assert len(cut(spoken + hum)) == 3


def test_silence_alone_is_one_segment_of_it() -> None:
    (segment,) = cut(silence(50))
    assert not segment.audio.samples.any()
    (short,) = cut(np.full(3, 0.5))
    assert len(short.audio.samples) == 3


@pytest.mark.parametrize("rate", [11_025, 44_100, 48_000])
def test_times_hold_at_every_rate(rate: int) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(14 * rate)
    noise[round(6.0 * rate) : round(6.5 * rate)] = 0
    noise *= 0.3 + np.abs(np.sin(8 * np.pi * np.arange(14 * rate) / rate + 1))
    segments = list(Recording().segments(file_of(noise, rate=rate), max_s=60))
    assert times(segments) == [
        (pytest.approx(start, abs=0.05), pytest.approx(end, abs=0.05)) for start, end in [(0, 6), (6.5, 14)]
    ]


def test_an_hour_needs_the_memory_of_a_few_segments() -> None:
    minute = np.concatenate([sound(7), silence(0.5)] * 8)
    file = file_of(*[minute] * 60)
    tracemalloc.start()
    reading = Recording()
    count = sum(1 for _ in reading.segments(file, max_s=10_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reading.duration_s == pytest.approx(3_600)
    assert count == 480
    assert peak < 20 * LONGEST_S * RATE * 4


def test_no_sample_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 0

    def counted(samples: np.ndarray, rate: int) -> np.ndarray:
        nonlocal measured
        measured += len(samples) // slot_samples(rate)
        return levels(samples, rate)

    monkeypatch.setattr(recording, "levels", counted)
    assert len(cut(*[sound(7), silence(0.5)] * 20)) == 20
    assert measured == 150 / SLOT_S


def test_what_is_too_long_is_refused_when_the_limit_is_met() -> None:
    read: list[Segment] = []
    with pytest.raises(BadMedia, match="longer than 40 s"):
        read.extend(Recording().segments(file_of(*[sound(7), silence(0.5)] * 10), max_s=40))
    with pytest.raises(BadMedia, match="0 bytes"):
        next(Recording().segments(io.BytesIO(), max_s=40))
