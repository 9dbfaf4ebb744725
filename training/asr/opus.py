"""Long files of many clips as Opus with an index beside them: NNN.opus and NNN.json, [[first sample, samples, text], ...].

Opus at 15 kbit/s is 7 MB an hour and, decoded, keeps the place of every sample (the delay of the coder is taken off).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np

RATE = 16_000
GAP = 1_600  # silence between clips, so that the codec does not smear one into the next
BIT_RATE = 15_000
_BLOCK = 320  # 20 ms


def write_opus(path: Path, samples: np.ndarray) -> None:
    """samples float32 [n] at 16 kHz, mono."""
    with av.open(str(path), "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=RATE, layout="mono", options={"application": "audio"})
        stream.bit_rate = BIT_RATE
        pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16)
        pcm = np.pad(pcm, (0, -len(pcm) % _BLOCK))
        for start in range(0, len(pcm), _BLOCK):
            frame = av.AudioFrame.from_ndarray(pcm[None, start : start + _BLOCK], format="s16", layout="mono")
            frame.sample_rate, frame.pts = RATE, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_opus(path: Path) -> np.ndarray:
    """int16 [n] at 16 kHz."""
    resampler = av.AudioResampler("s16", "mono", RATE)
    with av.open(str(path)) as container:
        blocks = [out.to_ndarray()[0] for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    return np.concatenate([*blocks, *(out.to_ndarray()[0] for out in resampler.resample(None))])


def clips(path: Path) -> Iterator[tuple[np.ndarray, str]]:
    """Each clip of one file: int16 [n], and what is said in it."""
    samples = read_opus(path)
    for start, count, text in json.loads(path.with_suffix(".json").read_text(encoding="utf-8")):
        yield samples[start : start + count], text
