"""The speech of a turn as the bytes of one reply: in the format, at the rate and the speed asked for, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from aura_omni.errors import BadRequest
from aura_omni.flow import FRAME_SAMPLES, VOICE_RATE
from aura_omni.media.audio import Resampler
from aura_omni.media.encoder import MEDIA_TYPES, AudioFormat, check_rate, encode, start
from aura_omni.media.speed import Stretch

RATES = (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz
# Of one piece: 30 KiB as base64, so that a line with one stays under 64 KiB, the limit of common line readers. Whole frames
# of 16-bit samples are a multiple of three bytes, so without padding.
PIECE_SAMPLES = 6 * FRAME_SAMPLES


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """rate: Hz, of RATES. Raises BadRequest for one that cannot be had."""

    name: AudioFormat
    rate: int = VOICE_RATE
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.rate not in RATES:
            raise BadRequest(
                f"sample_rate is {self.rate}; use one of {', '.join(map(str, RATES))}", param="sample_rate"
            )
        check_rate(self.name, self.rate, param="sample_rate")

    @property
    def media_type(self) -> str:
        """Bare samples have no other place for their rate."""
        form = f";rate={self.rate};channels=1" if self.name == "pcm16" else ""
        return MEDIA_TYPES[self.name] + form

    @property
    def costly(self) -> bool:
        """Whether pieces of it take longer to make than a change of thread."""
        return self != SoundFormat("wav") and self != SoundFormat("pcm16")


@dataclass(frozen=True, slots=True)
class Piece:
    """data: never empty; samples: how many of the listener's went into the stream since the piece before."""

    data: bytes
    samples: int


class SoundStream:
    """Of one reply. Joined, the pieces are one file with one header, whichever way the samples came."""

    def __init__(self, sound: SoundFormat) -> None:
        self._shape = _Shape(sound)
        self._encoder = start(sound.name, sound.rate)
        self._unsaid = 0

    def feed(self, samples: np.ndarray) -> Iterator[Piece]:
        """float32 [n] at VOICE_RATE -> what of it can be sent by now."""
        yield from self._encoded(self._shape.feed(samples))

    def finish(self) -> Iterator[Piece]:
        yield from self._encoded(self._shape.finish())
        yield from self._piece(self._encoder.finish())

    def _encoded(self, samples: np.ndarray) -> Iterator[Piece]:
        for begin in range(0, len(samples), PIECE_SAMPLES):
            some = samples[begin : begin + PIECE_SAMPLES]
            self._unsaid += len(some)
            yield from self._piece(self._encoder.feed(some))

    def _piece(self, data: bytes) -> Iterator[Piece]:
        if data:
            piece, self._unsaid = Piece(data, self._unsaid), 0
            yield piece


def whole_sound(samples: np.ndarray, sound: SoundFormat) -> Piece:
    """float32 [n] at VOICE_RATE -> one file that knows its length. Takes tens of ms a minute: call it off the event loop."""
    shape = _Shape(sound)
    shaped = np.concatenate([shape.feed(samples), shape.finish()])
    return Piece(encode(shaped, sound.rate, sound.name), len(shaped))


class _Shape:
    """What the listener hears of the samples, before any encoding."""

    def __init__(self, sound: SoundFormat) -> None:
        self._changes = (Stretch(sound.speed, VOICE_RATE), Resampler(VOICE_RATE, sound.rate))

    def feed(self, samples: np.ndarray) -> np.ndarray:
        for change in self._changes:
            samples = change.feed(samples)
        return samples

    def finish(self) -> np.ndarray:
        rest = np.zeros(0, np.float32)
        for change in self._changes:
            rest = np.concatenate([change.feed(rest), change.finish()])
        return rest
