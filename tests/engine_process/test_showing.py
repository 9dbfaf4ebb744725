"""Pictures that follow their turn through the socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from aura_omni.engine_process.client import PipelineProcess
from aura_omni.engine_process.messages import Accepted, Happened, Loaded, Show, Shown
from aura_omni.engine_process.wire import Link
from aura_omni.errors import AuraError, BadMedia, EngineError
from aura_omni.flow import Audio, Coming, Ended, Event, Text, TextDelta, TurnRequest, Video, unreported
from tests.engine_process.test_client import WAIT_S, Heard, Pipeline, apart, endless, loaded, question
from tests.server.fake import FakeTurn, plain_answer

LONG = Text("x" * 20_001)


def film(light: int) -> Video:
    return Video(np.full((2, 360, 640, 3), light, np.uint8), (0.0, 0.5), 2.0, bytes([light]))


def test_pictures_cross_unchanged_and_in_their_order() -> None:
    pipeline = Pipeline()
    request = question(Coming(), Text("hello"), Coming())
    with loaded(pipeline) as client:
        heard = Heard()
        turn = client.submit(request, heard)
        assert pipeline.requests == [request], "the turn does not wait for them"
        assert not heard.events
        turn.show([film(1), film(2)])
        assert heard.end().reason == "stop"
        assert client._turns == {}
    (got,) = pipeline.requests
    one, _, other = got.messages[0].parts
    for video, light in ((one, 1), (other, 2)):
        assert np.array_equal(video.frames, film(light).frames)
        assert (video.times_s, video.fps, video.key, video.still) == ((0.0, 0.5), 2.0, bytes([light]), False)
    assert heard.events[:-1] != []


def refusing(error: Exception):
    def script(request: TurnRequest) -> Iterator[Event]:
        raise error
        yield

    return script


def test_refused_pictures_are_refused_where_they_were_shown_and_end_the_turn_once() -> None:
    pipeline = Pipeline(refusing(BadMedia("too thin", param="messages")))
    with loaded(pipeline) as client:
        heard = Heard()
        turn = client.submit(question(Coming()), heard)
        with pytest.raises(BadMedia, match="too thin") as refused:
            turn.show([film(1)])
        assert refused.value.param == "messages"
        assert heard.end().reason == "cancelled"
        assert len(heard.events) == 1
        turn.cancel()
        assert client._turns == {}


def test_a_mistake_of_the_pipeline_with_pictures_is_told_as_an_error_of_ours() -> None:
    with loaded(Pipeline(refusing(ZeroDivisionError("by zero")))) as client:
        turn = client.submit(question(Coming()), Heard())
        with pytest.raises(AuraError, match="ZeroDivisionError: by zero"):
            turn.show([film(1)])


def test_a_turn_that_is_cancelled_before_it_is_shown_anything_ends_once() -> None:
    pipeline = Pipeline()
    with loaded(pipeline) as client:
        heard = Heard()
        turn = client.submit(question(Coming()), heard)
        turn.cancel()
        assert heard.end().reason == "cancelled"
        turn.show([film(1)])
        assert client.counters  # whatever would come has come
        assert len(heard.events) == 1
        assert pipeline.turns[0].shown == [], "its frames were sent for nothing"
        assert client._turns == {}


def test_pictures_that_meet_the_end_of_their_turn_are_answered() -> None:
    """The end is on its way here while they are on their way there."""
    here, there = map(Link, socket.socketpair())
    client = PipelineProcess(here, None)
    there.send(Loaded((), (), (), None))
    client.wait_until_loaded(unreported)

    def engine() -> None:
        number = there.receive().turn
        there.send(Accepted(number))
        assert isinstance(there.receive(), Show)
        there.send(Happened(((number, Ended("stop")),)))
        there.send(Shown(number))
        there.receive()  # to close
        there.close()

    process = threading.Thread(target=engine)
    process.start()
    heard = Heard()
    client.submit(question(Coming()), heard).show([film(1)])
    assert heard.end().reason == "stop"
    assert client._turns == {}
    client.close()
    process.join(WAIT_S)


def test_a_turn_that_ended_there_is_not_shown_anything_there() -> None:
    class Deaf(Pipeline):
        def submit(self, request, sink):
            sink(Ended("error", error=EngineError("the ear is broken")))
            return super().submit(request, lambda event: None)

    pipeline = Deaf()
    with loaded(pipeline) as client:
        heard = Heard()
        turn = client.submit(question(Coming()), heard)
        assert isinstance(heard.end().error, EngineError)
        turn.show([film(1)])
        assert pipeline.turns[0].shown == []
        assert client._turns == {}


@pytest.mark.parametrize("long", [False, True])
def test_who_prepares_a_turn_prepares_its_pictures(long: bool) -> None:
    """Writing a prompt of much text takes long, and with pictures it is written when they are there."""
    submitted, shown = [], []

    class Noting(Pipeline):
        def submit(self, request, sink):
            submitted.append(threading.current_thread())
            return super().submit(request, sink)

    def script(request: TurnRequest) -> Iterator[Event]:
        shown.append(threading.current_thread())
        yield from plain_answer(request)

    with loaded(Noting(script)) as client:
        heard = Heard()
        client.submit(question(Coming(), LONG if long else Text("hello")), heard).show([film(1)])
        heard.end()
    assert submitted == shown
    assert ("long" in submitted[0].name) == long


def test_many_frames_keep_no_other_turn_from_being_prepared() -> None:
    shown = []

    def script(request: TurnRequest) -> Iterator[Event]:
        shown.append(threading.current_thread().name)
        yield from plain_answer(request)

    many = Video(np.zeros((1_001, 1, 1, 3), np.uint8), (0.0,) * 1_001, 2.0, b"key")
    with loaded(Pipeline(script)) as client:
        heard = Heard()
        client.submit(question(Coming(), Text("hello")), heard).show([many])
        heard.end()
    assert "long" in shown[0]


def test_when_the_process_is_lost_a_turn_that_waits_for_its_pictures_ends_with_one_error() -> None:
    with apart(lambda report: Pipeline(endless)) as (client, there, _):
        client.wait_until_loaded(unreported)
        heard = Heard()
        turn = client.submit(question(Coming()), heard)
        there.close()
        assert isinstance(heard.end().error, EngineError)
        turn.show([film(1)])
        assert len(heard.events) == 1


def test_when_the_process_is_lost_whoever_shows_pictures_goes_on_to_the_error() -> None:
    preparing = threading.Event()

    def script(request: TurnRequest) -> Iterator[Event]:
        preparing.set()
        assert lost.wait(WAIT_S)
        yield TextDelta("too late")

    lost, shown = threading.Event(), threading.Event()
    with apart(lambda report: Pipeline(script)) as (client, there, _):
        client.wait_until_loaded(unreported)
        heard = Heard()
        turn = client.submit(question(Coming()), heard)

        def show() -> None:
            turn.show([film(1)])
            shown.set()

        threading.Thread(target=show, daemon=True).start()
        assert preparing.wait(WAIT_S)
        there.close()
        assert isinstance(heard.end().error, EngineError)
        assert shown.wait(WAIT_S)
        lost.set()
        assert len(heard.events) == 1


def test_closing_ends_a_turn_that_waits_for_its_pictures() -> None:
    pipeline = Pipeline(endless)
    with loaded(pipeline) as client:
        heard = Heard()
        turn = client.submit(question(Coming()), heard)
        client.close()
        heard.end()
        turn.show([film(1)])
        assert len(heard.events) == 1


def test_turns_and_their_pictures_do_not_mix() -> None:
    def script(request: TurnRequest) -> Iterator[Event]:
        text, video = request.messages[0].parts
        yield TextDelta(f"{text.text} {video.frames[0, 0, 0, 0]}")
        yield Ended("stop")

    with loaded(Pipeline(script)) as client:

        def ask(number: int) -> None:
            heard = Heard()
            turn = client.submit(question(Text(str(number)), Coming()), heard)
            if number % 5 == 4:
                turn.cancel()
            turn.show([film(number)])
            end = heard.end()
            if number % 5 == 4:
                assert end.reason in ("cancelled", "stop")
            else:
                assert heard.events[0] == TextDelta(f"{number} {number}")
            done.append(number)

        done: list[int] = []
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(done) == list(range(40))
        assert client._turns == {}


def test_pictures_are_shown_to_a_turn_once() -> None:
    with loaded(Pipeline(endless)) as client:
        turn = client.submit(question(Coming(), Audio(np.zeros(160, np.float32), 16_000, b"key")), Heard())
        turn.show([film(1)])
        with pytest.raises(AssertionError, match="once"):
            turn.show([film(1)])


def test_fake_turns_play_by_the_same_rules() -> None:
    """What the tests above stand on."""
    turn = FakeTurn()
    with pytest.raises(AssertionError, match="waits for none"):
        turn.show([])
    assert turn.cancelled.is_set()
