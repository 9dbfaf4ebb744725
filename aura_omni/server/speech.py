"""POST /v1/audio/speech: one text becomes the sound of it.

The reply is sent as it is made with `stream_format: "audio"` (or `stream: true`), and pcm always; otherwise it is a file that
knows its length. `stream_format: "sse"` sends the same bytes as `speech.audio.delta` {audio: base64, response_format}
events and ends with `speech.audio.done` {usage, audio_finish_reason}. A stream of bytes that fails, or whose speech a guard stopped, is broken off; a stream
of events ends with an `error` event.
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

from aura_omni.errors import AuraError, BadRequest, EngineError, NotFound, Unavailable, UnsupportedOption, fields_named
from aura_omni.flow import (
    FRAME_SAMPLES,
    VOICE_RATE,
    AudioChunk,
    Ended,
    Event,
    Message,
    Playback,
    StageName,
    Text,
    TurnRequest,
    Usage,
    checked_sampling,
    why_mute,
)
from aura_omni.media.budget import Budget
from aura_omni.media.formats import audio_format_of
from aura_omni.server.answer import EVENT_STREAM, WhileConnected, send_whole, served_model, stream_turn, whole_turn
from aura_omni.server.errors import error_event, log_failure
from aura_omni.server.parts import MediaReader
from aura_omni.server.schemas import SpeechRequest, documented, read_body
from aura_omni.server.sound import Piece, SoundFormat, SoundStream, whole_sound
from aura_omni.server.turns import Pipeline
from aura_omni.server.voice import speech_fields, speech_voice

SILENCE = np.zeros(FRAME_SAMPLES, np.float32)  # what has no speakable word still is a file that plays


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a speech is sent back. as_events: as server-sent ones; whole: when it is all there."""

    sound: SoundFormat
    as_events: bool
    whole: bool


def router(pipeline: Pipeline, media: MediaReader) -> APIRouter:
    routes = APIRouter()

    def check_speaks() -> None:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)
        if "talker" not in pipeline.stages:
            raise NotFound(why_mute(pipeline.stages))

    @routes.post("/v1/audio/speech", openapi_extra=documented(SpeechRequest))
    async def speech(request: Request) -> Response:
        check_speaks()
        body = await read_body(request, SpeechRequest)
        served_model(body.model, pipeline)
        wanted = wanted_of(body)

        async def work(send: Send) -> None:
            asked = await turn_request(body, wanted, media)
            with fields_named(speech_fields(body)):
                failed = await _answer(pipeline, asked, wanted, send)
            if failed is not None:
                log_failure(request.scope, failed)

        return WhileConnected(work)

    return routes


def wanted_of(body: SpeechRequest) -> Wanted:
    """Raises BadRequest for a sound that is not to be had and for fields that contradict each other."""
    if body.stream is False and body.stream_format == "sse":
        raise BadRequest('stream is false and stream_format is "sse"; give one of them', param="stream_format")
    sound = SoundFormat(
        audio_format_of(body.response_format, param="response_format"),
        rate=VOICE_RATE if body.sample_rate is None else body.sample_rate,
        speed=1.0 if body.speed is None else body.speed,
    )
    return Wanted(
        sound,
        as_events=body.stream_format == "sse",
        whole=not body.stream and body.stream_format is None and sound.name != "pcm16",
    )


async def turn_request(body: SpeechRequest, wanted: Wanted, media: MediaReader) -> TurnRequest:
    """Everything that can be refused without media is refused before any medium is fetched."""
    if not body.input.strip():
        raise BadRequest("input is empty; send the text to speak", param="input")
    voice = speech_voice(body)
    drawn = checked_sampling({"seed": body.seed})
    sampling: dict[StageName, Mapping[str, Any]] = {"talker": drawn} if drawn else {}
    source = _one(body.ref_audio)
    if source is not None:
        voice = replace(voice, ref_audio=await media.audio(source, param="ref_audio", budget=Budget()))
    return TurnRequest(
        (Message("user", (Text(body.input),)),),
        part="speech",
        voice=voice,
        playback=Playback(
            live=not wanted.whole, speed=wanted.sound.speed, first_frames=body.initial_codec_chunk_frames
        ),
        sampling=sampling,
    )


def _one(ref_audio: str | list[str] | None) -> str | None:
    if not isinstance(ref_audio, list):
        return ref_audio or None
    if len(ref_audio) > 1:
        raise UnsupportedOption(f"ref_audio has {len(ref_audio)} recordings; send one", param="ref_audio")
    return ref_audio[0] if ref_audio else None


# ---------------------------------------------------------------- answer


async def _answer(pipeline: Pipeline, request: TurnRequest, wanted: Wanted, send: Send) -> AuraError | None:
    """Returns the error that a stream ended with."""
    headers = EVENT_STREAM if wanted.as_events else {"content-type": wanted.sound.media_type}
    if wanted.whole:
        heard, ended = await whole_turn(pipeline, request)
        file = await asyncio.to_thread(whole_sound, heard.sound(), wanted.sound)
        headers = {**headers, "x-audio-finish-reason": ended.speech_reason or "stop"}
        await send_whole(Response(file.data, headers=headers), send)
        return None
    return await stream_turn(
        pipeline,
        request,
        send,
        headers=headers,
        pieces=_Reply(wanted).pieces,
        last_words=error_event if wanted.as_events else None,
        costly=wanted.sound.costly,
    )


class _Reply:
    """Events of a turn to the pieces of one stream."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._sound = SoundStream(wanted.sound)
        self._spoken = False

    def pieces(self, event: Event) -> Iterator[bytes]:
        match event:
            case AudioChunk() if len(event.samples):
                self._spoken = True
                yield from map(self._data, self._sound.feed(event.samples))
            case Ended() if event.speech_stopped and not self._wanted.as_events:
                # Nothing in bytes of sound can say so, and an end would pass for a whole answer.
                raise EngineError(f"the speech is not whole ({event.speech_reason}); ask again, or without a stream")
            case Ended():
                if not self._spoken:
                    yield from map(self._data, self._sound.feed(SILENCE))
                yield from map(self._data, self._sound.finish())
                if self._wanted.as_events:
                    reason = event.speech_reason or "stop"
                    done = {"type": "speech.audio.done", "usage": _usage(event.usage), "audio_finish_reason": reason}
                    yield _line(done)

    def _data(self, piece: Piece) -> bytes:
        if not self._wanted.as_events:
            return piece.data
        audio = base64.b64encode(piece.data).decode()
        name = "pcm" if self._wanted.sound.name == "pcm16" else self._wanted.sound.name  # as this endpoint calls it
        return _line({"type": "speech.audio.delta", "audio": audio, "response_format": name})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _usage(used: Usage) -> dict[str, int]:
    tokens, frames = used.prompt_text_tokens, used.audio_frames
    return {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}
