"""Media files made on the spot with PyAV and Pillow, so that the tests need no programs and no downloads; and how alike
two sounds are."""

import io
import struct
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from av.stream import Disposition
from PIL import Image


class Pipe(io.RawIOBase):
    """A file that can only be appended to, as a live recorder writes it: no sizes, no duration, no index."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:  # type: ignore[override]
        self.data += bytes(data)
        return len(data)

    def getvalue(self) -> bytes:
        return bytes(self.data)


def _audio_frame(samples: np.ndarray, rate: int, sample_format: str, layout: str) -> av.AudioFrame:
    """samples float32 [n, channels]."""
    as_float = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=layout)
    as_float.sample_rate = rate
    (frame,) = av.AudioResampler(format=sample_format, layout=layout, rate=rate).resample(as_float)
    return frame


def make_audio(
    samples: np.ndarray,
    rate: int,
    container: str,
    codec: str,
    sample_format: str,
    *,
    layout: str = "mono",
    options: dict[str, str] | None = None,
    live: bool = False,
    cover: bytes | None = None,
) -> bytes:
    """samples float32 [n] or [n, channels] -> a file; `cover` is a JPEG attached as the song's picture."""
    file = Pipe() if live else io.BytesIO()
    samples = samples[:, None] if samples.ndim == 1 else samples
    with av.open(file, "w", format=container, options=options or {}) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        stream.codec_context.format = sample_format
        picture = None
        if cover is not None:
            picture = out.add_stream("mjpeg", rate=1, disposition=Disposition.attached_pic)
            picture.disposition = Disposition.attached_pic
            with av.open(io.BytesIO(cover)) as image:
                frame = next(image.decode(video=0))
            picture.width, picture.height, picture.pix_fmt = frame.width, frame.height, "yuvj420p"
            frame = frame.reformat(format="yuvj420p")
            frame.pts, frame.time_base = 0, Fraction(1)
            out.mux(picture.encode(frame) + picture.encode(None))
        out.mux(stream.encode(_audio_frame(samples, rate, sample_format, layout)))
        out.mux(stream.encode(None))
    return file.getvalue()


def make_video(
    pictures: Sequence[np.ndarray],
    times_ms: Sequence[int],
    container: str,
    codec: str,
    *,
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    rotation: tuple[int, bool] | None = None,
    sound: np.ndarray | None = None,
    live: bool = False,
    tag: str | None = None,
) -> bytes:
    """uint8 RGB pictures shown at times_ms -> a file; rotation is (degrees counter-clockwise, mirrored); tag
    is the codec's name in the file."""
    file = Pipe() if live else io.BytesIO()
    height, width, _ = pictures[0].shape
    with av.open(file, "w", format=container, options=container_options or {}) as out:
        stream = out.add_stream(
            codec, rate=Fraction(1000, max(times_ms[1] - times_ms[0], 1) if len(times_ms) > 1 else 40)
        )
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.time_base = Fraction(1, 100) if codec == "gif" else Fraction(1, 1000)
        stream.codec_context.options = options or {}
        if tag is not None:
            stream.codec_context.codec_tag = tag
        if rotation is not None:
            stream.set_display_rotation(rotation[0], hflip=rotation[1])
        track = None
        sample_format = "flt" if container == "webm" else "fltp"
        if sound is not None:
            track = out.add_stream("libopus" if container == "webm" else "aac", rate=48_000, layout="mono")
            track.codec_context.format = sample_format
        for picture, time_ms in zip(pictures, times_ms, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time_ms, Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if track is not None:
            out.mux(track.encode(_audio_frame(sound[:, None], 48_000, sample_format, "mono")))
            out.mux(track.encode(None))
    return file.getvalue()


def make_wav(raw: bytes, rate: int, *, tag: int, bits: int, channels: int = 1, extensible: bool = False) -> bytes:
    """A RIFF file written byte by byte, for headers that encoders do not write."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else tag, channels, rate, rate * block, block, bits)
    if extensible:
        guid_tail = bytes.fromhex("000000001000800000aa00389b71")
        form += struct.pack("<HHIH", 22, bits, 0, tag) + guid_tail
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(raw))
    return b"RIFF" + struct.pack("<I", len(head) + len(raw)) + head + raw


def make_picture(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def likeness(got: np.ndarray, want: np.ndarray, *, longest_lag: int = 480) -> float:
    """Correlation of float32 [n] and [m] at 16 kHz over their common length, offsets left out, 1 for equal shapes: at the
    best delay of `got` up to longest_lag samples, for lossy codecs delay what they code."""
    count = min(len(got), len(want)) - longest_lag - 120
    lag = max(range(longest_lag + 1), key=lambda lag: float(got[lag : lag + count] @ want[:count]))
    heard, meant = got[lag : lag + count] - got.mean(), want[:count] - want.mean()
    return float(heard @ meant / np.sqrt((heard @ heard) * (meant @ meant)))
