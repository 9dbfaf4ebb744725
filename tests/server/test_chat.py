"""What an answer looks like, seen by the official client."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from aura_omni.flow import (
    FRAME_SAMPLES,
    SILENT_TEXT,
    VOICE_RATE,
    Audio,
    AudioChunk,
    Ended,
    Event,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
)
from aura_omni.media.encoder import pcm16
from tests.server.conftest import data_url, mp4_bytes, png_bytes, wav_bytes
from tests.server.fake import USAGE, FakePipeline, pictures, said, tone

Served = Callable[..., openai.OpenAI]
HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]


def silence(request: TurnRequest) -> Iterator[Event]:
    yield Transcript("nobody asked")
    yield Ended("silent", USAGE)


def spoken(data: str) -> np.ndarray:
    """int16 samples of a base64 WAV file."""
    with wave.open(io.BytesIO(base64.b64decode(data))) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (VOICE_RATE, 1, 2)
        return np.frombuffer(reader.readframes(reader.getnframes()), "<i2")


def test_one_choice_carries_text_and_audio(served: Served) -> None:
    answer = served(FakePipeline()).chat.completions.create(model="AURA", messages=HELLO)
    (choice,) = answer.choices
    message = choice.message
    assert message.content == "Hello there."
    assert message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert message.audio is not None
    assert message.audio.id.startswith("audio-")
    assert message.audio.transcript == "Hello there."
    assert message.audio.expires_at == answer.created + 24 * 3600
    expected = np.concatenate([tone(440, 1), tone(440, 3)])
    assert spoken(message.audio.data).tobytes() == pcm16(expected)
    extra = choice.model_extra
    assert extra["silent"] is False
    assert extra["audio_metadata"] == {"format": "wav", "sample_rate_hz": 24_000, "frame_count": 7_680, "channels": 1}
    assert extra["audio_finish_reason"] == "stop"


def test_usage_counts_text_audio_and_video(served: Served) -> None:
    usage = served(FakePipeline()).chat.completions.create(model="AURA", messages=HELLO).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (41, 7, 48)
    assert usage.prompt_tokens_details.audio_tokens == 13
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert usage.prompt_tokens_details.text_tokens == 11
    assert usage.prompt_tokens_details.video_tokens == 17
    assert usage.completion_tokens_details.audio_tokens == 4


@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]])
def test_sound_is_refused_where_the_voice_is_switched_off(served: Served, modalities: list[str]) -> None:
    pipeline = FakePipeline()
    pipeline.stages = ("asr", "aura")
    client = served(pipeline)
    with pytest.raises(
        openai.BadRequestError, match=r"voice.*switched off.*--deploy-config aura_omni\.yaml"
    ) as refusal:
        client.chat.completions.create(model="AURA", messages=HELLO, modalities=modalities)
    assert refusal.value.param == "modalities"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("modalities", [["text"], ["audio"], ["text", "audio"], None])
def test_modalities_are_obeyed(served: Served, modalities: list[str] | None, stream: bool) -> None:
    pipeline = FakePipeline()
    asked: dict[str, Any] = {} if modalities is None else {"modalities": modalities}
    answer = served(pipeline).chat.completions.create(model="AURA", messages=HELLO, stream=stream, **asked)
    wanted = modalities or ["text", "audio"]
    assert pipeline.talker_calls == ("audio" in wanted)
    if stream:
        chunks = list(answer)
        assert all(len(chunk.choices) == 1 for chunk in chunks)
        kinds = {chunk.modality for chunk in chunks if chunk.choices[0].delta.content}
        assert kinds == set(wanted)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    else:
        (choice,) = answer.choices
        assert (choice.message.audio is not None) == ("audio" in wanted)
        assert choice.message.content == ("Hello there." if "text" in wanted else None)


def test_a_silent_turn_says_so_and_has_no_audio(served: Served) -> None:
    answer = served(FakePipeline(silence)).chat.completions.create(model="AURA", messages=HELLO)
    (choice,) = answer.choices
    assert choice.message.content == SILENT_TEXT
    assert choice.message.audio is None
    assert "audio" not in choice.message.model_dump(exclude_unset=True)
    assert choice.finish_reason == "stop"
    assert choice.silent is True
    assert answer.aura == {"transcripts": ["nobody asked"]}


@pytest.mark.parametrize("audio", [None, {"format": "pcm16", "voice": "Vivian"}])
def test_a_silent_stream_says_so(served: Served, audio: Any) -> None:
    asked = {"audio": audio} if audio else {}
    stream = served(FakePipeline(silence)).chat.completions.create(model="AURA", messages=HELLO, stream=True, **asked)
    first, last = list(stream)
    assert first.choices[0].delta.content == SILENT_TEXT
    assert first.choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].silent is True


@pytest.mark.parametrize("audio_format", ["wav", "pcm", "pcm16", "flac", "mp3", "opus", "aac"])
def test_each_format_decodes_to_the_same_length(served: Served, audio_format: Any) -> None:
    answer = served(FakePipeline()).chat.completions.create(
        model="AURA", messages=HELLO, audio={"format": audio_format, "voice": "Vivian"}
    )
    data = base64.b64decode(answer.choices[0].message.audio.data)
    if audio_format.startswith("pcm"):
        assert len(data) == 2 * 4 * FRAME_SAMPLES
        return
    with av.open(io.BytesIO(data)) as container:
        samples = [frame.samples * VOICE_RATE / frame.sample_rate for frame in container.decode(audio=0)]
    assert sum(samples) == pytest.approx(4 * FRAME_SAMPLES, abs=2_500)  # lossy coders pad to their own blocks


@pytest.mark.parametrize(
    ("reason", "speech_reason"), [("length", "stop"), ("stop", "length"), ("stop", "loop"), ("stop", "silence")]
)
def test_a_cut_answer_is_finished_by_length(served: Served, reason: Any, speech_reason: Any) -> None:
    def cut(request: TurnRequest) -> Iterator[Event]:
        yield TextDelta("Hel")
        yield AudioChunk(tone(440, 2))
        yield Ended(reason, USAGE, speech_reason=speech_reason)

    client = served(FakePipeline(cut))
    (choice,) = client.chat.completions.create(model="AURA", messages=HELLO).choices
    assert choice.finish_reason == "length"
    assert choice.audio_finish_reason == speech_reason
    *_, last = client.chat.completions.create(model="AURA", messages=HELLO, stream=True)
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].audio_finish_reason == speech_reason


def test_an_answer_of_which_nothing_is_spoken_says_so(served: Served) -> None:
    client = served(FakePipeline(lambda _: [TextDelta("😀"), Ended("stop", USAGE, speech_reason="empty")]))
    (choice,) = client.chat.completions.create(model="AURA", messages=HELLO).choices
    assert (choice.finish_reason, choice.audio_finish_reason, choice.message.content) == ("stop", "empty", "😀")
    *_, last = client.chat.completions.create(model="AURA", messages=HELLO, stream=True)
    assert (last.choices[0].finish_reason, last.choices[0].audio_finish_reason) == ("stop", "empty")


def test_only_an_answer_that_is_sent_whole_may_be_spoken_again(served: Served) -> None:
    pipeline = FakePipeline()
    client = served(pipeline)
    client.chat.completions.create(model="AURA", messages=HELLO)
    list(client.chat.completions.create(model="AURA", messages=HELLO, stream=True))
    assert [request.playback.live for request in pipeline.requests] == [False, True]


def test_an_answer_without_a_speakable_word_still_plays(served: Served) -> None:
    def dots(request: TurnRequest) -> Iterator[Event]:
        yield TextDelta("...")
        yield Ended("stop", USAGE)

    answer = served(FakePipeline(dots)).chat.completions.create(model="AURA", messages=HELLO)
    assert not spoken(answer.choices[0].message.audio.data).any()


# ---------------------------------------------------------------- streams


def test_a_wav_stream_has_one_header_and_the_whole_sound(served: Served) -> None:
    client = served(FakePipeline())
    chunks = list(client.chat.completions.create(model="AURA", messages=HELLO, stream=True))
    audio = [chunk for chunk in chunks if chunk.modality == "audio" and chunk.choices[0].delta.content]
    data = b"".join(base64.b64decode(chunk.choices[0].delta.content) for chunk in audio)
    assert data.count(b"RIFF") == 1
    assert data[40:44] == b"\xff\xff\xff\xff"  # length unknown
    whole = client.chat.completions.create(model="AURA", messages=HELLO)
    assert data[44:] == spoken(whole.choices[0].message.audio.data).tobytes()
    with av.open(io.BytesIO(data)) as container:
        assert sum(frame.samples for frame in container.decode(audio=0)) == 4 * FRAME_SAMPLES
    assert sum(chunk.choices[0].audio_metadata["frame_count"] for chunk in audio) == 4 * FRAME_SAMPLES


def test_with_openais_audio_object_the_stream_is_openais(served: Served) -> None:
    stream = served(FakePipeline()).chat.completions.create(
        model="AURA",
        messages=HELLO,
        modalities=["text", "audio"],
        audio={"format": "pcm16", "voice": "Vivian"},
        stream=True,
    )
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in stream]
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    assert "".join(part.get("transcript", "") for part in audio) == "Hello there."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello there."
    joined = "".join(part.get("data", "") for part in audio)  # whole frames have no padding, so this decodes at once
    assert base64.b64decode(joined) == pcm16(np.concatenate([tone(440, 1), tone(440, 3)]))
    assert len({part["id"] for part in audio}) == 1
    assert [("expires_at" in part) for part in audio] == [False] * (len(audio) - 1) + [True]


def test_a_wav_stream_in_openais_shape_has_one_header(served: Served) -> None:
    stream = served(FakePipeline()).chat.completions.create(
        model="AURA", messages=HELLO, audio={"format": "wav", "voice": "Vivian"}, stream=True
    )
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in stream]
    parts = [delta["audio"]["data"] for delta in deltas if "data" in delta.get("audio", {})]
    data = b"".join(base64.b64decode(part) for part in parts)
    assert data.startswith(b"RIFF")
    assert data.count(b"RIFF") == 1
    assert len(data) == 44 + 2 * 4 * FRAME_SAMPLES


def test_usage_comes_once_at_the_end_when_asked(served: Served) -> None:
    client = served(FakePipeline())
    asked = list(
        client.chat.completions.create(
            model="AURA", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage is not None for chunk in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-1].choices == []
    assert asked[-1].usage.total_tokens == 48
    assert all(
        chunk.usage is None for chunk in client.chat.completions.create(model="AURA", messages=HELLO, stream=True)
    )


def raw_lines(client: openai.OpenAI, body: dict[str, Any]) -> list[str]:
    response = httpx.post(f"{client.base_url}chat/completions", json=body, timeout=20)
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.text.splitlines()


@pytest.mark.parametrize("audio", [None, {"format": "wav"}])
def test_no_line_reaches_64_kib_and_the_stream_ends_with_done(served: Served, audio: Any) -> None:
    def long(request: TurnRequest) -> Iterator[Event]:
        yield TextDelta("\N{GRINNING FACE}" * 20_000)
        yield AudioChunk(tone(440, 750))  # a minute at once
        yield Ended("stop", USAGE, speech_reason="stop")

    lines = raw_lines(served(FakePipeline(long)), {"messages": HELLO, "stream": True, "audio": audio})
    assert max(map(len, lines)) < 65_536
    assert [line for line in lines if line][-1] == "data: [DONE]"


def test_unicode_line_ends_stay_inside_a_line(served: Served) -> None:
    def odd(request: TurnRequest) -> Iterator[Event]:
        yield TextDelta("a\u2028b\u0085c")
        yield Ended("stop", USAGE)

    lines = raw_lines(served(FakePipeline(odd)), {"messages": HELLO, "stream": True, "modalities": ["text"]})
    assert all(line.startswith("data: ") for line in lines if line)
    assert json.loads(lines[0][6:])["choices"][0]["delta"]["content"] == "a\u2028b\u0085c"


# ---------------------------------------------------------------- what reaches the pipeline


def test_all_parts_reach_the_pipeline_in_order(served: Served) -> None:
    pipeline = FakePipeline()
    wav, mp4, png = wav_bytes(), mp4_bytes(), png_bytes()
    content: Any = [
        {"type": "text", "text": "look"},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "mp3"}},
        {"type": "video_url", "video_url": {"url": data_url(mp4, "video/mp4")}},
        {"type": "audio_url", "audio_url": {"url": data_url(wav, "audio/wav")}},
        {"type": "image_url", "image_url": {"url": data_url(png, "image/png")}},
        {"type": "video_url", "video_url": {"url": data_url(mp4, "video/mp4")}},
    ]
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "audio": {"id": "audio-1", "transcript": "Hello."}},
        {"role": "user", "content": content},
    ]
    answer = served(pipeline).chat.completions.create(model="AURA", messages=messages)
    assert answer.aura == {"transcripts": ["0.5 s of sound", "0.5 s of sound"]}
    (request,) = pipeline.requests
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]
    assert request.messages[2].parts == (Text("Hello."),)
    kinds = [type(part).__name__ for part in request.messages[3].parts]
    assert kinds == ["Text", "Audio", "Video", "Audio", "Video", "Video"]
    clip, picture, again = pictures(request)
    assert (clip.still, picture.still) == (False, True)
    assert clip.key == again.key


def test_three_spellings_of_one_sound_are_one_sound(served: Served) -> None:
    pipeline = FakePipeline()
    client = served(pipeline)
    bare = base64.b64encode(wav_bytes()).decode()
    spellings: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": bare}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{bare}", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{bare}"}},
        {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{bare}"},
        {"type": "input_audio", "input_audio": {"data": base64.encodebytes(wav_bytes()).decode()}},
    ]
    for part in spellings:
        client.chat.completions.create(model="AURA", messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item]
    keys = {part.key for request in pipeline.requests for part in request.messages[0].parts if isinstance(part, Audio)}
    assert len(pipeline.requests) == len(spellings)
    assert len(keys) == 1


def test_parallel_requests_get_exactly_their_own_audio(served: Served) -> None:
    def own(request: TurnRequest) -> Iterator[Event]:
        number = int(said(request))
        yield TextDelta(f"I am {number}.")
        for _ in range(3):
            yield AudioChunk(tone(200 + 10 * number, 1))
        yield Ended("stop", USAGE, speech_reason="stop")

    client = served(FakePipeline(own))

    def ask(number: int) -> tuple[str, bytes]:
        messages: Any = [{"role": "user", "content": str(number)}]
        if number % 2:
            message = client.chat.completions.create(model="AURA", messages=messages).choices[0].message
            return message.content, spoken(message.audio.data).tobytes()
        text, audio = "", b""
        for chunk in client.chat.completions.create(model="AURA", messages=messages, stream=True):
            content = chunk.choices[0].delta.content or ""
            if chunk.modality == "audio":
                audio += base64.b64decode(content)
            else:
                text += content
        return text, audio[44:]

    with ThreadPoolExecutor(32) as pool:
        for number, (text, audio) in enumerate(pool.map(ask, range(32))):
            assert text == f"I am {number}."
            assert audio == pcm16(np.tile(tone(200 + 10 * number, 1), 3))
