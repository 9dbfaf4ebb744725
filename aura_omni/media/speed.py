"""Speech faster or slower at its own pitch, as it comes.

    stretch = Stretch(1.25, 24_000)
    play(stretch.feed(samples))     # any number of samples, any number of times; what comes back may be empty
    play(stretch.finish())          # the rest, once

FFmpeg's `atempo` does the work (overlapping windows of 42 ms, each moved to where it fits). How the sound is cut into feeds
changes no sample, and the result is 1/speed as long as what came, to the sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.filter import Graph

MIN_SPEED, MAX_SPEED = 0.25, 4.0
_STEP_S = 0.01  # what the filter gets at a time: it hands out a step when it has worked on the next
_TAIL_S = 0.25  # silence after the sound, so that the filter keeps none of it back


class Stretch:
    """Of one sound. Not for two threads at once."""

    def __init__(self, speed: float, rate: int) -> None:
        """speed: MIN_SPEED to MAX_SPEED; 2 is twice as fast. 1 hands the samples through, bit by bit the same."""
        self._speed, self._rate = speed, rate
        self._taken = self._given = 0
        self._graph = None if speed == 1 else _graph(speed, rate)

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n] mono -> float32 [m], what is settled by now: 40 to 70 ms behind, above speed 2 up to 200 ms."""
        if self._graph is None:
            return samples
        self._taken += len(samples)
        settled = np.concatenate([_NONE, *self._through(self._graph, samples)])
        self._given += len(settled)
        return settled

    def finish(self) -> np.ndarray:
        """float32 [m], the rest of the sound."""
        if self._graph is None:
            return _NONE
        tail = [*self._through(self._graph, np.zeros(round(_TAIL_S * self._rate), np.float32))]
        self._graph.push(None)
        rest = np.concatenate([_NONE, *tail, *_ready(self._graph)])
        return rest[: round(self._taken / self._speed) - self._given]

    def _through(self, graph: Graph, samples: np.ndarray) -> Iterator[np.ndarray]:
        step = round(_STEP_S * self._rate)
        for start in range(0, len(samples), step):
            plane = np.ascontiguousarray(samples[None, start : start + step], dtype=np.float32)
            frame = AudioFrame.from_ndarray(plane, format="flt", layout="mono")
            frame.sample_rate = self._rate
            graph.push(frame)
            yield from _ready(graph)


_NONE = np.zeros(0, np.float32)


def _graph(speed: float, rate: int) -> Graph:
    graph = Graph()
    source = graph.add_abuffer(sample_rate=rate, format="flt", layout="mono")
    filters = [graph.add("atempo", repr(factor)) for factor in _factors(speed)]
    graph.link_nodes(source, *filters, graph.add("abuffersink")).configure()
    return graph


def _factors(speed: float) -> list[float]:
    """Each from 0.5 to 2: beyond, one filter would leave parts of the sound out."""
    factors = []
    while not 0.5 <= speed <= 2:
        factors.append(2.0 if speed > 2 else 0.5)
        speed /= factors[-1]
    return [*factors, speed]


def _ready(graph: Graph) -> Iterator[np.ndarray]:
    while True:
        try:
            frame = graph.pull()
        except (BlockingIOError, av.EOFError):
            return
        yield frame.to_ndarray().reshape(-1)
