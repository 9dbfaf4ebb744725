"""What ASR does with a clip before any network sees it: 16 kHz, cut what is too long."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import soxr

from aura_omni.flow import SPEECH_RATE, Audio

MAX_CLIP_S = 1_200.0  # what Qwen3-ASR was built to take at once
SEARCH_S = 5.0  # how far from a limit a cut may lie
LULL_S = 0.1  # a cut goes into the quietest stretch of this length


def at_speech_rate(audio: Audio) -> np.ndarray:
    """float32 [n] at 16 kHz, peak at most 1. Resampled as librosa does by default (soxr HQ, length rounded up).

    Louder than full scale is scaled down as a whole; anything else keeps its level.
    """
    samples = np.ascontiguousarray(audio.samples, dtype=np.float32)
    if audio.rate != SPEECH_RATE:
        length = -(-len(samples) * SPEECH_RATE // audio.rate)
        samples = soxr.resample(samples, audio.rate, SPEECH_RATE, quality="HQ")[:length]
        samples = np.pad(samples, (0, length - len(samples)))
    peak = float(max(samples.max(), -samples.min()))
    return samples / np.float32(peak) if peak > 1.0 else samples


def split_long(audio: Audio, *, limit_s: float = MAX_CLIP_S) -> tuple[Audio, ...]:
    """Audio in order, without overlap or loss, cut near each multiple of limit_s; the same object when short enough.

    A cut is at the quietest sample of the quietest 100 ms within 5 s of the limit (a quarter of it, if that is less), so
    a part may exceed it by as much.
    Parts of a longer clip are at 16 kHz. Transcripts of the parts go through `transcript.joined`.
    """
    if audio.duration_s <= limit_s:
        return (audio,)
    samples = at_speech_rate(audio)
    limit, reach, lull = (round(seconds * SPEECH_RATE) for seconds in (limit_s, min(SEARCH_S, limit_s / 4), LULL_S))
    cuts = [0]
    while len(samples) - cuts[-1] > limit:
        target = cuts[-1] + limit
        first = max(cuts[-1] + 1, target - reach)
        cuts.append(first + _quietest(np.abs(samples[first : target + reach]), lull))
    cuts.append(len(samples))
    return tuple(
        Audio(samples[start:stop], SPEECH_RATE, media_key(audio, f"{start}:{stop}")) for start, stop in pairwise(cuts)
    )


def media_key(audio: Audio, options: str) -> bytes:
    """A key of the clip's content together with what is done to it: equal keys, equal rows."""
    origin = f"{audio.rate}/{len(audio.samples)}/{options}/".encode()
    return hashlib.blake2b(origin + audio.key, digest_size=16).digest()


def _quietest(loudness: np.ndarray, lull: int) -> int:
    """Index of the quietest sample of the `lull` consecutive samples with the least sum."""
    if len(loudness) <= lull:
        return int(loudness.argmin())
    total = np.concatenate(([0.0], np.cumsum(loudness, dtype=np.float64)))
    start = int((total[lull:] - total[:-lull]).argmin())
    return start + int(loudness[start : start + lull].argmin())
