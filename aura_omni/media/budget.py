"""What the media of one request may cost together: a few kilobytes can decode to gigabytes, many times over.

budget = Budget()
decode_image(data, max_pixels=..., budget=budget)    # takes its pixels before it decodes them
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from aura_omni.errors import BadMedia

Cost = Literal["pixels", "watched_pixels", "audio_s", "samples"]

_MOST: dict[Cost, int] = {
    "pixels": 2**28,  # 0.8 GB as RGB: 128 frames of 1920x1080, or 5 pictures of 50 megapixels
    "watched_pixels": 20_000_000_000,  # five minutes of 1920x1080 at 30 frames per second: decoded, few are kept
    "audio_s": 3_600,
    "samples": 2**28,  # 1 GB as float32: an hour at 48 kHz is 173 million
}
_CALLED: dict[Cost, str] = {
    "pixels": "pixels (pictures and kept video frames)",
    "watched_pixels": "pixels of video to decode",
    "audio_s": "seconds of sound",
    "samples": "samples of sound",
}


@dataclass(slots=True)
class Budget:
    """Of one request. Thread-safe: its media are decoded side by side."""

    _taken: dict[Cost, float] = field(default_factory=lambda: dict.fromkeys(_MOST, 0.0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, cost: Cost, amount: float, *, param: str | None) -> None:
        """Raises BadMedia when all media of the request together cost more than the limit."""
        with self._lock:
            self._taken[cost] += amount
            taken = self._taken[cost]
        if taken > _MOST[cost]:
            raise BadMedia(
                f"up to here the request's media have {taken:,.0f} {_CALLED[cost]}; at most {_MOST[cost]:,} in one "
                "request. Send fewer, shorter or smaller ones",
                param=param,
            )
