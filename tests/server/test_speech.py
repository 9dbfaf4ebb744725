"""Text to sound, and files to text, seen by the official client."""

from __future__ import annotations

import base64
import io
import json
import time
import wave
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aura_omni.errors import BadVoice, EngineError, PromptTooLong, field_name
from aura_omni.flow import (
    FRAME_SAMPLES,
    AudioChunk,
    Ended,
    Event,
    Playback,
    StageName,
    Text,
    TextDelta,
    TurnRequest,
    Voice,
)
from aura_omni.media.encoder import pcm16, wav_header
from tests.server.conftest import data_url, wav_bytes
from tests.server.fake import USAGE, WAIT_S, FakePipeline, Pause, serving, tone

Served = Callable[..., openai.OpenAI]
SOUND = pcm16(np.concatenate([tone(440, 1), tone(440, 3)]))


def speak(client: openai.OpenAI, text: str = "Hello there.", **fields: Any) -> bytes:
    fields = {"model": "AURA", "voice": "ryan", **fields}
    return client.audio.speech.create(input=text, **fields).content


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/audio/speech", json={"input": "Hello.", **fields})


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]


def test_wav_is_a_whole_file_unless_something_else_is_asked_for(served: Served) -> None:
    pipeline = FakePipeline()
    with wave.open(io.BytesIO(speak(served(pipeline)))) as reader:
        assert (reader.getframerate(), reader.getnframes()) == (24_000, 4 * FRAME_SAMPLES)
        assert reader.readframes(4 * FRAME_SAMPLES) == SOUND
    (request,) = pipeline.requests
    assert request.part == "speech"
    assert request.messages[0].parts == (Text("Hello there."),)
    assert request.voice == Voice(speaker="ryan")


@pytest.mark.parametrize("asked", [{"stream_format": "audio"}, {"extra_body": {"stream": True}}])
def test_a_wav_stream_has_one_header_of_unknown_length(served: Served, asked: dict[str, Any]) -> None:
    data = speak(served(FakePipeline()), **asked)
    assert data == wav_header(24_000, None) + SOUND
    assert data.count(b"RIFF") == 1


def test_pcm_comes_while_it_is_made(served: Served) -> None:
    def halting(_: TurnRequest) -> Iterator[Event | Pause]:
        yield AudioChunk(tone(440, 1))
        yield Pause()
        yield Ended("stop")

    pipeline = FakePipeline(halting)
    with served(pipeline).audio.speech.with_streaming_response.create(
        input="Hello.", model="AURA", voice="ryan", response_format="pcm"
    ) as response:
        assert response.headers["content-type"].startswith("audio/pcm")
        assert next(response.iter_bytes(2 * FRAME_SAMPLES)) == SOUND[: 2 * FRAME_SAMPLES]
        left_at_s = time.monotonic()
    (turn,) = pipeline.turns
    assert turn.cancelled.wait(WAIT_S)
    assert turn.cancelled_at_s is not None
    assert turn.cancelled_at_s - left_at_s < 1


def test_streamed_bytes_equal_whole_bytes(served: Served) -> None:
    client = served(FakePipeline())
    assert speak(client, response_format="pcm") == SOUND
    assert speak(client)[44:] == SOUND
    body = speak(client, stream_format="sse", response_format="wav").decode()
    joined = b"".join(base64.b64decode(event["audio"]) for event in events(body) if "audio" in event)
    assert joined == wav_header(24_000, None) + SOUND


def test_an_event_stream_has_short_lines_and_ends_with_the_usage() -> None:
    def long(_: TurnRequest) -> Iterator[Event]:
        yield AudioChunk(tone(440, 750))
        yield Ended("stop", USAGE, speech_reason="length")

    with serving(FakePipeline(long)) as url:
        response = post(url, stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert max(map(len, response.text.splitlines())) < 64 * 1024
    *deltas, done = events(response.text)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 11, "output_tokens": 4, "total_tokens": 15},
        "audio_finish_reason": "length",
    }


def test_what_cannot_be_spoken_is_a_frame_of_silence(served: Served) -> None:
    client = served(FakePipeline(lambda _: [TextDelta("..."), Ended("stop")]))
    silence = bytes(2 * FRAME_SAMPLES)
    assert speak(client, "...", response_format="pcm") == silence
    assert speak(client, "...") == wav_header(24_000, FRAME_SAMPLES) + silence
    delta, _ = events(speak(client, "...", stream_format="sse", response_format="pcm").decode())
    assert base64.b64decode(delta["audio"]) == silence


def test_every_field_reaches_the_turn(served: Served) -> None:
    pipeline = FakePipeline()
    more = {
        "language": "en", "task_type": "base", "ref_audio": [data_url(wav_bytes(), "audio/wav")], "ref_text": "ref",
        "x_vector_only_mode": True, "non_streaming_mode": True, "max_new_tokens": 40, "seed": 7,
        "voice": {"id": "vivian"}, "sample_rate": 24_000, "word_timestamps": False, "normalize": False,
        "initial_codec_chunk_frames": 3,
    }  # fmt: skip
    speak(served(pipeline), instructions="slowly", speed=1.5, extra_body=more)
    (request,) = pipeline.requests
    voice = request.voice
    assert (voice.language, voice.task, voice.ref_text, voice.speaker) == ("en", "Base", "ref", "vivian")
    assert (voice.x_vector_only, voice.non_streaming, voice.max_frames, voice.instruct) == (True, True, 40, "slowly")
    assert voice.normalize is False
    assert voice.ref_audio is not None
    assert voice.ref_audio.rate == 16_000
    assert request.sampling == {"talker": {"seed": 7}}
    assert request.playback == Playback(live=False, speed=1.5, first_frames=3)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_request"),
        ({"input": " \n"}, "input", "invalid_request"),
        ({"input": None}, "input", "invalid_request"),
        ({"speed": 0.2}, "speed", "invalid_request"),
        ({"speed": 4.01}, "speed", "invalid_request"),
        ({"speed": "fast"}, "speed", "invalid_request"),
        ({"speed": True}, "speed", "invalid_request"),
        ({"word_timestamps": True}, "word_timestamps", "unsupported_option"),
        ({"speaker_embedding": [0.1]}, "speaker_embedding", "unsupported_option"),
        ({"sample_rate": 23_999}, "sample_rate", "invalid_request"),
        ({"sample_rate": 44_100, "response_format": "opus"}, "sample_rate", "invalid_request"),
        ({"initial_codec_chunk_frames": -1}, "initial_codec_chunk_frames", "invalid_request"),
        ({"response_format": "mp9"}, "response_format", "invalid_request"),
        ({"stream": False, "stream_format": "sse"}, "stream_format", "invalid_request"),
        ({"stream_format": "ogg"}, "stream_format", "invalid_request"),
        ({"voice": "ryan", "speaker": "vivian"}, "voice", "invalid_request"),
        ({"task_type": "Singing"}, "task_type", "invalid_voice"),
        ({"ref_audio": "data:audio/wav;base64,aGVsbG8="}, "ref_audio", "invalid_media"),
        ({"ref_audio": ["a", "b"]}, "ref_audio", "unsupported_option"),
        ({"max_new_tokens": 0}, "max_new_tokens", "invalid_request"),
        ({"seed": "x"}, "seed", "invalid_request"),
        ({"vioce": "ryan"}, "vioce", "invalid_request"),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: Served, fields: dict[str, Any], param: str, code: str) -> None:
    pipeline = FakePipeline()
    client = served(pipeline)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/audio/speech", body={"input": "Hello.", **fields}, cast_to=httpx.Response)
    assert (refusal.value.param, refusal.value.code) == (param, code)
    assert not pipeline.requests


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (BadVoice("no such", param="speaker"), "voice"),
        (BadVoice("no", param="instruct"), "instructions"),
        (PromptTooLong("long", param="messages"), "input"),
    ],
)
def test_what_the_pipeline_refuses_has_the_name_of_the_field(served: Served, error: Exception, param: str) -> None:
    def refuse(_: TurnRequest) -> Iterator[Event]:
        raise error
        yield

    with pytest.raises(openai.BadRequestError) as refusal:
        speak(served(FakePipeline(refuse)), response_format="pcm")
    assert refusal.value.param == param


def test_a_speaker_that_is_refused_has_the_name_that_the_request_gives_it(served: Served) -> None:
    def refuse(_: TurnRequest) -> Iterator[Event]:
        raise BadVoice(f"{field_name('speaker')} 'bob' is unknown", param="speaker")
        yield

    for field in ("voice", "speaker"):
        with pytest.raises(openai.BadRequestError, match=f"{field} 'bob' is unknown") as refusal:
            served(FakePipeline(refuse)).post(
                "/audio/speech", body={"input": "Hello.", field: "bob"}, cast_to=httpx.Response
            )
        assert refusal.value.param == field


def test_a_model_that_is_not_there_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        speak(served(FakePipeline()), model="tts-1")


# ---------------------------------------------------------------- failures


def fails(*before: Event) -> FakePipeline:
    return FakePipeline(lambda _: [*before, Ended("error", error=EngineError("code2wav failed"))])


@pytest.mark.parametrize(
    "asked", [{}, {"response_format": "pcm"}, {"stream_format": "audio"}, {"stream_format": "sse"}]
)
def test_a_failure_before_the_first_sound_has_a_real_status(served: Served, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.InternalServerError, match="code2wav failed") as failure:
        speak(served(fails(TextDelta("Hello."))), **asked)
    assert failure.value.code == "engine_error"


@pytest.mark.parametrize("reason", ["length", "loop", "silence"])
@pytest.mark.parametrize("asked", [{"response_format": "pcm"}, {"stream_format": "audio", "response_format": "mp3"}])
def test_bytes_of_speech_that_ran_away_do_not_pass_for_a_whole_answer(asked: dict[str, Any], reason: Any) -> None:
    pipeline = FakePipeline(
        lambda _: iter([AudioChunk(tone(440, 30)), Ended("stop", speech_reason=reason, speech_stopped=True)])
    )
    with (
        serving(pipeline) as url,
        httpx.stream("POST", f"{url}/v1/audio/speech", json={"input": "Hello.", **asked}) as response,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
    ):
        response.raise_for_status().read()


def test_bytes_of_speech_as_long_as_was_asked_for_end_as_they_should() -> None:
    pipeline = FakePipeline(lambda _: iter([AudioChunk(tone(440, 3)), Ended("stop", speech_reason="length")]))
    with serving(pipeline) as url:
        body = {"input": "Hello.", "response_format": "pcm", "max_new_tokens": 3}
        assert len(httpx.post(f"{url}/v1/audio/speech", json=body).content) == 3 * 2 * FRAME_SAMPLES


@pytest.mark.parametrize("asked", [{"response_format": "pcm"}, {"stream_format": "audio"}])
def test_a_byte_stream_that_fails_is_broken_off(asked: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    got: list[bytes] = []
    with (
        serving(fails(AudioChunk(tone(440, 1)))) as url,
        httpx.stream("POST", f"{url}/v1/audio/speech", json={"input": "Hello.", **asked}) as response,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete"),
    ):
        got.extend(response.iter_bytes())
    assert len(b"".join(got)) >= 2 * FRAME_SAMPLES
    assert "engine_error: code2wav failed" in caplog.text


def test_an_event_stream_that_fails_ends_with_the_error() -> None:
    with serving(fails(AudioChunk(tone(440, 1)))) as url:
        delta, last = events(post(url, stream_format="sse").text)
    assert delta["type"] == "speech.audio.delta"
    assert last["type"] == "error"
    assert last["error"]["code"] == "engine_error"


# ---------------------------------------------------------------- voices


def test_voices_are_the_names_of_the_checkpoint() -> None:
    with serving(FakePipeline()) as url:
        assert httpx.get(f"{url}/v1/audio/voices").json()["voices"] == ["vivian", "ryan"]


SWITCHED_OFF = r"voice.*switched off.*--deploy-config aura_omni\.yaml"


@pytest.mark.parametrize(("stages", "why"), [(("asr",), "does not speak"), (("asr", "aura"), SWITCHED_OFF)])
def test_a_server_without_a_voice_says_so(served: Served, stages: tuple[StageName, ...], why: str) -> None:
    pipeline = FakePipeline()
    pipeline.stages = stages
    client = served(pipeline)
    with pytest.raises(openai.NotFoundError, match=why):
        speak(client)
    assert httpx.get(f"{client.base_url}audio/voices").status_code == 404
