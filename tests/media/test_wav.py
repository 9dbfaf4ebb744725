"""A plain WAV file that is read without FFmpeg gives what FFmpeg gives; whatever is not plain is left to it."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aura_omni.errors import BadMedia
from aura_omni.media import audio as audio_module
from aura_omni.media import wav
from aura_omni.media.audio import decode_audio, mono_pieces
from aura_omni.media.wav import plain_wav

SAMPLES = np.sin(np.arange(3_001)) * 0.7


def chunk(name: bytes, data: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(data) if size is None else size) + data + b"\0" * (len(data) % 2)


def raw(kind: str) -> bytes:
    return SAMPLES.astype("<f4").tobytes() if kind == "f" else (SAMPLES * 32_767).astype("<i2").tobytes()


def form(
    kind: str = "i", *, rate: int = 16_000, channels: int = 1, block: int | None = None, more: bytes = b""
) -> bytes:
    tag, width = (3, 4) if kind == "f" else (1, 2)
    fields = (tag, channels, rate, rate * width * channels, width * channels if block is None else block, 8 * width)
    return chunk(b"fmt ", struct.pack("<HHIIHH", *fields) + more)


def file(*chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + sum(map(len, chunks))) + b"WAVE" + b"".join(chunks)


def decoded(data: bytes, *, plainly: bool) -> np.ndarray | None:
    """None: refused."""
    with pytest.MonkeyPatch.context() as patch:
        if not plainly:
            patch.setattr(audio_module, "plain_wav", lambda _: None)
        try:
            audio = decode_audio(data, max_s=60)
        except BadMedia:
            return None
    assert audio.rate == 16_000
    return audio.samples


def assert_as_ffmpeg(data: bytes) -> None:
    ours, theirs = decoded(data, plainly=True), decoded(data, plainly=False)
    assert (ours is None) == (theirs is None)
    assert ours is None or theirs is None or np.array_equal(ours, theirs)


INFO = chunk(b"LIST", b"INFOISFT\x04\0\0\0abc\0")
PLAIN = {
    "16 bit": file(form(), chunk(b"data", raw("i"))),
    "float": file(form("f"), chunk(b"data", raw("f"))),
    "other chunks before": file(INFO, form(), chunk(b"JUNK", bytes(27)), chunk(b"data", raw("i"))),
    "long format": file(form(more=b"\0\0"), chunk(b"data", raw("i"))),
    "streamed, length 0": file(form(), chunk(b"data", raw("i"), 0)),
    "streamed, largest length": file(form("f"), chunk(b"data", raw("f"), 2**32 - 1)),
    "cut off": file(form(), chunk(b"data", raw("i"), 10**6)),
    "cut off in a sample": file(form("f"), chunk(b"data", raw("f")))[:-3],
}
OTHER = {
    "stereo": file(form(channels=2), chunk(b"data", raw("i"))),
    "absurd block": file(form(block=7), chunk(b"data", raw("i"))),
    "chunks behind": file(form(), chunk(b"data", raw("i")), INFO),
    "two blocks": file(form(), chunk(b"data", raw("i")), chunk(b"data", raw("i"))),
    "format behind": file(chunk(b"data", raw("i")), form()),
    "two formats": file(form("f"), form(), chunk(b"data", raw("i"))),
    "longer format": file(form(more=bytes(24)), chunk(b"data", raw("i"))),
    "no sample": file(form(), chunk(b"data", b"")),
    "no data": file(form(), INFO),
    "cut in a header": file(form(), chunk(b"data", raw("i")))[:40],
    "big-endian": b"RIFX" + file(form(), chunk(b"data", raw("i")))[4:],
    "another RIFF": file(form(), chunk(b"data", raw("i"))).replace(b"WAVE", b"AVI "),
}


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN)
def test_a_plain_file_is_read_as_ffmpeg_reads_it_to_the_last_sample(data):
    assert plain_wav(io.BytesIO(data)) is not None
    assert_as_ffmpeg(data)


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER)
def test_anything_else_is_left_to_ffmpeg(data):
    assert plain_wav(io.BytesIO(data)) is None
    assert_as_ffmpeg(data)


@given(
    data=st.sampled_from(list(PLAIN.values())),
    where=st.integers(0, 70),
    value=st.integers(0, 255),
)
def test_a_damaged_header_is_read_or_refused_as_ffmpeg_does_it(data, where, value):
    broken = data[:where] + bytes([value]) + data[where + 1 :]
    assume(struct.pack("<I", 16_000) in broken[:80])  # an absurd rate is refused in other words
    assert_as_ffmpeg(broken)


def test_a_long_file_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(wav, "_PIECE", 1_000)
    pieces = [piece for piece, _ in mono_pieces(io.BytesIO(PLAIN["float"]))]
    assert [len(piece) for piece in pieces] == [1_000, 1_000, 1_000, 1]
    assert np.array_equal(np.concatenate(pieces), SAMPLES.astype(np.float32))
