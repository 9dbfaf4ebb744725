"""A Talker that does not come to an end is seen, and one that speaks is left alone."""

from itertools import count

import numpy as np
import pytest

from aura_omni.config import SpeechConfig
from aura_omni.flow import FRAME_S, FRAME_SAMPLES
from aura_omni.stages.speech_guard import SpeechGuard

LIMITS = SpeechConfig()


def frame(code: int, others: int = 0) -> np.ndarray:
    return np.array([code] + [others] * 15)


def guard(tokens: int, **fields: int) -> SpeechGuard:
    made = SpeechGuard(LIMITS, **fields)
    made.tokens = tokens
    return made


def frames_until_stopped(watching: SpeechGuard, codes) -> tuple[str | None, int]:
    for number, code in enumerate(codes, 1):
        if (fault := watching.frame(frame(code, number))) is not None:
            return fault, number
    return None, number


@pytest.mark.parametrize(("tokens", "longest_s"), [(1, 5), (2, 5), (3, 6), (10, 13), (100, 100)])
def test_the_longest_speech_follows_from_the_text(tokens, longest_s):
    rng = np.random.default_rng(0)
    fault, frames = frames_until_stopped(guard(tokens), (int(rng.integers(2048)) for _ in count()))
    assert fault == "length"
    assert 2 * tokens * 0.3 < frames * FRAME_S <= longest_s  # twice as slow as people speak is still no fault


def test_text_that_follows_makes_room():
    watching = guard(1)
    for number in range(45):
        assert watching.frame(frame(number)) is None
        watching.tokens += 1
    assert watching.budget > 500


@pytest.mark.parametrize("period", [1, 2, 7, 25])
def test_the_same_codes_again_and_again_are_a_loop(period):
    fault, frames = frames_until_stopped(guard(1_000), (number % period for number in range(500)))
    assert fault == "loop"
    assert LIMITS.max_loop_s <= frames * FRAME_S <= LIMITS.max_loop_s + period * FRAME_S + 0.1


def test_pauses_and_repeated_words_are_no_loop():
    rng = np.random.default_rng(1)
    word = [int(code) for code in rng.integers(0, 2048, 6)]
    codes: list[int] = []
    for _ in range(40):  # words, some of them three times, and pauses of two seconds
        codes += [*rng.integers(0, 2048, 8).tolist(), *word * 3, *[7] * 25]
    assert frames_until_stopped(guard(1_000), codes)[0] is None


def test_a_request_for_more_frames_is_no_fault():
    assert frames_until_stopped(guard(1, least_frames=300), [5] * 300) == (None, 300)
    assert frames_until_stopped(guard(1, least_frames=300), [5] * 400) == ("loop", 301)


def test_long_silence_is_stopped_and_a_pause_is_not():
    watching = guard(1_000)
    watching.frame(frame(1))
    quiet, loud = np.full(FRAME_SAMPLES, 1e-3, np.float32), np.full(FRAME_SAMPLES, 0.1, np.float32)
    for _ in range(3):
        assert watching.sound(np.concatenate([quiet] * 70 + [loud])) is None
    assert watching.sound(np.concatenate([quiet] * 74)) is None
    assert watching.sound(quiet) == "silence"


@pytest.mark.parametrize(
    ("tokens", "frames", "fault"),
    [(0, 0, None), (16, 0, None), (17, 0, "short"), (200, 137, "short"), (200, 138, None)],
)
def test_speech_that_ends_before_its_text_can_have_been_said_is_short(tokens, frames, fault):
    guard = SpeechGuard(SpeechConfig(least_frames_per_token=0.75))
    guard.tokens, guard.frames = tokens, frames
    assert guard.done() == guard.fault == fault
