"""POST /v1/audio/transcriptions: one file becomes the text of what is said in it; translations are refused.

`response_format` json (default), text, or verbose_json (language and duration; no segments, for ASR gives no times). With
`stream` the text comes as `transcript.text.delta` events and whole in the last one, `transcript.text.done`. Silence is an
empty text. `finish_reason` "length": a token budget cut the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Send

from aura_omni.errors import BadRequest, NotFound, Unavailable, UnsupportedOption
from aura_omni.flow import Audio, Ended, Event, Message, StageName, Text, TurnRequest, Usage, Voice, checked_sampling
from aura_omni.media.budget import Budget
from aura_omni.server.answer import EVENT_STREAM, WhileConnected, send_whole, served_model, stream_turn, whole_turn
from aura_omni.server.completion import Heard, finish_reason
from aura_omni.server.errors import error_event, log_failure
from aura_omni.server.forms import read_form
from aura_omni.server.parts import MediaReader
from aura_omni.server.schemas import TranscriptionRequest, documented
from aura_omni.server.stream import PIECE_CHARACTERS
from aura_omni.server.turns import Pipeline
from aura_omni.server.voice import request_fields_named

_FORMATS = ("json", "text", "verbose_json")
_TIMED = ("srt", "vtt", "diarized_json")
_STREAMED = ("json", "text")
_TURN_FIELDS = {"messages": "prompt"}


def router(pipeline: Pipeline, media: MediaReader) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/audio/transcriptions", openapi_extra=documented(TranscriptionRequest, file="file"))
    async def transcriptions(request: Request) -> Response:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)
        if "asr" not in pipeline.stages:
            raise NotFound(f"this server does not listen; its stages are {', '.join(pipeline.stages)}")
        body, upload = await read_form(request, TranscriptionRequest, file="file", longest=media.policy.max_bytes)
        file = await upload.read()
        served_model(body.model, pipeline)
        response_format = _response_format(body)

        async def work(send: Send) -> None:
            sound = await media.sound(file, param="file", budget=Budget())
            with request_fields_named(_TURN_FIELDS):
                asked = turn_request(body, sound)
                if body.stream:
                    events = _Events().lines
                    failed = await stream_turn(
                        pipeline, asked, send, headers=EVENT_STREAM, pieces=events, last_words=error_event
                    )
                    if failed is not None:
                        log_failure(request.scope, failed)
                    return
                heard, ended = await whole_turn(pipeline, asked)
            await send_whole(_response(heard, ended, sound, response_format), send)

        return WhileConnected(work)

    @routes.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        async for _ in request.stream():  # a client that still sends would see a broken connection, not this answer
            pass
        raise UnsupportedOption(
            "this server does not translate; /v1/audio/transcriptions writes what is said in its own language"
        )

    return routes


# ---------------------------------------------------------------- request


def _response_format(body: TranscriptionRequest) -> str:
    name = (body.response_format or "json").lower()
    if name in _TIMED:
        raise UnsupportedOption(
            f"response_format {name!r} is not served, for it needs times or speakers, which ASR does not give; "
            f"use one of {', '.join(_FORMATS)}",
            param="response_format",
        )
    if name not in _FORMATS:
        raise BadRequest(
            f"response_format is {name[:60]!r}; it must be one of {', '.join(_FORMATS)}", param="response_format"
        )
    if body.stream and name not in _STREAMED:
        raise UnsupportedOption(
            f"response_format {name!r} is not streamed; use {' or '.join(_STREAMED)}, or stream: false",
            param="response_format",
        )
    return name


def turn_request(body: TranscriptionRequest, sound: Audio) -> TurnRequest:
    drawn = checked_sampling({"temperature": body.temperature, "seed": body.seed})
    sampling: dict[StageName, Mapping[str, Any]] = {"asr": drawn} if drawn else {}
    context = (Message("system", (Text(body.prompt),)),) if body.prompt else ()
    return TurnRequest(
        (*context, Message("user", (sound,))),
        part="transcript",
        voice=Voice(language=body.language or None),
        sampling=sampling,
    )


# ---------------------------------------------------------------- answer


def _response(heard: Heard, ended: Ended, sound: Audio, response_format: str) -> Response:
    text = "".join(heard.texts)
    if response_format == "text":
        return PlainTextResponse(text)
    body: dict[str, Any] = {"text": text}
    if response_format == "verbose_json":
        body = {
            "task": "transcribe",
            "language": (heard.language or "").lower(),
            "duration": round(sound.duration_s, 3),
            **body,
        }
    return JSONResponse({**body, "usage": _usage(ended.usage), "finish_reason": finish_reason(ended)})


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": used.prompt_tokens,
        "input_token_details": {"text_tokens": used.prompt_text_tokens, "audio_tokens": used.prompt_audio_tokens},
        "output_tokens": used.text_tokens,
        "total_tokens": used.prompt_tokens + used.text_tokens,
    }


@dataclass(slots=True)
class _Events:
    """Events of a turn as lines of a stream."""

    _heard: Heard = field(default_factory=Heard)

    def lines(self, event: Event) -> Iterator[bytes]:
        before = len(self._heard.texts)
        self._heard.add(event)
        for text in self._heard.texts[before:]:
            for start in range(0, len(text), PIECE_CHARACTERS):
                yield _line({"type": "transcript.text.delta", "delta": text[start : start + PIECE_CHARACTERS]})
        if isinstance(event, Ended):
            whole = "".join(self._heard.texts)
            usage, reason = _usage(event.usage), finish_reason(event)
            yield _line({"type": "transcript.text.done", "text": whole, "usage": usage, "finish_reason": reason})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
