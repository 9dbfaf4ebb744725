"""A06, A08 and A11 of the reports: one message, failures that show, lines that every client can read."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from aura_omni.config import AudioChunks
from aura_omni.errors import EngineError
from aura_omni.flow import FRAME_S, FRAME_SAMPLES, VOICE_RATE, AudioChunk, Ended, Event, TextDelta, TurnRequest, Usage
from tests.cases.conftest import Served, both, served_with
from tests.family import config
from tests.server.fake import FakePipeline, serving, tone

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 8}
MINUTE = round(60 / FRAME_S)  # frames


def talker_steps(served: Served) -> int:
    return served.witness.pipeline.parts.ar_runners["talker"].counters.steps


# ---------------------------------------------------------------- A06


@both
def test_a06_text_alone_runs_no_talker_and_has_no_audio(served: Served) -> None:
    before = talker_steps(served)
    (choice,) = served.client.chat.completions.create(model=served.model, **HELLO, modalities=["text"]).choices
    assert choice.message.content
    assert choice.message.audio is None
    for chunk in served.client.chat.completions.create(model=served.model, **HELLO, modalities=["text"], stream=True):
        assert all(getattr(entry.delta, "audio", None) is None for entry in chunk.choices)
        assert chunk.model_extra["modality"] == "text"
    assert talker_steps(served) == before


@both
def test_a06_text_and_audio_are_one_message(served: Served) -> None:
    before = talker_steps(served)
    (choice,) = served.client.chat.completions.create(model=served.model, **HELLO, modalities=["text", "audio"]).choices
    audio = choice.message.audio
    assert choice.message.content == audio.transcript
    assert audio.id
    assert audio.expires_at
    assert base64.b64decode(audio.data)[:4] == b"RIFF"
    assert talker_steps(served) > before


@both
@pytest.mark.parametrize("audio", [None, {"voice": "vivian", "format": "pcm16"}])
def test_a06_a_stream_of_text_and_audio_is_one_choice(served: Served, audio: dict[str, str] | None) -> None:
    fields = {} if audio is None else {"audio": audio}
    stream = served.client.chat.completions.create(
        model=served.model, **HELLO, modalities=["text", "audio"], stream=True, **fields
    )
    chunks = [chunk for chunk in stream if chunk.choices]
    assert {entry.index for chunk in chunks for entry in chunk.choices} == {0}
    assert {chunk.model_extra["modality"] for chunk in chunks} == {"text", "audio"}
    assert sum(entry.finish_reason is not None for chunk in chunks for entry in chunk.choices) == 1


@both
@pytest.mark.parametrize("modalities", [["video"], ["text", "smell"], [], ["TEXT"]])
def test_a06_a_modality_that_is_not_served_is_refused(served: Served, modalities: list[Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="modalities") as refusal:
        served.client.chat.completions.create(model=served.model, **HELLO, modalities=modalities)
    assert refusal.value.param == "modalities"


# ---------------------------------------------------------------- A08

CHAT = ("/v1/chat/completions", {"model": "AURA", "messages": HELLO["messages"]})
SPEECH = ("/v1/audio/speech", {"model": "AURA", "input": "Hello."})
STREAMED = [
    ("chat", *CHAT[:1], {**CHAT[1], "stream": True}),
    ("chat as OpenAI", *CHAT[:1], {**CHAT[1], "stream": True, "modalities": ["text", "audio"], "audio": {"voice": "vivian", "format": "wav"}}),
    ("speech", *SPEECH[:1], {**SPEECH[1], "response_format": "pcm"}),
    ("speech, wav", *SPEECH[:1], {**SPEECH[1], "stream_format": "audio"}),
    ("speech in events", *SPEECH[:1], {**SPEECH[1], "stream_format": "sse"}),
]  # fmt: skip
WHOLE = [("chat", *CHAT), ("speech", *SPEECH)]


def fails_at_once(_: TurnRequest) -> Iterator[Event]:
    yield Ended("error", error=EngineError("the stage broke"))


def fails_after_two_chunks(_: TurnRequest) -> Iterator[Event]:
    yield TextDelta("Hel")
    yield AudioChunk(tone(220, 2))
    yield AudioChunk(tone(220, 2))
    yield Ended("error", error=EngineError("the stage broke"))


@pytest.mark.parametrize(("name", "path", "body"), STREAMED + WHOLE)
def test_a08_a_failure_before_the_first_token_has_a_status(name: str, path: str, body: dict[str, Any]) -> None:
    with serving(FakePipeline(fails_at_once)) as url:
        answer = httpx.post(url + path, json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the stage broke"


@pytest.mark.parametrize(("name", "path", "body"), WHOLE)
def test_a08_a_failure_later_is_no_whole_answer(name: str, path: str, body: dict[str, Any]) -> None:
    with serving(FakePipeline(fails_after_two_chunks)) as url:
        assert httpx.post(url + path, json=body).status_code == 500


@pytest.mark.parametrize(("name", "path", "body"), STREAMED)
def test_a08_a_failure_in_a_stream_cannot_be_taken_for_its_end(name: str, path: str, body: dict[str, Any]) -> None:
    with serving(FakePipeline(fails_after_two_chunks)) as url, httpx.stream("POST", url + path, json=body) as answer:
        assert answer.status_code == 200
        if "event-stream" not in answer.headers["content-type"]:
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                answer.read()
            return
        *_, last = [line for line in answer.iter_lines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
    assert "[DONE]" not in last


def test_a08_the_official_client_raises_in_the_middle_of_a_stream() -> None:
    with (
        serving(FakePipeline(fails_after_two_chunks)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIError, match="the stage broke"):
            list(client.chat.completions.create(**CHAT[1], stream=True))
        with (
            client.audio.speech.with_streaming_response.create(
                **SPEECH[1], voice="vivian", response_format="pcm"
            ) as speech,
            pytest.raises(Exception, match="incomplete chunked read"),  # of whichever HTTP library the client uses
        ):
            speech.read()


# ---------------------------------------------------------------- A11

LONG_TEXT = "Every word of this sentence has its time. " * 4
SPOKEN_FOR = {"min_tokens": MINUTE, "max_tokens": MINUTE}


@pytest.fixture(scope="module")
def talkative() -> Iterator[Served]:
    """Every answer is long, is spoken for a minute, and is cut in chunks of 2 s, each too long for a line."""
    aura = {"default_sampling_params": {"min_tokens": 80, "max_tokens": 80, "temperature": 0.0}}
    talker = {"default_sampling_params": {**SPOKEN_FOR, "temperature": 0.9}}
    with served_with(config(aura=aura, talker=talker), audio_chunks=AudioChunks(25, 25)) as served:
        yield served


def in_events(model: str, audio_format: str) -> list[tuple[str, dict[str, Any]]]:
    chat = {"model": model, "messages": HELLO["messages"], "stream": True}
    openai_audio = {"modalities": ["text", "audio"], "audio": {"voice": "vivian", "format": audio_format}}
    speech = {"model": model, "input": LONG_TEXT, "voice": "vivian", "stream_format": "sse"}
    return [
        (CHAT[0], chat),
        (CHAT[0], {**chat, **openai_audio}),
        (SPEECH[0], {**speech, "response_format": audio_format}),
    ]


def lines(url: str, *requests: tuple[str, dict[str, Any]]) -> list[list[bytes]]:
    """Of all requests, sent together: as the default reader of aiohttp gives them, which raises for those too long."""

    async def read(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[bytes]:
        async with session.post(url + path, json=body) as answer:
            assert answer.status == 200
            return [line async for line in answer.content if line.strip()]

    async def read_all() -> list[list[bytes]]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(read(session, path, body) for path, body in requests))

    return asyncio.run(read_all())


def sound_in(line: bytes) -> bytes:
    """Of an event in any of the shapes; the text of an event is no sound."""
    event = json.loads(line.removeprefix(b"data: "))
    if "choices" not in event:
        return base64.b64decode(event.get("audio", ""))
    deltas = [choice["delta"] for choice in event["choices"]]
    shapes = (
        delta.get("audio", {}).get("data") or (event["modality"] == "audio" and delta.get("content"))
        for delta in deltas
    )
    return b"".join(base64.b64decode(data) for data in shapes if data)


def test_a11_a_minute_of_speech_comes_in_lines_that_aiohttp_reads(talkative: Served) -> None:
    chat, _, speech = in_events(talkative.model, "wav")
    _, as_openai, _ = in_events(talkative.model, "pcm16")
    for found in lines(talkative.url, chat, as_openai, speech):
        events = [line for line in found if b"[DONE]" not in line]
        sound = b"".join(map(sound_in, events))
        assert len(sound) // 2 // FRAME_SAMPLES == MINUTE
        assert max(map(len, events)) < 60_000
        assert len(events[-1]) < 1_000, "the end does not repeat the sound"


TOLD = [
    "A red circle and a blue square meet in the middle of a big picture, and a pink heart looks on from the left.",
    "The circle is small and the square is big, but the heart is black.",
    "They all move to the right, and a green star comes from the top.",
]
WORD_S = (0.18, 0.35)  # of an unhurried voice


def test_a11_a_long_text_is_spoken_to_its_end_in_such_lines(nano: Served) -> None:
    """By a voice that ends when it has said everything: what is left out at any place would be missing from its length."""
    speech = {"voice": "vivian", "seed": 3, "response_format": "wav", "stream_format": "sse"}
    texts = [" ".join(TOLD[:count]) for count in (1, 2, 3)]
    lengths_s = [0.0]
    for found in lines(nano.url, *((SPEECH[0], {**speech, "input": text}) for text in texts)):
        assert max(map(len, found)) < 60_000
        assert len(found[-1]) < 1_000, "the end does not repeat the sound"
        assert json.loads(found[-1].removeprefix(b"data: "))["audio_finish_reason"] == "stop"
        samples = len(b"".join(map(sound_in, found))[44:]) // 2
        lengths_s.append(samples / VOICE_RATE)
    for sentence, (before_s, after_s) in zip(TOLD, itertools.pairwise(lengths_s), strict=True):
        assert WORD_S[0] < (after_s - before_s) / len(sentence.split()) < WORD_S[1]


def a_book_at_once(_: TurnRequest) -> Iterator[Event]:
    yield TextDelta("word " * 20_000)
    yield AudioChunk(tone(220, MINUTE))
    yield Ended("stop", Usage(), speech_reason="stop")


@pytest.mark.parametrize(("path", "body"), in_events("AURA", "wav"))
def test_a11_what_no_model_gives_at_once_comes_in_such_lines_too(path: str, body: dict[str, Any]) -> None:
    """A fake, for AURA writes token by token and Code2Wav speaks in chunks: neither a text of 100 kB nor a minute of sound
    is ever in one of their events. The server must not lean on that."""
    with serving(FakePipeline(a_book_at_once)) as url:
        (found,) = lines(url, (path, body))
    assert len(found) > 60
    assert max(map(len, found)) < 60_000
    assert len(found[-1]) < 1_000, "the end does not repeat the sound"
