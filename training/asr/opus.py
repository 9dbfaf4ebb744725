"""Long files of many clips as Opus with an index beside them: NNN.opus and NNN.json, [[first sample, samples, text], ...].

Opus at 15 kbit/s is 7 MB an hour and, decoded, keeps the place of every sample (the delay of the coder is taken off).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000
GAP = 1_600  # silence between clips, so that the codec does not smear one into the next


def clips(path: Path) -> Iterator[tuple[np.ndarray, str]]:
    """Each clip of one file: int16 [n] at 16 kHz, and what is said in it."""
    samples, rate = soundfile.read(path, dtype="int16")
    assert rate == RATE
    for start, count, text in json.loads(path.with_suffix(".json").read_text(encoding="utf-8")):
        yield samples[start : start + count], text
