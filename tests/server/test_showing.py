"""A turn begins with its sounds, and is shown its pictures when they are decoded; nobody is told anything before."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest

from aura_omni.errors import BadMedia, EngineError, Forbidden, PromptTooLong
from aura_omni.flow import Audio, Coming, Ended, Event, Text, TurnRequest, Video
from aura_omni.media import budget
from aura_omni.media.budget import Budget
from aura_omni.media.fetch import MediaPolicy
from aura_omni.server import parts
from aura_omni.server.parts import MediaReader, threads
from aura_omni.server.schemas import ChatRequest, checked
from aura_omni.server.turns import opened
from tests.media_files import make_wav
from tests.server.conftest import data_url, mp4_bytes, png_bytes, wav_bytes
from tests.server.fake import WAIT_S, FakePipeline, FakeTurn, plain_answer, serving
from tests.server.test_failures import assert_cancelled, wait_for_turn

Content = list[dict[str, Any]]
SOUND = {"type": "audio_url", "audio_url": {"url": data_url(wav_bytes(), "audio/wav")}}
FILM = {"type": "video_url", "video_url": {"url": data_url(mp4_bytes(), "video/mp4")}}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png_bytes(), "image/png")}}
WORDS = {"type": "text", "text": "What is this?"}
BROKEN_FILM = {"type": "video_url", "video_url": {"url": data_url(wav_bytes(0.1), "video/mp4")}}
BROKEN_SOUND = {"type": "audio_url", "audio_url": {"url": data_url(b"no sound", "audio/wav")}}


class Gate:
    """Decoding of one kind of media that waits until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, decode: str) -> None:
        self.began = threading.Semaphore(0)
        self._open = threading.Event()
        real = getattr(parts, decode)

        def waits(*args: Any, **more: Any) -> Any:
            self.began.release()
            assert self._open.wait(WAIT_S)
            return real(*args, **more)

        patch.setattr(parts, decode, waits)

    def wait(self) -> None:
        assert self.began.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "decode_video")
    yield gate
    gate.open()


@pytest.fixture
def hearing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(parts, "SHORT_WAV", 0)  # in a thread, which can wait
    gate = Gate(monkeypatch, "decode_audio")
    yield gate
    gate.open()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """ask, in a thread."""
    with ThreadPoolExecutor(16) as pool:
        yield lambda *args, **more: pool.submit(ask, *args, **more)


def ask(url: str, content: Content, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)


def kinds(request: TurnRequest) -> list[type]:
    return [type(part) for message in request.messages for part in message.parts]


# ---------------------------------------------------------------- sooner


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_begins_while_its_pictures_are_decoded(seeing: Gate, beside: Any, stream: bool) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        asked = beside(url, [FILM, SOUND, PICTURE, WORDS], stream=stream)
        turn = wait_for_turn(pipeline)
        assert kinds(pipeline.requests[0]) == [Coming, Audio, Coming, Text]
        assert not turn.shown
        assert not asked.done()
        seeing.open()
        answer = asked.result(WAIT_S)
    assert answer.status_code == 200
    assert "Hello" in answer.text
    (videos,) = turn.shown
    assert [(len(video.frames), video.still) for video in videos] == [(3, False), (1, True)]
    assert kinds(pipeline.requests[0]) == [Video, Audio, Video, Text]


def test_pictures_of_all_messages_are_shown_in_their_order(seeing: Gate, beside: Any) -> None:
    pipeline = FakePipeline()
    earlier = [
        {"role": "user", "content": [PICTURE, WORDS]},
        {"role": "assistant", "content": "A bird."},
    ]
    with serving(pipeline) as url:
        body = {"messages": [*earlier, {"role": "user", "content": [SOUND, FILM, PICTURE]}]}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=WAIT_S)
            turn = wait_for_turn(pipeline)
            assert kinds(pipeline.requests[0]) == [Coming, Text, Text, Audio, Coming, Coming]
            seeing.open()
            assert asked.result(WAIT_S).status_code == 200
    assert [video.still for video in turn.shown[0]] == [True, False, True]


@pytest.mark.parametrize("content", [[FILM, WORDS], [PICTURE], [SOUND], [SOUND, WORDS], [WORDS]])
def test_a_turn_without_sound_or_without_pictures_begins_when_all_is_there(content: Content) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        assert ask(url, content).status_code == 200
    assert Coming not in kinds(pipeline.requests[0])
    assert not pipeline.turns[0].shown


def test_no_sound_waits_for_the_pictures_of_others(seeing: Gate, beside: Any) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        silent = [beside(url, [FILM, FILM, FILM]) for _ in range(4)]
        for _ in range(4):
            seeing.wait()  # all who decode pictures are busy
        spoken = [beside(url, [FILM, SOUND]) for _ in range(3)]
        wait_until(lambda: len(pipeline.turns) == 3)
        seeing.open()
        assert {asked.result(WAIT_S).status_code for asked in (*silent, *spoken)} == {200}


def test_sounds_of_a_request_are_begun_before_its_pictures(seeing: Gate, beside: Any) -> None:
    """Few media of one request are read side by side, and side by side each takes longer."""
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        asked = beside(url, [*[FILM] * 8, SOUND])
        wait_for_turn(pipeline)
        seeing.open()
        assert asked.result(WAIT_S).status_code == 200


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_picture_beside_good_sound_is_the_400_that_it_always_was(seeing: Gate, beside: Any, stream: bool) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        asked = beside(url, [SOUND, FILM, BROKEN_FILM], stream=stream)
        turn = wait_for_turn(pipeline)
        seeing.open()
        answer = asked.result(WAIT_S)
        alone = ask(url, [WORDS, FILM, BROKEN_FILM], stream=stream)
        assert turn.cancelled.wait(WAIT_S)
    assert answer.status_code == alone.status_code == 400
    assert answer.json() == alone.json()
    assert answer.json()["error"]["param"] == "messages[0].content[2].video_url"
    assert answer.headers["content-type"] == "application/json"
    assert not turn.shown
    assert len(pipeline.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [BadMedia("too thin", param="messages"), PromptTooLong("too long", param="messages"), EngineError("broken")],
)
def test_pictures_that_the_pipeline_refuses_have_a_real_status(
    seeing: Gate, beside: Any, error: Any, stream: bool
) -> None:
    def script(request: TurnRequest) -> Iterator[Event]:
        if Video in kinds(request):
            raise error
        yield from plain_answer(request)

    pipeline = FakePipeline(script)
    with serving(pipeline) as url:
        asked = beside(url, [SOUND, FILM], stream=stream)
        turn = wait_for_turn(pipeline)
        seeing.open()
        answer = asked.result(WAIT_S)
        assert answer.status_code == error.status
        assert answer.json()["error"]["message"] == error.message
        assert turn.shown
        assert turn.cancelled.is_set()
        assert ask(url, [SOUND]).status_code == 200


def test_no_turn_begins_whose_picture_is_found_to_be_bad_while_its_sound_is_fetched(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*args: Any, **more: Any) -> bytes:
        await asyncio.sleep(WAIT_S)
        return wav_bytes()

    monkeypatch.setattr(parts, "fetch", slow)
    far = {"type": "audio_url", "audio_url": {"url": "http://far.test/a.wav"}}
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        answer = beside(url, [far, BROKEN_FILM]).result(WAIT_S)
        assert answer.json()["error"]["param"] == "messages[0].content[1].video_url"
        assert not pipeline.turns


def test_no_turn_begins_whose_sound_is_bad(seeing: Gate) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        answer = ask(url, [FILM, SOUND, BROKEN_SOUND])
        assert answer.json()["error"]["param"] == "messages[0].content[2].audio_url"
        assert not pipeline.turns


def test_no_picture_is_begun_before_the_sound_that_came_with_it_is_there(
    hearing: Gate, seeing: Gate, beside: Any
) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        asked = beside(url, [FILM, SOUND])
        hearing.wait()
        assert not seeing.began.acquire(timeout=0.1)
        hearing.open()
        seeing.wait()
        seeing.open()
        assert asked.result(WAIT_S).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_turn_fails_with_while_its_pictures_are_decoded_is_told(seeing: Gate, beside: Any, stream: bool) -> None:
    class Deaf(FakePipeline):
        def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> FakeTurn:
            turn = super().submit(request, lambda event: None)
            sink(Ended("error", error=EngineError("the ear is broken")))
            turn.see = lambda videos: ()
            return turn

    pipeline = Deaf()
    with serving(pipeline) as url:
        asked = beside(url, [SOUND, FILM], stream=stream)
        wait_for_turn(pipeline)
        seeing.open()
        answer = asked.result(WAIT_S)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the ear is broken"


def test_pixels_are_counted_over_all_media_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budget._MOST, "pixels", 2_000)
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        answer = ask(url, [SOUND, PICTURE, PICTURE, PICTURE])
    assert answer.status_code == 400
    assert "2,304 pixels" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- given up


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_pictures_are_decoded_cancels_the_turn(seeing: Gate, stream: bool) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"messages": [{"role": "user", "content": [SOUND, FILM]}], "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            turn = wait_for_turn(pipeline)
            seeing.wait()
            assert not turn.cancelled.is_set()
            left_at_s = time.monotonic()
        assert_cancelled(turn, left_at_s)
        seeing.open()
        assert turn.ended.wait(WAIT_S) or turn.cancelled.is_set()
        assert ask(url, [SOUND, FILM]).status_code == 200
    assert not turn.shown


def test_time_that_is_over_while_pictures_are_decoded_cancels_the_turn(
    seeing: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aura_omni.server.answer.LAST_WORDS_S", 0.1)
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        answer = ask(url, [SOUND, FILM], headers={"x-request-timeout": "0.3"})
        assert pipeline.turns[0].cancelled.wait(WAIT_S)
    assert answer.status_code == 504
    assert "0.3 s, as x-request-timeout asked" in answer.json()["error"]["message"]


def test_turns_are_counted_from_their_sound_on(seeing: Gate, beside: Any) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        asked = beside(url, [SOUND, FILM])
        wait_for_turn(pipeline)
        time.sleep(0.25)
        seeing.open()
        assert asked.result(WAIT_S).status_code == 200
        lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines())
    assert float(lines['aura_omni:time_to_first_token_seconds_sum{part="turn"}']) >= 0.25
    assert lines['aura_omni:turns_total{outcome="stop",part="turn"}'] == "1.0"


# ---------------------------------------------------------------- what is held


def messages(*content: dict[str, Any]) -> Any:
    return checked(ChatRequest, {"messages": [{"role": "user", "content": list(content)}]}).messages


@pytest.mark.parametrize("film", [FILM, BROKEN_FILM], ids=["refused by the turn", "bad"])
def test_what_is_refused_for_its_pictures_keeps_nothing_of_its_request(seeing: Gate, film: dict[str, Any]) -> None:
    """Not even until the garbage collector comes: media may be hundreds of megabytes."""
    held: list[weakref.ref[Any]] = []

    def script(request: TurnRequest) -> Iterator[Event]:
        raise BadMedia("too thin", param="messages")
        yield

    async def read() -> None:
        async with MediaReader(MediaPolicy()).reading(messages(SOUND, film), budget=Budget()) as read:
            held.extend(weakref.ref(part.samples) for part in read.messages[0].parts if isinstance(part, Audio))
            seeing.open()
            async with opened(pipeline, TurnRequest(read.messages), read.pictures):
                raise AssertionError("an answer begins")

    async def refused() -> None:
        with suppress(BadMedia):
            await read()

    pipeline = FakePipeline(script)
    gc.disable()
    try:
        asyncio.run(refused())
        pipeline.requests.clear()
        (sound,) = held
        wait_until(lambda: sound() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize(("cores", "most"), [(1, 4), (8, 4), (16, 12), (128, 16)])
def test_more_is_decoded_at_once_where_there_are_cores_for_it(cores: int, most: int) -> None:
    assert threads(cores) == most


def test_a_short_plain_wav_is_decoded_where_it_came_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hearers = ThreadPoolExecutor(1, "hear")
    reader = MediaReader(MediaPolicy(), hearers=hearers)
    where: list[str] = []
    real = parts.decode_audio

    def decode(data: bytes, **more: Any) -> Audio:
        where.append(threading.current_thread().name.partition("_")[0])
        return real(data, **more)

    monkeypatch.setattr(parts, "decode_audio", decode)
    loop = threading.current_thread().name
    eight_bits = make_wav(bytes(range(256)) * 30, 16_000, tag=1, bits=8)
    long = wav_bytes(parts.SHORT_WAV / 4 * 3 / 2 / 16_000 + 0.1)
    sounds = [(wav_bytes(), loop), (eight_bits, "hear"), (long, "hear")]
    for data, expected in sounds:
        for source in (data_url(data, "audio/wav"), data_url(data, "audio/wav").partition(",")[2]):
            found = asyncio.run(reader.audio(source, param="x", budget=Budget()))
            assert np.array_equal(found.samples, real(data, max_s=1e9).samples)
            assert where.pop() == expected
    with pytest.raises(BadMedia):
        asyncio.run(reader.audio(data_url(b"RIFF and no more", "audio/wav"), param="x", budget=Budget()))
    assert where == ["hear"]


@pytest.mark.parametrize("url", ["file:///tmp/a,UklGR.wav", "https://example.com/a,UklGR.wav"])
def test_a_place_may_be_called_like_the_beginning_of_a_wav(url: str) -> None:
    with pytest.raises(Forbidden):
        asyncio.run(MediaReader(MediaPolicy()).audio(url, param="x", budget=Budget()))


@pytest.mark.parametrize("body", ["%" * 100, "%41" * 100])
def test_what_has_to_be_unquoted_first_is_not_decoded_on_the_event_loop(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a hundred times as long as base64, up to 0.2 s for what is short otherwise."""
    where: list[str] = []
    real = parts.decode_base64

    def decode(*given: Any, **more: Any) -> bytes:
        where.append(threading.current_thread().name.partition("_")[0])
        return real(*given, **more)

    monkeypatch.setattr(parts, "decode_base64", decode)
    reader = MediaReader(MediaPolicy(), hearers=ThreadPoolExecutor(1, "hear"))
    with pytest.raises(BadMedia):
        asyncio.run(reader.audio(f"data:audio/wav;base64,UklGR{body}", param="x", budget=Budget()))
    assert where == ["hear"]


def test_of_many_short_sounds_only_the_first_are_decoded_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 64 of them would keep it from everybody for a tenth of a second."""
    here: list[int] = []
    real = parts.decode_audio

    def decode(data: bytes, **more: Any) -> Audio:
        if threading.current_thread() is threading.main_thread():
            here.append(len(data))
        return real(data, **more)

    async def read(body: ChatRequest) -> None:
        async with MediaReader(MediaPolicy()).reading(body.messages, budget=Budget()) as found:
            (message,) = found.messages
            assert len(message.parts) == 16

    monkeypatch.setattr(parts, "decode_audio", decode)
    sound = {"type": "audio_url", "audio_url": {"url": data_url(wav_bytes(3.0), "audio/wav")}}
    asyncio.run(read(checked(ChatRequest, {"messages": [{"role": "user", "content": [sound] * 16}]})))
    assert 2 <= len(here) <= 4
    assert sum(here) <= parts.SHORT_WAV
