"""How loud a recording is, moment by moment, and what that alone says about speech. Knows samples, no model."""

from __future__ import annotations

import numpy as np

# The rounding noise of 16-bit audio lies 15 dB below this level; a reader recorded at -38 dBFS and then attenuated by 45 dB
# is above it a third of the time.
SILENCE_RMS = 5e-5  # -86 dBFS
SOUND_S = 0.06  # less sound than this is a click, not a word
SLOT_S = 0.02
# A tone, a hum or white noise keeps its level: over slots of 20 ms white noise at 16 kHz has a standard deviation of
# 0.4 dB. Words, even clipped or at -10 dB in noise, have peaks and pauses. Longer than a word, so that a short clip with nothing
# but one vowel is heard.
_STEADY_DB = 3.0
_STEADY_S = 1.0


def slot_samples(rate: int) -> int:
    """Samples of the stretches that `levels` measures."""
    return max(1, round(SLOT_S * rate))


def levels(samples: np.ndarray, rate: int) -> np.ndarray:
    """float64 [slots]: the RMS of each whole 20 ms of float samples [n], a constant offset not counted."""
    slot = slot_samples(rate)
    slots = samples[: len(samples) // slot * slot].astype(np.float64).reshape(-1, slot)
    # Two sums take half of what `std` does, and float64 has digits to spare for their difference. A product would be shared out among
    # as many threads as there are cores, and each reader of a recording would have as many.
    mean = slots.mean(axis=1)
    return np.sqrt(np.maximum(np.einsum("ij,ij->i", slots, slots) / slot - mean * mean, 0.0))


def quantiles(values: np.ndarray, *shares: float) -> np.ndarray:
    """float64 [shares] of values [n], n > 0: as `np.quantile`, which takes five times as long for so few."""
    return np.interp(np.multiply(shares, len(values) - 1), np.arange(len(values)), np.sort(values))


def has_energy(samples: np.ndarray, rate: int) -> bool:
    """Whether any sound is in float samples [n]: 60 ms or more above -86 dBFS."""
    return _enough(levels(samples, rate))


def may_be_speech(samples: np.ndarray, rate: int) -> bool:
    """Whether a model should listen: there is sound, and it is not one steady sound from its beginning to its end.

    False means that the transcript is empty. True means nothing yet: other sounds change too.
    """
    loud = levels(samples, rate)
    return _enough(loud) and not _steady(loud[loud > SILENCE_RMS])


def _enough(loud: np.ndarray) -> bool:
    return int((loud > SILENCE_RMS).sum()) >= round(SOUND_S / SLOT_S)


def _steady(loud: np.ndarray) -> bool:
    """loud: of the slots that have sound. The quietest tenth may be where the sound begins and ends."""
    if len(loud) * SLOT_S < _STEADY_S:
        return False
    low, high = quantiles(loud, 0.1, 1.0)
    return bool(20 * np.log10(high / low) < _STEADY_DB)
