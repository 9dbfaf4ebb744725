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
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response
from starlette.types import Send

from aura_omni.errors import BadMedia, BadRequest, NotFound, TooLarge, Unavailable, UnsupportedOption
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
from aura_omni.media.budget import Budget
from aura_omni.server.answer import EVENT_STREAM, WhileConnected, send_whole, served_model, stream_turn, whole_turn
from aura_omni.server.errors import error_event, log_failure
from aura_omni.server.parts import MediaReader
from aura_omni.server.schemas import TranscriptionRequest, checked, documented
from aura_omni.server.stream import PIECE_CHARACTERS
from aura_omni.server.turns import Pipeline
from aura_omni.server.voice import request_fields_named
from aura_omni.transcript_file import transcript_usage, written

_TIMED = ("srt", "vtt", "diarized_json")
_STREAMED = ("json", "text")
_MOST_FIELDS = 100
_LONGEST_FIELD = 2**20  # bytes
_TURN_FIELDS = {"messages": "prompt"}


def router(pipeline: Pipeline, media: MediaReader) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/audio/transcriptions", openapi_extra=documented(TranscriptionRequest, file="file"))
    async def transcriptions(request: Request) -> Response:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)
        if "asr" not in pipeline.stages:
            raise NotFound(f"this server does not listen; its stages are {', '.join(pipeline.stages)}")
        body, file = await _read_form(request, longest=media.policy.max_bytes)
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
                heard, _ = await whole_turn(pipeline, asked)
            await send_whole(_response(heard, sound.duration_s, response_format), send)

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


async def _read_form(request: Request, *, longest: int) -> tuple[TranscriptionRequest, bytes]:
    """The fields and the bytes of the file. Raises BadRequest naming the field, TooLarge for a file over `longest` bytes."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise BadRequest("the body must be a form with a file; send the header 'Content-Type: multipart/form-data'")
    async with request.form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=_LONGEST_FIELD) as form:
        body = checked(TranscriptionRequest, _fields(form))
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise BadRequest("file is required: a recording, as a file of the form", param="file")
        size = file.size or 0
        if size > longest:
            raise TooLarge(
                f"the file has {size:,} bytes; this server takes {longest:,}. Send a shorter clip, or raise media.max_bytes "
                "in the deploy file",
                param="file",
            )
        if not size:
            raise BadMedia("the file is empty; send a recording", param="file")
        return body, await file.read()


def _fields(form: FormData) -> dict[str, Any]:
    """All but the file, by name, as what their texts stand for. Lists have names that end in []."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise BadRequest(f"the file is sent as {name[:60]!r}; its name must be 'file'", param="file")
        elif name.endswith("[]"):
            fields.setdefault(name[:-2], []).append(value)
        elif name == "file":
            continue  # refused by who needs a file
        elif name in fields:
            raise BadRequest(f"{name[:60]} is sent twice; send it once", param=name[:60])
        else:
            fields[name] = _meant(name, value)
    return fields


def _meant(name: str, text: str) -> Any:
    if name == "stream" and text.strip().lower() in ("true", "1", "false", "0", ""):
        return text.strip().lower() in ("true", "1")
    if name == "temperature":
        return _number(text, float)
    if name == "seed":
        return _number(text, int)
    return text


def _number(text: str, kind: type[float] | type[int]) -> Any:
    """What is no number stays what it is, and is refused with its limits."""
    try:
        return kind(text) if text.strip() else None
    except ValueError:
        return text


def _response_format(body: TranscriptionRequest) -> TranscriptFormat:
    name = (body.response_format or "json").lower()
    known = ", ".join(TRANSCRIPT_FORMATS)
    if name in _TIMED:
        raise UnsupportedOption(
            f"response_format {name!r} is not served, for it needs times or speakers, which ASR does not give; "
            f"use one of {known}",
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


def _response(heard: Heard, duration_s: float, form: TranscriptFormat) -> Response:
    media_type = "text/plain; charset=utf-8" if form == "text" else "application/json"
    return Response(written(heard, duration_s, form), headers={"content-type": media_type})


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
