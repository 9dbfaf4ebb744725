"""Clips for training: made by worker processes, kept on the device, drawn into batches there.

    store = Clips(device, hours=24)
    maker = Maker(bundle, english, workers=14, count=30_000, seed=0, avoid=frozenset())     # before CUDA is touched: it forks
    store.take(maker.ready())
    batch = store.batch(random.Random(0))

A clip is int16 at 16 kHz in one long tensor; a batch is a gather from it, at a pace (and so a pitch) of its own for each clip.
"""

from __future__ import annotations

import bisect
import multiprocessing
import os
import random
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.asr import opus
from training.asr.network import sent
from training.asr.sounds import sound
from training.asr.voices import RATE, Mouth, training_voice
from training.text.grammar import sentence

JOB_CLIPS = 40
SOUND_SHARE = 0.06  # of the clips that are made
CLASSES_S = (1.4, 2.2, 3.2, 5.0, 7.5)  # clips up to so long share a batch
LONG_S = 27.0  # what a batch of joined clips is filled to
LONG_SHARE = 0.12
BATCH_S = 750.0  # sound in a batch, with the pauses around it
EMPTY_SHARE = 0.03  # of a batch: nothing but noise
SOUNDS_SHARE = 0.05  # of a batch
PAUSE_S = 0.6  # at most, before and after
SLOWEST, FASTEST = 0.86, 1.17
HELD_OUT_LINES = 1_000  # the first sentences of English are spoken to nobody but the evaluation
WITHHELD_WORDS = 5  # sentences of the evaluation from so many words on are said to nobody else
_MARGIN = 800  # silence around every clip, so that reading a little beyond it finds nothing
GROUPS = {"made": 0.72, "piper": 0.12, "festival": 0.08, "human": 0.08}


@dataclass(frozen=True, slots=True)
class Clip:
    samples: np.ndarray  # int16
    text: str  # empty: no speech
    group: str


@cache
def lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def said(rng: random.Random, english: Sequence[str]) -> str:
    """Half of it what is said to the assistant; the rest general, and fragments of both."""
    kind = rng.random()
    if kind < 0.5:
        return sentence(rng)
    return rng.choice(english) if kind < 0.8 else fragments(rng, english)


def fragments(rng: random.Random, english: Sequence[str]) -> str:
    """One to three words each out of several sentences: what comes next cannot be guessed, only heard."""
    found: list[str] = []
    for _ in range(rng.randint(2, 4)):
        text = sentence(rng) if rng.random() < 0.4 else rng.choice(english)
        words = re.findall(r"[A-Za-z'-]+", text)
        if words[0].split("'")[0] != "I":
            words[0] = words[0].lower()
        first = rng.randrange(len(words))
        found += words[first : first + rng.randint(1, 3)]
    text = " ".join(found)
    return f"{text[0].upper()}{text[1:]}."


def withheld(heldout: Iterable[Clip]) -> frozenset[str]:
    """What the evaluation alone says. Shorter sentences are stock phrases, which training has to say too."""
    return frozenset(clip.text for clip in heldout if len(clip.text.split()) >= WITHHELD_WORDS)


def make(bundle: Path, english: Path, seed: int, avoid: frozenset[str], count: int = JOB_CLIPS) -> list[Clip]:
    """Spoken by voices of the bundle, and sounds that are no speech. Nothing of `avoid` is said."""
    rng = random.Random(seed)
    mouth, general = Mouth(bundle), lines(english)[HELD_OUT_LINES:]
    made = []
    for _ in range(count):
        if rng.random() < SOUND_SHARE:
            made.append(Clip(_pcm(sound(rng)), "", "sounds"))
            continue
        text = said(rng, general)
        if text in avoid:
            continue
        samples = mouth.speak(training_voice(rng), text, rng)
        if 0.2 * RATE < len(samples) < 20 * RATE:
            made.append(Clip(_pcm(samples), text, "made"))
    mouth.close()
    return made


def recorded(folder: Path, pattern: str, group: str) -> list[Clip]:
    """Of files that `opus` wrote. Sounds are cut into pieces of a few seconds."""
    found = []
    for path in sorted(folder.glob(pattern)):
        for samples, text in opus.clips(path):
            if text:
                found.append(Clip(samples, text, group))
            else:
                found += [
                    Clip(samples[start : start + 5 * RATE], "", group) for start in range(0, len(samples), 5 * RATE)
                ]
    return found


def _pcm(samples: np.ndarray) -> np.ndarray:
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16)


def _quietly() -> None:
    os.nice(10)


class Maker:
    """`count` clips from worker processes, in the background. Create it before the parent has threads or a CUDA context."""

    def __init__(
        self, bundle: Path, english: Path, *, workers: int, count: int, seed: int, avoid: frozenset[str]
    ) -> None:
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_quietly)
        first = seed * 1_000_000
        self._jobs: list[Future[list[Clip]]] = [
            self._pool.submit(make, bundle, english, job, avoid) for job in range(first, first - -count // JOB_CLIPS)
        ]

    def ready(self) -> list[Clip]:
        """What was finished since the last call; a failed job raises here."""
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if not job.done()]
        return [clip for job in done for clip in job.result()]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """waves float32 [B, L] with silence around what is said, samples int64 [B] that count (and on the host), texts of the B."""

    waves: Tensor
    samples: Tensor
    lengths: tuple[int, ...]
    texts: tuple[str, ...]


class Clips:
    """All clips, on the device."""

    def __init__(self, device: torch.device, *, capacity_s: float) -> None:
        self._flat = torch.zeros(round(capacity_s * RATE), dtype=torch.int16, device=device)
        self._end = _MARGIN
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._texts: list[str] = []
        self._by_group: dict[str, list[list[int]]] = {}

    @property
    def hours(self) -> float:
        return sum(self._lengths) / RATE / 3600

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, clips: Sequence[Clip]) -> None:
        """Raises ValueError when they do not fit."""
        if not clips:
            return
        total = sum(len(clip.samples) + _MARGIN for clip in clips)
        if self._end + total > len(self._flat):
            raise ValueError(f"{len(self)} clips fill the {len(self._flat) / RATE:.0f} s that were asked for")
        silence = np.zeros(_MARGIN, np.int16)
        joined = np.concatenate([part for clip in clips for part in (clip.samples, silence)])
        self._flat[self._end : self._end + total] = torch.from_numpy(joined).to(self._flat.device)
        for clip in clips:
            length = len(clip.samples)
            kind = bisect.bisect_left(CLASSES_S, length / RATE)
            self._by_group.setdefault(clip.group, [[] for _ in range(len(CLASSES_S) + 1)])[kind].append(len(self))
            self._starts.append(self._end)
            self._lengths.append(length)
            self._texts.append(clip.text)
            self._end += length + _MARGIN

    def batch(self, rng: random.Random, *, batch_s: float = BATCH_S, vary: bool = True) -> Batch:
        """Clips of one length class, or now and then several joined; some with no speech at all."""
        kind = self._class(rng)
        long = kind == len(CLASSES_S)
        longest = LONG_S if long else CLASSES_S[kind]
        room = longest / SLOWEST + 2 * PAUSE_S
        items: list[list[int]] = []
        for _ in range(max(1, round(batch_s / room))):
            chance = rng.random()
            if vary and chance < EMPTY_SHARE:
                items.append([])
            elif vary and chance < EMPTY_SHARE + SOUNDS_SHARE and "sounds" in self._by_group:
                items.append([rng.choice(self._of("sounds", rng, min(kind, len(CLASSES_S) - 1)))])
            elif long:
                items.append(self._joined(rng))
            else:
                items.append([rng.choice(self._of(self._group(rng), rng, kind))])
        return self._gather(rng, items, round(room * RATE), vary)

    def background(self, rng: random.Random, count: int, length: int) -> Tensor:
        """float32 [count, length]: sounds that are not speech, each repeated to fill its row."""
        found = [n for part in self._by_group.get("sounds", []) for n in part]
        if not found:
            return torch.zeros(count, length, device=self._flat.device)
        chosen = [rng.choice(found) for _ in range(count)]
        known = [[self._starts[n] for n in chosen], [self._lengths[n] for n in chosen]]
        starts, lengths = sent(known, self._flat.device)[:, :, None]
        return self._flat[starts + torch.arange(length, device=self._flat.device) % lengths].float() / 32768

    # ------------------------------------------------------------ choosing

    def _group(self, rng: random.Random) -> str:
        there = {name: share for name, share in GROUPS.items() if name in self._by_group}
        return rng.choices(list(there), list(there.values()))[0]

    def _class(self, rng: random.Random) -> int:
        """Every clip of a group is as likely as any other, whatever its class."""
        if rng.random() < LONG_SHARE:
            return len(CLASSES_S)
        return rng.choices(range(len(CLASSES_S)), [len(part) for part in self._by_group[self._group(rng)][:-1]])[0]

    def _of(self, group: str, rng: random.Random, kind: int) -> list[int]:
        """Clips of the group that fit the class: of the class itself, or the next shorter one that has any."""
        for part in reversed(self._by_group[group][: kind + 1]):
            if part:
                return part
        return next(part for parts in self._by_group.values() for part in parts[: kind + 1] if part)

    def _joined(self, rng: random.Random) -> list[int]:
        chosen: list[int] = []
        group, total = self._group(rng), 0.0
        wanted = rng.uniform(6.0, LONG_S)
        while True:
            clip = rng.choice(rng.choices(self._by_group[group], [len(part) for part in self._by_group[group]])[0])
            total += self._lengths[clip] / RATE + PAUSE_S / 2
            if chosen and total > wanted:
                return chosen
            chosen.append(clip)

    # ------------------------------------------------------------ sounding

    def _gather(self, rng: random.Random, items: list[list[int]], room: int, vary: bool) -> Batch:
        rows, starts, counts, offsets, paces, ends = [], [], [], [], [], []
        for row, item in enumerate(items):
            pace = rng.uniform(SLOWEST, FASTEST) if vary else 1.0
            # The middle is the most natural, the ends are there to be heard too.
            pace = pace if rng.random() < 0.7 or not vary else 1.0
            at = rng.uniform(0.0, PAUSE_S) if vary else 0.1
            for clip in item:
                count = min(int((self._lengths[clip] - 1) / pace), room - round(at * RATE))
                rows.append(row)
                starts.append(self._starts[clip])
                counts.append(count)
                offsets.append(round(at * RATE))
                paces.append(pace)
                at += count / RATE + (rng.uniform(0.05, PAUSE_S) if vary else 0.1)
            if not item:
                at += rng.uniform(0.5, 4.0)
            ends.append(min(room, max(RATE // 2, round(at * RATE))))
        device = self._flat.device
        waves = torch.zeros(len(items), room, device=device)
        if rows:
            row, start, count, offset = sent([rows, starts, counts, offsets], device)[:, :, None]
            place = torch.arange(max(counts), device=device)
            exact = place * sent(paces, device, torch.float64)[:, None]
            whole = exact.floor().long()
            values = _between(self._flat, start + whole, (exact - whole).float())
            waves.view(-1).scatter_add_(
                0, (row * room + (offset + place).clamp_max(room - 1)).flatten(), (values * (place < count)).flatten()
            )
        texts = tuple(" ".join(text for clip in item if (text := self._texts[clip])) for item in items)
        return Batch(waves, sent(ends, device), tuple(ends), texts)


def _between(flat: Tensor, index: Tensor, part: Tensor) -> Tensor:
    """int16 samples read at index + part by a cubic through the four around."""
    a, b, c, d = (flat[index + step].float() / 32768 for step in (-1, 0, 1, 2))
    return b + 0.5 * part * (c - a + part * (2 * a - 5 * b + 4 * c - d + part * (3 * (b - c) + d - a)))
