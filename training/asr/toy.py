"""A voice for trying the training out: every letter is a pair of tones of 70 ms. Needs no synthesizer, and a machine can learn it."""

from __future__ import annotations

import random

import numpy as np

from training.asr.clips import Clip
from training.asr.network import CHARACTERS, letters
from training.text.grammar import sentence

RATE = 16_000
_LETTER = np.arange(1_120) / RATE


def toy_clips(count: int, seed: int = 0) -> list[Clip]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        text = sentence(rng, "talk")
        made.append(Clip((8_000 * spelled(text)).astype(np.int16), text, "made"))
    return made


def spelled(text: str) -> np.ndarray:
    tones = []
    for number in letters(text):
        low, high = 250 * 1.09 ** (number % 14), 1_500 * 1.12 ** (number // 14 + number % 5)
        tones.append(
            np.sin(2 * np.pi * low * _LETTER) + np.sin(2 * np.pi * high * _LETTER) * (number <= len(CHARACTERS))
        )
    return np.concatenate(tones) * 0.5
