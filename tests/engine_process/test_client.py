"""A pipeline behind a socket is the pipeline: the same answers, refusals and ends. The pipeline here is a script in a thread."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from aura_omni.engine_process.client import PipelineProcess
from aura_omni.engine_process.messages import Accepted, Loaded
from aura_omni.engine_process.wire import Link
from aura_omni.engine_process.worker import Worker
from aura_omni.errors import AuraError, BadVoice, CheckpointError, EngineError, Unavailable
from aura_omni.flow import (
    Audio,
    AudioChunk,
    Ended,
    Event,
    Message,
    Report,
    Text,
    TextDelta,
    TurnRequest,
    Video,
    Voice,
    unreported,
)
from aura_omni.server.turns import opened
from tests.server.fake import USAGE, FakePipeline, Pause, plain_answer

WAIT_S = 20


class Pipeline(FakePipeline):
    def __init__(self, *given) -> None:
        super().__init__(*given)
        self._stopped = threading.Event()

    def wait_until_stopped(self) -> None:
        self._stopped.wait()

    def fail(self, reason: str) -> None:
        self.ready, self.reason = False, reason
        self._stopped.set()

    def close(self) -> None:
        super().close()
        self._stopped.set()


class Heard:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Ended):
            self.ended.set()

    def end(self) -> Ended:
        assert self.ended.wait(WAIT_S), self.events
        (end,) = [event for event in self.events if isinstance(event, Ended)]
        assert self.events[-1] is end
        return end


@contextmanager
def apart(load: Callable[[Report], Pipeline]) -> Iterator[tuple[PipelineProcess, Link, list[str]]]:
    """A client that is not loaded yet, the worker's end of its socket, and what the worker did in the end."""
    here, there = map(Link, socket.socketpair())
    done: list[str] = []
    worker = Worker(there, load, orphaned=lambda: done.append("orphaned"))

    def run() -> None:
        worker.run()
        done.append("ended")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = PipelineProcess(here, None)
    try:
        yield client, there, done
    finally:
        client.close()
        thread.join(WAIT_S)
        assert "ended" in done


@contextmanager
def loaded(pipeline: Pipeline) -> Iterator[PipelineProcess]:
    with apart(lambda report: pipeline) as (client, _, _):
        client.wait_until_loaded(unreported)
        yield client


def question(*parts, **more) -> TurnRequest:
    return TurnRequest((Message("user", parts or (Text("hello"),)),), **more)


def test_it_is_what_the_pipeline_is():
    pipeline = Pipeline()
    with loaded(pipeline) as client:
        assert client.ready
        assert client.reason == ""
        assert (client.served_names, client.stages) == (pipeline.served_names, pipeline.stages)
        assert (client.speakers, client.voice_task) == (pipeline.speakers, pipeline.voice_task)
        assert client.progress == pipeline.progress
        assert client.counters == pipeline.counters


def test_a_request_and_its_events_cross_unchanged():
    pipeline = Pipeline()
    samples = np.linspace(-1, 1, 100_000, dtype=np.float32)
    request = question(Audio(samples, 16_000, b"key"), Text("hello"))
    with loaded(pipeline) as client:
        heard = Heard()
        client.submit(request, heard)
        assert heard.end() == Ended("stop", USAGE, speech_reason="stop")
    (got,) = pipeline.requests
    assert np.array_equal(got.messages[0].parts[0].samples, samples)
    assert got.messages[0].parts[0].key == b"key"
    assert (got.messages[0].parts[1], got.voice, got.sampling) == (Text("hello"), request.voice, request.sampling)
    wanted = list(plain_answer(request))
    assert len(heard.events) == len(wanted)
    for event, expected in zip(heard.events, wanted, strict=True):
        if isinstance(expected, AudioChunk):
            assert np.array_equal(event.samples, expected.samples)
        else:
            assert event == expected


def test_many_turns_at_once_do_not_mix():
    def script(request: TurnRequest) -> Iterator[Event]:
        (part,) = request.messages[0].parts
        for _ in range(20):
            yield AudioChunk(np.full(1_920, float(part.text), np.float32))
        yield Ended("stop")

    with loaded(Pipeline(script)) as client:
        turns = [Heard() for _ in range(32)]
        for number, heard in enumerate(turns):
            client.submit(question(Text(str(number))), heard)
        for number, heard in enumerate(turns):
            heard.end()
            chunks = [event.samples for event in heard.events[:-1]]
            assert len(chunks) == 20
            assert all((samples == number).all() for samples in chunks)
        assert client._turns == {}


SOUND = Audio(np.zeros(16_000 * 61, np.float32), 16_000, b"key")
FILM = Video(np.zeros((1_001, 1, 1, 3), np.uint8), (0.0,) * 1_001, 2.0, b"key")


@pytest.mark.parametrize(
    "long",
    [
        question(SOUND),
        question(replace(SOUND, rate=192_000), replace(SOUND, rate=192_000), replace(SOUND, rate=192_000)),
        question(Text("x" * 20_001)),
        question(Text("x"), system_prompt="x" * 20_001),
        question(Text("x"), voice=Voice(instruct="x" * 20_001)),
        TurnRequest((Message("user", (Text("x"),)),) * 1_001),
        question(FILM),
    ],
    ids=["sound", "samples", "text", "system prompt", "instruct", "messages", "frames"],
)
def test_what_takes_long_to_prepare_keeps_nobody_else_waiting(long: TurnRequest) -> None:
    release = threading.Event()

    class Slow(Pipeline):
        def submit(self, request, sink):
            if request.messages[0].parts[0] != Text("hello"):
                assert release.wait(WAIT_S)
            return super().submit(request, sink)

    with loaded(Slow()) as client:
        slow, quick, there = Heard(), Heard(), threading.Event()
        waiting = threading.Thread(target=client.submit, args=(long, slow))
        others = threading.Thread(target=lambda: (client.submit(question(), quick), there.set()))
        waiting.start()
        while not client._turns:
            threading.Event().wait(0.001)
        others.start()
        in_time = there.wait(WAIT_S / 4)
        release.set()
        assert in_time
        quick.end()
        slow.end()
        waiting.join(WAIT_S)


def test_turns_are_prepared_one_after_the_other():
    """More threads at once would only keep the engine's from the interpreter."""
    at_once, most = [], []

    class Counting(Pipeline):
        def submit(self, request, sink):
            at_once.append(request)
            most.append(len(at_once))
            threading.Event().wait(0.005)
            at_once.pop()
            return super().submit(request, sink)

    with loaded(Counting()) as client:
        turns = [Heard() for _ in range(8)]
        threads = [threading.Thread(target=client.submit, args=(question(), heard)) for heard in turns]
        for thread in threads:
            thread.start()
        for thread, heard in zip(threads, turns, strict=True):
            thread.join(WAIT_S)
            heard.end()
    assert most == [1] * 8


@pytest.mark.parametrize("error", [BadVoice("no such voice", param="voice"), Unavailable("stopping")])
def test_a_refusal_is_raised_where_it_was_submitted(error):
    def script(request: TurnRequest) -> Iterator[Event]:
        raise error
        yield

    heard = Heard()
    with loaded(Pipeline(script)) as client:
        with pytest.raises(type(error), match=error.message) as found:
            client.submit(question(), heard)
        assert found.value.param == error.param
        assert client._turns == {}
    assert heard.events == []


def test_a_refused_request_is_held_nowhere():
    """Not even until the garbage collector comes, which may be when many more have: its media may be hundreds of megabytes."""
    held = []

    def script(request: TurnRequest) -> Iterator[Event]:
        held.append(weakref.ref(request.messages[0].parts[0].samples))
        raise BadVoice("no such voice")
        yield

    async def refused(client: PipelineProcess) -> None:
        request = question(Audio(np.zeros(100_000, np.float32), 16_000, b"key"))
        held.append(weakref.ref(request.messages[0].parts[0].samples))
        with suppress(BadVoice):
            async with opened(client, request):
                pass

    pipeline = Pipeline(script)
    gc.disable()
    try:
        with loaded(pipeline) as client:
            asyncio.run(refused(client))
            pipeline.requests.clear()
            for _ in range(200):
                if not any(samples() is not None for samples in held):
                    break
                threading.Event().wait(0.01)
            assert [samples() is not None for samples in held] == [False, False]
    finally:
        gc.enable()


def test_a_mistake_of_the_pipeline_is_told_as_an_error_of_ours():
    def script(request: TurnRequest) -> Iterator[Event]:
        raise ZeroDivisionError("by zero")
        yield

    with loaded(Pipeline(script)) as client, pytest.raises(AuraError, match="ZeroDivisionError: by zero"):
        client.submit(question(), Heard())


def endless(request: TurnRequest) -> Iterator[Event | Pause]:
    yield AudioChunk(np.zeros(1_920, np.float32))
    yield Pause()
    yield Ended("stop")


def test_a_cancelled_turn_is_cancelled_there_and_ends_once():
    pipeline = Pipeline(endless)
    with loaded(pipeline) as client:
        heard = Heard()
        turn = client.submit(question(), heard)
        turn.cancel()
        turn.cancel()
        assert heard.end().reason == "cancelled"
        assert pipeline.turns[0].cancelled.is_set()
        turn.cancel()


def test_cancelling_after_the_end_does_nothing(monkeypatch):
    with loaded(Pipeline()) as client:
        heard = Heard()
        turn = client.submit(question(), heard)
        assert heard.end().reason == "stop"
        assert client.counters  # whatever the end brings with it is over
        sent = []
        monkeypatch.setattr(client._outbox, "put", sent.append)
        turn.cancel()
        assert not sent, "every turn is cancelled when its request is over"
        monkeypatch.undo()
        assert len([event for event in heard.events if isinstance(event, Ended)]) == 1


def test_a_listener_that_fails_harms_nobody_else():
    def failing(event: Event) -> None:
        raise ValueError("a listener's mistake")

    with loaded(Pipeline()) as client:
        client.submit(question(), failing)
        heard = Heard()
        client.submit(question(), heard)
        assert heard.end().reason == "stop"


def test_when_the_process_is_lost_every_turn_ends_with_one_error():
    with apart(lambda report: Pipeline(endless)) as (client, there, _):
        client.wait_until_loaded(unreported)
        turns = [Heard() for _ in range(3)]
        for heard in turns:
            client.submit(question(), heard)
        there.close()
        for heard in turns:
            end = heard.end()
            assert end.reason == "error"
            assert isinstance(end.error, EngineError)
        assert not client.ready
        assert "ended" in client.reason
        assert set(client.progress.values()) == {"failed"}
        with pytest.raises(Unavailable, match="ended"):
            client.submit(question(), Heard())
        assert client.counters == {}


def test_a_listener_that_fails_does_not_keep_the_end_from_the_others():
    def failing(event: Event) -> None:
        raise ValueError("a listener's mistake")

    with apart(lambda report: Pipeline(endless)) as (client, there, _):
        client.wait_until_loaded(unreported)
        heard = Heard()
        for sink in (failing, heard):
            client.submit(question(), sink)
        there.close()
        assert heard.end().reason == "error"


def test_nobody_waits_for_a_process_that_does_not_read(monkeypatch):
    """While a large request is stuck on its way there, turns are cancelled and counters read on the event loop's account."""
    monkeypatch.setattr("aura_omni.engine_process.client.CLOSING_S", 0.5)
    here, there = map(Link, socket.socketpair())
    client = PipelineProcess(here, None)
    there.send(Loaded((), (), (), None))
    client.wait_until_loaded(unreported)
    accepting = threading.Thread(target=lambda: there.send(Accepted(there.receive().turn)))
    accepting.start()
    turn = client.submit(question(), Heard())
    accepting.join()
    refused = threading.Event()

    def submit() -> None:
        with pytest.raises(Unavailable, match="stopping"):
            client.submit(question(Audio(np.zeros(10_000_000, np.float32), 16_000, b"key")), Heard())
        refused.set()

    def all_else() -> None:
        turn.cancel()
        assert client.counters == {}
        client.close()
        done.set()

    done = threading.Event()
    threading.Thread(target=submit, daemon=True).start()
    while len(client._turns) < 2:
        threading.Event().wait(0.01)
    threading.Event().wait(0.2)  # as much of it as fits is on its way
    threading.Thread(target=all_else, daemon=True).start()
    try:
        assert done.wait(WAIT_S)
        assert refused.wait(WAIT_S)
    finally:
        there.close()


def test_an_event_that_cannot_be_sent_ends_every_turn():
    def script(request: TurnRequest) -> Iterator[Event | Pause]:
        if request.messages[0].parts == (Text("bad"),):
            yield TextDelta(lambda: "no pickle takes a lambda")
        yield Pause()
        yield Ended("stop")

    with apart(lambda report: Pipeline(script)) as (client, _, _):
        client.wait_until_loaded(unreported)
        good, bad = Heard(), Heard()
        client.submit(question(Text("good")), good)
        with suppress(EngineError):  # whichever of the two is first
            client.submit(question(Text("bad")), bad)
        assert isinstance(good.end().error, EngineError)
        assert not client.ready


def test_a_message_that_nobody_knows_ends_every_turn():
    with apart(lambda report: Pipeline(endless)) as (client, there, _):
        client.wait_until_loaded(unreported)
        heard = Heard()
        client.submit(question(), heard)
        there.send("nonsense")
        assert isinstance(heard.end().error, EngineError)
        with pytest.raises(Unavailable):
            client.submit(question(), Heard())


def test_when_the_engine_stops_by_itself_nothing_more_is_taken():
    pipeline = Pipeline()
    with loaded(pipeline) as client:
        pipeline.fail("the engine is not running: it failed")
        deadline = threading.Event()
        for _ in range(200):
            if not client.ready:
                break
            deadline.wait(0.05)
        assert client.reason == "the engine is not running: it failed"
        with pytest.raises(Unavailable, match="it failed"):
            client.submit(question(), Heard())


def test_closing_ends_open_turns_before_it_returns():
    pipeline = Pipeline(endless)
    with loaded(pipeline) as client:
        heard = Heard()
        client.submit(question(), heard)
        client.close()
        heard.end()
        assert pipeline.closed
        with pytest.raises(Unavailable):
            client.submit(question(), Heard())
        client.close()


def test_loading_is_reported_stage_by_stage():
    def load(report: Report) -> Pipeline:
        report("asr", "loading")
        report("asr", "ready")
        return Pipeline()

    seen = []
    with apart(load) as (client, _, _):
        client.wait_until_loaded(lambda stage, phase: seen.append((stage, phase)))
    assert seen == [("asr", "loading"), ("asr", "ready")]


def test_a_pipeline_that_cannot_be_loaded_says_why():
    def load(report: Report) -> Pipeline:
        raise CheckpointError("weights are missing")

    with apart(load) as (client, _, _):
        with pytest.raises(CheckpointError, match="weights are missing"):
            client.wait_until_loaded(unreported)
        assert not client.ready


def test_a_process_without_its_server_does_not_go_on_loading():
    gone = threading.Event()

    def load(report: Report) -> Pipeline:
        gone.wait(WAIT_S)
        raise CheckpointError("too late")

    here, there = map(Link, socket.socketpair())
    worker = Worker(there, load, orphaned=gone.set)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    here.close()
    assert gone.wait(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
