"""Files to text, seen by the official client."""

from __future__ import annotations

import io
import re
import threading
import time
import wave
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aura_omni.errors import BadRequest, EngineError, Overloaded, PromptTooLong
from aura_omni.flow import Audio, Ended, Event, Message, Text, TextDelta, Transcript, TurnRequest
from aura_omni.media.fetch import MediaPolicy
from aura_omni.server.app import ServerConfig
from aura_omni.transcript_file import srt, vtt
from aura_omni.transcription import TimedText
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


def spoken(*lengths_s: float, rate: int = 8_000, pause_s: float = 0.6) -> bytes:
    """Noise with syllables, in sentences of these lengths, pauses between them."""
    parts = []
    for length_s in lengths_s:
        times_s = np.arange(round(length_s * rate)) / rate
        parts += [0.2 * np.random.default_rng(0).standard_normal(len(times_s)) * np.abs(np.sin(12 * times_s)) + 0.01]
        parts += [np.zeros(round(pause_s * rate))]
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((32_767 * np.clip(np.concatenate(parts[:-1]), -1, 1)).astype("<i2").tobytes())
    return file.getvalue()


def lengths(request: TurnRequest) -> Iterator[Event]:
    """Says how long the segment is, in whole seconds."""
    (sound,) = request.messages[-1].parts
    assert isinstance(sound, Audio)
    yield TextDelta(f"{round(sound.duration_s)} seconds.")
    yield Transcript(f"{round(sound.duration_s)} seconds.", "German" if sound.duration_s > 8 else "English")
    yield Ended("stop", USAGE)


RECORDING = ("talk.wav", spoken(6, 9, 6.4))
TEXT = "6 seconds. 10 seconds. 7 seconds."  # with parts of the pauses around them


def test_verbose_json_has_language_duration_and_segments(served: Served) -> None:
    answer = transcribe(
        served(FakePipeline(lengths)),
        file=RECORDING,
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.5,
    )
    assert answer.text == TEXT
    assert answer.duration == pytest.approx(22.6, abs=0.01)
    assert answer.language == "english"  # in 12.4 of 21.4 s
    assert [segment.text for segment in answer.segments] == TEXT.replace(". ", ".|").split("|")
    assert [(segment.start, segment.end) for segment in answer.segments] == [
        (pytest.approx(start, abs=0.03), pytest.approx(end, abs=0.03))
        for start, end in [(0, 6), (6.6, 15.6), (16.2, 22.6)]
    ]
    first, second, _ = answer.segments
    assert (first.id, second.id, second.seek, second.temperature) == (0, 1, pytest.approx(660, abs=3), 0.5)


def test_subtitles_have_the_times_of_the_segments(served: Served) -> None:
    client = served(FakePipeline(lengths))
    blocks = transcribe(client, file=RECORDING, response_format="srt").split("\n\n")
    assert blocks[-1] == ""
    number, times, text = blocks[1].split("\n")
    assert (number, text) == ("2", "10 seconds.")
    assert re.fullmatch(r"00:00:06,[56]\d\d --> 00:00:15,[56]\d\d", times)
    cues = transcribe(client, file=RECORDING, response_format="vtt").split("\n\n")
    assert cues[0] == "WEBVTT"
    assert re.match(r"00:00:06\.[56]\d\d --> 00:00:15\.[56]\d\d\n10 seconds\.", cues[2])


def test_subtitles_survive_any_text() -> None:
    segments = [TimedText("a\n\n<b> & 1 --> 2", 3_599.9996, 360_001.5)]
    assert srt(segments) == "1\n01:00:00,000 --> 100:00:01,500\na\n<b> & 1 -> 2\n\n"
    assert vtt(segments) == "WEBVTT\n\n01:00:00.000 --> 100:00:01.500\na\n&lt;b&gt; &amp; 1 -&gt; 2\n\n"
    assert (srt([]), vtt([])) == ("", "WEBVTT\n\n")


@pytest.mark.parametrize("response_format", ["json", "text", "verbose_json"])
def test_every_format_has_the_same_text(served: Served, response_format: Any) -> None:
    answer = transcribe(served(FakePipeline(lengths)), file=RECORDING, response_format=response_format)
    assert (answer if isinstance(answer, str) else answer.text) == TEXT


def test_segments_are_heard_a_few_at_a_time_and_told_in_order(served: Served) -> None:
    now, most = 0, 0
    lock = threading.Lock()

    def slow(request: TurnRequest) -> Iterator[Event | Pause]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        (sound,) = request.messages[-1].parts
        assert isinstance(sound, Audio)
        yield Pause(0.05 if sound.duration_s > 7 else 0.2)
        with lock:
            now -= 1
        yield from lengths(request)

    file = ("talk.wav", spoken(*[6, 9] * 6))
    *deltas, done = transcribe(served(FakePipeline(slow)), file=file, stream=True)
    assert len(deltas) == 12
    assert (
        "".join(event.delta for event in deltas)
        == done.text
        == " ".join(f"{seconds} seconds." for seconds in [6, 10, *[7, 10] * 4, 7, 9])
    )
    assert done.usage.input_tokens == 12 * 41
    assert 1 < most <= 4


def test_a_full_server_refuses_the_first_segment_and_waits_with_a_later_one(served: Served) -> None:
    refused: list[TurnRequest] = []

    def full(request: TurnRequest) -> Iterator[Event]:
        if len(refused) < 1:
            refused.append(request)
            yield Ended("error", error=Overloaded("full"))
        else:
            yield from lengths(request)

    with pytest.raises(openai.RateLimitError):
        transcribe(served(FakePipeline(full)))
    asked: list[TurnRequest] = []

    def once(request: TurnRequest) -> Iterator[Event]:
        asked.append(request)
        if len(asked) == 3:
            yield Ended("error", error=Overloaded("full"))
        else:
            yield from lengths(request)

    assert transcribe(served(FakePipeline(once)), file=RECORDING).text == TEXT


def test_silence_between_sentences_is_not_heard(served: Served) -> None:
    pipeline = FakePipeline(lengths)
    transcribe(served(pipeline), file=("talk.wav", spoken(6, 6, pause_s=60)))
    assert len(pipeline.requests) == 2


def test_a_stream_is_deltas_and_the_whole_at_the_end(served: Served) -> None:
    *deltas, done = transcribe(served(FakePipeline(heard)), stream=True)
    assert [event.type for event in deltas] == ["transcript.text.delta"]
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
        ({"response_format": "diarized_json"}, "response_format", "unsupported_option"),
        ({"response_format": "srt", "stream": True}, "response_format", "unsupported_option"),
        ({"response_format": "xml"}, "response_format", "invalid_request"),
        ({"response_format": "verbose_json", "stream": True}, "response_format", "unsupported_option"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "unsupported_option"),
        ({"timestamp_granularities": ["line"]}, "timestamp_granularities", "invalid_request"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "invalid_request"),
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
    def second_fails(request: TurnRequest) -> Iterator[Event]:
        (sound,) = request.messages[-1].parts
        assert isinstance(sound, Audio)
        if sound.duration_s > 8:
            yield Ended("error", error=EngineError("asr failed"))
        else:
            yield from lengths(request)

    stream = transcribe(served(FakePipeline(second_fails)), file=RECORDING, stream=True)
    assert next(stream).delta == "6 seconds."
    with pytest.raises(openai.APIError, match="asr failed"):
        next(stream)
    for streamed in (True, False):
        with pytest.raises(openai.InternalServerError, match="asr failed"):
            transcribe(
                served(FakePipeline(lambda _: [Ended("error", error=EngineError("asr failed"))])), stream=streamed
            )


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
