"""Sound for where no words matter: to warm up, and to measure."""

from __future__ import annotations

import numpy as np


def swelling_noise(random: np.random.Generator, length_s: float, rate: int) -> np.ndarray:
    """Noise float32 [n] that swells and fades four times a second, as loud as speech. Steady noise no model would listen to."""
    times_s = np.arange(int(length_s * rate)) / rate
    samples = 0.1 * random.standard_normal(len(times_s)) * np.sin(4 * np.pi * times_s) ** 2
    return np.clip(samples, -1.0, 1.0).astype(np.float32)
