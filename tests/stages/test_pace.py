"""Chunks of speech against a clock that the test turns."""

import math
from collections.abc import Sequence
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.flow import FRAME_S, Playback
from aura_omni.stages.pace import Pace

LIVE = Playback()


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def chunks(gaps_s: Sequence[float], playback: Playback = LIVE, *, first: int = 1, most: int = 25):
    """Sizes of the chunks of a Talker whose frames come after these gaps, and for how long the listener heard nothing."""
    clock = Clock()
    pace = Pace(playback, first=first, most=most, clock=clock)
    sizes, waiting, silence_s = [], 0, 0.0
    for gap_s in gaps_s:
        clock.now_s += gap_s
        pace.came()
        waiting += 1
        if pace.due:
            if sizes:
                silence_s = max(silence_s, -pace.unheard_s)
            pace.sent()
            sizes.append(waiting)
            waiting = 0
    return sizes, silence_s


FAST = list(repeat(0.01, 120))


def test_chunks_double_up_to_the_largest_power_of_two_that_is_allowed():
    assert chunks(FAST)[0] == [1, 1, 2, 4, 8, *repeat(16, 6)]
    assert chunks(FAST, most=8)[0][:6] == [1, 1, 2, 4, 8, 8]
    assert set(chunks(FAST, most=1)[0]) == {1}


def test_a_given_first_chunk_is_obeyed():
    assert chunks(FAST, first=8)[0][:4] == [8, 8, 16, 16]
    assert chunks(FAST, first=5)[0][:4] == [5, 4, 8, 16]
    assert chunks(FAST, Playback(first_frames=3), first=8)[0][:3] == [3, 2, 4]
    assert chunks(FAST, first=30)[0][:2] == [30, 16]


@pytest.mark.parametrize("period_s", [0.001, 0.01, 0.03, 0.039])
def test_from_twice_the_speed_of_playing_on_the_clock_changes_nothing(period_s):
    frames = list(repeat(period_s, 120))
    assert chunks(frames) == (chunks(FAST)[0], 0)


def test_a_hiccup_of_a_fast_talker_changes_nothing_while_the_listener_has_enough():
    frames = FAST.copy()
    frames[40] = 0.3
    assert chunks(frames) == chunks(FAST)


def test_after_a_long_wait_of_the_listener_chunks_grow_again():
    frames = FAST.copy()
    frames[5] = 5.0
    sizes, silence_s = chunks(frames)
    assert 4 < silence_s < 5
    assert sizes[4] == 1  # first of all, what there is
    assert sizes[-5:-1] == [16] * 4


@settings(max_examples=200)
@given(st.floats(0.005, 0.078), st.integers(1, 200), st.sampled_from([1, 4, 25]))
def test_a_talker_that_keeps_up_with_playing_is_never_waited_for(period_s, frames, most):
    _, silence_s = chunks(list(repeat(period_s, frames)), most=most)
    assert silence_s <= 0


def test_a_talker_that_does_not_keep_up_is_heard_frame_by_frame():
    sizes, _ = chunks(list(repeat(0.2, 30)))
    assert set(sizes) == {1}


@settings(max_examples=200)
@given(st.lists(st.floats(0.0, 0.3), min_size=1, max_size=80))
def test_what_waits_goes_when_the_listener_is_about_to_run_out(gaps_s):
    """However irregular: nobody listens to silence for longer than the next frame takes."""
    clock = Clock()
    pace = Pace(Playback(), first=1, most=25, clock=clock)
    for gap_s in gaps_s:
        for _ in range(30):  # AURA writes meanwhile, which lets what waits be looked at
            clock.now_s += gap_s / 30
            if pace.due:
                assert pace.unheard_s > -0.011
                pace.sent()
        pace.came()
        if pace.due:
            pace.sent()


def test_who_hears_it_at_the_end_gets_the_chunks_of_a_fast_talker():
    whole = Playback(live=False)
    assert chunks(list(repeat(3.0, 120)), whole)[0] == chunks(FAST)[0]


def test_at_double_speed_the_listener_needs_twice_as_much():
    at_30_ms = list(repeat(0.03, 60))
    assert chunks(at_30_ms)[0] == chunks(FAST[:60])[0]
    faster, silence_s = chunks(at_30_ms, Playback(speed=2.0))
    assert max(faster) < 16
    assert silence_s <= 0


def test_nothing_is_due_before_a_frame_has_come():
    clock = Clock()
    pace = Pace(Playback(), first=1, most=25, clock=clock)
    assert not pace.due
    pace.came()
    pace.sent()
    clock.now_s += 10
    assert not pace.due


def test_the_next_chunk_is_due_when_the_listener_has_heard_the_last():
    clock = Clock()
    pace = Pace(Playback(), first=2, most=25, clock=clock)
    assert pace.dry_at_s == -math.inf, "nobody waits longer than before the first sound"
    pace.came()
    pace.came()
    pace.sent()
    assert pace.dry_at_s == pytest.approx(clock.now_s + 2 * FRAME_S)
    clock.now_s += 0.1
    pace.came()
    pace.sent()
    assert pace.dry_at_s == pytest.approx(clock.now_s - 0.1 + 3 * FRAME_S)
    clock.now_s += 5.0
    assert pace.dry_at_s < clock.now_s, "it is late"
    pace.came()
    pace.sent()
    assert pace.dry_at_s == pytest.approx(clock.now_s + FRAME_S)


def test_a_frame_that_was_held_back_says_nothing_of_the_next_ones_time() -> None:
    """Else the first one after a pause would be sent alone, as from a Talker too slow to fill a chunk in time."""
    now_s = 0.0
    pace = Pace(Playback(), first=1, most=16, clock=lambda: now_s)
    for _ in range(1 + 1 + 2 + 4 + 8):
        now_s += 0.005
        pace.came()
        if pace.due:
            pace.sent()
    now_s += 0.9
    pace.came(paused=True)
    assert not pace.due
    now_s += 0.005
    pace.came()
    assert not pace.due
    pace.sent()
    now_s += 0.9
    pace.came()
    assert pace.due, "nobody has held this one back, so the next may take as long"
