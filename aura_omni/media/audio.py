"""Sound from bytes: decode any file to mono float32, change the rate.

    audio = decode_audio(data, max_s=1200)      # flow.Audio at the file's own rate
    speech = resample(audio.samples, audio.rate, 16_000)

Does not know where the bytes come from. `encoder` is the way back.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import soxr
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from aura_omni.errors import BadMedia
from aura_omni.flow import Audio
from aura_omni.media.budget import Budget
from aura_omni.media.container import audio_frames, opened, packets
from aura_omni.media.wav import plain_wav

MIN_RATE, MAX_RATE = 4_000, 192_000  # Hz; outside, the header is wrong or meant to exhaust memory
MAX_SAMPLES = 2**27  # of one sound, half a gigabyte: 46 minutes at 48 kHz
_SAMPLE_FORMATS = ("u8", "s16", "s32", "flt", "dbl")  # the ways decoders write samples, all but 64-bit integers


# ---------------------------------------------------------------- decode


def decode_audio(
    data: bytes,
    *,
    max_s: float,
    max_s_key: str | None = "media.max_audio_s",
    budget: Budget | None = None,
    param: str | None = None,
) -> Audio:
    """The first audio track of a file, as mono float32 at its own rate.

    data    a whole audio or video file of any common container; a file that is cut off is good up to the cut
    max_s   longest sound accepted, in seconds; counted while decoding, declared durations are not trusted
    max_s_key  of the deploy file, which raises max_s; None: nothing does
    budget  what the whole request may cost, taken from frame by frame
    returns samples float32 [n] in [-1, 1], the mean of all channels; louder files are divided by their peak
    raises  BadMedia: unreadable, no audio track, no samples, non-finite samples, too long, or an absurd rate
    """
    pieces: list[np.ndarray] = []
    rate = count = 0
    for piece, rate in mono_pieces(data, param=param):
        pieces.append(piece)
        count += len(piece)
        if count > max_s * rate:
            way_out = f"cut it, or raise {max_s_key} in the deploy file" if max_s_key else "cut it"
            raise BadMedia(f"the sound lasts longer than {max_s:,g} s; {way_out}", param=param)
        if count > MAX_SAMPLES:
            raise BadMedia(
                f"the sound has more than {MAX_SAMPLES:,} samples, {MAX_SAMPLES / rate:,.0f} s at {rate:,} Hz; cut it, "
                "or send it at a lower rate",
                param=param,
            )
        if budget is not None:
            budget.take("audio_s", len(piece) / rate, param=param)
            budget.take("samples", len(piece), param=param)
    return audio_of(np.concatenate(pieces), rate, param=param)


def mono_pieces(data: bytes | BinaryIO, *, param: str | None = None) -> Iterator[tuple[np.ndarray, int]]:
    """The first audio track of a file as it is decoded: float32 [n] pieces, n > 0, and their rate, which does not change.

    At least one piece. Not checked to be finite or in [-1, 1]: `audio_of` does it. Raises BadMedia as `decode_audio`.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    plain = plain_wav(file)
    if plain is not None:
        rate = _checked_rate(plain.rate, 0, param=param)
        yield from ((piece, rate) for piece in plain.pieces(file))
        return
    with opened(file, param=param) as container:
        if not container.streams.audio:
            raise BadMedia("the file has no audio track; send one that has sound", param=param)
        stream = container.streams.best("audio") or container.streams.audio[0]
        assert isinstance(stream, AudioStream)
        if stream.codec_context is None:
            raise BadMedia("the audio track uses a codec that this server cannot decode", param=param)
        rate = count = 0
        for frame in audio_frames(stream, packets(container, stream), param=param):
            rate = _checked_rate(frame.sample_rate, rate, param=param)
            if frame.format.packed.name not in _SAMPLE_FORMATS:
                raise BadMedia(f"samples of type {frame.format.name} are not supported; send 16-bit", param=param)
            if frame.samples:
                count += frame.samples
                yield _mono(frame), rate
    if not count:
        raise BadMedia("the audio track has no samples (0 s); send a recording that has some", param=param)


def audio_of(samples: np.ndarray, rate: int, *, param: str | None = None) -> Audio:
    """Audio from float32 [n] mono samples, n > 0: checked to be finite, kept in [-1, 1], with its key."""
    check_finite(samples, param=param)
    peak = float(max(samples.max(), -samples.min()))
    if peak > 1.0:  # float files and lossy decoders overshoot; scaling keeps the shape, clipping would distort it
        samples = samples / np.float32(peak)
    samples = np.ascontiguousarray(samples, dtype=np.float32)
    key = hashlib.sha256(rate.to_bytes(8, "little"))  # which processors have instructions for
    key.update(samples)
    return Audio(samples=samples, rate=rate, key=key.digest()[:16])


def check_finite(samples: np.ndarray, *, param: str | None = None) -> None:
    """Raises BadMedia when a sample is no number."""
    if not np.isfinite(samples).all():
        bad = int(np.count_nonzero(~np.isfinite(samples)))
        raise BadMedia(f"{bad:,} of {len(samples):,} samples are NaN or infinite; send finite audio", param=param)


def _checked_rate(rate: int, before: int, *, param: str | None) -> int:
    if before and rate != before:
        raise BadMedia(f"the sample rate changes from {before:,} to {rate:,} Hz inside the file; use one", param=param)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise BadMedia(f"the sample rate is {rate:,} Hz; it must be from {MIN_RATE:,} to {MAX_RATE:,}", param=param)
    return rate


def _mono(frame: AudioFrame) -> np.ndarray:
    """float32 [n]: full scale is 1, channels averaged. Read from the frame's own layout, so any channel count works."""
    values = frame.to_ndarray()
    channels = frame.layout.nb_channels
    by_channel = values if frame.format.is_planar or channels == 1 else values.reshape(-1, channels).T
    if by_channel.dtype == np.uint8:
        by_channel = (by_channel.astype(np.float32) - 128) / 128
    elif by_channel.dtype.kind == "i":
        by_channel = by_channel / np.float64(2 ** (8 * by_channel.dtype.itemsize - 1))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by `audio_of`, with its number
        mean = by_channel[0] if channels == 1 else by_channel.mean(axis=0, dtype=np.float64)
        return mean.astype(np.float32)


# ---------------------------------------------------------------- rate


def resample(samples: np.ndarray, rate_in: int, rate_out: int) -> np.ndarray:
    """float32 [n] at rate_in -> float32 [ceil(n * rate_out / rate_in)] at rate_out (soxr HQ, linear phase).

    The same filter and length as librosa's default, which the published models were fed with.
    """
    if rate_in == rate_out:
        return samples
    return _of_length(soxr.resample(samples, rate_in, rate_out, quality="HQ"), _length(len(samples), rate_in, rate_out))


def _length(count: int, rate_in: int, rate_out: int) -> int:
    return -(-count * rate_out // rate_in)


def _of_length(samples: np.ndarray, length: int) -> np.ndarray:
    """The converter may end a sample early or late; the length is a promise."""
    if len(samples) >= length:
        return samples[:length]
    return np.concatenate([samples, np.zeros(length - len(samples), np.float32)])


class Resampler:
    """`resample` of a sound that comes in parts: the same samples, however it is cut. Not for two threads at once."""

    def __init__(self, rate_in: int, rate_out: int) -> None:
        self._rates = rate_in, rate_out
        self._taken = self._given = 0
        self._stream = None
        if rate_in != rate_out:
            self._stream = soxr.ResampleStream(rate_in, rate_out, 1, dtype="float32", quality="HQ")

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n] -> float32 [m], what is settled by now: 40 to 70 ms behind."""
        if self._stream is None:
            return samples
        self._taken += len(samples)
        settled = self._stream.resample_chunk(samples)
        self._given += len(settled)
        return settled

    def finish(self) -> np.ndarray:
        """float32 [m], the rest of the sound."""
        if self._stream is None:
            return np.zeros(0, np.float32)
        rest = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        return _of_length(rest, _length(self._taken, *self._rates) - self._given)
