"""Who speaks, and how sound is cut into frames. Imported everywhere, so it imports nothing."""

from __future__ import annotations

from dataclasses import dataclass

VOICE_RATE = 24_000  # Hz
FRAME_SAMPLES = 1_920


@dataclass(frozen=True, slots=True)
class Speaker:
    """One voice, three speakers: played `pitch` times as fast, after speaking that much slower, so at its own `tempo`."""

    name: str
    pitch: float
    tempo: float

    @property
    def length_scale(self) -> float:
        return self.pitch / self.tempo


SPEAKERS = (Speaker("ryan", 1.0, 1.0), Speaker("vivian", 1.24, 1.0), Speaker("uncle_fu", 0.86, 0.95))
