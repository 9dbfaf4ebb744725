"""A request that takes too long ends in one visible way, and nothing goes on working for it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from aura_omni.flow import AudioChunk, Ended, Event, TextDelta, TurnRequest
from aura_omni.server.app import ServerConfig
from tests.server.conftest import wav_bytes
from tests.server.fake import WAIT_S, FakePipeline, Pause, serving, tone

SOON = ServerConfig(timeout_s=0.3)
SOON_AFTER_IT_BEGAN = ServerConfig(timeout_s=2.0)  # a busy machine has sent the first bytes by then
CHAT = {"messages": [{"role": "user", "content": "Hello?"}]}


def mute(_: TurnRequest) -> Iterator[Event | Pause]:
    yield Pause()
    yield Ended("stop")


def begins(_: TurnRequest) -> Iterator[Event | Pause]:
    yield TextDelta("Hel")
    yield AudioChunk(tone(440, 1))
    yield Pause()
    yield Ended("stop")


def chat(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**CHAT, **fields}, timeout=WAIT_S)


def speech(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/audio/speech", json={"input": "Hello.", **fields}, timeout=WAIT_S)


def transcript(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/audio/transcriptions", files={"file": wav_bytes()}, data=fields, timeout=WAIT_S)


def check_freed(pipeline: FakePipeline) -> None:
    (turn,) = pipeline.turns
    assert turn.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("ask", [chat, speech, transcript])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_an_answer_in_time_is_a_504_that_says_so(ask: Any, stream: bool) -> None:
    pipeline = FakePipeline(mute)
    with serving(pipeline, SOON) as url:
        fields = {"stream_format": "sse" if stream else "audio"} if ask is speech else {"stream": stream}
        response = ask(url, **fields)
        check_freed(pipeline)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("timeout", "server_error")
    assert "0.3 s" in error["message"]
    assert "--request-timeout" in error["message"]
    assert response.headers["x-should-retry"] == "false"


def test_a_stream_that_has_begun_ends_with_the_reason() -> None:
    pipeline = FakePipeline(begins)
    with serving(pipeline, SOON_AFTER_IT_BEGAN) as url:
        response = chat(url, stream=True)
        check_freed(pipeline)
    lines = [line for line in response.text.splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert "[DONE]" not in response.text


def test_a_stream_of_bytes_is_broken_off() -> None:
    pipeline = FakePipeline(begins)
    with serving(pipeline, SOON_AFTER_IT_BEGAN) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            speech(url, response_format="pcm")
        check_freed(pipeline)


def test_a_request_may_ask_for_less_time_and_for_no_more() -> None:
    pipeline = FakePipeline(mute)
    with serving(pipeline, ServerConfig(timeout_s=0.5)) as url:
        less = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"x-request-timeout": "0.2"})
        more = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"x-request-timeout": "60"})
    assert "0.2 s, as x-request-timeout asked" in less.json()["error"]["message"]
    assert "0.5 s, the limit of this server" in more.json()["error"]["message"]


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", ""])
def test_a_time_that_is_none_is_refused(given: str) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"x-request-timeout": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-timeout"
    assert not pipeline.requests


def test_the_official_client_raises_once_and_does_not_try_again() -> None:
    pipeline = FakePipeline(mute)
    with serving(pipeline, SOON) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3) as client:
        with pytest.raises(openai.InternalServerError, match="limit of this server") as raised:
            client.chat.completions.create(model="AURA", **CHAT)
        assert raised.value.code == "timeout"
    assert len(pipeline.turns) == 1


def test_a_client_that_does_not_read_loses_its_turn_soon_after_the_limit() -> None:
    def flood(_: TurnRequest) -> Iterator[Event | Pause]:
        for _number in range(200):
            yield AudioChunk(tone(440, 50))
        yield Pause()
        yield Ended("stop")

    pipeline = FakePipeline(flood)
    with serving(pipeline, SOON) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address) as connection:
            body = json.dumps({"input": "Hello.", "response_format": "pcm"}).encode()
            connection.sendall(
                b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            asked_at_s = time.monotonic()
            while not pipeline.turns:
                time.sleep(0.01)
            assert pipeline.turns[0].cancelled.wait(WAIT_S)
            assert time.monotonic() - asked_at_s < 5
