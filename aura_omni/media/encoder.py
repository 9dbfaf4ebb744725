"""Sound to bytes, as it comes or at once.

    encoder = start("opus", 24_000)
    send(encoder.feed(samples))     # any number of samples, any number of times; what comes back may be empty
    send(encoder.finish())          # the rest, once
    file = encode(samples, 24_000, "opus")

One encoder runs over the whole sound, so how it is cut into feeds changes no byte of the stream. `encode` runs the same one;
a file of it only differs in front, where the length is known: in the header of wav and flac and the first frame of mp3.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, Protocol, cast

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from aura_omni.errors import BadRequest, EngineError
from aura_omni.flow import FRAME_SAMPLES

AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]

PCM16_SCALE = 32_767
MEDIA_TYPES: Mapping[AudioFormat, str] = {
    "wav": "audio/wav",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


class Encoder(Protocol):
    """Of one sound. Not for two threads at once."""

    def feed(self, samples: np.ndarray) -> bytes:
        """float32 [n] mono -> the bytes that they complete. Raises EngineError on NaN or infinity."""

    def finish(self) -> bytes:
        """The bytes that were still held back. Raises EngineError if a compressed sound has no samples at all."""


def start(audio_format: AudioFormat, rate: int) -> Encoder:
    """An encoder whose output can be sent while it grows; what it is of a player can only learn at the end.

    wav, flac   16-bit, see `pcm16` for the rounding; pcm16: the bare samples, little-endian
    mp3, aac    constant 96 kbit/s, aac in ADTS; opus: about 48 kbit/s in Ogg
    raises      BadRequest when the format cannot carry the rate
    """
    if audio_format in ("wav", "pcm16"):
        return _Plain(wav_header(rate, None) if audio_format == "wav" else b"")
    pipe = _Pipe()
    return _Stream(_Writer(audio_format, rate, cast(BinaryIO, pipe)), pipe)


def encode(samples: np.ndarray, rate: int, audio_format: AudioFormat) -> bytes:
    """float32 [n] mono at `rate` Hz -> one whole file that knows its length; equal samples give equal bytes.

    Raises BadRequest when the format cannot carry the rate; EngineError for no samples (but wav, pcm16).
    """
    if audio_format in ("wav", "pcm16"):
        return (wav_header(rate, len(samples)) if audio_format == "wav" else b"") + pcm16(samples)
    file = io.BytesIO()
    writer = _Writer(audio_format, rate, file)
    writer.write(samples)
    writer.end()
    return file.getvalue()


def check_rate(audio_format: AudioFormat, rate: int, *, param: str | None = None) -> None:
    """Raises BadRequest when the format cannot carry the rate in Hz, naming those that it can."""
    if audio_format in _CODECS and rate not in _CODECS[audio_format].rates:
        rates = ", ".join(map(str, _CODECS[audio_format].rates))
        raise BadRequest(f"{audio_format} at {rate} Hz is not possible; choose one of {rates}, or wav", param=param)


# ---------------------------------------------------------------- samples as they are


class _Plain:
    def __init__(self, header: bytes) -> None:
        self._header = header

    def feed(self, samples: np.ndarray) -> bytes:
        if not len(samples):
            return b""
        header, self._header = self._header, b""
        return header + pcm16(samples)

    def finish(self) -> bytes:
        return self._header


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


# ---------------------------------------------------------------- through a codec


@dataclass(frozen=True, slots=True)
class _Codec:
    container: str
    codec: str
    sample_format: str
    rates: tuple[int, ...]
    bit_rate: int | None = None
    codec_options: Mapping[str, str] = field(default_factory=dict)
    container_options: Mapping[str, str] = field(default_factory=dict)


_MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_CODECS: Mapping[AudioFormat, _Codec] = {
    "flac": _Codec(
        "flac", "flac", "s16", (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000),
        # A block is a codec frame of speech, which so leaves complete; players need no room for tags
        codec_options={"frame_size": str(FRAME_SAMPLES)}, container_options={"metadata_header_padding": "0"},
    ),
    # Without the reservoir a frame needs none of the frames before it
    "mp3": _Codec("mp3", "libmp3lame", "fltp", _MPEG_RATES, 96_000, {"reservoir": "0"}, {"id3v2_version": "0"}),
    # A page for each packet of 20 ms; the default collects a second
    "opus": _Codec("ogg", "libopus", "flt", (8_000, 12_000, 16_000, 24_000, 48_000), 48_000,
                   container_options={"page_duration": "20000"}),
    "aac": _Codec("adts", "aac", "fltp", _MPEG_RATES, 96_000),
}  # fmt: skip


class _Writer:
    """A codec and its container into a file. One that can be sought in gets its length in front at the end."""

    def __init__(self, audio_format: AudioFormat, rate: int, file: BinaryIO) -> None:
        check_rate(audio_format, rate)
        codec = _CODECS[audio_format]
        self._name, self._format, self._rate = audio_format, codec.sample_format, rate
        self._empty = True
        # bitexact: no random stream serials or version tags, so that outputs can be compared and cached.
        options = {"fflags": "+bitexact", "flush_packets": "1", **codec.container_options}
        self._container = av.open(file, "w", format=codec.container, options=options)
        stream = self._container.add_stream(codec.codec, rate=rate, layout="mono", options=dict(codec.codec_options))
        assert isinstance(stream, AudioStream)
        assert isinstance(stream.codec_context, AudioCodecContext)
        self._stream, context = stream, stream.codec_context
        context.format = codec.sample_format
        if codec.bit_rate is not None:
            context.bit_rate = codec.bit_rate

    def write(self, samples: np.ndarray) -> None:
        if not len(samples):
            return
        self._empty = False
        plane = np.frombuffer(pcm16(samples), "<i2") if self._format == "s16" else _clipped(samples)
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(plane[None, :]), format=self._format, layout="mono")
        frame.sample_rate = self._rate
        self._container.mux(self._stream.encode(frame))

    def end(self) -> None:
        if self._empty:
            raise EngineError(f"there are no samples to encode as {self._name}; a stage produced nothing")
        self._container.mux(self._stream.encode(None))
        self._container.close()


class _Pipe:
    """What was written since it was last taken. No seek: so nothing written before is changed later."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _Stream:
    def __init__(self, writer: _Writer, pipe: _Pipe) -> None:
        self._writer, self._pipe = writer, pipe

    def feed(self, samples: np.ndarray) -> bytes:
        self._writer.write(samples)
        return self._pipe.take()

    def finish(self) -> bytes:
        self._writer.end()
        return self._pipe.take()
