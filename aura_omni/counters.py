"""What a stage has done and has in hand, as metrics show it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """running to pages_kept: now; the rest since the start. Code2Wav has no pages, and its tokens and rows are frames."""

    running: int
    waiting: int
    pages: int = 0
    pages_used: int = 0
    pages_kept: int = 0  # that a new request could find
    steps: int
    prompt_tokens: int  # of requests that were taken on
    generated_tokens: int
    step_s: float = 0.0  # in which a step was under way, see `UnderWay`
    computed_rows: int = 0  # of all steps
    cached_rows: int = 0  # rows of prompts that were found instead of computed
    preemptions: int = 0


class UnderWay:
    """Seconds in which at least one step was under way: from when the host began to launch it until it found its end.

    On a GPU that is neither the time of kernels (the device may wait for the host, or for other stages) nor costs it anything: no
    step is waited for. begin and end may be called again and again, on one thread; total_s may be read on any.
    """

    def __init__(self) -> None:
        # Seconds of the spans that are over, and when the present one began; one object, so that whoever reads gets both of one moment.
        self._spans: tuple[float, float | None] = (0.0, None)

    def begin(self) -> None:
        over_s, since_s = self._spans
        if since_s is None:
            self._spans = over_s, time.perf_counter()

    def end(self) -> None:
        self._spans = self.total_s, None

    @property
    def total_s(self) -> float:
        over_s, since_s = self._spans
        return over_s if since_s is None else over_s + time.perf_counter() - since_s
