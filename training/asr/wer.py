"""Word error rate, on words alone: case and punctuation do not count."""

from __future__ import annotations

import re
from collections.abc import Iterable


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower().replace("-", " "))


def distance(said: list[str], heard: list[str]) -> int:
    """Words to change, add or leave out."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def wer(pairs: Iterable[tuple[str, str]]) -> float:
    """Of (said, heard) pairs: all errors over all words said."""
    errors = total = 0
    for said, heard in pairs:
        errors += distance(words(said), words(heard))
        total += len(words(said))
    return errors / max(1, total)
