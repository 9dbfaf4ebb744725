"""Progress of a run that must end at a given time, and its checkpoints."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Clock:
    """progress goes from 0 to 1 as the budget (seconds, or steps when given) is used up."""

    def __init__(self, seconds: float, steps: int | None = None) -> None:
        self._start, self._seconds, self._steps, self.step = time.monotonic(), seconds, steps, 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def progress(self) -> float:
        by_time = self.elapsed_s / self._seconds
        return max(by_time, self.step / self._steps) if self._steps else by_time

    @property
    def over(self) -> bool:
        return self.progress >= 1.0


def rate(progress: float, step: int, peak: float, *, warmup: int = 100, floor: float = 0.05) -> float:
    """Linear warm-up over steps, then a cosine over the run's progress."""
    return (
        peak
        * min(1.0, (step + 1) / warmup)
        * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
    )


def save(path: Path, *, model: nn.Module, **content: Any) -> None:
    """Weights in float16: half the size, and more than enough to go on from."""
    state = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    draft = path.with_suffix(".draft")
    torch.save({"model": state, **content}, draft)
    os.replace(draft, path)


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
