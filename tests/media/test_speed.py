from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.media.speed import MAX_SPEED, MIN_SPEED, Stretch

RATE = 24_000
SPEEDS = st.one_of(st.sampled_from([0.25, 0.5, 1.0, 1.25, 2.0, 4.0]), st.floats(MIN_SPEED, MAX_SPEED))


def tone(hz: float, seconds: float) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 0.1, count).astype(np.float32)


def stretched(samples: np.ndarray, speed: float, cuts: Sequence[int] = ()) -> np.ndarray:
    stretch = Stretch(speed, RATE)
    pieces = np.split(samples, sorted(min(cut, len(samples)) for cut in cuts))
    return np.concatenate([*(stretch.feed(piece) for piece in pieces), stretch.finish()])


@settings(max_examples=60, deadline=None)
@given(SPEEDS, st.integers(0, 12_000), st.lists(st.integers(0, 12_000), max_size=12))
def test_cutting_changes_no_sample(speed, count, cuts):
    samples = noise(count)
    whole = stretched(samples, speed)
    assert len(whole) == round(count / speed)
    assert np.array_equal(stretched(samples, speed, cuts), whole)


def test_speed_one_is_the_sound_itself():
    samples = noise(5_000)
    assert np.array_equal(stretched(samples, 1.0, [1, 77, 1_920]), samples)


@pytest.mark.parametrize("speed", [0.25, 0.4, 0.8, 1.3, 2.0, 3.1, 4.0])
def test_the_pitch_stays(speed):
    sound = stretched(tone(440, 2.0), speed)[RATE // 10 : -RATE // 10]
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    assert abs(np.fft.rfftfreq(len(sound), 1 / RATE)[spectrum.argmax()] - 440) < 440 * 0.01


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.5, 2.5, 4.0])
def test_what_happens_in_the_sound_happens_at_its_time(speed):
    """Three words with silence between them, the last one up to the very end."""
    quiet = np.zeros(RATE, np.float32)
    word = tone(300, 1.0)
    sound = stretched(np.concatenate([word, quiet, word, quiet, word]), speed)
    tenth = round(0.1 * RATE / speed)
    loud = [np.sqrt(np.mean(part**2)) > 0.1 for part in np.array_split(sound, 50)]
    want = [(number // 10) % 2 == 0 for number in range(50)]
    wrong = [number for number in range(50) if loud[number] != want[number]]
    assert all(number % 10 in (0, 9) for number in wrong), wrong  # at most a tenth of a word off, at its edges
    assert np.sqrt(np.mean(sound[-tenth:] ** 2)) > 0.1, "the end is missing"


@pytest.mark.parametrize(("speed", "most_ms"), [(0.25, 75), (0.8, 75), (1.25, 75), (2.0, 80), (4.0, 210)])
def test_a_stretch_holds_little_back(speed, most_ms):
    stretch, given = Stretch(speed, RATE), 0
    for taken in range(240, 24_000, 240):
        given += len(stretch.feed(noise(240)))
        assert (taken - given * speed) / RATE * 1e3 <= most_ms
