"""How conversations that go on were written: their rows need neither be written nor hashed again.

A chat sends its whole history with every request, a live session every second. Knows rows and how messages are told apart, no
pixels: pictures are large, and each request brings its own.

    memory = PromptMemory(rows=500_000)
    written = memory.longest(path)               # path: what tells the prompt's messages apart, one after another
    memory.keep(path[:-1], written)              # all but the last message, which the next request will follow up
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock

import numpy as np

from aura_omni.engine.sequence import Beginning, MediaSpan
from aura_omni.models.vision_input import PixelRules

# Messages at the end of a prompt that may be new: of the next round the answer, its question, and the one before it, which was
# the last of its own prompt.
MOST_NEW = 4

Path = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [start, start + length) of a prompt are temporal group `number` of visuals[visual]."""

    start: int
    length: int
    visual: int
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What so many messages have become, up to the start of the next one.

    shapes: of each picture the size in pixels after resizing, and whose rules say so; positions int32 [3, rows]; position: of
    the next row; before_text: as `AuraPrompt` has it; beginning: for the prefix cache.
    """

    messages: int
    ids: list[int]
    shapes: tuple[tuple[tuple[int, int], PixelRules], ...]
    groups: tuple[Group, ...]
    media: tuple[MediaSpan, ...]
    positions: np.ndarray
    position: int
    before_text: tuple[int, ...]
    beginning: Beginning


class PromptMemory:
    """Thread-safe."""

    def __init__(self, rows: int) -> None:
        """rows: of all that is kept; 20 to 50 bytes each."""
        self._most, self._rows = rows, 0
        self._kept: OrderedDict[Path, Written] = OrderedDict()  # least recently used first
        self._lock = Lock()

    def longest(self, path: Path) -> Written | None:
        """The most that is known of how a prompt begins; never all of it."""
        with self._lock:
            for end in range(len(path) - 1, max(len(path) - 1 - MOST_NEW, 0), -1):
                known = self._kept.get(path[:end])
                if known is not None:
                    self._kept.move_to_end(path[:end])
                    return known
        return None

    def keep(self, path: Path, written: Written, *, instead: Path = ()) -> None:
        """instead: of what these messages begin with, which nobody will ask for if the conversation goes on."""
        with self._lock:
            for old in (instead, path):
                gone = self._kept.pop(old, None)
                self._rows -= 0 if gone is None else len(gone.ids)
            self._kept[path] = written
            self._rows += len(written.ids)
            while self._rows > self._most:
                _, gone = self._kept.popitem(last=False)
                self._rows -= len(gone.ids)
