"""POST /v1/audio/speech: one text becomes the sound of it; GET /v1/audio/voices.

pcm is sent as it is made, and so is wav with `stream_format: "audio"` (or `stream: true`): one header of unknown length, then samples. Without
it wav is a file whose header knows its length. mp3, opus and flac are always whole files. `stream_format: "sse"` sends
wav or pcm as `speech.audio.delta` {audio: base64} events and ends with `speech.audio.done` {usage, audio_finish_reason}.
A stream of bytes that fails is broken off; a stream of events ends with an `error` event.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from aura_omni.errors import AuraError, BadRequest, NotFound, Unavailable, UnsupportedOption
from aura_omni.flow import (
    FRAME_SAMPLES,
    VOICE_RATE,
    AudioChunk,
    Ended,
    Event,
    Message,
    StageName,
    Text,
    TurnRequest,
    Usage,
    checked_sampling,
)
from aura_omni.media.budget import Budget
from aura_omni.media.encoder import AudioFormat, encode, pcm16, wav_header
from aura_omni.server.answer import EVENT_STREAM, WhileConnected, send_whole, served_model, stream_turn, whole_turn
from aura_omni.server.completion import STREAMED_FORMATS, audio_format_of
from aura_omni.server.errors import error_event, log_failure
from aura_omni.server.parts import MediaReader
from aura_omni.server.schemas import SpeechRequest, documented, read_body
from aura_omni.server.stream import PIECE_SAMPLES
from aura_omni.server.turns import Pipeline
from aura_omni.server.voice import SPEECH_FIELDS, request_fields_named, speech_voice

_MEDIA_TYPES: Mapping[AudioFormat, str] = {
    "wav": "audio/wav",
    "pcm16": f"audio/pcm;rate={VOICE_RATE};channels=1",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}


def router(pipeline: Pipeline, media: MediaReader) -> APIRouter:
    routes = APIRouter()

    def check_speaks() -> None:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)
        if "talker" not in pipeline.stages:
            raise NotFound(f"this server does not speak; its stages are {', '.join(pipeline.stages)}")

    @routes.post("/v1/audio/speech", openapi_extra=documented(SpeechRequest))
    async def speech(request: Request) -> Response:
        check_speaks()
        body = await read_body(request, SpeechRequest)
        served_model(body.model, pipeline)
        audio_format, stream_format = _audio_format(body), _stream_format(body)

        async def work(send: Send) -> None:
            asked = await turn_request(body, media)
            with request_fields_named(SPEECH_FIELDS):
                failed = await _answer(pipeline, asked, stream_format, audio_format, send)
            if failed is not None:
                log_failure(request.scope, failed)

        return WhileConnected(work)

    @routes.get("/v1/audio/voices")
    async def voices() -> dict[str, list[str]]:
        check_speaks()
        return {"voices": list(pipeline.speakers)}

    return routes


def _audio_format(body: SpeechRequest) -> AudioFormat:
    audio_format = audio_format_of(body.response_format, param="response_format")
    if (body.stream or body.stream_format == "sse") and audio_format not in STREAMED_FORMATS:
        raise UnsupportedOption(
            f"response_format {audio_format!r} is not streamed; use wav or pcm, or ask for no stream",
            param="response_format",
        )
    return audio_format


def _stream_format(body: SpeechRequest) -> str | None:
    if body.stream is False and body.stream_format == "sse":
        raise BadRequest('stream is false and stream_format is "sse"; give one of them', param="stream_format")
    return "audio" if body.stream and body.stream_format is None else body.stream_format


async def turn_request(body: SpeechRequest, media: MediaReader) -> TurnRequest:
    """Everything that can be refused without media is refused before any medium is fetched."""
    if not body.input.strip():
        raise BadRequest("input is empty; send the text to speak", param="input")
    voice = speech_voice(body)
    drawn = checked_sampling({"seed": body.seed})
    sampling: dict[StageName, Mapping[str, Any]] = {"talker": drawn} if drawn else {}
    source = _one(body.ref_audio)
    if source is not None:
        voice = replace(voice, ref_audio=await media.audio(source, param="ref_audio", budget=Budget()))
    return TurnRequest((Message("user", (Text(body.input),)),), part="speech", voice=voice, sampling=sampling)


def _one(ref_audio: str | list[str] | None) -> str | None:
    if not isinstance(ref_audio, list):
        return ref_audio or None
    if len(ref_audio) > 1:
        raise UnsupportedOption(f"ref_audio has {len(ref_audio)} recordings; send one", param="ref_audio")
    return ref_audio[0] if ref_audio else None


# ---------------------------------------------------------------- answer


async def _answer(
    pipeline: Pipeline, request: TurnRequest, stream_format: str | None, audio_format: AudioFormat, send: Send
) -> AuraError | None:
    """Returns the error that a stream ended with."""
    if stream_format == "sse":
        pieces = _Pieces(audio_format).events
        return await stream_turn(
            pipeline, request, send, headers=EVENT_STREAM, pieces=pieces, last_words=error_event
        )  # fmt: skip
    headers = {"content-type": _MEDIA_TYPES[audio_format]}
    if audio_format == "pcm16" or (audio_format == "wav" and stream_format == "audio"):
        pieces = _Pieces(audio_format).sound
        return await stream_turn(pipeline, request, send, headers=headers, pieces=pieces, last_words=None)
    heard, ended = await whole_turn(pipeline, request)
    file = await asyncio.to_thread(encode, heard.sound(), VOICE_RATE, audio_format)
    headers["x-audio-finish-reason"] = ended.speech_reason or "stop"
    await send_whole(Response(file, headers=headers), send)
    return None


@dataclass(slots=True)
class _Pieces:
    """Events of a turn as pieces of one stream. What has no speakable word is one frame of silence."""

    audio_format: AudioFormat
    _begun: bool = False

    def sound(self, event: Event) -> Iterator[bytes]:
        match event:
            case AudioChunk():
                yield self._data(event.samples)
            case Ended() if not self._begun:
                yield self._data(np.zeros(FRAME_SAMPLES, np.float32))

    def events(self, event: Event) -> Iterator[bytes]:
        """Every line stays under 64 KiB, the limit of common line readers."""
        match event:
            case AudioChunk():
                for start in range(0, len(event.samples), PIECE_SAMPLES):
                    yield self._delta(event.samples[start : start + PIECE_SAMPLES])
            case Ended():
                if not self._begun:
                    yield self._delta(np.zeros(FRAME_SAMPLES, np.float32))
                reason = event.speech_reason or "stop"
                yield _line({"type": "speech.audio.done", "usage": _usage(event.usage), "audio_finish_reason": reason})

    def _delta(self, samples: np.ndarray) -> bytes:
        return _line({"type": "speech.audio.delta", "audio": base64.b64encode(self._data(samples)).decode()})

    def _data(self, samples: np.ndarray) -> bytes:
        header = b"" if self._begun or self.audio_format != "wav" else wav_header(VOICE_RATE, None)
        self._begun = True
        return header + pcm16(samples)


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _usage(used: Usage) -> dict[str, int]:
    tokens, frames = used.prompt_text_tokens, used.audio_frames
    return {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}
