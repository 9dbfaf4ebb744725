"""Sound from bytes and back: decode any file to mono float32, change the rate, encode whole files.

    audio = decode_audio(data, max_s=1200)      # flow.Audio at the file's own rate
    speech = resample(audio.samples, audio.rate, 16_000)
    mp3 = encode(samples, 24_000, "mp3")

Does not know where the bytes come from or who listens.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import av
import numpy as np
import soxr
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from aura_omni.errors import BadMedia, BadRequest, EngineError
from aura_omni.flow import Audio
from aura_omni.media.budget import Budget
from aura_omni.media.container import audio_frames, opened, packets

MIN_RATE, MAX_RATE = 4_000, 192_000  # Hz; outside, the header is wrong or meant to exhaust memory
MAX_SAMPLES = 2**27  # of one sound, half a gigabyte: 46 minutes at 48 kHz
_SAMPLE_FORMATS = ("u8", "s16", "s32", "flt", "dbl")  # the ways decoders write samples, all but 64-bit integers
PCM16_SCALE = 32_767

AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus"]


# ---------------------------------------------------------------- decode


def decode_audio(data: bytes, *, max_s: float, budget: Budget | None = None, param: str | None = None) -> Audio:
    """The first audio track of a file, as mono float32 at its own rate.

    data    a whole audio or video file of any common container; a file that is cut off is good up to the cut
    max_s   longest sound accepted, in seconds; counted while decoding, declared durations are not trusted
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
            raise BadMedia(
                f"the sound lasts longer than {max_s:g} s; cut it, or raise media.max_audio_s in the deploy file",
                param=param,
            )
        if count > MAX_SAMPLES:
            raise BadMedia(
                f"the sound has more than {MAX_SAMPLES:,} samples, {MAX_SAMPLES / rate:,.0f} s at {rate} Hz; cut it, "
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
    with opened(data, param=param) as container:
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
    peak = float(np.abs(samples).max())
    if peak > 1.0:  # float files and lossy decoders overshoot; scaling keeps the shape, clipping would distort it
        samples = samples / np.float32(peak)
    samples = np.ascontiguousarray(samples, dtype=np.float32)
    key = hashlib.blake2b(samples, digest_size=16, salt=rate.to_bytes(8, "little"))
    return Audio(samples=samples, rate=rate, key=key.digest())


def check_finite(samples: np.ndarray, *, param: str | None = None) -> None:
    """Raises BadMedia when a sample is no number."""
    if not np.isfinite(samples).all():
        bad = int(np.count_nonzero(~np.isfinite(samples)))
        raise BadMedia(f"{bad} of {len(samples)} samples are NaN or infinite; send finite audio", param=param)


def _checked_rate(rate: int, before: int, *, param: str | None) -> int:
    if before and rate != before:
        raise BadMedia(f"the sample rate changes from {before} to {rate} Hz inside the file; use one", param=param)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise BadMedia(f"the sample rate is {rate} Hz; it must be from {MIN_RATE} to {MAX_RATE}", param=param)
    return rate


def _mono(frame: AudioFrame) -> np.ndarray:
    """float32 [n]: full scale is 1, channels averaged. Read from the frame's own layout, so any channel count works."""
    values = frame.to_ndarray()
    channels = frame.layout.nb_channels
    by_channel = values if frame.format.is_planar else values.reshape(-1, channels).T
    if by_channel.dtype == np.uint8:
        by_channel = (by_channel.astype(np.float32) - 128) / 128
    elif by_channel.dtype.kind == "i":
        by_channel = by_channel / np.float64(2 ** (8 * by_channel.dtype.itemsize - 1))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by `audio_of`, with its number
        return by_channel.mean(axis=0, dtype=np.float64).astype(np.float32)


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


# ---------------------------------------------------------------- encode


@dataclass(frozen=True, slots=True)
class _Codec:
    container: str
    codec: str
    sample_format: str
    bit_rate: int | None
    rates: tuple[int, ...]


_CODECS: dict[AudioFormat, _Codec] = {
    "flac": _Codec("flac", "flac", "s16", None, (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000)),
    "mp3": _Codec(
        "mp3", "libmp3lame", "fltp", 96_000, (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
    ),
    "opus": _Codec("ogg", "libopus", "flt", 48_000, (8_000, 12_000, 16_000, 24_000, 48_000)),
}


def encode(samples: np.ndarray, rate: int, audio_format: AudioFormat) -> bytes:
    """float32 [n] mono at `rate` Hz -> one whole file; equal samples give equal bytes.

    wav, flac   16-bit; pcm16: the bare samples, little-endian; see `pcm16` for the rounding
    mp3, opus   constant 96 kbit/s and 48 kbit/s; opus is Ogg Opus
    raises      BadRequest when the format cannot carry the rate; EngineError for no samples (flac, mp3, opus)
    """
    if audio_format == "pcm16":
        return pcm16(samples)
    if audio_format == "wav":
        return wav_header(rate, len(samples)) + pcm16(samples)
    codec = _CODECS[audio_format]
    if rate not in codec.rates:
        rates = ", ".join(map(str, codec.rates))
        raise BadRequest(f"{audio_format} at {rate} Hz is not possible; choose one of {rates}, or wav")
    if not len(samples):
        raise EngineError(f"there are no samples to encode as {audio_format}; a stage produced nothing")
    plane = np.frombuffer(pcm16(samples), "<i2") if codec.sample_format == "s16" else _clipped(samples)
    file = io.BytesIO()
    # bitexact: no random stream serials or version tags, so that outputs can be compared and cached.
    with av.open(file, "w", format=codec.container, options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec.codec, rate=rate, layout="mono")
        context = stream.codec_context
        assert isinstance(stream, AudioStream)
        assert isinstance(context, AudioCodecContext)
        context.format = codec.sample_format
        if codec.bit_rate is not None:
            context.bit_rate = codec.bit_rate
        frame = AudioFrame.from_ndarray(plane[None, :], format=codec.sample_format, layout="mono")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def pcm16(samples: np.ndarray) -> bytes:
    """float32 [n] -> little-endian int16: clip to [-1, 1], times 32767, rounded half to even.

    So -1 becomes -32767 and +1 becomes 32767; -32768 is never written. Raises EngineError on NaN or infinity.
    """
    return np.rint(_clipped(samples).astype(np.float64) * PCM16_SCALE).astype("<i2").tobytes()


def _clipped(samples: np.ndarray) -> np.ndarray:
    if not np.isfinite(samples).all():
        raise EngineError("the audio to encode has NaN or infinite samples; a stage produced them")
    return np.clip(samples, -1.0, 1.0)


def wav_header(rate: int, count: int | None) -> bytes:
    """44 bytes in front of 16-bit mono samples; `count` samples follow, or None for a stream of unknown length.

    Unknown lengths are written as 0xFFFFFFFF, as FFmpeg does into a pipe: players then read to the end. Send it once,
    before the first audio chunk.
    """
    size = 0xFFFF_FFFF if count is None else 2 * count
    riff_size = 0xFFFF_FFFF if count is None else min(36 + size, 0xFFFF_FFFF)
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s4sI16s4sI", b"RIFF", riff_size, b"WAVE", b"fmt ", 16, form, b"data", size)
