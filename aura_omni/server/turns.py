"""A turn on the event loop: events cross over from the engine thread, and a client that leaves stops the work.

Knows the pipeline by two small protocols. Knows neither JSON nor audio formats.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.types import Receive

from aura_omni.counters import Counters
from aura_omni.flow import Ended, Event, StageName, StagePhase, TurnRequest, Video, VoiceTask
from aura_omni.server.deadline import Deadline, deadline

# Waits for the pictures of a request that are Coming, in their order; raises what is wrong with them.
Pictures = Callable[[], Awaitable[Sequence[Video]]]


class Turn(Protocol):
    def show(self, videos: Sequence[Video]) -> None:
        """The pictures that the request says are Coming, in order; once. Blocks as `Pipeline.submit`, and raises what that would
        have raised for them: then the turn is cancelled. Thread-safe, does nothing after Ended."""

    def cancel(self) -> None:
        """Stop all stages of this turn. Thread-safe, idempotent, does nothing after Ended."""


class Pipeline(Protocol):
    @property
    def ready(self) -> bool:
        """Whether a turn can be answered now."""

    @property
    def reason(self) -> str:
        """Why not, in one sentence, when ready is False."""

    @property
    def progress(self) -> Mapping[StageName, StagePhase]:
        """How far each stage has come; empty while the stages are not known yet."""

    @property
    def counters(self) -> Mapping[StageName, Counters]:
        """What each stage has done and has in hand; cheap, from any thread."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """Model names that requests may use; the first is the default."""

    @property
    def stages(self) -> tuple[StageName, ...]:
        """Stages in order; entry i of sampling_params_list is for stage i."""

    @property
    def speakers(self) -> tuple[str, ...]:
        """Names of the voices that the checkpoint has."""

    @property
    def voice_task(self) -> VoiceTask | None:
        """What the Talker's checkpoint can do; None: there is no Talker."""

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn:
        """Prepare on the CPU and hand the turn to the engine; may take 100 ms, so never call it on the event loop.

        sink gets the turn's events on the engine thread, exactly one Ended last; as long as pictures are Coming, nothing but
        that one.
        Raises AuraError for what must not reach the engine.
        """

    def close(self) -> None:
        """Stop the engine and free what it holds. Idempotent."""


@asynccontextmanager
async def opened(
    pipeline: Pipeline, request: TurnRequest, pictures: Pictures | None = None
) -> AsyncIterator[AsyncIterator[Event]]:
    """Submit a turn, show it its pictures, and yield its events, Ended last. Leaving the block cancels what still runs.

    Raises what the turn is refused with, or its pictures.
    When the time of the request is over the last event is an Ended with TimedOut.
    """
    events = _Events()
    submission = asyncio.ensure_future(asyncio.to_thread(pipeline.submit, request, events.put))
    try:
        try:
            turn = await asyncio.shield(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(_cancel_late)  # the thread cannot be interrupted, its turn can
            raise
        finally:
            del submission  # a refusal knows this frame: it would keep itself, and the request's media
        try:
            if pictures is not None:
                await asyncio.to_thread(turn.show, await pictures())
            yield events.until_ended(deadline())
        finally:
            turn.cancel()
    finally:
        events.listening = False


class _Events:
    """Events on their way to the event loop, which those that come together wake once.

    Without a limit of its own: the token and frame budgets of the turn bound what it can hold.
    """

    def __init__(self) -> None:
        self.listening = True
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Event] = deque()
        self._there = asyncio.Event()
        self._told = False  # that something waits

    def put(self, event: Event) -> None:
        """From any thread."""
        if not self.listening:
            return
        self._waiting.append(event)
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._there.set)

    async def until_ended(self, limit: Deadline) -> AsyncIterator[Event]:
        while True:
            self._there.clear()
            self._told = False  # first, so that whatever is not seen below tells again
            while self._waiting:
                event = self._waiting.popleft()
                yield event
                if isinstance(event, Ended):
                    return
            try:
                async with asyncio.timeout_at(limit.at_s):
                    await self._there.wait()
            except TimeoutError:
                yield Ended("error", error=limit.passed())
                return


def _cancel_late(submission: asyncio.Future[Turn]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        submission.result().cancel()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run work, and cancel it as soon as the client closes the connection. The request body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
