"""What encoded pictures have become, kept for when their rows are computed again.

A live session that cuts its history has the rows of all frames that are left computed anew, but what the vision tower makes of a frame
does not depend on what is before it. The engine's thread alone uses it, in the stage's lane.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor


class PictureCache:
    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of all that is kept; 0: nothing is. The least recently used go first."""
        self._most_bytes, self._bytes = most_bytes, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def find(self, key: bytes) -> Tensor | None:
        """key: of content and everything that shapes it."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, features: Tensor) -> Tensor:
        """features [1 + K, rows, H] of a group, or a copy of them if there is room for it at all: they may be a part of something larger,
        which would stay with them."""
        if features.nbytes > self._most_bytes or key in self._kept:
            return features
        self._bytes += features.nbytes
        while self._bytes > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.nbytes
        self._kept[key] = features.clone()
        return self._kept[key]
