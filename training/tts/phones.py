"""Book 0 by supervision: what is being spoken in each half of an 80 ms frame, as one code.

A code is first * PHONES + second, the phones of the frame's first and second 40 ms. It repeats by construction (the same
speech gives the same codes), and text predicts it. Knows Piper's phoneme ids only through their characters.

    spans = to_spans(characters, durations)            # one span per phone
    codes = frame_codes(spans, frames)                 # int array [frames]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FRAME_S = 0.08
SLOT_S = FRAME_S / 2

# Silence, then every phone that espeak's American English has; at most 45, since 45 * 45 pairs fit 2,048 rows.
SYMBOLS = (
    "_", "a", "b", "d", "e", "f", "h", "i", "j", "k", "l", "m", "n", "o", "p", "s", "t", "u", "v", "w", "z", "æ", "ð", "ŋ", "ɐ",
    "ɑ", "ɔ", "ə", "ɚ", "ɛ", "ɜ", "ɡ", "ɪ", "ɹ", "ɾ", "ʃ", "ʊ", "ʌ", "ʒ", "ʔ", "θ", "ᵻ", "ɬ", "r", "x",
)  # fmt: skip
PHONES = len(SYMBOLS)
CODES = PHONES * PHONES
SILENCE = 0
_INDEX = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_SILENT = frozenset("^$!'(),-.:;?—…\"")
_NEXT = frozenset("ˈˌ")  # stress: its time belongs to the phone after it
_BEFORE = frozenset("_ ːˑ̩̃ʲ")  # padding, spaces, length and colouring: to the phone before
_LIKE = {
    "g": "ɡ",
    "ɫ": "l",
    "n̩": "n",
    "c": "k",
    "y": "i",
    "ç": "h",
    "ø": "ɜ",
    "œ": "ɜ",
    "ʁ": "ɹ",
    "ɣ": "ɡ",
    "β": "v",
    "ɲ": "n",
}


@dataclass(frozen=True, slots=True)
class Span:
    phone: int  # index into SYMBOLS
    start_s: float
    stop_s: float


class UnknownPhone(ValueError):
    """A character that no phone stands for; such a sentence is left out of the data."""


def to_spans(characters: Sequence[str], durations_s: Sequence[float], start_s: float = 0.0) -> list[Span]:
    """Characters of one sentence as Piper read them ("_" for padding), with the time of each -> one span per phone."""
    spans: list[Span] = []
    at = begin = start_s
    for character, duration in zip(characters, durations_s, strict=True):
        at += duration
        if character in _NEXT:
            continue  # `begin` stays, so that the next phone takes this time
        if character in _BEFORE and spans:
            last = spans.pop()
            spans.append(Span(last.phone, last.start_s, at))
        else:
            phone = SILENCE if character in _SILENT or character in _BEFORE else _phone(character)
            if phone == SILENCE and spans and spans[-1].phone == SILENCE:
                begin = spans.pop().start_s
            spans.append(Span(phone, begin, at))
        begin = at
    return spans


def _phone(character: str) -> int:
    found = _INDEX.get(_LIKE.get(character, character))
    if found is None:
        raise UnknownPhone(f"no phone stands for {character!r}")
    return found


def owners(spans: Sequence[Span], frames: int) -> np.ndarray:
    """Which span each slot of `frames` frames belongs to, int64 [2 * frames]; -1 after the last one.

    A slot of 40 ms belongs to the phone that fills most of it. A phone that got none takes the slot it overlaps best if
    that slot's owner keeps another one; without this rule a quarter of the shortest phones would be lost.
    """
    count = 2 * frames
    share = np.zeros((len(spans), count))
    for row, span in enumerate(spans):
        for slot in range(int(span.start_s / SLOT_S), min(count, int(np.ceil(span.stop_s / SLOT_S)))):
            share[row, slot] = min(span.stop_s, (slot + 1) * SLOT_S) - max(span.start_s, slot * SLOT_S)
    owner = np.where(share.max(0, initial=0.0) > 1e-9, share.argmax(0), -1) if len(spans) else np.full(count, -1)
    held = np.bincount(owner[owner >= 0], minlength=len(spans))
    for row in np.flatnonzero(held == 0):
        for slot in np.argsort(-share[row], kind="stable"):
            if share[row, slot] <= 1e-9:
                break
            if owner[slot] < 0 or held[owner[slot]] > 1:
                if owner[slot] >= 0:
                    held[owner[slot]] -= 1
                owner[slot], held[row] = row, 1
                break
    return owner


def frame_codes(spans: Sequence[Span], frames: int) -> np.ndarray:
    """The codes of `frames` frames, int64 [frames]. Time after the last span is silence."""
    phones = np.array([spans[row].phone if row >= 0 else SILENCE for row in owners(spans, frames)], dtype=np.int64)
    return phones[0::2] * PHONES + phones[1::2]


def phones_of(codes: Sequence[int] | np.ndarray) -> list[int]:
    """The phones that codes say, in order, silence and repetitions removed (two equal phones in a row count once)."""
    said: list[int] = []
    for code in np.asarray(codes):
        for phone in divmod(int(code), PHONES):
            if not said or said[-1] != phone:
                said.append(phone)
    return [phone for phone in said if phone != SILENCE]
