"""Clips for training: made by worker processes, kept on the device, drawn into batches there.

    store = Clips(device, writer, capacity_s=3_600.0)
    maker = Maker(bundle, english, workers=14, count=30_000, seed=0, avoid=frozenset())     # before CUDA is touched: it forks
    store.take(maker.ready())
    deal = store.deal(np.random.default_rng(0), batch_s=400.0)          # on the host: which clips, where, how fast
    sound = sounded(store.samples, deal.form, Columns.of(deal.form, deal.table))             # on the device: always the same launches for one form

A clip is int16 at 16 kHz in one long tensor; a batch is a gather from it, at a pace (and so a pitch) of its own for each clip.
Every batch has one of a few forms, so that a step can be captured once for each and replayed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.asr import opus
from training.asr.network import IGNORED
from training.asr.sounds import sound
from training.asr.voices import RATE, Mouth, training_voice
from training.text.grammar import sentence

JOB_CLIPS = 40
SOUND_SHARE = 0.06  # of the clips that are made
BATCH_S = 400.0  # sound in a batch, with the pauses around it
EMPTY_SHARE = 0.03  # of a batch: nothing but noise
SOUNDS_SHARE = 0.05  # of a batch
PAUSE_S = 0.6  # at most, before and after
SLOWEST, FASTEST = 0.86, 1.17
HELD_OUT_LINES = 1_000  # the first sentences of English are spoken to nobody but the evaluation
WITHHELD_WORDS = 5  # sentences of the evaluation from so many words on are said to nobody else
PACE_ONE = 1 << 20
MARGIN = 800  # silence around every clip, so that reading a little beyond it finds nothing
GROUPS = {"made": 0.8, "piper": 0.1, "festival": 0.06, "human": 0.04}


@dataclass(frozen=True, slots=True)
class Form:
    """The shape of a batch: rows of room_s seconds (whole ones, as the encoder reads), so many clips, pieces and letters each at most."""

    longest_s: float  # a clip that fits at the slowest pace with the longest pauses
    room_s: int
    joined: int  # clips in a row, at most
    pieces: int
    letters: int
    share: float = 0.0  # of the batches; 0: as many as there are clips that fit no shorter form

    def rows(self, batch_s: float) -> int:
        return max(1, round(batch_s / self.room_s))


FORMS = (
    Form(1.5, 3, 1, 24, 48), Form(2.4, 4, 1, 32, 64), Form(3.2, 5, 1, 40, 88), Form(5.8, 8, 1, 64, 144),
    Form(12.6, 16, 8, 112, 256, 0.07), Form(12.6, 24, 12, 168, 400, 0.03),
)  # fmt: skip
LONGEST_S = FORMS[-1].longest_s


@dataclass(frozen=True, slots=True)
class Clip:
    samples: np.ndarray  # int16
    text: str  # empty: no speech
    group: str


@cache
def lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def said(rng: random.Random, english: Sequence[str], asked: Sequence[str] = ()) -> str:
    """Half of it what is said to the assistant, two fifths of that in AURA's phrasings (`asked`); the rest general, and fragments."""
    kind = rng.random()
    if kind < 0.2 and asked:
        return rng.choice(asked)
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


def make(
    bundle: Path, english: Path, seed: int, avoid: frozenset[str], count: int = JOB_CLIPS, asked: Path | None = None
) -> list[Clip]:
    """Spoken by voices of the bundle, and sounds that are no speech. Nothing of `avoid` is said. asked: `asked.py`'s file."""
    rng = random.Random(seed)
    mouth, general = Mouth(bundle), lines(english)[HELD_OUT_LINES:]
    questions = lines(asked) if asked else ()
    made = []
    for _ in range(count):
        if rng.random() < SOUND_SHARE:
            made.append(Clip(_pcm(sound(rng)), "", "sounds"))
            continue
        text = said(rng, general, questions)
        if text in avoid:
            continue
        samples = mouth.speak(training_voice(rng), text, rng)
        if 0.2 * RATE < len(samples) < LONGEST_S * RATE:
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
        self,
        bundle: Path,
        english: Path,
        *,
        workers: int,
        count: int,
        seed: int,
        avoid: frozenset[str],
        asked: Path | None = None,
    ) -> None:
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_quietly)
        first = seed * 1_000_000
        self._jobs: list[Future[list[Clip]]] = [
            self._pool.submit(make, bundle, english, job, avoid, JOB_CLIPS, asked)
            for job in range(first, first - -count // JOB_CLIPS)
        ]

    def ready(self) -> list[Clip]:
        """What was finished since the last call; a failed job raises here."""
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if not job.done()]
        return [clip for job in done for clip in job.result()]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Deal:
    """What a batch is made of, on the host. table int64 [rows, columns]: see `Columns`."""

    form: Form
    table: Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """The table of one form, taken apart. All int64 of B rows; K clips in a row, absent ones beyond its end.

    start, count, offset, pace [B, K]: from which sample of all, how many samples of the row, from where in it, how fast
    (in PACE_ONE); samples [B]: of the row, that count; behind_start, behind_length [B]: a sound to hear behind it;
    pieces [B, W] with IGNORED behind the end; spelled [B, S] with 0 behind the end, spelled_count [B].
    """

    start: Tensor
    count: Tensor
    offset: Tensor
    pace: Tensor
    samples: Tensor
    behind_start: Tensor
    behind_length: Tensor
    pieces: Tensor
    spelled: Tensor
    spelled_count: Tensor

    @staticmethod
    def width(form: Form) -> int:
        return 4 * form.joined + 4 + form.pieces + form.letters

    @classmethod
    def of(cls, form: Form, table: Tensor) -> Columns:
        k = form.joined
        parts = table.split([k, k, k, k, 1, 1, 1, form.pieces, form.letters, 1], 1)
        return cls(*(part[:, 0] if n in (4, 5, 6, 9) else part for n, part in enumerate(parts)))


Writer = Callable[[str], tuple[list[int], list[int]]]  # a text as pieces to write and as letters to spell


class Clips:
    """All clips, their samples on the device."""

    def __init__(self, device: torch.device, writer: Writer, *, capacity_s: float, kept: Path | None = None) -> None:
        """kept: a folder that remembers what is taken, for `recall`."""
        self.samples = torch.zeros(round(capacity_s * RATE), dtype=torch.int16, device=device)
        self._writer, self._kept = writer, kept
        self._end = MARGIN
        self._texts: list[str] = []
        self._groups: list[str] = []
        room = max(1024, round(capacity_s))
        self._starts, self._lengths = np.zeros(room, np.int64), np.zeros(room, np.int64)
        self._pieces = np.full((room, FORMS[-1].pieces), IGNORED, np.int16)
        self._letters = np.zeros((room, FORMS[-1].letters), np.int8)
        self._letter_counts, self._piece_counts = np.zeros(room, np.int64), np.zeros(room, np.int64)
        self._by_group: dict[str, list[list[int]]] = {}
        self._arrays: dict[str, list[np.ndarray]] = {}
        self._nothing = np.full(FORMS[-1].pieces, IGNORED, np.int16)
        pieces, _ = writer("")
        self._nothing[: len(pieces)] = pieces

    @property
    def hours(self) -> float:
        return float(self._lengths.sum()) / RATE / 3600

    def __len__(self) -> int:
        return len(self._texts)

    def take(self, clips: Sequence[Clip], *, remember: bool = False) -> None:
        """What no longer fits is left out."""
        fit: list[tuple[Clip, int, tuple[list[int], list[int]]]] = []
        end = self._end
        for clip in clips:
            written = self._writer(clip.text)
            form = _form(len(clip.samples) / RATE, *map(len, written))
            if form is None or len(self) + len(fit) >= len(self._starts):
                continue
            if end + len(clip.samples) + MARGIN > len(self.samples):
                break
            fit.append((clip, form, written))
            end += len(clip.samples) + MARGIN
        if not fit:
            return
        silence = np.zeros(MARGIN, np.int16)
        joined = np.concatenate([part for clip, _, _ in fit for part in (clip.samples, silence)])
        self.samples[self._end : end] = sent(joined, self.samples.device)
        for clip, form, (pieces, letters) in fit:
            n, length = len(self), len(clip.samples)
            self._by_group.setdefault(clip.group, [[] for _ in FORMS])[form].append(n)
            self._starts[n], self._lengths[n], self._letter_counts[n] = self._end, length, len(letters)
            self._piece_counts[n] = len(pieces)
            self._pieces[n, : len(pieces)], self._letters[n, : len(letters)] = pieces, letters
            self._texts.append(clip.text)
            self._end += length + MARGIN
        self._arrays = {group: [np.array(part, np.int64) for part in parts] for group, parts in self._by_group.items()}
        if remember and self._kept is not None:
            with (self._kept / "speech.i16").open("ab") as samples, (self._kept / "speech.jsonl").open("a") as index:
                samples.write(joined.tobytes())
                index.writelines(json.dumps([len(clip.samples), clip.text, clip.group]) + "\n" for clip, _, _ in fit)

    def recall(self) -> None:
        """Takes what an earlier run remembered in the folder."""
        if self._kept is None or not (self._kept / "speech.jsonl").exists():
            return
        samples = np.memmap(self._kept / "speech.i16", np.int16, "r")
        end, clips = 0, []
        for line in (self._kept / "speech.jsonl").read_text().splitlines():
            length, text, group = json.loads(line)
            clips.append(Clip(samples[end : end + length], text, group))
            end += length + MARGIN
        for first in range(0, len(clips), 2_000):
            self.take(clips[first : first + 2_000])

    def deal(self, rng: np.random.Generator, *, batch_s: float = BATCH_S, form: Form | None = None) -> Deal:
        """Clips of one form, or now and then several joined; some rows with no speech at all."""
        number = self._drawn(rng) if form is None else FORMS.index(form)
        form = FORMS[number]
        rows = form.rows(batch_s)
        table = np.zeros((rows, Columns.width(form)), np.int64)
        columns = Columns.of(form, torch.from_numpy(table))  # views of it
        kind = rng.random(rows)
        speech = kind >= EMPTY_SHARE + SOUNDS_SHARE
        pieces = np.tile(self._nothing[: form.pieces], (rows, 1))
        if form.joined == 1:
            chosen = np.zeros((rows, 1), np.int64)
            chosen[speech, 0] = self._chosen(rng, number, int(speech.sum()))
            heard = speech[:, None].copy()
            pieces[speech] = self._pieces[chosen[speech, 0], : form.pieces]
            columns.spelled.numpy()[speech] = self._letters[chosen[speech, 0], : form.letters]
            columns.spelled_count.numpy()[speech] = self._letter_counts[chosen[speech, 0]]
        else:
            chosen, heard = self._joined(rng, form, number, ~speech, columns, pieces)
        sounds = self._arrays.get("sounds", [])
        if len(fitting := np.concatenate([np.zeros(0, np.int64), *sounds[: number + 1]])):
            alone = (kind >= EMPTY_SHARE) & ~speech
            chosen[alone, 0], heard[alone, 0] = rng.choice(fitting, int(alone.sum())), True
            around = rng.choice(np.concatenate(sounds), rows)
            columns.behind_start.numpy()[:], columns.behind_length.numpy()[:] = (
                self._starts[around], self._lengths[around],
            )  # fmt: skip
        columns.behind_length.clamp_(min=1)
        columns.pieces.numpy()[:] = pieces
        self._place(rng, form, chosen, heard, columns)
        return Deal(form, sent(table, self.samples.device, send=False))

    # ------------------------------------------------------------ choosing

    def _drawn(self, rng: np.random.Generator) -> int:
        """A form: every clip of a group is as likely as any other, whatever its length."""
        counts = np.zeros(len(FORMS))
        groups = {name: share for name, share in GROUPS.items() if name in self._arrays}
        for name, share in groups.items():
            sizes = np.array([len(part) for part in self._arrays[name]], float)
            counts += share / sum(groups.values()) * sizes / sizes.sum()
        fixed = np.array([form.share for form in FORMS])
        weights = np.where(fixed > 0, 0.0, counts * [form.room_s for form in FORMS])
        weights = fixed + (1 - fixed.sum()) * weights / max(weights.sum(), 1e-9)
        return int(rng.choice(len(FORMS), p=weights / weights.sum()))

    def _chosen(self, rng: np.random.Generator, number: int, count: int, *, shorter: bool = False) -> np.ndarray:
        """Clips of the form, groups in their shares; with `shorter` of all forms up to it."""
        pools = {}
        for name, share in GROUPS.items():
            parts = self._arrays.get(name, [])[0 if shorter else number : number + 1]
            pool = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            if len(pool):
                pools[name] = (pool, share)
        if not pools:
            return self._chosen(rng, number, count, shorter=True)
        shares = np.array([share for _, share in pools.values()])
        group = rng.choice(len(pools), count, p=shares / shares.sum())
        out = np.zeros(count, np.int64)
        for place, (pool, _) in enumerate(pools.values()):
            mine = group == place
            out[mine] = rng.choice(pool, int(mine.sum()))
        return out

    def _joined(
        self, rng: np.random.Generator, form: Form, number: int, quiet: np.ndarray, columns: Columns, pieces: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of one group of clips after another, as many as fit into a length drawn for each row; none in quiet ones."""
        rows = len(quiet)
        first = self._chosen(rng, number, rows, shorter=True)
        chosen = self._chosen(rng, number, rows * form.joined, shorter=True).reshape(rows, form.joined)
        chosen[:, 0] = first
        lengths, sizes = self._lengths[chosen] / RATE + PAUSE_S, self._piece_counts[chosen]
        letters = self._letter_counts[chosen] + 1
        wanted = rng.uniform(5.0, (form.room_s - 2 * PAUSE_S) * SLOWEST, (rows, 1))
        heard = (lengths.cumsum(1) <= wanted) & (sizes.cumsum(1) <= form.pieces) & (letters.cumsum(1) <= form.letters)
        heard[:, 0] = True
        heard[quiet] = False
        for row in np.flatnonzero(~quiet):
            texts = [text for clip in chosen[row, heard[row]] if (text := self._texts[clip])]
            ids, spelled = self._writer(" ".join(texts))
            pieces[row] = IGNORED
            pieces[row, : len(ids)] = ids[: form.pieces]
            spelled = spelled[: form.letters]
            columns.spelled[row, : len(spelled)] = torch.tensor(spelled)
            columns.spelled_count[row] = len(spelled)
        return chosen, heard

    def _place(
        self, rng: np.random.Generator, form: Form, chosen: np.ndarray, heard: np.ndarray, columns: Columns
    ) -> None:
        """Pauses and paces. The middle is the most natural, the ends are there to be heard too."""
        rows, room = len(chosen), form.room_s * RATE
        pace = np.where(rng.random(rows) < 0.7, rng.uniform(SLOWEST, FASTEST, rows), 1.0)
        pace = np.round(pace * PACE_ONE).astype(np.int64)
        at = np.round(rng.uniform(0.0, PAUSE_S, rows) * RATE).astype(np.int64)
        for place in range(chosen.shape[1]):
            clip, there = chosen[:, place], heard[:, place]
            count = np.minimum(((self._lengths[clip] - 1) * PACE_ONE) // pace, np.maximum(room - at, 0))
            columns.start.numpy()[:, place] = np.where(there, self._starts[clip], 0)
            columns.count.numpy()[:, place] = np.where(there, count, 0)
            columns.offset.numpy()[:, place] = np.where(there, at, room)
            columns.pace.numpy()[:, place] = pace
            pause = np.round(rng.uniform(0.05, PAUSE_S, rows) * RATE).astype(np.int64)
            at = np.where(there, np.minimum(at + count + pause, room), at)
        silent = ~heard.any(1)
        at = np.where(silent, at + np.round(rng.uniform(0.5, form.room_s - 1.0, rows) * RATE), at)
        columns.samples.numpy()[:] = np.clip(at, RATE // 2, room)


def _form(seconds: float, pieces: int, letters: int) -> int | None:
    """The shortest form that a clip fits; None if there is none."""
    for number, form in enumerate(FORMS):
        if seconds <= form.longest_s and pieces <= form.pieces and letters <= form.letters:
            return number
    return None


# ---------------------------------------------------------------- sounding, on the device


def sounded(samples: Tensor, form: Form, columns: Columns, wobble: Tensor | None = None) -> Tensor:
    """float32 [B, room]: every clip at its place and pace, silence elsewhere.

    wobble float32 [B, 3] (depth in samples, radians a sample, phase) makes the pace of a row come and go.
    """
    rows, room = len(columns.samples), form.room_s * RATE
    place = torch.arange(room, device=samples.device).expand(rows, -1)

    def here(column: Tensor) -> Tensor:
        return column if form.joined == 1 else column.gather(1, which)

    which = place
    if form.joined > 1:
        offsets = columns.offset.contiguous()
        which = (torch.searchsorted(offsets, place.contiguous(), right=True) - 1).clamp_min(0)
    inner = place - here(columns.offset)
    there = (inner >= 0) & (inner < here(columns.count))
    inner = torch.where(there, inner, 0)
    scaled = inner * here(columns.pace)
    whole = scaled // PACE_ONE
    part = (scaled - whole * PACE_ONE).float() / PACE_ONE
    if wobble is not None:
        depth, rate, phase = wobble[:, :, None].unbind(1)
        part = part + depth * (torch.sin(place * rate + phase))
        more = part.floor()
        whole, part = whole + more.long(), part - more
    return _between(samples, (here(columns.start) + whole).clamp_(2, len(samples) - 3), part) * there


def behind(samples: Tensor, form: Form, columns: Columns) -> Tensor:
    """float32 [B, room]: sounds that are not speech, each repeated to fill its row."""
    place = torch.arange(form.room_s * RATE, device=samples.device)
    index = columns.behind_start[:, None] + place % columns.behind_length[:, None]
    return samples[index.clamp_(0, len(samples) - 1)].float() / 32768


def _between(flat: Tensor, index: Tensor, part: Tensor) -> Tensor:
    """int16 samples read at index + part by a cubic through the four around."""
    a, b, c, d = (flat[index + step].float() / 32768 for step in (-1, 0, 1, 2))
    return b + 0.5 * part * (c - a + part * (2 * a - 5 * b + 4 * c - d + part * (3 * (b - c) + d - a)))


def sent(values: np.ndarray, device: torch.device, *, send: bool = True) -> Tensor:
    """On the device without waiting for what the device is busy with; with send=False only ready for that."""
    made = torch.from_numpy(values)
    if device.type != "cuda":
        return made
    pinned = made.pin_memory()
    return pinned.to(device, non_blocking=True) if send else pinned
