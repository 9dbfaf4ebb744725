"""A recording of any length to text: segment after segment, each a turn of its own, a few of them at a time.

    transcribed = Transcribed(pipeline, media, request_of)
    async for event in transcribed.events(file): ...    # TextDelta of each segment with text, in order; Ended last
    transcribed.segments, transcribed.language

The file is read while its first segments are heard, so that hours of sound need the memory of a few segments.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, fields
from typing import BinaryIO

from aura_omni.errors import AuraError, Overloaded
from aura_omni.flow import Audio, Ended, Event, TextDelta, TurnRequest, Usage
from aura_omni.media.recording import Recording, Segment
from aura_omni.server.answer import whole_turn
from aura_omni.server.completion import Heard, finish_reason
from aura_omni.server.parts import MediaReader
from aura_omni.server.turns import Pipeline
from aura_omni.spacing import space_between

_AT_ONCE = 4  # segments of one recording; more would let one file fill the server
_Answer = tuple[Heard, Ended]


@dataclass(frozen=True, slots=True)
class TimedText:
    """What was said in one segment, and when its sound begins and ends."""

    text: str
    start_s: float
    end_s: float


class Transcribed:
    """request_of makes the turn of a segment."""

    def __init__(self, pipeline: Pipeline, media: MediaReader, request_of: Callable[[Audio], TurnRequest]) -> None:
        self._pipeline, self._media, self._request_of = pipeline, media, request_of
        self._recording = Recording()
        self._spoken_s: defaultdict[str, float] = defaultdict(float)
        self.segments: list[TimedText] = []
        self.text = ""

    @property
    def duration_s(self) -> float:
        return self._recording.duration_s

    @property
    def language(self) -> str:
        """In which most was said; "" when nothing was."""
        return max(self._spoken_s, key=lambda name: self._spoken_s[name], default="")

    async def events(self, file: BinaryIO) -> AsyncGenerator[Event, None]:
        """Leaving the iterator early, or being cancelled, cancels what still runs."""
        usage, cut = Usage(), False
        segments = self._recording.segments(file, max_s=self._media.policy.max_recording_s, param="file")
        waiting: deque[tuple[Segment, asyncio.Task[_Answer]]] = deque()
        try:
            more = True
            while more or waiting:
                while more and len(waiting) < _AT_ONCE:
                    segment = await self._next(segments)
                    if segment is None:
                        more = False
                    else:
                        waiting.append((segment, asyncio.create_task(self._hear(segment.audio))))
                if not waiting:
                    break
                segment, task = waiting.popleft()
                heard, ended = await self._answer(segment, task)
                usage = _sum(usage, ended.usage)
                cut = cut or finish_reason(ended) == "length"
                delta = self._add(segment, heard)
                if delta:
                    yield TextDelta(delta)
        except AuraError as error:
            yield Ended("error", usage, error)
        else:
            yield Ended("length" if cut else "stop" if self.text else "silent", usage)
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

    async def _next(self, segments: Iterator[Segment]) -> Segment | None:
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._media.decoders, lambda: next(segments, None))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait({reading})  # the thread cannot be interrupted, and the file is closed next
            raise

    async def _hear(self, audio: Audio) -> _Answer:
        return await whole_turn(self._pipeline, self._request_of(audio))

    async def _answer(self, segment: Segment, task: asyncio.Task[_Answer]) -> _Answer:
        try:
            return await task
        except Overloaded:
            if not self.segments:
                raise  # the server was full before anything was heard
            return await self._hear(
                segment.audio
            )  # others have filled it meanwhile; what we had is heard, and makes room

    def _add(self, segment: Segment, heard: Heard) -> str:
        """Write down a segment; the delta that it is to the text."""
        text = "".join(heard.texts).strip()
        if not text:
            return ""
        delta = space_between(self.text, text) + text
        self.text += delta
        self.segments.append(TimedText(text, segment.start_s, segment.end_s))
        if heard.language:
            self._spoken_s[heard.language.partition(",")[0]] += segment.end_s - segment.start_s
        return delta


def _sum(left: Usage, right: Usage) -> Usage:
    return Usage(**{field.name: getattr(left, field.name) + getattr(right, field.name) for field in fields(Usage)})
