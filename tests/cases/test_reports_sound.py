"""A09 and A10 of the reports, and what is streamed: one file, one continuous sound, the same as not streamed."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from aura_omni.config import AudioChunks
from aura_omni.flow import FRAME_S, FRAME_SAMPLES, VOICE_RATE, AudioChunk, Ended, Event, TextDelta, TurnRequest
from aura_omni.media.audio import decode_audio
from tests.cases.ask import url_part
from tests.cases.conftest import Served, both
from tests.media_files import make_picture
from tests.nano import shown
from tests.server.fake import FakePipeline, serving, tone

HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello?"}],
    "max_tokens": 12,
    "seed": 5,
    "modalities": ["text", "audio"],
    "additional_information": {"tts_non_streaming_mode": False},  # spoken while it is written
}
SAID: dict[str, Any] = {"voice": "vivian", "input": "Hello there, all of you.", "seed": 5}


def post(url: str, body: dict[str, Any]) -> bytes:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


def pcm(data: bytes) -> np.ndarray:
    """int [n] of a joined stream: WAV or bare samples."""
    return np.frombuffer(data[44:] if data[:4] == b"RIFF" else data, "<i2").astype(int)


def events(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def chat_whole(url: str, audio_format: str, **fields: Any) -> bytes:
    answer = json.loads(
        post(f"{url}/v1/chat/completions", {**HELLO, "audio": {"voice": "vivian", "format": audio_format}, **fields})
    )
    return base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])


def chat_stream(url: str, audio_format: str, **fields: Any) -> bytes:
    body = {**HELLO, "audio": {"voice": "vivian", "format": audio_format}, "stream": True, **fields}
    pieces = []
    for chunk in events(post(f"{url}/v1/chat/completions", body)):
        for choice in chunk["choices"]:
            pieces.append(base64.b64decode(choice["delta"].get("audio", {}).get("data", "")))
    return b"".join(pieces)


def chat_upstream(url: str, audio_format: str, **fields: Any) -> bytes:
    """In the shape without OpenAI's `audio` object, which is always WAV."""
    pieces = []
    for chunk in events(post(f"{url}/v1/chat/completions", {**HELLO, "stream": True, **fields})):
        for choice in chunk["choices"]:
            if chunk["modality"] == "audio":
                pieces.append(base64.b64decode(choice["delta"].get("content", "")))
    return b"".join(pieces)


def speech_whole(url: str, audio_format: str, **fields: Any) -> bytes:
    return post(f"{url}/v1/audio/speech", {**SAID, "response_format": audio_format, **fields})


def speech_stream(url: str, audio_format: str, **fields: Any) -> bytes:
    body = {**SAID, "response_format": audio_format, "stream_format": "audio", **fields}
    return post(f"{url}/v1/audio/speech", body)


def speech_events(url: str, audio_format: str, **fields: Any) -> bytes:
    body = {**SAID, "response_format": audio_format, "stream_format": "sse", **fields}
    return b"".join(base64.b64decode(event.get("audio", "")) for event in events(post(f"{url}/v1/audio/speech", body)))


STREAMS = [
    (chat_whole, chat_stream),
    (chat_whole, chat_upstream),
    (speech_whole, speech_stream),
    (speech_whole, speech_events),
]


@cache
def once(whole: Callable[[str, str], bytes], url: str, audio_format: str) -> bytes:
    """What is not streamed, asked for one time by all tests."""
    return whole(url, audio_format)


each_stream = pytest.mark.parametrize(("whole", "streamed"), STREAMS)


# ---------------------------------------------------------------- A09


@both
@each_stream
def test_a09_a_wav_stream_is_one_file(served: Served, whole: Any, streamed: Any) -> None:
    file = streamed(served.url, "wav")
    assert file.count(b"RIFF") == 1
    assert file.startswith(b"RIFF")
    heard, meant = (decode_audio(data, max_s=60) for data in (file, once(whole, served.url, "wav")))
    assert heard.rate == VOICE_RATE
    assert heard.duration_s == meant.duration_s > 0.3


# ---------------------------------------------------------------- streamed equals whole


@both
@pytest.mark.parametrize(
    "chunks", [AudioChunks(1, 1), AudioChunks(1, 25), AudioChunks(2, 7), AudioChunks(8, 25)], ids=str
)
def test_streamed_sound_is_whole_sound_in_every_chunking(
    served: Served, chunks: AudioChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = served.witness.pipeline
    monkeypatch.setattr(pipeline, "config", replace(pipeline.config, audio_chunks=chunks))
    for whole, streamed in STREAMS:
        want, got = pcm(once(whole, served.url, "wav")), pcm(streamed(served.url, "wav"))
        assert len(got) == len(want) > 2 * FRAME_SAMPLES
        np.testing.assert_array_equal(got, want)


@both
@each_stream
def test_the_same_request_streamed_and_whole_is_the_same_to_the_last_sample(
    served: Served, whole: Any, streamed: Any
) -> None:
    np.testing.assert_array_equal(pcm(streamed(served.url, "wav")), pcm(once(whole, served.url, "wav")))


CODER_S = 0.1


def coder_delay(streamed: np.ndarray, whole: np.ndarray) -> int:
    """Samples in front that a file says to leave out and a stream cannot, because it would have to say how long it is."""
    for start in range(int(CODER_S * VOICE_RATE)):
        if np.array_equal(streamed[start : start + VOICE_RATE // 4], whole[: VOICE_RATE // 4]):
            return start
    raise AssertionError("the beginning of the whole sound is not in the streamed one")


@both
@pytest.mark.parametrize("audio_format", ["flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("streamed", [chat_stream, speech_stream, speech_events])
def test_streamed_sound_is_whole_sound_in_every_format(served: Served, streamed: Any, audio_format: str) -> None:
    whole = chat_whole if streamed is chat_stream else speech_whole
    files = streamed(served.url, audio_format), once(whole, served.url, audio_format)
    got, want = (decode_audio(file, max_s=60) for file in files)
    assert got.rate == want.rate
    start = coder_delay(got.samples, want.samples)
    assert 0 <= len(got.samples) - start - len(want.samples) < CODER_S * got.rate
    np.testing.assert_array_equal(got.samples[start : start + len(want.samples)], want.samples)


# ---------------------------------------------------------------- A10

TEN_SECONDS = round(10 / FRAME_S)
SINE = tone(220, TEN_SECONDS)  # of the fake vocoder: any seam in it can be heard and measured


def in_chunks(first: int, frames: int) -> Callable[[TurnRequest], Iterator[Event]]:
    def script(_: TurnRequest) -> Iterator[Event]:
        yield TextDelta("Hello.")
        bounds = [0, *range(first, TEN_SECONDS, frames), TEN_SECONDS]
        for start, stop in itertools.pairwise(bounds):
            yield AudioChunk(SINE[start * FRAME_SAMPLES : stop * FRAME_SAMPLES])
        yield Ended("stop", speech_reason="stop")

    return script


def largest_jump(samples: np.ndarray) -> float:
    return float(np.abs(np.diff(samples.astype(float))).max())


@pytest.mark.parametrize(("first", "frames"), [(1, 1), (1, 25), (2, 7), (8, 25), (TEN_SECONDS, TEN_SECONDS)])
def test_a10_no_seam_can_be_heard_in_any_chunking(first: int, frames: int) -> None:
    with serving(FakePipeline(in_chunks(first, frames))) as url:
        for whole, streamed in STREAMS:
            for read in (whole, streamed):
                got = pcm(read(url, "wav"))
                assert len(got) == len(SINE)
                assert largest_jump(got) <= largest_jump(SINE * 32_767) + 1


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "flac"])
@pytest.mark.parametrize("read", [chat_whole, speech_whole])
def test_a10_no_coded_file_has_a_seam(read: Any, audio_format: str) -> None:
    with serving(FakePipeline(in_chunks(1, 7))) as url:
        heard = decode_audio(read(url, audio_format), max_s=60)
    assert heard.duration_s == pytest.approx(10, abs=0.15)
    inside = heard.samples[heard.rate // 5 : -heard.rate // 5]  # coders smear the beginning and the end
    continuous = 0.5 * 2 * np.pi * 220 / heard.rate
    assert largest_jump(inside) <= 1.25 * continuous


# ---------------------------------------------------------------- many at once


SCENES = [scene for scene in shown.CASES if "moving" not in scene]


@cache
def looked_at(scene: str) -> dict[str, Any]:
    camera = shown.Camera(41, height=224, width=224, colours=shown.colours_of(scene))
    (frame,) = camera.chunk(scene, frames=1)
    return url_part("image", make_picture(Image.fromarray(frame), "PNG"), "image/png")


@both
def test_32_parallel_requests_get_exactly_their_own_text_and_sound(served: Served) -> None:
    """Every other one is a speech, the others an answer about a picture. A trained voice ends its speech by itself."""

    def speech(number: int) -> dict[str, Any]:
        body = {**SAID, "input": f"This is number {number}.", "seed": number, "response_format": "pcm"}
        return body if served.trained else {**body, "max_new_tokens": 4 + number % 7}

    def chat(number: int) -> dict[str, Any]:
        scene = SCENES[number // 2 % len(SCENES)]
        content = [
            looked_at(scene),
            {"type": "text", "text": "What do you see?" if served.trained else f"Number {number}?"},
        ]
        return {
            **HELLO,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.9,
            "seed": number,
            "max_tokens": 64 if served.trained else 3 + number % 5,
            "audio": {"voice": "vivian", "format": "pcm16"},
            "additional_information": {"tts_max_new_tokens": 4 + number % 7, "tts_non_streaming_mode": number % 4 == 0},
        }

    def ask(number: int) -> tuple[str, np.ndarray]:
        if number % 2:
            return "", pcm(post(f"{served.url}/v1/audio/speech", speech(number)))
        message = json.loads(post(f"{served.url}/v1/chat/completions", chat(number)))["choices"][0]["message"]
        return message["content"], pcm(base64.b64decode((message.get("audio") or {}).get("data", "")))

    alone = [ask(number) for number in range(32)]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, range(32)))
    for (text, sound), (own_text, own_sound) in zip(together, alone, strict=True):
        assert text == own_text
        np.testing.assert_array_equal(sound, own_sound)
    assert len({text for text, _ in alone}) > (len(SCENES) // 2 if served.trained else 12)
    assert len({sound.tobytes() for _, sound in alone}) > (20 if served.trained else 28)
