"""Files to text, seen by the official client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from aura_omni.errors import BadRequest, EngineError, PromptTooLong
from aura_omni.flow import Audio, Ended, Event, Message, Text, TextDelta, Transcript, TurnRequest
from aura_omni.media.fetch import MediaPolicy
from aura_omni.server.app import ServerConfig
from tests.server.conftest import wav_bytes
from tests.server.fake import USAGE, WAIT_S, FakePipeline, Pause, serving

Served = Callable[..., openai.OpenAI]
USED = {
    "type": "tokens",
    "input_tokens": 41,
    "input_token_details": {"text_tokens": 11, "audio_tokens": 13},
    "output_tokens": 3,
    "total_tokens": 44,
}


def heard(_: TurnRequest) -> Iterator[Event]:
    yield TextDelta("What is ")
    yield TextDelta("this?")
    yield Transcript("What is this?", "English")
    yield Ended("stop", USAGE)


def nothing(_: TurnRequest) -> Iterator[Event]:
    yield Transcript("")
    yield Ended("silent")


def transcribe(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "AURA", "file": ("question.wav", wav_bytes()), **fields}
    return client.audio.transcriptions.create(**fields)


def test_json_is_the_text_and_its_tokens(served: Served) -> None:
    answer = transcribe(served(FakePipeline(heard)))
    assert answer.text == "What is this?"
    assert answer.usage.to_dict() == USED
    assert answer.model_extra == {"finish_reason": "stop"}


def test_text_is_nothing_but_the_text(served: Served) -> None:
    assert transcribe(served(FakePipeline(heard)), response_format="text") == "What is this?"


def test_verbose_json_has_language_and_duration_and_no_times(served: Served) -> None:
    answer = transcribe(served(FakePipeline(heard)), response_format="verbose_json")
    assert (answer.text, answer.language, answer.duration) == ("What is this?", "english", 0.5)
    assert answer.segments is None


def test_a_stream_is_deltas_and_the_whole_at_the_end(served: Served) -> None:
    *deltas, done = transcribe(served(FakePipeline(heard)), stream=True)
    assert [event.type for event in deltas] == ["transcript.text.delta"] * 2
    assert "".join(event.delta for event in deltas) == done.text == "What is this?"
    assert done.type == "transcript.text.done"
    assert done.usage.to_dict() == USED


def test_long_text_is_cut_into_short_lines() -> None:
    with serving(FakePipeline(lambda _: [TextDelta("字" * 9_000), Ended("stop")])) as url:
        files = {"file": wav_bytes()}
        response = httpx.post(f"{url}/v1/audio/transcriptions", files=files, data={"stream": "true"})
    assert max(map(len, response.text.splitlines())) < 64 * 1024
    assert response.text.count("transcript.text.delta") == 5


@pytest.mark.parametrize("asked", [{}, {"response_format": "text"}, {"response_format": "verbose_json"}])
def test_silence_is_an_empty_text(served: Served, asked: dict[str, Any]) -> None:
    answer = transcribe(served(FakePipeline(nothing)), **asked)
    assert (answer if isinstance(answer, str) else answer.text) == ""
    (done,) = transcribe(served(FakePipeline(nothing)), stream=True)
    assert done.text == ""


def test_every_field_reaches_the_turn(served: Served) -> None:
    pipeline = FakePipeline(heard)
    client = served(pipeline)
    transcribe(
        client, language="en-US", prompt="AURA", temperature=0.5, chunking_strategy="auto", extra_body={"seed": 3}
    )
    (request,) = pipeline.requests
    context, question = request.messages
    assert context == Message("system", (Text("AURA"),))
    (sound,) = question.parts
    assert isinstance(sound, Audio)
    assert (sound.rate, sound.duration_s) == (16_000, 0.5)
    assert (request.part, request.voice.language) == ("transcript", "en-US")
    assert request.sampling == {"asr": {"temperature": 0.5, "seed": 3}}
    transcribe(client, language="", prompt="")
    assert pipeline.requests[1].voice.language is None
    assert len(pipeline.requests[1].messages) == 1


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "srt"}, "response_format", "unsupported_option"),
        ({"response_format": "vtt"}, "response_format", "unsupported_option"),
        ({"response_format": "xml"}, "response_format", "invalid_request"),
        ({"response_format": "verbose_json", "stream": True}, "response_format", "unsupported_option"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "unsupported_option"),
        ({"include": ["logprobs"]}, "include", "unsupported_option"),
        ({"chunking_strategy": {"type": "server_vad"}}, None, None),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"extra_body": {"temperature": "hot"}}, "temperature", "invalid_request"),
        ({"extra_body": {"seed": "1.5"}}, "seed", "invalid_request"),
        ({"extra_body": {"stream": "perhaps"}}, "stream", "invalid_request"),
        ({"extra_body": {"langauge": "en"}}, "langauge", "invalid_request"),
        ({"extra_body": {"file": "text"}, "file": openai.NOT_GIVEN}, None, None),
        ({"file": ("a.wav", b"")}, "file", "invalid_media"),
        ({"file": ("a.wav", b"no sound")}, "file", "invalid_media"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    pipeline = FakePipeline(heard)
    with pytest.raises(openai.BadRequestError) as refusal:
        transcribe(served(pipeline), **fields)
    if param is not None:
        assert (refusal.value.param, refusal.value.code) == (param, code)
    assert not pipeline.requests


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"json": {"file": "x"}}, "multipart/form-data"),
        ({"data": {"model": "AURA"}}, "multipart/form-data"),
        ({"files": {"audio": wav_bytes()}}, "must be 'file'"),
        ({"files": {"file": (None, "text")}}, "file is required"),
        ({"files": {"model": (None, "AURA")}}, "file is required"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, ""),
        ({"content": b"hello", "headers": {"content-type": "multipart/form-data; boundary=x"}}, ""),
        ({"files": [("file", wav_bytes()), ("file", wav_bytes())]}, ""),
        ({"files": [("file", wav_bytes()), ("prompt", (None, "a")), ("prompt", (None, "b"))]}, "twice"),
    ],
)
def test_a_broken_form_is_a_bad_request(sent: dict[str, Any], words: str) -> None:
    with serving(FakePipeline(heard)) as url:
        response = httpx.post(f"{url}/v1/audio/transcriptions", **sent)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_a_file_over_the_limit_of_one_medium_is_too_large(served: Served) -> None:
    policy = MediaPolicy(max_bytes=10_000)
    pipeline = FakePipeline(heard)
    with pytest.raises(openai.APIStatusError, match="10,000") as refusal:
        transcribe(served(pipeline, ServerConfig(media=policy)))
    assert refusal.value.status_code == 413
    assert not pipeline.requests


@pytest.mark.parametrize(
    ("error", "param"),
    [(BadRequest("no", param="language"), "language"), (PromptTooLong("long", param="messages"), "prompt")],
)
def test_what_the_pipeline_refuses_has_the_name_of_the_field(served: Served, error: Exception, param: str) -> None:
    def refuse(_: TurnRequest) -> Iterator[Event]:
        raise error
        yield

    with pytest.raises(openai.BadRequestError) as refusal:
        transcribe(served(FakePipeline(refuse)), stream=True)
    assert refusal.value.param == param


def test_a_stream_that_fails_raises_in_the_client(served: Served) -> None:
    script = [TextDelta("What"), Ended("error", error=EngineError("asr failed"))]
    stream = transcribe(served(FakePipeline(lambda _: script)), stream=True)
    assert next(stream).delta == "What"
    with pytest.raises(openai.APIError, match="asr failed"):
        next(stream)
    with pytest.raises(openai.InternalServerError, match="asr failed"):
        transcribe(served(FakePipeline(lambda _: script)))


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_stops_the_work(stream: str) -> None:
    def halting(_: TurnRequest) -> Iterator[Event | Pause]:
        yield Pause()
        yield Ended("stop")

    pipeline = FakePipeline(halting)
    with serving(pipeline) as url:
        files = {"file": wav_bytes()}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/audio/transcriptions", files=files, data={"stream": stream}, timeout=0.5)
        left_at_s = time.monotonic()
        (turn,) = pipeline.turns
        assert turn.cancelled.wait(WAIT_S)
        assert turn.cancelled_at_s is not None
        assert turn.cancelled_at_s - left_at_s < 1


def test_translations_are_refused_clearly(served: Served) -> None:
    client = served(FakePipeline(heard))
    files = {"file": ("a.wav", wav_bytes(20))}
    with pytest.raises(openai.BadRequestError, match="does not translate") as refusal:
        client.post("/audio/translations", cast_to=httpx.Response, files=files)
    assert refusal.value.code == "unsupported_option"


def test_a_server_that_only_speaks_says_so(served: Served) -> None:
    pipeline = FakePipeline(heard)
    pipeline.stages = ("talker", "code2wav")
    with pytest.raises(openai.NotFoundError, match="does not listen"):
        transcribe(served(pipeline))
