"""Progress of a run that must end at a given time, and its checkpoints."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Clock:
    """progress goes from 0 to 1 as the budget (seconds, or steps when given) is used up."""

    def __init__(self, seconds: float, steps: int | None = None) -> None:
        self._start, self._seconds, self._steps, self.step = time.monotonic(), seconds, steps, 0
        self._before, self._first = 0.0, 0

    def go_on(self, progress: float, step: int) -> None:
        """With a run that had come so far: what is left of it fills the time."""
        self._before, self._first, self.step = progress, step, step

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def progress(self) -> float:
        here = self.elapsed_s / self._seconds
        if self._steps:
            here = max(here, (self.step - self._first) / self._steps)
        return self._before + (1 - self._before) * here

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


def save(path: Path, *, model: nn.Module, mean: list[Tensor] | None = None) -> None:
    """Weights in float16: half the size, and more than enough to go on from. mean: what to write for those that are trained."""
    state = model.state_dict()
    if mean is not None:
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        state |= dict(zip(trained, mean, strict=True))
    state = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    draft = path.with_suffix(".draft")
    torch.save({"model": state}, draft)
    os.replace(draft, path)


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
