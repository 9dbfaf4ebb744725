"""How many frames of speech go out together: few at first, then as many as the listener has time for.

Knows counts and a clock. Does not know codes or samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from aura_omni.flow import FRAME_S, Playback

_RESERVE_S = FRAME_S / 2  # of unheard speech, at which what there is goes out
_NEWEST = 0.25  # weight of the newest frame in the time that a frame takes


class Pace:
    """Of one reply.

    A first chunk of `first` frames, then chunks of 1, 2, 4, ... frames: the largest that neither exceeds what went before it
    nor `most`. A Talker at twice the speed of playing and more fills each of them before the listener has heard the last.
    From a slower one the listener gets what there is before they run out of speech.

    So chunks depend on the clock only where they must: speech that is streamed in time is chunked as speech that nobody waits
    for, and so rounded alike where frames are decoded together (on a GPU).
    """

    def __init__(
        self, playback: Playback, *, first: int, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """first, most: frames, at least 1; the playback's own first_frames goes before `first`."""
        self._live, self._frame_s = playback.live, FRAME_S / playback.speed
        self._first, self._most = playback.first_frames or first, most
        self._clock = clock
        self._waiting = self._sent = 0
        self._period_s = 0.0  # from frame to frame, lately
        self._came_at_s: float | None = None
        self._began_at_s = -math.inf  # when the first chunk was sent, later by every wait for more

    def came(self, *, paused: bool = False) -> None:
        """One more frame waits to be sent. paused: it could have come sooner, so its time says nothing of the next one's."""
        self._waiting += 1
        now_s = self._clock()
        if self._came_at_s is not None and not paused:
            self._period_s += _NEWEST * (now_s - self._came_at_s - self._period_s)
        self._came_at_s = now_s

    @property
    def due(self) -> bool:
        """Whether what waits should go now. Changes with time, too."""
        if not self._waiting:
            return False
        missing = self._size() - self._waiting
        if missing <= 0 or not self._sent or not self._live:
            return missing <= 0
        return self.unheard_s - missing * self._period_s < _RESERVE_S

    def sent(self) -> None:
        """All that waited has gone."""
        # Who had heard everything has waited until now
        self._began_at_s = max(self._began_at_s, self._clock() - self._sent * self._frame_s)
        self._sent += self._waiting
        self._waiting = 0

    @property
    def unheard_s(self) -> float:
        """How long the listener can go on with what was sent, if they play it as it comes."""
        return self.dry_at_s - self._clock()

    @property
    def dry_at_s(self) -> float:
        """When the listener will have heard what was sent, on the clock; minus infinity before the first chunk."""
        return self._began_at_s + self._sent * self._frame_s

    def _size(self) -> int:
        if not self._sent:
            return self._first
        largest = min(self._sent, self._most)
        return 1 << (largest.bit_length() - 1)
