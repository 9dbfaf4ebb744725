"""POST /v1/chat/completions: one request body becomes one turn, one turn becomes JSON or an event stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from aura_omni.errors import AuraError, BadRequest, ModelNotFound, Unavailable, UnsupportedOption
from aura_omni.flow import Ended, StageName, TurnRequest
from aura_omni.media.audio import AudioFormat
from aura_omni.media.budget import Budget
from aura_omni.server.completion import Heard, Wanted, completion, failure
from aura_omni.server.errors import error_line, log_failure
from aura_omni.server.parts import MediaReader
from aura_omni.server.sampling import stage_sampling
from aura_omni.server.schemas import ChatRequest, documented, read_body
from aura_omni.server.stream import ChunkStream
from aura_omni.server.turns import Pipeline, opened, unless_gone
from aura_omni.server.voice import request_fields_named, voice_request

_FORMATS: dict[str, AudioFormat] = {
    "wav": "wav", "pcm": "pcm16", "pcm16": "pcm16", "flac": "flac", "mp3": "mp3", "opus": "opus",
}  # fmt: skip
_STREAMED: tuple[AudioFormat, ...] = ("wav", "pcm16")


def router(pipeline: Pipeline, media: MediaReader) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)
        body = await read_body(request, ChatRequest)
        wanted = wanted_of(body, pipeline)
        answer = _streamed if body.stream else _whole

        async def work(send: Send) -> None:
            with request_fields_named():
                asked = await turn_request(body, pipeline.stages, wanted, media)
                failed = await answer(pipeline, asked, wanted, send)
            if failed is not None:
                log_failure(request.scope, failed)

        return _WhileConnected(work)

    return routes


class _WhileConnected(Response):
    """A response that is made while it is sent, and dropped the moment the client goes away."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            await self._work(send)

        await unless_gone(receive, work())


# ---------------------------------------------------------------- request


def wanted_of(body: ChatRequest, pipeline: Pipeline) -> Wanted:
    """What to send back. Raises for a model, a modality or a format that is not served."""
    model = body.model or pipeline.served_names[0]
    if model not in pipeline.served_names:
        raise ModelNotFound(
            f"no model {model[:100]!r}; this server has {', '.join(pipeline.served_names)}", param="model"
        )
    modalities = _modalities(body.modalities, pipeline.stages)
    audio_format = _audio_format(body)
    if body.stream and "audio" in modalities and audio_format not in _STREAMED:
        raise UnsupportedOption(
            f"audio.format {audio_format!r} is not streamed; use wav or pcm16, or stream: false", param="audio.format"
        )
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    return Wanted(
        model=model,
        text="text" in modalities,
        audio="audio" in modalities,
        audio_format=audio_format,
        openai_audio=body.audio is not None,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _modalities(given: Any, stages: Sequence[StageName]) -> frozenset[str]:
    possible = ["text", "audio"] if "code2wav" in stages else ["text"]
    if given is None:
        return frozenset(possible)
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise BadRequest('modalities must be a list of strings, e.g. ["text", "audio"]', param="modalities")
    refused = [name[:60] for name in given if name not in possible]
    if refused or not given:
        raise BadRequest(
            f"Unsupported output modalities {refused[:3]}; supported: {', '.join(possible)}", param="modalities"
        )
    return frozenset(given)


def _audio_format(body: ChatRequest) -> AudioFormat:
    given = body.audio.format if body.audio else None
    if given is None:
        return "wav"
    if given.lower() not in _FORMATS:
        raise BadRequest(f"Invalid audio format {given[:60]!r}; use one of {', '.join(_FORMATS)}", param="audio.format")
    return _FORMATS[given.lower()]


async def turn_request(
    body: ChatRequest, stages: Sequence[StageName], wanted: Wanted, media: MediaReader
) -> TurnRequest:
    """Everything that can be refused without media is refused before any medium is fetched."""
    sampling = stage_sampling(body, stages)
    asked = voice_request(body)
    voice, budget = asked.voice, Budget()
    if asked.ref_audio is not None and wanted.audio:
        ref_audio = await media.audio(asked.ref_audio, param="additional_information.tts_ref_audio", budget=budget)
        voice = replace(voice, ref_audio=ref_audio)
    return TurnRequest(
        messages=await media.messages(body.messages, budget=budget),
        speak=wanted.audio,
        system_prompt=asked.system_prompt,
        voice=voice,
        sampling=sampling,
    )


# ---------------------------------------------------------------- answer


async def _whole(pipeline: Pipeline, request: TurnRequest, wanted: Wanted, send: Send) -> AuraError | None:
    heard = Heard()
    async with opened(pipeline, request) as events:
        async for event in events:
            heard.add(event)
    ended = heard.ended
    assert ended is not None, "every turn ends with Ended"
    error = failure(ended)
    if error is not None:
        raise error
    await _send_json(await asyncio.to_thread(completion, heard, ended, wanted), send)
    return None


async def _send_json(body: dict[str, Any], send: Send) -> None:
    response = JSONResponse(body)
    await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


async def _streamed(pipeline: Pipeline, request: TurnRequest, wanted: Wanted, send: Send) -> AuraError | None:
    """Headers leave with the first line, so a turn that fails before it has something to say gets a real status.

    Returns the error that the stream ended with.
    """
    chunks = ChunkStream(wanted)
    begun = False
    error: AuraError | None = None
    async with opened(pipeline, request) as events:
        async for event in events:
            error = failure(event) if isinstance(event, Ended) else None
            if error is not None and not begun:
                raise error
            for line in chunks.lines(event) if error is None else (error_line(error),):
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                    begun = True
                await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return error


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies would collect the stream
]
