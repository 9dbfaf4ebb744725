"""Events on their way from other threads to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from aura_omni.flow import Ended, Event, TextDelta, TurnRequest
from aura_omni.server.turns import opened
from tests.server.fake import FakePipeline, FakeTurn

SAID: tuple[Event, ...] = (*(TextDelta(str(number)) for number in range(20)), Ended("stop"))


class AtOnce(FakePipeline):
    """All events of a turn come together."""

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> FakeTurn:
        for event in SAID:
            sink(event)
        return FakeTurn()


class OneByOne(FakePipeline):
    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> FakeTurn:
        def say() -> None:
            for number in range(200):
                sink(TextDelta(str(number)))
            sink(Ended("stop"))

        threading.Thread(target=say).start()
        return FakeTurn()


async def heard(pipeline: FakePipeline) -> list[Event]:
    async with opened(pipeline, TurnRequest(())) as events:
        return [event async for event in events]


def test_events_that_come_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = 0

    async def run() -> list[Event]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(callback, *args, **options):
            nonlocal wakes
            wakes += 1
            return wake(callback, *args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        return await heard(AtOnce())

    assert asyncio.run(run()) == list(SAID)
    assert wakes <= 3, "one for the events, one for the turn, one to spare"


def test_no_event_is_lost_or_passes_another() -> None:
    for _ in range(20):
        found = asyncio.run(heard(OneByOne()))
        assert [event.text for event in found if isinstance(event, TextDelta)] == [str(n) for n in range(200)]
        assert found[-1] == Ended("stop")
