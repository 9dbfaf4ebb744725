"""Books 1 to 4, given like book 0: pitch, loudness, where the phones meet, and the voice.

Each is one small number of a frame that repeats by construction; pitch and loudness are measured, the rest is known. A code
that is off by one is off by little, so that a decoder may be told lies of that size while it learns.

    book 1  pitch, 0.8 semitones a step from 60 Hz on; 0 in silence
    book 2  loudness, 2.5 dB a step from -62 dB of full scale on; 0 in silence
    book 3  how far the edges between the slots of 40 ms are from where the phones meet: EDGES * (at the start) + (in the middle)
    book 4  the voice: by how many semitones (8 a step of a third) formants and pitch are shifted
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.tts.phones import PHONES, SILENCE, SLOT_S, Span, owners
from training.tts.speakers import FRAME_SAMPLES, VOICE_RATE

BOOKS = 4
ROWS = 64  # of each
EDGES = 8  # kinds of an edge
UNKNOWN = 255  # of a book whose clip has no sound
LOWEST_HZ, PITCH_STEP = 60.0, 0.8
QUIETEST_DB, LOUDNESS_STEP = -62.0, 2.5
_EDGE_STEP_S = 0.007
_NO_EDGE = 0
_WINDOW = 2_048


def pitch_of(sound: Tensor, *, block: int = 2_048) -> np.ndarray:
    """sound [frames, 1920] of one voice, float -> Hz of each frame, float32 [frames]; nan where nothing is voiced."""
    edge = (_WINDOW - FRAME_SAMPLES) // 2
    flat = F.pad(sound.flatten().float(), (edge, edge + FRAME_SAMPLES))
    windows = flat.unfold(0, _WINDOW, FRAME_SAMPLES)[: len(sound)]
    shape = torch.hann_window(_WINDOW, device=sound.device)
    low, high = int(VOICE_RATE / 420), int(VOICE_RATE / LOWEST_HZ)
    own = _autocorrelation(shape[None])[0, : high + 2]
    found = []
    for part in windows.split(block):
        part = part * shape
        r = _autocorrelation(part)[:, : high + 2]
        r = r / (r[:, :1] + 1e-3) / (own / own[0])
        found.append(r)
    r = torch.cat(found)
    lags = torch.arange(high + 2, device=r.device)
    first = _best(r, lags, torch.full((len(r),), low, device=r.device), torch.full((len(r),), high, device=r.device))
    clear = first[1] > 0.6
    if not bool(clear.any()):
        return np.full(len(sound), np.nan, dtype=np.float32)
    usual = first[0][clear].median()
    # One voice hardly leaves an octave; the usual pitch of the clip decides between a period and its double.
    lag, sure = _best(r, lags, (usual / 1.6).expand(len(r)).int(), (usual * 1.6).expand(len(r)).int())
    hz = torch.where(sure > 0.5, VOICE_RATE / lag, torch.nan)
    return hz.cpu().numpy().astype(np.float32)


def _autocorrelation(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, n=2 * _WINDOW)
    return torch.fft.irfft(spectrum.real.square() + spectrum.imag.square())


def _best(r: Tensor, lags: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    inside = (lags >= low[:, None]) & (lags <= high[:, None])
    score = torch.where(inside, r - 2e-4 * lags, -torch.inf)
    at = score.argmax(1)
    around = r.gather(1, (at[:, None] + torch.tensor([-1, 0, 1], device=r.device)).clamp(0, r.shape[1] - 1))
    bend = around[:, 0] - 2 * around[:, 1] + around[:, 2]
    shift = torch.where(bend < -1e-6, 0.5 * (around[:, 0] - around[:, 2]) / bend.clamp_max(-1e-6), 0.0)
    return at + shift.clamp(-0.5, 0.5), around[:, 1]


def sound_codes(sound: Tensor, book0: np.ndarray) -> np.ndarray:
    """Books 1 and 2 of one clip: sound float [frames, 1920] at the level that is trained -> int64 [frames, 2]."""
    silent = book0 == SILENCE * PHONES + SILENCE
    hz = pitch_of(sound)
    made = np.zeros((len(book0), 2), dtype=np.int64)
    known = np.flatnonzero(~np.isnan(hz) & ~silent)
    if len(known):
        steps = 12 * np.log2(hz[known] / LOWEST_HZ) / PITCH_STEP
        if len(steps) > 2:  # a lone wrong frame
            steps = np.median(np.stack((np.r_[steps[0], steps[:-1]], steps, np.r_[steps[1:], steps[-1]])), 0)
        made[:, 0] = np.rint(np.interp(np.arange(len(book0)), known, steps)).clip(0, ROWS - 2) + 1
    level = 10 * torch.log10(sound.float().square().mean(1) + 1e-9).cpu().numpy()
    made[:, 1] = np.rint((level - QUIETEST_DB) / LOUDNESS_STEP).clip(0, ROWS - 2) + 1
    made[silent] = 0
    return made


def edge_codes(spans: Sequence[Span], frames: int) -> np.ndarray:
    """Book 3 of one clip, int64 [frames]."""
    owner = owners(spans, frames)
    before = np.r_[-1, owner[:-1]]
    made = np.full(2 * frames, _NO_EDGE, dtype=np.int64)
    for slot in np.flatnonzero((owner != before) & (owner >= 0)):
        late = spans[owner[slot]].start_s - slot * SLOT_S
        made[slot] = 4 + int(np.rint(np.clip(late / _EDGE_STEP_S, -3, 3)))
    return made[0::2] * EDGES + made[1::2]


def voice_code(shift: float) -> int:
    """Book 4: shift is the factor of pitch and formants against the voice as synthesized."""
    return int(np.clip(np.rint(12 * np.log2(shift) * 3), -31, 32)) + 31


def books_of(spans: Sequence[Span], book0: np.ndarray, shift: float, sound: Tensor | None) -> np.ndarray:
    """Books 1 to 4 of one clip, uint8 [frames, 4]."""
    made = np.full((len(book0), BOOKS), UNKNOWN, dtype=np.uint8)
    if sound is not None:
        made[:, :2] = sound_codes(sound, book0)
    made[:, 2] = edge_codes(spans, len(book0))
    made[:, 3] = voice_code(shift)
    return made


def told(codes: Tensor) -> Tensor:
    """codes int64 [B, T, 1 + BOOKS] with small lies, as a Talker tells them: what follows must not lean on a single step."""
    b, frames, _ = codes.shape
    device = codes.device
    chance = torch.rand(b, frames, 3, device=device)
    step = torch.randint(0, 2, (b, frames, 2), device=device) * 2 - 1
    drift = torch.randint(-1, 2, (b, 1, 2), device=device)
    level = codes[..., 1:3]
    moved = (level + drift + step * (chance[..., :2] < 0.25)).clamp(1, ROWS - 1)
    level = torch.where(level > 0, moved, level)
    edge = codes[..., 3]
    other = edge.flatten()[torch.randint(0, b * frames, (b, frames), device=device)]
    edge = torch.where(chance[..., 2] < 0.12, other, edge)
    voice = (codes[..., 4] + torch.randint(-1, 2, (b, 1), device=device)).clamp(0, ROWS - 1)
    return torch.stack((codes[..., 0], level[..., 0], level[..., 1], edge, voice), -1)
