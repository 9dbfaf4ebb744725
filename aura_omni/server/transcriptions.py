"""POST /v1/audio/transcriptions: one file becomes the text of what is said in it; translations are refused.

`response_format` json (default), text, verbose_json (language, duration, segments), srt or vtt. A segment is what lies between two pauses,
5 to 30 s: its times are where its sound begins and ends. ASR gives no times of words, so word timestamps are refused. With
`stream` the text comes segment by segment as `transcript.text.delta` events and whole in the last one,
`transcript.text.done`. Silence is an empty text. `finish_reason` "length": a token budget cut the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from aura_omni.errors import BadRequest, NotFound, Unavailable, UnsupportedOption, fields_named
from aura_omni.flow import (
    TRANSCRIPT_FORMATS,
    Audio,
    Ended,
    Event,
    Message,
    StageName,
    Text,
    TranscriptFormat,
    TurnRequest,
    Voice,
    checked_sampling,
)
from aura_omni.heard import Heard, finish_reason
from aura_omni.server.answer import (
    EVENT_STREAM,
    WhileConnected,
    send_whole,
    served_model,
    stream_events,
    whole_events,
)
from aura_omni.server.errors import error_event, log_failure
from aura_omni.server.forms import closed_after, read_form
from aura_omni.server.parts import MediaReader
from aura_omni.server.schemas import TranscriptionRequest, documented
from aura_omni.server.stream import PIECE_CHARACTERS
from aura_omni.server.transcript import Transcribed
from aura_omni.server.turns import Pipeline
from aura_omni.transcript_file import transcript_usage, written
from aura_omni.transcription import Transcription

_MEDIA_TYPES: Mapping[TranscriptFormat, str] = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
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
        longest, way_out = media.policy.max_bytes, "Send a shorter clip, or raise media.max_bytes in the deploy file"
        body, upload = await read_form(request, TranscriptionRequest, file="file", longest=longest, way_out=way_out)
        served_model(body.model, pipeline)
        response_format = _response_format(body)
        _check_granularities(body.timestamp_granularities, response_format)

        async def work(send: Send) -> None:
            transcribed = Transcribed(pipeline, media, partial(turn_request, body))
            async with closed_after(upload), aclosing(transcribed.events(upload.file)) as events:
                with fields_named(_TURN_FIELDS):
                    if body.stream:
                        lines = _Events().lines
                        failed = await stream_events(
                            events, send, headers=EVENT_STREAM, pieces=lines, last_words=error_event
                        )
                        if failed is not None:
                            log_failure(request.scope, failed)
                        return
                    await whole_events(events)
            await send_whole(_response(transcribed.said, response_format, body), send)

        return WhileConnected(work)

    @routes.post("/v1/audio/translations")
    async def translations() -> Response:
        raise UnsupportedOption(
            "this server does not translate; /v1/audio/transcriptions writes what is said in its own language"
        )

    return routes


# ---------------------------------------------------------------- request


def _response_format(body: TranscriptionRequest) -> TranscriptFormat:
    name = (body.response_format or "json").lower()
    known = ", ".join(TRANSCRIPT_FORMATS)
    if name == "diarized_json":
        raise UnsupportedOption(
            f"response_format {name!r} is not served, for ASR does not tell speakers apart; use one of {known}",
            param="response_format",
        )
    form = next((form for form in TRANSCRIPT_FORMATS if form == name), None)
    if form is None:
        raise BadRequest(f"response_format is {name[:60]!r}; it must be one of {known}", param="response_format")
    if body.stream and form not in _STREAMED:
        raise UnsupportedOption(
            f"response_format {name!r} is not streamed; use {' or '.join(_STREAMED)}, or stream: false",
            param="response_format",
        )
    return form


def _check_granularities(granularities: list[str] | None, response_format: str) -> None:
    param = "timestamp_granularities"
    for name in granularities or []:
        if name == "word":
            raise UnsupportedOption(
                "timestamp_granularities has 'word', and ASR gives no times of words; ask for 'segment', whose times are "
                "those of the pauses",
                param=param,
            )
        if name != "segment":
            raise BadRequest(f"timestamp_granularities has {name[:60]!r}; it may have 'segment'", param=param)
    if granularities and response_format != "verbose_json":
        raise BadRequest(f"{param} needs response_format 'verbose_json'", param=param)


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


def _response(said: Transcription, form: TranscriptFormat, body: TranscriptionRequest) -> Response:
    return Response(
        written(said, form, temperature=body.temperature or 0.0), headers={"content-type": _MEDIA_TYPES[form]}
    )


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
            usage, reason = transcript_usage(event.usage), finish_reason(event)
            yield _line({"type": "transcript.text.done", "text": whole, "usage": usage, "finish_reason": reason})


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
