"""A device that computes in its own time, so that a test can have things happen while a step is under way."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aura_omni.engine.lane import Arrival, Lane


class SlowLane(Lane):
    """What is launched in it arrives when the test says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.under_way: list[SlowArrival] = []
        self.waited = 0

    def home(self, values: Tensor) -> Arrival:
        self.under_way.append(SlowArrival(values))
        return self.under_way[-1]

    def arrive(self, count: int | None = None) -> None:
        """The first so many of what is under way; None: all."""
        for arrival in self.under_way[:count]:
            arrival.there = True
        del self.under_way[:count]

    def wait(self) -> None:
        self.waited += 1


class SlowArrival:
    def __init__(self, values: Tensor) -> None:
        self._values, self.there = values.clone(), False

    def numpy(self) -> np.ndarray:
        assert self.there, "someone waits for the device"
        return self._values.numpy()
