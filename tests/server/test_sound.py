"""The sound of a reply on its way to the client: the same in every format, however it is made, cut and sent."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest

from aura_omni.flow import FRAME_SAMPLES, VOICE_RATE, AudioChunk, Ended, Event, Playback, TextDelta, TurnRequest
from aura_omni.media.audio import decode_audio
from aura_omni.media.encoder import AudioFormat
from tests.server.fake import USAGE, WAIT_S, FakePipeline, Script, serving, tone

FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
# A reply of 40 frames as different paces send it
CUTS = [[40], [1] * 40, [1, 1, 2, 4, 8, 16, 8], [8, 25, 7], [39, 1]]
SINE = tone(220, 40)
HELLO: Any = [{"role": "user", "content": "Hi."}]
Served = Callable[..., openai.OpenAI]


def saying(samples: np.ndarray, cut: Sequence[int], before: Sequence[Event] = ()) -> Script:
    """The samples in chunks of so many frames."""

    def script(_: TurnRequest) -> Iterator[Event]:
        yield from before
        for chunk in np.split(samples, np.cumsum(cut)[:-1] * FRAME_SAMPLES):
            yield AudioChunk(chunk)
        yield Ended("stop", USAGE, speech_reason="stop")

    return script


def speech(url: str, **fields: Any) -> httpx.Response:
    response = httpx.post(f"{url}/v1/audio/speech", json={"input": "Hello.", **fields}, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    return response


def joined(events: str) -> bytes:
    """The sound of `speech.audio.delta` events."""
    data = [json.loads(line[6:]) for line in events.split("\n\n") if line]
    return b"".join(base64.b64decode(event["audio"]) for event in data if event["type"] == "speech.audio.delta")


def heard(data: bytes, kind: str, rate: int = VOICE_RATE) -> np.ndarray:
    """What a player makes of it."""
    if kind == "pcm16":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32_767
    audio = decode_audio(data, max_s=600)
    assert audio.rate == (48_000 if kind == "opus" else rate)
    return audio.samples


# ---------------------------------------------------------------- streamed equals whole


@pytest.mark.parametrize("kind", FORMATS)
def test_a_reply_is_the_same_bytes_however_it_is_made_and_sent(kind: AudioFormat) -> None:
    sent = set()
    for cut in CUTS:
        with serving(FakePipeline(saying(SINE, cut))) as url:
            sent.add(speech(url, response_format=kind, stream_format="audio").content)
            sent.add(joined(speech(url, response_format=kind, stream_format="sse").text))
            whole = speech(url, response_format=kind).content
    (stream,) = sent
    skipped = 1_105 if kind == "mp3" else 0  # only the whole file can say what a player should skip
    assert np.array_equal(heard(stream, kind)[skipped:][: len(heard(whole, kind))], heard(whole, kind))
    if kind not in ("mp3", "aac", "opus"):  # their players add silence at the end
        assert len(heard(stream, kind)) == len(SINE)


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [
        ("wav", "audio/wav"),
        ("pcm", "audio/pcm;rate=24000;channels=1"),
        ("flac", "audio/flac"),
        ("mp3", "audio/mpeg"),
        ("opus", "audio/ogg"),
        ("aac", "audio/aac"),
    ],
)
def test_a_reply_says_what_it_is(kind: str, media_type: str) -> None:
    with serving(FakePipeline()) as url:
        for asked in ({}, {"stream_format": "audio"}, {"stream": True}):
            assert speech(url, response_format=kind, **asked).headers["content-type"] == media_type
        events = speech(url, response_format=kind, stream_format="sse")
    assert events.headers["content-type"].startswith("text/event-stream")
    assert json.loads(events.text.split("\n\n")[0][6:])["response_format"] == kind


@pytest.mark.parametrize("voice", [{}, {"voice": ""}], ids=["upstream's shape", "OpenAI's shape"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_chat_streams_every_format_as_one_file(served: Served, kind: AudioFormat, voice: dict[str, str]) -> None:
    client = served(FakePipeline(saying(SINE, [1, 1, 2, 4, 8, 24], before=[TextDelta("Hello.")])))
    asked: Any = {"model": "AURA", "messages": HELLO, "audio": {"format": kind, **voice}}
    whole = client.chat.completions.create(**asked).choices[0]
    data, count = b"", 0
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0].model_dump()
        if choice.get("audio_metadata"):
            assert chunk.modality == "audio"
            count += choice["audio_metadata"]["frame_count"]
            data += base64.b64decode(choice["delta"]["audio"]["data"] if voice else choice["delta"]["content"])
    assert count == whole.audio_metadata["frame_count"] == len(SINE)
    skipped = 1_105 if kind == "mp3" else 0
    want = heard(base64.b64decode(whole.message.audio.data), kind)
    assert np.array_equal(heard(data, kind)[skipped:][: len(want)], want)


# ---------------------------------------------------------------- A10: no clicks


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_seam_between_chunks_can_be_heard(cut: list[int], rate: int) -> None:
    sine = 0.5 * np.sin(2 * np.pi * 220 * np.arange(len(SINE) * rate // VOICE_RATE) / rate)
    most = np.abs(np.diff(sine)).max() + 2 / 32_767
    with serving(FakePipeline(saying(SINE, cut))) as url:
        got = heard(speech(url, response_format="wav", stream_format="audio", sample_rate=rate).content, "wav", rate)
    assert len(got) == len(sine)
    inside = got[rate // 50 : -rate // 50]  # before and after the sound is silence, which a sine does not run into
    assert np.abs(np.diff(inside)).max() <= most
    assert np.abs(inside - sine[rate // 50 : -rate // 50]).max() < 1e-3


# ---------------------------------------------------------------- speed and rate


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.5, 4.0])
@pytest.mark.parametrize("kind", ["pcm16", "wav", "flac", "mp3", "opus", "aac"])
def test_at_another_speed_streamed_is_whole_and_as_long_as_it_says(kind: AudioFormat, speed: float) -> None:
    sent, fields = set(), {"response_format": kind, "speed": speed}
    for cut in CUTS[:3]:
        pipeline = FakePipeline(saying(SINE, cut))
        with serving(pipeline) as url:
            sent.add(speech(url, stream_format="audio", **fields).content)
            events = speech(url, stream_format="sse", **fields).text
            sent.add(joined(events))
            whole = heard(speech(url, **fields).content, kind)
        assert {request.playback.speed for request in pipeline.requests} == {speed}
    (stream,) = sent
    skipped = 1_105 if kind == "mp3" else 0
    assert np.array_equal(heard(stream, kind)[skipped:][: len(whole)], whole)
    rate, padding = (48_000, 0) if kind == "opus" else (VOICE_RATE, 2_048 if kind == "aac" else 0)
    if kind != "pcm16":  # pcm16 is always streamed
        assert 0 <= len(whole) / rate - len(SINE) / VOICE_RATE / speed <= padding / VOICE_RATE + 1e-3
    assert json.loads(events.split("\n\n")[-2][6:])["usage"]["output_tokens"] == USAGE.audio_frames


def test_speed_one_is_no_speed_at_all() -> None:
    with serving(FakePipeline(saying(SINE, [40]))) as url:
        assert speech(url, speed=1).content == speech(url, speed=1.0).content == speech(url).content


@pytest.mark.parametrize(
    ("fields", "live"),
    [({}, False), ({"stream_format": "audio"}, True), ({"stream_format": "sse"}, True), ({"stream": True}, True),
     ({"response_format": "pcm"}, True)],
)  # fmt: skip
def test_the_engine_knows_whether_somebody_listens(fields: dict[str, Any], live: bool) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        speech(url, **fields)
    assert pipeline.requests[0].playback == Playback(live=live)


def test_a_chat_says_whether_somebody_listens(served: Served) -> None:
    pipeline = FakePipeline()
    client = served(pipeline)
    more = {"additional_information": {"initial_codec_chunk_frames": [2]}}
    client.chat.completions.create(model="AURA", messages=HELLO)
    list(client.chat.completions.create(model="AURA", messages=HELLO, stream=True, extra_body=more))
    assert [request.playback for request in pipeline.requests] == [Playback(live=False), Playback(first_frames=2)]


# ---------------------------------------------------------------- A11: lines that every reader takes


@pytest.mark.parametrize("kind", FORMATS)
def test_a_minute_of_speech_has_no_long_line_and_is_sent_once(kind: AudioFormat) -> None:
    noise = np.random.default_rng(0).normal(0, 0.3, 750 * FRAME_SAMPLES).astype(np.float32)

    async def longest_line(port: int, path: str, body: dict[str, Any]) -> tuple[int, int]:
        """Read with asyncio's own line reader, whose limit is 64 KiB."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        lengths = [len(line) async for line in reader]
        writer.close()
        return max(lengths), sum(lengths)

    with serving(FakePipeline(saying(noise, [750]))) as url:
        port = urlsplit(url).port
        assert port is not None
        whole = len(speech(url, response_format=kind).content)
        body: dict[str, Any] = {"input": "Hello.", "response_format": kind, "stream_format": "sse"}
        _, total = asyncio.run(longest_line(port, "/v1/audio/speech", body))
        assert 4 / 3 * whole < total < 1.5 * whole + 200 * whole / 20_000 + 4_000
        body = {"messages": HELLO, "stream": True, "audio": {"format": kind, "voice": "ryan"}}
        longest, _ = asyncio.run(longest_line(port, "/v1/chat/completions", body))
        assert longest < 40_000


# ---------------------------------------------------------------- a slow client


def test_a_client_that_reads_slowly_gets_every_sample_and_holds_up_nobody() -> None:
    """32 MB are more than the sockets hold: the server keeps the rest, and the turn ends long before it is read."""
    long = np.tile(tone(220, 50), 160)
    pipeline = FakePipeline(saying(long, [25] * 320))
    with serving(pipeline) as url, socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as client:
        content = b'{"input": "Hello.", "response_format": "pcm"}'
        head = f"POST /v1/audio/speech HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        begun_s = time.monotonic()
        while not (pipeline.turns and pipeline.turns[0].ended.is_set()):
            assert time.monotonic() - begun_s < WAIT_S
            time.sleep(0.01)
        assert speech(url, response_format="opus").content  # others are served meanwhile
        client.settimeout(WAIT_S)
        got = io.BytesIO()
        while data := client.recv(2**20):
            got.write(data)
    sound = np.frombuffer(got.getvalue().partition(b"\r\n\r\n")[2], "<i2")
    assert np.array_equal(sound, np.rint(long.astype(np.float64) * 32_767).astype("<i2"))


# ---------------------------------------------------------------- failures


def broken(_: TurnRequest) -> Iterator[Event]:
    yield AudioChunk(SINE)
    yield AudioChunk(np.full(FRAME_SAMPLES, np.nan, np.float32))
    yield Ended("stop", USAGE, speech_reason="stop")


@pytest.mark.parametrize("kind", FORMATS)
def test_sound_that_cannot_be_encoded_is_a_visible_failure(kind: str) -> None:
    pipeline = FakePipeline(broken)
    with serving(pipeline) as url:
        *_, last = speech(url, response_format=kind, stream_format="sse").text.strip().split("\n\n")
        assert "NaN" in json.loads(last[6:])["error"]["message"]
        body: dict[str, Any] = {"input": "Hello.", "response_format": kind, "stream_format": "audio"}
        with (
            httpx.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=WAIT_S) as response,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            list(response.iter_bytes())
        chat = {"messages": HELLO, "stream": True, "audio": {"format": kind}}
        lines = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=WAIT_S).text.strip().split("\n\n")
    assert any('"error"' in line for line in lines[-2:])


def test_an_empty_chunk_is_no_sound() -> None:
    def script(_: TurnRequest) -> Iterator[Event]:
        yield AudioChunk(np.zeros(0, np.float32))
        yield Ended("stop", USAGE)

    with serving(FakePipeline(script)) as url:
        silence = speech(url, response_format="flac", stream_format="audio").content
    assert not heard(silence, "flac").any()
    assert len(heard(silence, "flac")) == FRAME_SAMPLES


def test_the_header_comes_with_the_first_sound_and_not_before() -> None:
    def late(_: TurnRequest) -> Iterator[Event]:
        yield AudioChunk(SINE[:FRAME_SAMPLES])
        time.sleep(0.3)
        yield AudioChunk(SINE[FRAME_SAMPLES:])
        yield Ended("stop", USAGE)

    with serving(FakePipeline(late)) as url:
        for kind in ("wav", "flac", "opus", "mp3"):
            body = {"input": "Hello.", "response_format": kind, "stream_format": "audio"}
            times_s, sizes = [], []
            with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=WAIT_S) as response:
                for data in response.iter_raw():
                    times_s.append(time.monotonic())
                    sizes.append(len(data))
            assert max(after - before for before, after in pairwise(times_s)) > 0.2, kind
            assert sizes[0] > 300, kind
