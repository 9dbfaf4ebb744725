"""A stage that fails, a client that leaves, a server that starts or stops: who is told, and how soon."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aura_omni.errors import EngineError
from aura_omni.flow import AudioChunk, Ended, Event, TextDelta, Transcript, TurnRequest
from aura_omni.server.sound import Piece, SoundStream
from tests.server.fake import WAIT_S, FakePipeline, FakeTurn, Pause, plain_answer, serving, tone

HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]
BROKEN = Ended("error", error=EngineError("code2wav failed: out of pages"))
CANCEL_LIMIT_S = 1.0


def fails_at_once(request: TurnRequest) -> Iterator[Event]:
    yield Transcript("heard")
    yield BROKEN


def fails_after_audio(request: TurnRequest) -> Iterator[Event]:
    yield TextDelta("Hel")
    yield AudioChunk(tone(440, 1))
    yield AudioChunk(tone(440, 1))
    yield BROKEN


def endless(request: TurnRequest) -> Iterator[Event | Pause]:
    yield Transcript("heard")
    yield TextDelta("Hel")
    yield AudioChunk(tone(440, 1))
    yield Pause()
    yield Ended("stop")


def mute(request: TurnRequest) -> Iterator[Event | Pause]:
    yield Transcript("heard")
    yield Pause()
    yield Ended("stop")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


# ---------------------------------------------------------------- a stage fails


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_a_real_status(stream: bool) -> None:
    with serving(FakePipeline(fails_at_once)) as url, pytest.raises(openai.InternalServerError) as raised:
        client_of(url).chat.completions.create(model="AURA", messages=HELLO, stream=stream)
    assert raised.value.code == "engine_error"
    assert "out of pages" in raised.value.message


def test_a_failure_after_audio_is_no_whole_answer() -> None:
    with serving(FakePipeline(fails_after_audio)) as url, pytest.raises(openai.InternalServerError):
        client_of(url).chat.completions.create(model="AURA", messages=HELLO)


@pytest.mark.parametrize("audio", [None, {"format": "pcm16", "voice": "Vivian"}])
def test_a_failure_in_a_stream_is_an_error_line_and_no_done(audio: Any) -> None:
    asked = {"audio": audio} if audio else {}
    with serving(FakePipeline(fails_after_audio)) as url:
        stream = client_of(url).chat.completions.create(model="AURA", messages=HELLO, stream=True, **asked)
        seen = []
        with pytest.raises(openai.APIError, match="out of pages"):
            seen.extend(stream)
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "stream": True, **asked})
    lines = [line for line in response.text.splitlines() if line]
    assert "[DONE]" not in response.text
    assert json.loads(lines[-1][6:])["error"]["code"] == "engine_error"
    assert all(json.loads(line[6:])["choices"][0]["finish_reason"] is None for line in lines[:-1])


@pytest.mark.parametrize(
    ("script", "stream"), [(fails_at_once, False), (fails_at_once, True), (fails_after_audio, True)]
)
def test_a_failure_is_logged_once_under_the_request_id(
    script: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(FakePipeline(script)) as url:
        asked = {"messages": HELLO, "stream": stream}
        response = httpx.post(f"{url}/v1/chat/completions", json=asked, headers={"x-request-id": "id-1"})
    assert response.headers["x-request-id"] == "id-1"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "id-1 POST /v1/chat/completions: 500 engine_error: code2wav failed: out of pages"


def test_asking_whether_the_server_is_ready_leaves_no_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = FakePipeline()
    pipeline.ready, pipeline.reason = False, "loading"
    with serving(pipeline) as url:
        assert httpx.get(f"{url}/health").status_code == 503
        httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO}, headers={"x-request-id": "id-2"})
    lines = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.INFO and "aura" in record.name
    ]
    assert lines == ["id-2 POST /v1/chat/completions: 503 unavailable: loading"]


def test_a_turn_that_the_server_cancels_is_unavailable() -> None:
    with serving(FakePipeline(lambda _: [Ended("cancelled")])) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"


# ---------------------------------------------------------------- the client leaves


def assert_cancelled(turn: FakeTurn, left_at_s: float) -> None:
    assert turn.cancelled.wait(WAIT_S)
    assert turn.cancelled_at_s is not None
    assert turn.cancelled_at_s - left_at_s < CANCEL_LIMIT_S


def wait_for_turn(pipeline: FakePipeline) -> FakeTurn:
    deadline_s = time.monotonic() + WAIT_S
    while not pipeline.turns:
        assert time.monotonic() < deadline_s, "the request did not reach the pipeline"
        time.sleep(0.01)
    return pipeline.turns[-1]


@pytest.mark.parametrize("script", [endless, mute])
@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_connection_cancels_the_turn_within_a_second(script: Any, stream: bool) -> None:
    pipeline = FakePipeline(script)
    with serving(pipeline) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"messages": HELLO, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            turn = wait_for_turn(pipeline)
            if stream and script is endless:
                assert b"200 OK" in connection.recv(65_536)
            assert not turn.cancelled.is_set()
            left_at_s = time.monotonic()
        assert_cancelled(turn, left_at_s)


@pytest.mark.parametrize("form", ["mp3", "opus", "flac"])
@pytest.mark.parametrize("stream_format", ["sse", "audio"])
def test_a_turn_is_free_before_its_sound_is_encoded_when_the_client_leaves(
    form: str, stream_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed_first: list[bool] = []
    encoding = threading.Event()
    feed = SoundStream.feed

    def slow_feed(sound: SoundStream, samples: np.ndarray) -> Iterator[Piece]:
        if len(fed) == 1:  # the second chunk: the first has begun the answer
            encoding.set()
            freed_first.append(pipeline.turns[0].cancelled.wait(WAIT_S))
        fed.append(1)
        yield from feed(sound, samples)

    def speaks(_: TurnRequest) -> Iterator[Event | Pause]:
        yield AudioChunk(tone(440, 12))
        yield AudioChunk(tone(440, 12))
        yield Pause()
        yield Ended("stop")

    fed: list[int] = []
    monkeypatch.setattr(SoundStream, "feed", slow_feed)
    pipeline = FakePipeline(speaks)
    with serving(pipeline) as url:
        asked = {"input": "Hello.", "response_format": form, "stream_format": stream_format}
        with httpx.stream("POST", f"{url}/v1/audio/speech", json=asked, timeout=WAIT_S) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            assert encoding.wait(WAIT_S)
        assert pipeline.turns[0].ended.wait(WAIT_S)
    assert freed_first == [True]


def test_a_client_that_drops_its_upload_is_no_event(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakePipeline()) as url:
        host, port = url.removeprefix("http://").split(":")
        for size in (100, 10**6, 10**10):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(f"{head}Content-Length: {size}\r\n\r\n{{".encode())
                time.sleep(0.1)
        assert httpx.get(f"{url}/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_closing_the_stream_cancels_the_turn_and_the_next_one_is_fine() -> None:
    pipeline = FakePipeline(endless)
    with serving(pipeline) as url:
        client = client_of(url)
        for _ in range(20):
            stream = client.chat.completions.create(model="AURA", messages=HELLO, stream=True)
            next(iter(stream))
            left_at_s = time.monotonic()
            stream.close()
            assert_cancelled(pipeline.turns[-1], left_at_s)
        pipeline.script = plain_answer
        answer = client.chat.completions.create(model="AURA", messages=HELLO)
    assert answer.choices[0].message.content == "Hello there."
    assert len(pipeline.turns) == 21


def test_a_client_that_gives_up_while_the_prompt_is_prepared_cancels_the_turn() -> None:
    pipeline = FakePipeline(mute)
    submit = pipeline.submit

    def slow_submit(request: TurnRequest, sink: Any) -> FakeTurn:
        gone.wait(WAIT_S)
        return submit(request, sink)

    gone = threading.Event()
    pipeline.submit = slow_submit  # type: ignore[method-assign]
    with serving(pipeline) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO}, timeout=0.3)
        time.sleep(0.2)  # the server notices first; only then does the preparation end
        gone.set()
        left_at_s = time.monotonic()
        assert_cancelled(wait_for_turn(pipeline), left_at_s)


def test_a_finished_turn_is_not_cancelled() -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        client_of(url).chat.completions.create(model="AURA", messages=HELLO)
        list(client_of(url).chat.completions.create(model="AURA", messages=HELLO, stream=True))
    assert all(turn.ended.is_set() and turn.cancelled_at_s is None for turn in pipeline.turns)


# ---------------------------------------------------------------- starting and stopping


def test_before_it_is_ready_the_server_says_so_and_how_long_to_wait() -> None:
    pipeline = FakePipeline()
    pipeline.ready, pipeline.reason = False, "the engine stopped: device lost"
    with serving(pipeline) as url:
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            response = httpx.request(method, f"{url}{path}", json={"messages": HELLO} if method == "POST" else None)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the engine stopped: device lost"
            assert int(response.headers["retry-after"]) > 0
        assert httpx.head(f"{url}/health").status_code == 503
        pipeline.ready = True
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}


def test_models_are_listed_by_their_served_names_only() -> None:
    with serving(FakePipeline()) as url:
        client = client_of(url)
        assert [model.id for model in client.models.list()] == ["AURA", "aurateam/AURA"]
        for path in ("/health", "/v1/models", "/v1/models/AURA"):
            assert (httpx.head(f"{url}{path}").status_code, httpx.head(f"{url}{path}").content) == (200, b"")
        assert client.models.retrieve("aurateam/AURA").object == "model"
        answer = client.chat.completions.create(model="aurateam/AURA", messages=HELLO)
    assert answer.model == "aurateam/AURA"


def test_stopping_the_server_closes_the_pipeline() -> None:
    pipeline = FakePipeline()
    with serving(pipeline):
        assert not pipeline.closed
    assert pipeline.closed
