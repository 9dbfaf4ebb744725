"""A recording of any length to text: segment after segment, each a turn of its own, a few of them at a time.

    transcribed = Transcribed(pipeline, media, request_of)
    async for event in transcribed.events(file): ...    # TextDelta of each segment with text, in order; Ended last
    transcribed.said    # the Transcription

The file is read while its first segments are heard, so that hours of sound need the memory of a few segments.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import islice
from typing import BinaryIO

from aura_omni.errors import AuraError, Overloaded
from aura_omni.flow import Audio, Ended, Event, TextDelta, TurnRequest
from aura_omni.heard import Heard
from aura_omni.media.recording import Recording, Segment
from aura_omni.server.answer import whole_turn
from aura_omni.server.parts import MediaReader
from aura_omni.server.turns import Pipeline
from aura_omni.transcription import SEGMENTS_AT_ONCE, Transcription

_Answer = tuple[Heard, Ended]


class Transcribed:
    """request_of makes the turn of a segment."""

    def __init__(self, pipeline: Pipeline, media: MediaReader, request_of: Callable[[Audio], TurnRequest]) -> None:
        self._pipeline, self._media, self._request_of = pipeline, media, request_of
        self._recording = Recording()
        self.said = Transcription()

    async def events(self, file: BinaryIO) -> AsyncGenerator[Event, None]:
        """Leaving the iterator early, or being cancelled, cancels what still runs."""
        said = self.said
        segments = self._recording.segments(file, max_s=self._media.policy.max_recording_s, param="file")
        waiting: deque[tuple[Segment, asyncio.Task[_Answer]]] = deque()
        try:
            more = True
            while more or waiting:
                while more and (room := SEGMENTS_AT_ONCE - len(waiting)):
                    most = min(room, 2)  # so that a recording of one segment is read to its end at once
                    read = await self._next(segments, most)
                    waiting.extend((segment, asyncio.create_task(self._hear(segment.audio))) for segment in read)
                    more = len(read) == most
                if not waiting:
                    break
                segment, task = waiting.popleft()
                heard, _ = await self._answer(segment, task)
                delta = said.add(heard, start_s=segment.start_s, end_s=segment.end_s)
                said.duration_s = self._recording.duration_s
                if delta:
                    yield TextDelta(delta)
        except AuraError as error:
            yield Ended("error", said.usage, error)
        else:
            yield Ended("length" if said.cut else "stop" if said.text else "silent", said.usage)
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

    async def _next(self, segments: Iterator[Segment], most: int) -> list[Segment]:
        """Fewer than `most`: these are the last."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._media.decoders, lambda: list(islice(segments, most)))
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
            if not self.said.segments:
                raise  # the server was full before anything was heard
            return await self._hear(
                segment.audio
            )  # others have filled it meanwhile; what we had is heard, and makes room
