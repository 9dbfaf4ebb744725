"""Sound for where no words matter: to warm up, and to measure."""

from __future__ import annotations

import numpy as np

SENTENCE_S, PAUSE_S = 7.0, 0.5  # 15 to 20 words, and a breath


def swelling_noise(random: np.random.Generator, length_s: float, rate: int) -> np.ndarray:
    """Noise float32 [n] that swells and fades four times a second, as loud as speech. Steady noise no model would listen to."""
    times_s = np.arange(int(length_s * rate)) / rate
    samples = 0.1 * random.standard_normal(len(times_s)) * np.sin(4 * np.pi * times_s) ** 2
    return np.clip(samples, -1.0, 1.0).astype(np.float32)


def sentences(random: np.random.Generator, length_s: float, rate: int) -> np.ndarray:
    """`swelling_noise` with a pause after every sentence, where a long recording is cut as speech is."""
    samples = swelling_noise(random, length_s, rate)
    sentence, period = round(SENTENCE_S * rate), round((SENTENCE_S + PAUSE_S) * rate)
    samples[np.arange(len(samples)) % period >= sentence] = 0.0
    return samples
