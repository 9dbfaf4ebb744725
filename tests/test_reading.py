"""What turns to come will begin with, read by AURA beforehand: the answers stay the same, and only what is new is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aura_omni.errors import BadRequest, PromptTooLong, Unavailable
from aura_omni.flow import Message, Text, TurnRequest, Video
from aura_omni.pipeline import Pipeline
from tests.family import Listener, ask, clip, config, recording, running

ANSWER = {"aura": {"max_tokens": 6, "temperature": 1.0, "seed": 5}}


def rounds(first: int, stop: int) -> tuple[Message, ...]:
    """Each with frames of its own and an answer."""
    messages: list[Message] = []
    for number in range(first, stop):
        messages += [Message("user", (seen(number),)), Message("assistant", (Text(f"circle {number}"),))]
    return tuple(messages)


def seen(number: int) -> Video:
    return replace(clip(), frames=np.roll(clip().frames, 40 * number, axis=2), key=b"seen %d" % number)


def turn(history: tuple[Message, ...]) -> TurnRequest:
    return TurnRequest((*history, Message("user", (seen(99), Text("What?")))), speak=False, sampling=ANSWER)


def test_a_turn_finds_what_was_read_for_it_and_says_what_it_would_have_said(pipeline: Pipeline) -> None:
    want = ask(pipeline, turn(rounds(0, 3)))
    with running(config()) as other:
        warm = other.counters["aura"]
        assert other.prepare(rounds(0, 2)).wait(60)
        assert other.prepare(rounds(0, 3)).wait(60)
        after = other.counters["aura"]
        assert (after.generated_tokens, after.cached_rows) == (warm.generated_tokens, warm.cached_rows)
        assert after.pages_used == 0
        read = after.computed_rows - warm.computed_rows
        got = ask(other, turn(rounds(0, 3)))
        own = other.counters["aura"].computed_rows - after.computed_rows
    assert (got.text, got.end.reason) == (want.text, want.end.reason)
    assert replace(got.end.usage, cached_tokens=0) == replace(want.end.usage, cached_tokens=0)
    assert got.end.usage.cached_tokens > read - 2 * 16, "all of it but what fills no page"
    assert own < read / 2


def test_a_cut_history_is_read_while_turns_go_on(pipeline: Pipeline) -> None:
    want = [ask(pipeline, turn(rounds(0, number))) for number in range(3, 6)]
    with running(config(aura={"max_num_seqs": 8})) as busy:
        listeners, readings = [], []
        for number in range(3, 6):
            listener = Listener()
            busy.submit(turn(rounds(0, number)), listener)
            readings.append(busy.prepare(rounds(2, number)))
            listeners.append(listener)
        said = [listener.wait() for listener in listeners]
        assert all(reading.wait(60) for reading in readings)
        cut = ask(busy, turn(rounds(2, 5)))
    assert [one.text for one in said] == [one.text for one in want]
    assert cut.end.usage.cached_tokens > cut.end.usage.prompt_video_tokens / 2


def test_a_reading_can_be_given_up(pipeline: Pipeline) -> None:
    reading = pipeline.prepare(rounds(0, 6))
    reading.cancel()
    reading.cancel()
    reading.wait(60)
    assert reading.over


def test_where_there_is_no_seat_nothing_is_read() -> None:
    with running(config(aura={"max_num_seqs": 1})) as other:
        listener = Listener()
        other.submit(turn(rounds(0, 3)), listener)
        assert not other.prepare(rounds(4, 6)).wait(60)
        listener.wait()


def test_what_cannot_be_read_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(BadRequest, match="must be text"):
        pipeline.prepare((Message("user", (recording(),)),))
    with running(config(aura={"max_model_len": 512})) as other, pytest.raises(PromptTooLong):
        other.prepare(rounds(0, 6))
    with running(config(pipeline="qwen3_tts.yaml")) as mute, pytest.raises(BadRequest, match="reads no messages"):
        mute.prepare(rounds(0, 1))
    with pytest.raises(Unavailable):
        mute.prepare(rounds(0, 1))
