"""Writing what `opus` reads; needs PyAV, which only the machine that makes the data has to have."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np

from training.asr.opus import GAP, RATE

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


def write(out: Path, name: str, clips: list[tuple[np.ndarray, str]]) -> None:
    """One file of clips, float32 [n] each, and its index."""
    index: list[tuple[int, int, str]] = []
    parts, length = [np.zeros(GAP, np.float32)], GAP
    for samples, text in clips:
        index.append((length, len(samples), text))
        parts += [samples, np.zeros(GAP, np.float32)]
        length += len(samples) + GAP
    write_opus(out / f"{name}.opus", np.concatenate(parts))
    (out / f"{name}.json").write_text(json.dumps(index), encoding="utf-8")
