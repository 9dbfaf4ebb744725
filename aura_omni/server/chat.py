"""POST /v1/chat/completions: one request body becomes one turn, one turn becomes JSON or an event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from aura_omni.errors import AuraError, BadRequest, Unavailable, UnsupportedOption, fields_named, shown
from aura_omni.flow import Playback, StageName, TurnRequest, why_mute
from aura_omni.media.budget import Budget
from aura_omni.media.formats import audio_format_of
from aura_omni.server.answer import EVENT_STREAM, WhileConnected, send_whole, served_model, stream_turn, whole_turn
from aura_omni.server.completion import Wanted, completion
from aura_omni.server.errors import error_line, log_failure
from aura_omni.server.parts import MediaReader
from aura_omni.server.sampling import sampling_fields, stage_sampling
from aura_omni.server.schemas import ChatRequest, documented, read_body
from aura_omni.server.sound import SoundFormat
from aura_omni.server.stream import ChunkStream
from aura_omni.server.turns import Pictures, Pipeline
from aura_omni.server.voice import chat_fields, voice_request


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
            async with turn_request(body, pipeline.stages, wanted, media) as (asked, pictures):
                with fields_named({**chat_fields(body), **sampling_fields(body, pipeline.stages)}):
                    failed = await answer(pipeline, asked, pictures, wanted, send)
            if failed is not None:
                log_failure(request.scope, failed)

        return WhileConnected(work)

    return routes


# ---------------------------------------------------------------- request


def wanted_of(body: ChatRequest, pipeline: Pipeline) -> Wanted:
    """What to send back. Raises for a model, a modality or a format that is not served."""
    model = served_model(body.model, pipeline)
    modalities = _modalities(body.modalities, pipeline.stages)
    audio_format = audio_format_of(body.audio.format if body.audio else None, param="audio.format")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    return Wanted(
        model=model,
        text="text" in modalities,
        audio="audio" in modalities,
        audio_format=audio_format,
        openai_audio=body.audio is not None and "voice" in body.audio.model_fields_set,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _modalities(given: Any, stages: Sequence[StageName]) -> frozenset[str]:
    possible = ["text", "audio"] if "code2wav" in stages else ["text"]
    if given is None:
        return frozenset(possible)
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise BadRequest(
            f'modalities must be a list of strings, e.g. ["text", "audio"]; it is {shown(given)}', param="modalities"
        )
    refused = [name[:60] for name in given if name not in possible]
    if "audio" in refused:
        raise UnsupportedOption(why_mute(stages), param="modalities")
    if refused or not given:
        raise BadRequest(
            f"Unsupported output modalities {refused[:3]}; supported: {', '.join(possible)}", param="modalities"
        )
    return frozenset(given)


@asynccontextmanager
async def turn_request(
    body: ChatRequest, stages: Sequence[StageName], wanted: Wanted, media: MediaReader
) -> AsyncIterator[tuple[TurnRequest, Pictures | None]]:
    """The turn as soon as its sounds are there, and its pictures if those are still Coming.

    Everything that can be refused without media is refused before any medium is fetched. Leaving the block gives up what is not
    decoded yet.
    """
    sampling = stage_sampling(body, stages)
    asked = voice_request(body)
    voice, budget = asked.voice, Budget()
    if asked.ref_audio is not None and wanted.audio:
        ref_audio = await media.audio(asked.ref_audio, param="additional_information.tts_ref_audio", budget=budget)
        voice = replace(voice, ref_audio=ref_audio)
    async with media.reading(body.messages, budget=budget) as read:
        request = TurnRequest(
            messages=read.messages,
            speak=wanted.audio,
            system_prompt=asked.system_prompt,
            voice=voice,
            playback=Playback(live=bool(body.stream), first_frames=asked.first_frames),
            sampling=sampling,
        )
        yield request, read.pictures


# ---------------------------------------------------------------- answer


async def _whole(
    pipeline: Pipeline, request: TurnRequest, pictures: Pictures | None, wanted: Wanted, send: Send
) -> AuraError | None:
    heard, ended = await whole_turn(pipeline, request, pictures=pictures)
    await send_whole(JSONResponse(await asyncio.to_thread(completion, heard, ended, wanted)), send)
    return None


async def _streamed(
    pipeline: Pipeline, request: TurnRequest, pictures: Pictures | None, wanted: Wanted, send: Send
) -> AuraError | None:
    """Returns the error that the stream ended with."""
    return await stream_turn(
        pipeline,
        request,
        send,
        pictures=pictures,
        headers=EVENT_STREAM,
        pieces=ChunkStream(wanted).lines,
        last_words=error_line,
        costly=wanted.audio and SoundFormat(wanted.audio_format).costly,
    )
