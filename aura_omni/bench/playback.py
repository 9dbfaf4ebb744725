"""What a listener hears of sound that arrives in chunks: pure arithmetic on arrival times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Playback:
    """A player that starts with the first sound it gets. All in seconds.

    first_s     from the request to the first sound
    audio_s     sound that came in all
    stalled_s   how long it had nothing to play before the last sound came
    worst_s     the longest of those gaps
    gap_free_s  from the request to the earliest start that would have had no gap
    """

    first_s: float
    audio_s: float
    stalled_s: float
    worst_s: float
    gap_free_s: float


def listen(arrivals: Sequence[tuple[float, float]]) -> Playback | None:
    """arrivals: (time since the request, seconds of sound), in order; None when no sound came."""
    arrivals = [(time_s, length_s) for time_s, length_s in arrivals if length_s > 0]
    if not arrivals:
        return None
    first_s = arrivals[0][0]
    heard_until, stalled, worst = first_s, 0.0, 0.0
    audio_s, gap_free_s = 0.0, first_s
    for time_s, length_s in arrivals:
        gap = max(0.0, time_s - heard_until)
        stalled, worst = stalled + gap, max(worst, gap)
        heard_until = max(heard_until, time_s) + length_s
        # This chunk is due when all before it has been played.
        gap_free_s = max(gap_free_s, time_s - audio_s)
        audio_s += length_s
    return Playback(first_s, audio_s, stalled, worst, gap_free_s)
