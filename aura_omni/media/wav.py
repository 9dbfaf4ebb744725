"""WAV files of one channel of 16-bit or float samples, which is what microphones give, read without a decoder.

    plain = plain_wav(file)                  # None: leave it to FFmpeg, which knows all the others
    for samples in plain.pieces(file): ...   # float32, as `audio.mono_pieces` has them

Only what needs no second thought is read here, and comes out as it does from FFmpeg: a header with chunks in the usual order,
and one block of samples that ends the file, cut off perhaps, or of a length that nobody knew when the header was written.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (1, 16): np.dtype("<i2"),
    (3, 32): np.dtype("<f4"),
}  # by format tag and bits
_CHUNKS = 16  # headers before the samples that are looked at
_PIECE = 2**17  # samples read at a time


@dataclass(frozen=True, slots=True)
class PlainWav:
    """count > 0 samples of dtype, from byte `start` of the file."""

    rate: int
    dtype: np.dtype[Any]
    start: int
    count: int

    def pieces(self, file: BinaryIO) -> Iterator[np.ndarray]:
        """float32 [n], n > 0; full scale is 1."""
        file.seek(self.start)
        for first in range(0, self.count, _PIECE):
            size = min(_PIECE, self.count - first) * self.dtype.itemsize
            samples = np.frombuffer(file.read(size), self.dtype).astype(np.float32)
            yield samples if self.dtype.kind == "f" else samples * np.float32(2**-15)


def plain_wav(file: BinaryIO) -> PlainWav | None:
    """What is in the file if it is such a one. Leaves its position anywhere."""
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return None
    form: tuple[int, np.dtype[Any]] | None = None
    at = 12
    for _ in range(_CHUNKS):
        file.seek(at)
        header = file.read(8)
        if len(header) < 8:
            return None
        name, size = struct.unpack("<4sI", header)
        at += 8
        if name == b"data":
            # 0 and the largest number: whoever wrote the header did not know
            unknown = size in (0, 2**32 - 1)
            if form is None or not (unknown or at + size >= end):
                return None
            rate, dtype = form
            count = (end - at) // dtype.itemsize
            return PlainWav(rate, dtype, at, count) if count else None
        if name == b"fmt ":
            if form is not None:
                return None
            form = _form(file.read(size)) if size in (16, 18) else None
            if form is None:
                return None
        at += size + size % 2
    return None


def _form(fields: bytes) -> tuple[int, np.dtype[Any]] | None:
    """Rate and type of the samples of a format chunk, if there is one channel of them."""
    if len(fields) < 16:
        return None
    tag, channels, rate, _, block, bits = struct.unpack("<HHIIHH", fields[:16])
    dtype = _DTYPES.get((tag, bits))
    if dtype is None or channels != 1 or block != dtype.itemsize:
        return None
    return rate, dtype
