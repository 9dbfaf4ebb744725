"""What is not speech: tones, hums, chirps, rings, beats, melodies, gusts, clicks. Drawn, never the same twice.

samples = sound(random.Random(0))          # float32 at 16 kHz, 1 to 6 s, peak 0.5
"""

from __future__ import annotations

import random

import numpy as np

RATE = 16_000


def sound(rng: random.Random) -> np.ndarray:
    t = np.arange(round(rng.uniform(1.0, 6.0) * RATE)) / RATE
    noise = np.random.default_rng(rng.getrandbits(32))
    wave = rng.choice(_KINDS)(rng, noise, t)
    if rng.random() < 0.3:
        wave = wave + 0.3 * rng.choice(_KINDS)(rng, noise, t)
    return (0.5 * wave / max(1e-3, np.abs(wave).max())).astype(np.float32)


def _voice(rng: random.Random, hz: float, t: np.ndarray) -> np.ndarray:
    """One note with overtones that fall off, perhaps with vibrato."""
    phase = 2 * np.pi * hz * t + rng.choice((0.0, 0.0, 2.0)) * np.sin(2 * np.pi * rng.uniform(4, 7) * t)
    fall = rng.uniform(0.3, 0.9)
    waves = [fall**n * np.sin(n * phase) for n in range(1, rng.randint(2, 9)) if n * hz < 7_500]
    return np.sum(waves, 0)


def _tone(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    hz = [rng.uniform(80, 4_000) for _ in range(rng.choice((1, 1, 2, 3)))]
    gate = (np.sin(2 * np.pi * rng.uniform(0.5, 5) * t) > rng.uniform(-1, 0.5)) if rng.random() < 0.5 else 1.0
    return np.sum([np.sin(2 * np.pi * f * t) for f in hz], 0) * gate


def _hum(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    base = rng.choice((50, 60, 100, 120)) * rng.uniform(0.95, 1.05)
    return np.sum([rng.random() / n * np.sin(2 * np.pi * base * n * t + rng.uniform(0, 6)) for n in range(1, 20)], 0)


def _sweep(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    low, depth, pace = rng.uniform(300, 2_500), rng.uniform(0.1, 0.6), rng.uniform(0.3, 8)
    curve = np.sin(2 * np.pi * pace * t) if rng.random() < 0.6 else 2 * ((pace * t) % 1) - 1
    return np.sin(2 * np.pi * np.cumsum(low * (1 + depth * curve)) / RATE)


def _melody(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    wave = np.zeros_like(t)
    scale = rng.choice(((0, 2, 4, 5, 7, 9, 11), (0, 3, 5, 7, 10), (0, 2, 3, 5, 7, 8, 10)))
    root, beat = rng.uniform(70, 400), rng.uniform(0.12, 0.6)
    for voice in range(rng.randint(1, 3)):
        start = 0.0
        while start < t[-1]:
            note = root * 2 ** ((rng.choice(scale) + 12 * rng.randint(0, 2) * (voice == 0)) / 12)
            length = beat * rng.choice((1, 1, 2, 4))
            first, last = round(start * RATE), min(len(t), round((start + length) * RATE))
            if last > first and rng.random() < 0.9:
                part = t[: last - first]
                wave[first:last] += (
                    _voice(rng, note, part) * np.exp(-part * rng.uniform(0.5, 8)) * np.minimum(1, part * 200)
                )
            start += length
    return wave + (0.5 * _beats(rng, noise, t) * np.abs(wave).max() if rng.random() < 0.4 else 0.0)


def _beats(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    beat, wave = rng.uniform(0.15, 0.6), np.zeros_like(t)
    for number in range(int(t[-1] / beat)):
        part = t[: min(len(t) - round(number * beat * RATE), round(0.2 * RATE))]
        first = round(number * beat * RATE)
        if number % 2 or rng.random() < 0.3:
            hit = noise.standard_normal(len(part)) * np.exp(-part * rng.uniform(20, 90))
        else:
            hit = 2 * np.sin(2 * np.pi * rng.uniform(45, 90) * part * (1 + np.exp(-part * 40))) * np.exp(-part * 18)
        wave[first : first + len(part)] += hit
    return wave


def _gusts(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """Noise of some colour whose loudness wanders: wind, breath, traffic, rustling."""
    spectrum = np.fft.rfft(noise.standard_normal(len(t)))
    hz = np.fft.rfftfreq(len(t), 1 / RATE)
    centre, width = rng.uniform(50, 4_000), rng.uniform(0.3, 2.0)
    shape = np.exp(-((np.log(hz + 20) - np.log(centre)) ** 2) / width)
    slow = np.interp(t, np.linspace(0, t[-1], 12), noise.random(12) ** rng.uniform(0.2, 3))
    return np.fft.irfft(spectrum * shape, len(t)) * slow


def _clicks(rng: random.Random, noise: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """Keys, knocks, footsteps."""
    wave = np.zeros_like(t)
    for _ in range(rng.randint(1, 25)):
        first, ring = rng.randrange(len(t)), rng.uniform(100, 4_000)
        part = t[: len(t) - first][: RATE // 5]
        body = np.sin(2 * np.pi * ring * part) + noise.standard_normal(len(part))
        wave[first : first + len(part)] += rng.uniform(0.2, 1) * body * np.exp(-part * rng.uniform(30, 300))
    return wave


_KINDS = (_tone, _hum, _sweep, _melody, _melody, _melody, _beats, _gusts, _gusts, _clicks)
