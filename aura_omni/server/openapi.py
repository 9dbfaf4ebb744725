"""The document behind /openapi.json and /docs: every endpoint with what it takes and what it answers.

Bodies of requests come from `schemas`, next to their endpoints; the answers, which endpoints write as plain objects,
are described here, and the tests hold both against real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from aura_omni.flow import SpeechReason, StageName, StagePhase
from aura_omni.server.deadline import HEADER, LEAST_S
from aura_omni.server.field_notes import IGNORED, NOTES

# ---------------------------------------------------------------- answers


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Of every failure. param names the part of the request; type says whose fault it is, code what it is."""

    error: Error


class TokenDetails(BaseModel):
    text_tokens: int
    audio_tokens: int


class PromptDetails(TokenDetails):
    video_tokens: int
    cached_tokens: int


class ChatUsage(BaseModel):
    """audio_tokens of the completion are frames of 80 ms."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: TokenDetails


class SpokenAnswer(BaseModel):
    """data: a file in base64, in the format that was asked for."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    audio: SpokenAnswer | None = None


class AudioMetadata(BaseModel):
    format: str
    sample_rate_hz: int
    frame_count: int
    channels: int


class Choice(BaseModel):
    """silent: the turn chose not to answer; content is then "<|silent|>"."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None
    silent: bool
    audio_metadata: AudioMetadata | None = None
    audio_finish_reason: SpeechReason | None = None


class AuraPart(BaseModel):
    """What was heard, one text for each audio part."""

    transcripts: list[str]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage
    aura: AuraPart


class DeltaAudio(BaseModel):
    """data: base64, to be joined; transcript: text as it is written; expires_at in the last one."""

    id: str
    data: str | None = None
    transcript: str | None = None
    expires_at: int | None = None


class Delta(BaseModel):
    """content is text, or in a stream without OpenAI's audio object and with modality "audio" sound in base64."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: DeltaAudio | None = None


class ChunkChoice(BaseModel):
    """finish_reason and what follows it: at the end."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None
    logprobs: None
    silent: bool | None = None
    audio_metadata: AudioMetadata | None = None
    audio_finish_reason: SpeechReason | None = None


class ChatChunk(BaseModel):
    """choices is empty in the chunk that has the usage. The stream ends with [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    modality: Literal["text", "audio"] | None = None
    usage: ChatUsage | None = None
    aura: AuraPart | None = None


class SpeechUsage(BaseModel):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechEvent(BaseModel):
    """audio: base64, to be joined, of a delta; what follows it: of the last event."""

    type: Literal["speech.audio.delta", "speech.audio.done", "error"]
    audio: str | None = None
    usage: SpeechUsage | None = None
    audio_finish_reason: SpeechReason | None = None
    error: Error | None = None


class TranscriptionUsage(BaseModel):
    type: Literal["tokens"]
    input_tokens: int
    input_token_details: TokenDetails
    output_tokens: int
    total_tokens: int


class TranscriptSegment(BaseModel):
    """What lies between two pauses; start and end are seconds, seek is in units of 10 ms."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    temperature: float


class Transcription(BaseModel):
    """task to segments: of verbose_json."""

    text: str
    usage: TranscriptionUsage
    finish_reason: Literal["stop", "length"]
    task: Literal["transcribe"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptSegment] | None = None


class TranscriptEvent(BaseModel):
    """delta: text to be joined, of one segment; what follows it: of the last event."""

    type: Literal["transcript.text.delta", "transcript.text.done", "error"]
    delta: str | None = None
    text: str | None = None
    usage: TranscriptionUsage | None = None
    finish_reason: Literal["stop", "length"] | None = None
    error: Error | None = None


class UploadedVoiceShown(BaseModel):
    name: str
    consent: str
    created_at: int
    file_size: int
    mime_type: str
    duration_s: float
    embedding_source: Literal["audio"]
    ref_text: str | None = None
    speaker_description: str | None = None


class VoiceList(BaseModel):
    """voices: what `voice` may be."""

    voices: list[str]
    uploaded_voices: list[UploadedVoiceShown]


class VoiceKept(BaseModel):
    success: Literal[True]
    voice: UploadedVoiceShown
    id: str
    object: Literal["audio.voice"]
    type: Literal["audio_sample"]
    name: str
    created_at: int


class VoiceDeleted(BaseModel):
    success: Literal[True]
    id: str
    object: Literal["audio.voice.deleted"]
    deleted: Literal[True]


class ModelShown(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelShown]


class Status(BaseModel):
    status: Literal["alive", "healthy"]


class Ready(BaseModel):
    status: Literal["ready"]
    stages: dict[StageName, StagePhase]


class NotReady(ErrorAnswer):
    status: Literal["loading", "failed"]
    stages: dict[StageName, StagePhase]


_ANSWERS: tuple[type[BaseModel], ...] = (
    ErrorAnswer, ChatCompletion, ChatChunk, SpeechEvent, Transcription, TranscriptEvent, VoiceList, VoiceKept, VoiceDeleted, ModelShown, ModelList, Status, Ready,
    NotReady,
)  # fmt: skip

# ---------------------------------------------------------------- endpoints

_SOUND = {"schema": {"type": "string", "format": "binary"}}
_TEXT = {"schema": {"type": "string"}}


def _events(answer: type[BaseModel], *, done: str | None = None) -> dict[str, Any]:
    """Server-sent events, one by one, as OpenAPI 3.2 describes them: the line `data:` has JSON, or `done` in the last."""
    content = {"$ref": f"#/components/schemas/{answer.__name__}"}
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    if done is not None:
        data = {"anyOf": [{"const": done}, data]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


def _json(answer: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer.__name__}"}}}


# Content of the 200 of every operation; a type of content for each format there is
_CONTENTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("post", "/v1/chat/completions"): {**_json(ChatCompletion), **_events(ChatChunk, done="[DONE]")},
    ("post", "/v1/audio/speech"): {
        **dict.fromkeys(("audio/wav", "audio/pcm", "audio/flac", "audio/mpeg", "audio/ogg", "audio/aac"), _SOUND),
        **_events(SpeechEvent),
    },
    ("post", "/v1/audio/transcriptions"): {
        **_json(Transcription),
        **dict.fromkeys(("text/plain", "application/x-subrip", "text/vtt"), _TEXT),
        **_events(TranscriptEvent),
    },
    ("post", "/v1/audio/translations"): {},
    ("get", "/v1/audio/voices"): _json(VoiceList),
    ("post", "/v1/audio/voices"): _json(VoiceKept),
    ("delete", "/v1/audio/voices/{name}"): _json(VoiceDeleted),
    ("get", "/v1/models"): _json(ModelList),
    ("get", "/v1/models/{name}"): _json(ModelShown),
    ("get", "/live"): _json(Status),
    ("get", "/health"): _json(Status),
    ("get", "/ready"): _json(Ready),
    ("get", "/metrics"): {"text/plain": _TEXT},
}
_ABOUT: Mapping[tuple[str, str], str] = {
    (
        "post",
        "/v1/chat/completions",
    ): "A turn: text, recordings, clips and pictures in; text and speech out, whole or streamed.",
    ("post", "/v1/audio/speech"): "Speak a text.",
    ("post", "/v1/audio/transcriptions"): "Write down what is said in a recording of up to hours.",
    ("post", "/v1/audio/translations"): "Not served: always a 400.",
    ("get", "/v1/audio/voices"): "Voices of the checkpoint and uploaded ones.",
    ("post", "/v1/audio/voices"): "Keep a voice under a name; a Base checkpoint can then speak with it.",
    ("delete", "/v1/audio/voices/{name}"): "Forget an uploaded voice, and its recording if no other name has it.",
    ("get", "/v1/models"): "The names that requests may use.",
    ("get", "/v1/models/{name}"): "One of them.",
    ("get", "/live"): "The process runs, whatever its stages do.",
    ("get", "/health"): "A turn can be answered now.",
    ("get", "/ready"): "Every stage has done one real inference; until then a 503 that says how far each has come.",
    ("get", "/metrics"): "For Prometheus.",
}
_EXAMPLES: Mapping[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello, who are you?"}], "modalities": ["text"]},
    "/v1/audio/speech": {"input": "Hello there.", "response_format": "wav"},
    "/v1/audio/transcriptions": {"file": "question.wav", "response_format": "verbose_json"},
    "/v1/audio/voices": {"audio_sample": "ada.wav", "name": "Ada", "consent": "Ada, on 30 November 2026"},
}
_HOW_SPEECH_ENDED = "of a file that is sent whole: how its speech ended, as audio_finish_reason says it elsewhere"
# Of every answer, of streams, of some failures: name, type, what it says
_HEADERS = (
    ("x-request-id", "string", "under which the server logs this request: the caller's x-request-id if it was harmless, or a new one"),
    ("cache-control", "string", "no-cache, of an event stream"),
    ("x-accel-buffering", "string", "no, of an event stream: reverse proxies then pass on what comes as it comes"),
    ("retry-after", "integer", "with 429 and 503: seconds after which to ask again"),
    ("x-should-retry", "string", "false, with 408 and 504: the same would run into the same limit, so official clients do not repeat it"),
    ("allow", "string", "with 405: the methods that there are"),
    ("www-authenticate", "string", "with 401: Bearer"),
)  # fmt: skip
_OF_EVENTS = ("cache-control", "x-accel-buffering")
_NO_KEY = ("/live", "/health", "/ready", "/metrics")
_TIMED = ("/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions")


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1. Raises KeyError for an endpoint whose answers are not described above."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes, description=_DESCRIPTION)
    _, definitions = models_json_schema(
        [(answer, "serialization") for answer in _ANSWERS], ref_template="#/components/schemas/{model}"
    )
    schemes = {"key": {"type": "http", "scheme": "bearer", "description": "only where the server was given API keys"}}
    headers = {name: {"description": about, "schema": {"type": kind}} for name, kind, about in _HEADERS}
    made["components"] = {"schemas": definitions["$defs"], "headers": headers, "securitySchemes": schemes}
    for path, item in made["paths"].items():
        for method, operation in item.items():
            _complete(method, path, operation)
    return made


def operations(document: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Method in upper case, path, operation."""
    return [
        (method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


def _complete(method: str, path: str, operation: dict[str, Any]) -> None:
    contents = _CONTENTS[method, path]
    operation["description"] = _ABOUT[method, path]
    failed = {
        "description": "What is wrong and the way out",
        "headers": _of_every([name for name, _, _ in _HEADERS if name not in _OF_EVENTS]),
        "content": _json(ErrorAnswer),
    }
    operation["responses"] = {"4XX": failed, "5XX": failed}
    if contents:
        headers = _of_every(["x-request-id", *(_OF_EVENTS if "text/event-stream" in contents else ())])
        if path == "/v1/audio/speech":
            reasons = {"type": "string", "enum": list(get_args(SpeechReason))}
            headers["x-audio-finish-reason"] = {"description": _HOW_SPEECH_ENDED, "schema": reasons}
        operation["responses"]["200"] = {"description": "Answered", "headers": headers, "content": dict(contents)}
    if path == "/ready":
        operation["responses"]["503"] = {**failed, "description": "Not ready yet", "content": _json(NotReady)}
    if path not in _NO_KEY:
        operation["security"] = [{"key": []}, {}]
    if path in _TIMED:
        operation.setdefault("parameters", []).append(
            {
                "name": HEADER,
                "in": "header",
                "description": "seconds after which the request ends with code timeout; the server's own limit is the most",
                "schema": {"type": "number", "minimum": LEAST_S},
            }
        )
    for body in operation.get("requestBody", {}).get("content", {}).values():
        if path in _EXAMPLES:
            body["example"] = _EXAMPLES[path]
        for name, field in body["schema"]["properties"].items():
            field["description"] = NOTES.get(name, IGNORED)


def _of_every(names: Sequence[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


_DESCRIPTION = """\
Clients of OpenAI's API work unchanged. Every answer has x-request-id; every failure is an ErrorAnswer, also as the last event \
of a stream that fails after it has begun (no [DONE] follows). A stream of bytes that fails is broken off without its end. \
429 and 503 have Retry-After. Fields that are not served are refused by name."""
