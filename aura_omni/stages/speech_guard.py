"""When a Talker that does not come to an end is stopped, and whether one that does can have said its text.

Once in a few hundred times a Talker misses the end of its text and goes on: it murmurs, repeats itself, or is silent until its
frame budget ends. Of a text that is longer than those it learned from, it may lose most. No way of sampling prevents it, so it is watched.

    guard = SpeechGuard(config.speech, least_frames=sampling.min_tokens)
    guard.tokens += len(ids)                 # of the text that it has been given
    fault = guard.frame(codes) or guard.sound(samples)     # None while all is well
    fault = guard.done()                     # when the Talker says that it is
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from aura_omni.config import SpeechConfig
from aura_omni.flow import FRAME_S, FRAME_SAMPLES

Fault = Literal["length", "loop", "silence", "short"]

_LONGEST_PERIOD = 25  # frames; a loop of two seconds
_SPARE = 12  # frames that speech may lack; of a few words nothing can be told
_SILENT = 2e-3  # root mean square of a frame, of samples in [-1, 1]: -54 dB
_SILENT_ENERGY = FRAME_SAMPLES * _SILENT**2


class SpeechGuard:
    """One speech. Frames are watched as they are made, and their sound, which comes a little later."""

    def __init__(self, limits: SpeechConfig, *, least_frames: int = 0) -> None:
        """least_frames: that the request asks for, whatever the text."""
        self._limits, self._least = limits, least_frames
        self.tokens = 0
        self.fault: Fault | None = None
        self.frames = 0
        self._window = round(limits.max_loop_s / FRAME_S)
        self._codes: deque[int] = deque(maxlen=_LONGEST_PERIOD)
        self._repeats: dict[int, int] = {}  # period -> how many frames in a row were as those one period before
        self._silent_frames = 0

    @property
    def budget(self) -> int:
        """The most frames that the text may become."""
        return max(self._least, self._limits.spare_frames + int(self._limits.frames_per_token * self.tokens))

    def frame(self, codes: np.ndarray) -> Fault | None:
        """int64 [16]. Its first code says what is spoken; the others are drawn anew even where that stands still."""
        self.frames += 1
        code = int(codes[0])
        if code in self._codes:
            before = enumerate(reversed(self._codes), 1)
            self._repeats = {period: self._repeats.get(period, 0) + 1 for period, earlier in before if earlier == code}
        elif self._repeats:
            self._repeats = {}
        self._codes.append(code)
        if self.frames > self._least:
            if self._repeats and max(self._repeats.values()) >= self._window:
                self.fault = "loop"
            elif self.frames >= self.budget:
                self.fault = "length"
        return self.fault

    def sound(self, samples: np.ndarray) -> Fault | None:
        """float32 [n * 1920]."""
        frames = samples.reshape(-1, FRAME_SAMPLES)
        for silent in np.einsum("fs,fs->f", frames, frames) < _SILENT_ENERGY:
            self._silent_frames = self._silent_frames + 1 if silent else 0
            if self._silent_frames * FRAME_S >= self._limits.max_silence_s and self.frames > self._least:
                self.fault = "silence"
        return self.fault

    def done(self) -> Fault | None:
        """The Talker has ended by itself."""
        if self.fault is None and self.frames + _SPARE < self._limits.least_frames_per_token * self.tokens:
            self.fault = "short"
        return self.fault
