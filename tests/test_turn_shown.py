"""A turn that begins while its pictures are still being decoded: sooner, and with the same answers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aura_omni.errors import AuraError, BadMedia, BadRequest, EngineError, PromptTooLong, Unavailable
from aura_omni.flow import Coming, Ended, Event, Message, Part, Text, Transcript, TurnRequest, Video
from aura_omni.pipeline import Pipeline
from aura_omni.turn import Turn
from tests.family import WORDS, Listener, ask, clip, config, recording, running, spoken
from tests.test_turn_ahead import QUIET, SOUND, TURNS, ahead, read, said, same, still

__all__ = ["read"]  # a fixture

ASKED = {
    name: TurnRequest(messages, speak=name == "a question", sampling=WORDS)
    for name, messages in {
        **TURNS,
        "interleaved": (said("user", clip(), SOUND[0], still(b"one"), SOUND[1], "and now?", clip()),),
        "silence": (said("user", QUIET, clip(), "What is this?"),),
        "a silent clip": (said("user", QUIET, clip()),),
    }.items()
    if any(isinstance(part, Video) for message in messages for part in message.parts)
}


def split(request: TurnRequest) -> tuple[TurnRequest, list[Video]]:
    """The request with its pictures Coming, and these."""
    videos = list[Video]()

    def coming(part: Part) -> Part:
        if isinstance(part, Video):
            videos.append(part)
            return Coming()
        return part

    messages = tuple(replace(message, parts=tuple(map(coming, message.parts))) for message in request.messages)
    return replace(request, messages=messages), videos


def begin(pipeline: Pipeline, request: TurnRequest) -> tuple[Turn, list[Video], Listener]:
    listener = Listener()
    without, videos = split(request)
    return pipeline.submit(without, listener), videos, listener


def has_written(pipeline: Pipeline, tokens: int) -> bool:
    return pipeline.parts.ar_runners["asr"].counters.generated_tokens >= tokens


def wait_until_all_is_heard(pipeline: Pipeline) -> None:
    asr = pipeline.parts.ar_runners["asr"]
    wait_for(lambda: pipeline.engine.call(lambda: asr.counters.running + asr.counters.waiting == 0))


def wait_for(true: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def nothing_is_left(pipeline: Pipeline) -> None:
    pipeline.engine.check_integrity()
    for name, runner in pipeline.parts.ar_runners.items():
        counters = pipeline.engine.call(lambda runner=runner: runner.counters)
        assert (counters.pages_used, counters.running, counters.waiting) == (0, 0, 0), name
    assert pipeline._pictures.waiting == 0


# ---------------------------------------------------------------- the same turn


def shown_at_once(pipeline: Pipeline, request: TurnRequest) -> Listener:
    """Before the engine has begun with the turn."""
    begun = threading.Event()
    held = pipeline.engine.post(lambda: begun.wait(60))
    turn, videos, listener = begin(pipeline, request)
    turn.show(videos)
    begun.set()
    assert held.result()
    return listener.wait()


def shown_last(pipeline: Pipeline, request: TurnRequest) -> Listener:
    turn, videos, listener = begin(pipeline, request)
    wait_until_all_is_heard(pipeline)
    assert listener.events == [], "something is said before all is seen"
    turn.show(videos)
    return listener.wait()


@pytest.fixture(scope="module")
def plain() -> list[Listener]:
    """Of every turn, and of every turn again, with its pictures from the start."""
    with running(config()) as pipeline:
        return [ask(pipeline, request) for request in (*ASKED.values(), *ASKED.values())]


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize("asked", [shown_at_once, shown_last])
def test_answers_and_usage_are_those_of_a_turn_that_had_its_pictures_from_the_start(
    plain: list[Listener], asked: Callable[..., Listener], reads_ahead: bool
) -> None:
    with ahead() if reads_ahead else running(config()) as pipeline:
        for request, other in zip((*ASKED.values(), *ASKED.values()), plain, strict=True):
            listener = asked(pipeline, request)
            same(listener, other)
            told = [isinstance(event, Transcript) for event in listener.events]
            assert told == sorted(told, reverse=True), "what was heard is told before it is answered"
        nothing_is_left(pipeline)


def test_turns_at_once_say_what_each_says_alone_whenever_they_are_shown(pipeline: Pipeline) -> None:
    def request(number: int) -> TurnRequest:
        asked = list(ASKED.values())[number % len(ASKED)]
        drawn = {"max_tokens": 6, "temperature": 1.0, "seed": number}
        return replace(asked, speak=False, sampling={"aura": drawn})

    alone = [ask(pipeline, request(number)) for number in range(24)]
    chance = random.Random(7)
    with ahead() as eager:
        for served in (pipeline, eager):
            begun = [begin(served, request(number)) for number in range(24)]
            order = chance.sample(range(24), 24)
            cancelled = set(chance.sample(range(24), 6))
            for number in order:
                turn, videos, _ = begun[number]
                if number in cancelled and chance.random() < 0.5:
                    turn.cancel()
                turn.show(videos)
                if number in cancelled:
                    turn.cancel()
                time.sleep(chance.choice([0.0, 0.0, 0.03]))
            for number, (_, _, listener) in enumerate(begun):
                listener.wait()
                if number in cancelled and listener.end.reason == "cancelled":
                    continue
                same_words(listener, alone[number])
            nothing_is_left(served)


def same_words(one: Listener, other: Listener) -> None:
    assert (one.heard, one.text, one.end.reason) == (other.heard, other.text, other.end.reason)


# ---------------------------------------------------------------- sooner


def test_what_is_said_is_heard_before_anything_is_seen(pipeline: Pipeline) -> None:
    heard, thought = (pipeline.parts.ar_runners[name].counters for name in ("asr", "aura"))
    turn, videos, listener = begin(pipeline, spoken(speak=False))
    wait_until_all_is_heard(pipeline)
    assert pipeline.parts.ar_runners["asr"].counters.generated_tokens > heard.generated_tokens
    assert pipeline.parts.ar_runners["aura"].counters.steps == thought.steps
    assert pipeline._pictures.waiting == 1
    turn.show(videos)
    assert listener.wait().text


@pytest.mark.parametrize("last", ["the pictures", "the first id"])
def test_aura_reads_ahead_as_soon_as_asr_writes_and_all_is_shown(read: list[int], last: str) -> None:
    writes = WORDS | {"asr": {"min_tokens": 120, "max_tokens": 120}}
    with ahead() as pipeline:
        before = pipeline.parts.ar_runners["asr"].counters.generated_tokens
        turn, videos, listener = begin(pipeline, spoken(speak=False, sampling=writes))
        if last == "the pictures":
            wait_for(lambda: has_written(pipeline, before + 1))
        turn.show(videos)
        listener.wait()
        same_words(listener, ask(pipeline, spoken(speak=False, sampling=writes)))
    assert len(read) == 2
    assert min(read) > 320, "the pictures were not read while ASR wrote"


# ---------------------------------------------------------------- refused


THIN = Video(np.zeros((1, 10, 4000, 3), np.uint8), (0.0,), 2.0, b"thin")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("parts", "videos", "error", "words"),
    [
        ((recording(), Coming()), [THIN], BadMedia, "aspect ratio"),
        ((recording(), Coming(), Text("long " * 20_000)), [clip()], PromptTooLong, "8,191"),
        ((QUIET, Coming(), Coming()), [clip(), THIN], BadMedia, "aspect ratio"),
        ((recording(), Coming()), [clip(), clip()], BadRequest, "2 pictures .* waits for 1"),
        ((recording(), Coming()), [], BadRequest, "0 pictures .* waits for 1"),
    ],
)
def test_refused_pictures_cancel_the_turn_and_leave_nothing_behind(
    pipeline: Pipeline, parts: Any, videos: list[Video], error: type[AuraError], words: str, late: bool
) -> None:
    listener = Listener()
    turn = pipeline.submit(spoken(*parts), listener)
    if late:
        wait_until_all_is_heard(pipeline)
    with pytest.raises(error, match=words):
        turn.show(videos)
    assert listener.wait().end.reason == "cancelled"
    assert len(listener.events) == 1
    nothing_is_left(pipeline)


@pytest.mark.parametrize("served", ["qwen3_asr.yaml", "qwen3_tts.yaml"])
def test_a_server_that_does_not_see_refuses_pictures_before_they_come(served: str) -> None:
    heard = recording() if served == "qwen3_asr.yaml" else Text("hello")
    with running(config(pipeline=served)) as pipeline, pytest.raises(BadRequest, match="does not see"):
        pipeline.submit(spoken(heard, Coming(), sampling={}), lambda event: pytest.fail("an event of a refused turn"))


@pytest.mark.parametrize("part", ["speech", "transcript"])
def test_parts_of_a_turn_see_nothing(pipeline: Pipeline, part: Any) -> None:
    with pytest.raises(BadRequest, match="does not see"):
        pipeline.submit(spoken(Text("hello"), Coming(), sampling={}, part=part), lambda event: None)


def test_what_is_read_beforehand_is_all_there(pipeline: Pipeline) -> None:
    with pytest.raises(BadRequest, match="be there"):
        pipeline.prepare((Message("user", (Coming(),)),))


def test_a_turn_that_waits_for_no_pictures_is_shown_none(pipeline: Pipeline) -> None:
    turn, videos, listener = begin(pipeline, spoken(speak=False))
    turn.show(videos)
    with pytest.raises(AssertionError, match="waits for no pictures"):
        turn.show(videos)
    listener.wait()
    nothing_is_left(pipeline)


# ---------------------------------------------------------------- ended before


@pytest.mark.parametrize("request_", [spoken(), spoken(QUIET, clip())], ids=["sound", "silence"])
@pytest.mark.parametrize("late", [False, True])
def test_a_turn_that_is_cancelled_before_it_is_shown_anything_ends_once(
    pipeline: Pipeline, request_: TurnRequest, late: bool
) -> None:
    turn, videos, listener = begin(pipeline, request_)
    if late:
        wait_until_all_is_heard(pipeline)
    turn.cancel()
    assert listener.wait().end.reason == "cancelled"
    turn.show([THIN] if late else videos)  # nobody looks
    turn.cancel()
    nothing_is_left(pipeline)
    assert len(listener.events) == 1


def test_cancelling_while_pictures_are_prepared_ends_the_turn_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, videos, listener = begin(pipeline, spoken())
    aura, prepared, cancelled = pipeline.parts.aura, threading.Event(), threading.Event()
    write = type(aura).prompt

    def slow(*args: Any, **more: Any) -> Any:
        prepared.set()
        assert cancelled.wait(60)
        return write(*args, **more)

    monkeypatch.setattr(type(aura), "prompt", slow)
    showing = threading.Thread(target=turn.show, args=(videos,))
    showing.start()
    assert prepared.wait(60)
    turn.cancel()
    assert listener.wait().end.reason == "cancelled"
    cancelled.set()
    showing.join(60)
    nothing_is_left(pipeline)
    assert len(listener.events) == 1


def test_a_failure_of_asr_is_told_before_anything_is_seen(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: Any) -> Any:
        raise RuntimeError("the ear is broken")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.parts.asr, "rows", broken)
        turn, videos, listener = begin(pipeline, spoken())
        assert isinstance(listener.wait().end.error, EngineError)
    turn.show(videos)
    nothing_is_left(pipeline)
    assert len(listener.events) == 1


@pytest.mark.parametrize("request_", [spoken(), spoken(QUIET, clip())], ids=["sound", "silence"])
def test_a_pipeline_that_closes_ends_turns_that_wait_for_pictures(request_: TurnRequest) -> None:
    pipeline = Pipeline.load(config())
    turn, videos, listener = begin(pipeline, request_)
    wait_until_all_is_heard(pipeline)
    pipeline.close()
    assert isinstance(listener.end.error, Unavailable)
    turn.show(videos)
    assert len(listener.events) == 1
    assert pipeline._pictures.waiting == 0


def test_an_engine_that_fails_ends_turns_that_wait_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> bool:
        raise RuntimeError("the device is lost")

    pipeline = Pipeline.load(config())
    try:
        turn, videos, listener = begin(pipeline, spoken(QUIET, clip()))
        monkeypatch.setattr(pipeline.parts.ar_runners["asr"], "launch", failing)
        pipeline.engine.post(lambda: None)
        assert isinstance(listener.wait().end.error, EngineError)
        turn.show(videos)
        assert [type(event) for event in listener.events] == [Ended]
    finally:
        pipeline.close()


def test_a_listener_that_fails_when_all_is_seen_starts_no_answer(pipeline: Pipeline) -> None:
    def sink(event: Event) -> None:
        listener(event)
        raise RuntimeError("gone")

    listener = Listener()
    without, videos = split(spoken())
    turn = pipeline.submit(without, sink)
    wait_until_all_is_heard(pipeline)
    turn.show(videos)
    assert listener.wait().end.reason == "cancelled"
    nothing_is_left(pipeline)
