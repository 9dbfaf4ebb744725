"""The bodies that clients may send. Every field is served, harmless to leave alone, or refused by name.

Harmless: `user`, `metadata`, `store`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`, `prediction`,
`service_tier` and `parallel_tool_calls` of a chat, and `name` of a message. They label, bill or speed up; no answer
would differ. A field that is known elsewhere but not served here is accepted as long as it asks for nothing (null,
false, empty, or the value in `ASKS_NOTHING`); anything else is refused by name, and an unknown name with its neighbour.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from aura_omni.errors import BadRequest, TooLarge, nearest, shown
from aura_omni.media.formats import RECORDING_FORMATS, names_a_recording
from aura_omni.media.speed import MAX_SPEED, MIN_SPEED
from aura_omni.server.errors import bad_request
from aura_omni.server.twice import refuse_names_twice

# flow.checked_sampling checks these, with their limits in its messages
Number = Annotated[Any, WithJsonSchema({"type": ["number", "null"]})]
Integer = Annotated[Any, WithJsonSchema({"type": ["integer", "null"]})]


def hint(name: str, known: Iterable[str]) -> str:
    """'; did you mean 'x'?' for a misspelt name, or nothing: a request has too many names to list them."""
    if name.startswith("tts_") and "additional_information" in known:
        return "; what begins with tts_ belongs in additional_information"
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""


ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "chunking_strategy": ("auto",),
    "chat_template_content_format": ("auto",),
    "length_penalty": (1.0,),
    "n": (1,),
    "output_kind": (0,),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
}

_TRUE_BY_DEFAULT = frozenset({"add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"})


def asks_nothing(name: str, value: Any) -> bool:
    """Whether leaving this field alone does what it says."""
    if name in _TRUE_BY_DEFAULT:
        return value is None or value is True
    if value is None or value is False or value in ("", [], {}):
        return True
    return any(value == neutral and type(value) is type(neutral) for neutral in ASKS_NOTHING.get(name, ()))


def why_not_served(where: str, name: str, value: Any) -> str:
    """Why a field of this name is refused with this value, and the values that it may have, if there are any."""
    served = [True] if name in _TRUE_BY_DEFAULT else ASKS_NOTHING.get(name, ())
    if not served:
        return f"{where} is not served; leave it out"
    return f"{where} is {shown(value)}; only {' and '.join(map(json.dumps, served))} {'is' if len(served) == 1 else 'are'} served"


class Body(BaseModel):
    """A JSON object whose field names are all known."""

    # extra: _names_are_known refuses, with the nearest name
    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra={"additionalProperties": False})
    not_served: ClassVar[frozenset[str]] = frozenset()
    form_values: ClassVar[Mapping[str, type]] = {}  # of fields that a form sends as text and that are something else

    @model_validator(mode="before")
    @classmethod
    def _names_are_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if name in cls.model_fields:
                continue
            if name in cls.not_served:
                if asks_nothing(name, value):
                    continue
                raise PydanticCustomError(
                    "unsupported_option", "{why}", {"field": name, "why": why_not_served(name, name, value)}
                )
            raise PydanticCustomError(
                "unknown_field",
                "unknown field '{field}'{hint}",
                {"field": name[:60], "hint": hint(name, cls.model_fields)},
            )
        return data


B = TypeVar("B", bound=Body)


# ---------------------------------------------------------------- messages


def _or_text(schema: dict[str, Any]) -> None:
    """A field that may also be a plain text, which a validator turns into the long form."""
    schema.update({"anyOf": [{"type": "string"}, schema.copy()]})
    for key in schema.keys() - {"anyOf"}:
        del schema[key]


_SHORT_FORM_TOO = Field(json_schema_extra=_or_text)


class Url(Body):
    url: str
    detail: Literal["auto", "high"] | None = None  # pictures are always seen in full detail


class InputAudio(Body):
    data: str
    format: str | None = Field(None, description=f"{', '.join(RECORDING_FORMATS)}; the bytes say what they are")

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None and not names_a_recording(name):
            raise PydanticCustomError("recording_format", "one of {known}", {"known": ", ".join(RECORDING_FORMATS)})
        return name


class Part(Body):
    not_served = frozenset({"uuid", "prompt_cache_breakpoint"})


def _as_object(data: Any, name: str, field: str) -> Any:
    """The short spelling {"type": "image_url", "image_url": "https://..."} as the long one."""
    if isinstance(data, dict) and isinstance(data.get(name), str):
        return {**data, name: {field: data[name]}}
    return data


class TextPart(Part):
    type: Literal["text"]
    text: str


class AudioUrlPart(Part):
    type: Literal["audio_url"]
    audio_url: Url = _SHORT_FORM_TOO

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return _as_object(data, "audio_url", "url")


class InputAudioPart(Part):
    type: Literal["input_audio"]
    input_audio: InputAudio = _SHORT_FORM_TOO

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return _as_object(data, "input_audio", "data")


class VideoUrlPart(Part):
    type: Literal["video_url"]
    video_url: Url = _SHORT_FORM_TOO

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return _as_object(data, "video_url", "url")


class ImageUrlPart(Part):
    type: Literal["image_url"]
    image_url: Url = _SHORT_FORM_TOO

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return _as_object(data, "image_url", "url")


ContentPart = Annotated[
    TextPart | AudioUrlPart | InputAudioPart | VideoUrlPart | ImageUrlPart, Field(discriminator="type")
]


class EarlierAudio(BaseModel):
    """The audio of an earlier answer. Answers are not kept, so its id means nothing here; its transcript does."""

    transcript: str | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: list[ContentPart] = Field([], json_schema_extra=_or_text)
    audio: EarlierAudio | None = None
    name: str | None = None
    not_served = frozenset({"tool_calls", "tool_call_id", "function_call", "refusal", "annotations", "reasoning",
                            "reasoning_content"})  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _content_is_a_list(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if isinstance(data.get("content"), str):
                return {**data, "content": [{"type": "text", "text": data["content"]}]}
            if data.get("content") is None:
                return {**data, "content": []}
        return data


# ---------------------------------------------------------------- chat


class SpeakerId(Body):
    id: str


class AudioOptions(Body):
    voice: str | SpeakerId | None = None
    format: str | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    not_served = frozenset({"continuous_usage_stats", "include_obfuscation"})


class ChatRequest(Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    model: str | None = None
    modalities: Annotated[Any, WithJsonSchema({"type": ["array", "null"], "items": {"enum": ["text", "audio"]}})] = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    voice: str | SpeakerId | None = None
    speaker: str | None = None
    instructions: str | None = None
    language: str | None = None
    additional_information: dict[str, Any] | None = None

    sampling_params_list: Annotated[
        Any, WithJsonSchema({"type": ["array", "null"], "items": {"type": "object"}})
    ] = None  # fmt: skip
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    max_tokens: Integer = None
    max_completion_tokens: Integer = None
    min_tokens: Integer = None
    seed: Integer = None
    stop: Annotated[Any, WithJsonSchema({"type": ["string", "array", "null"], "items": {"type": "string"}})] = None
    stop_token_ids: Annotated[Any, WithJsonSchema({"type": ["array", "null"], "items": {"type": "integer"}})] = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: Annotated[Any, WithJsonSchema({"type": ["object", "null"]})] = None
    ignore_eos: Annotated[Any, WithJsonSchema({"type": ["boolean", "null"]})] = None

    # Harmless to leave alone
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None

    not_served = frozenset({
        # OpenAI
        "n", "tools", "tool_choice", "functions", "function_call", "logprobs", "top_logprobs", "response_format",
        "reasoning_effort", "verbosity", "web_search_options", "moderation", "prompt_cache_options",
        # vLLM
        "best_of", "use_beam_search", "length_penalty", "include_stop_str_in_output", "skip_special_tokens",
        "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids",
        "bad_words", "echo", "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents",
        "chat_template", "chat_template_kwargs", "chat_template_content_format", "mm_processor_kwargs",
        "media_io_kwargs", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "priority", "request_id",
        "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params",
        "vllm_xargs", "include_reasoning", "thinking_token_budget",
        # vLLM-Omni
        "return_stage_metrics", "ref_audio", "ref_text", "task_type",
    })  # fmt: skip


# ---------------------------------------------------------------- speech and transcripts


class SpeechRequest(Body):
    """POST /v1/audio/speech."""

    input: str
    model: str | None = None
    voice: str | SpeakerId | None = None
    speaker: str | None = None
    instructions: str | None = None
    language: str | None = None
    response_format: str | None = None
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    task_type: str | None = None
    ref_audio: str | list[str] | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool | None = None
    non_streaming_mode: bool | None = None
    normalize: bool | None = None
    max_new_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    initial_codec_chunk_frames: int | None = Field(None, ge=0, le=2**31 - 1)
    speed: float | None = Field(None, ge=MIN_SPEED, le=MAX_SPEED)
    sample_rate: int | None = None
    seed: Integer = None

    not_served = frozenset({
        "word_timestamps", "speaker_embedding", "references", "extra_params",
        "temperature", "top_p", "top_k", "repetition_penalty", "lang_code", "volume_multiplier",
        "normalization_options",
    })  # fmt: skip


class TranscriptionRequest(Body):
    """The fields beside the file of POST /v1/audio/transcriptions."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    stream: bool | None = None
    timestamp_granularities: list[str] | None = None
    temperature: Number = None
    seed: Integer = None

    form_values = {"stream": bool, "temperature": float, "seed": int, "timestamp_granularities": list}
    not_served = frozenset({
        "chunking_strategy", "include", "known_speaker_names", "known_speaker_references",
        "to_language", "stream_include_usage", "stream_continuous_usage_stats", "max_completion_tokens", "top_p", "top_k",
        "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "vllm_xargs",
    })  # fmt: skip


class VoiceUpload(Body):
    """The fields beside the file of POST /v1/audio/voices."""

    name: str
    consent: str
    ref_text: str | None = None
    speaker_description: str | None = None
    type: Literal["audio_sample"] | None = None

    not_served = frozenset({"speaker_embedding", "prompt", "model", "script_hint", "x_vector_only_mode"})


# ---------------------------------------------------------------- reading

LARGE_BODY_BYTES = 2**20
MAX_VALUES = 1_000_000  # of a body, about; base64 has no commas
MAX_CHARACTERS = 4_000_000  # of a body without media, ten times what the longest context could hold
MAX_MESSAGES = 4_096
MAX_LEVELS = 201  # of lists and objects in each other; the parser's
_QUOTED = 20  # bytes on each side of where a body is no JSON
MAX_PARTS = 1_024  # content parts of all messages
MEDIA_FIELDS = frozenset(
    {"url", "data", "audio_url", "input_audio", "video_url", "image_url", "tts_ref_audio", "ref_audio"}
)


_KINDS: Mapping[type, str] = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def wrong_type(form: str, *, given: str, wanted: str) -> str:
    """Why a body with this Content-Type is not read."""
    said = f"is {shown(given)}" if given else "is not given"
    return f"the body must be {form}, and its Content-Type {said}; send the header 'Content-Type: {wanted}'"


async def read_body(request: Request, kind: type[B]) -> B:
    """The JSON body of a request. Raises BadRequest with the path to the first problem, TooLarge from the limit."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadRequest(wrong_type("JSON", given=media_type, wanted="application/json"))
    body = await request.body()
    if len(body) > LARGE_BODY_BYTES:  # others are answered meanwhile
        return await asyncio.to_thread(_read, kind, body)
    return _read(kind, body)


def _read(kind: type[B], body: bytes) -> B:
    # Of two bytes each, they would become objects of sixty. A body that is no longer than this has no more of them.
    if len(body) > MAX_VALUES and (values := sum(map(body.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise TooLarge(f"the body has {values:,} commas and brackets; at most {MAX_VALUES:,}. Send less")
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(_why_no_json(str(error), body)) from None
    refuse_names_twice(body)
    if len(body) > MAX_CHARACTERS:
        characters = sum(_characters(data))
        if characters > MAX_CHARACTERS:
            raise TooLarge(f"the body has {characters:,} characters of text; at most {MAX_CHARACTERS:,}. Send less")
    return checked(kind, data)


def _why_no_json(detail: str, body: bytes) -> str:
    """The parser's words are for its programmer; where it stopped is for everybody."""
    if not body.strip():
        return "the body is empty; send a JSON object"
    if detail.startswith("recursion limit"):
        return f"the body is JSON of more than {MAX_LEVELS} levels; put fewer lists and objects into each other"
    found = re.search(r" at line (\d+) column (\d+)", detail)
    line, column = map(int, found.groups()) if found else (1, 1)
    if len(body) > LARGE_BODY_BYTES:
        return f"the body is not JSON beyond line {line:,}, column {column:,}"
    start = 0
    for _ in range(line - 1):
        start = body.index(b"\n", start) + 1
    at = max(start + column - 1, 0)
    if detail.startswith("EOF") or not body[at:].strip():
        return f"the body is not JSON: it ends after {len(body):,} bytes, before it is complete"
    before, here = (
        text.decode(errors="replace") for text in (body[max(at - _QUOTED, 0) : at], body[at : at + _QUOTED])
    )
    after = f" after {shown(before)}" if before else ""
    return f"the body is not JSON: line {line:,}, column {column:,} has {shown(here)}{after}"


def _characters(node: Any) -> Iterator[int]:
    """Lengths of all texts but media."""
    waiting = [node]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield len(text)
            case list() as items:
                waiting += items
            case dict() as fields:
                yield sum(map(len, fields))
                waiting += [
                    value for key, value in fields.items() if key not in MEDIA_FIELDS or isinstance(value, dict | list)
                ]


def checked(kind: type[B], data: Any) -> B:
    """A body from parsed JSON. Raises BadRequest with the path to the first problem."""
    if not isinstance(data, dict):
        raise BadRequest(f"the body is {_KINDS.get(type(data), 'a number')}; it must be a JSON object")
    _check_counts(data.get("messages"))
    try:
        return kind.model_validate(data)
    except ValidationError as invalid:
        raise bad_request(invalid) from None


def _check_counts(messages: Any) -> None:
    """Before anything is made of them; what is no list of messages is refused by its type."""
    if not isinstance(messages, list):
        return
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"{len(messages):,} messages; at most {MAX_MESSAGES:,}", param="messages")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_PARTS:
        raise BadRequest(f"the messages have {parts:,} content parts; at most {MAX_PARTS:,} in all", param="messages")


def documented(kind: type[Body], *, file: str | None = None) -> dict[str, Any]:
    """The OpenAPI entry of an endpoint that uses read_body; with a file it is a form that has one of that name."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[node["$ref"].rpartition("/")[2]])
            return {key: inlined(value) for key, value in node.items() if key != "discriminator"}
        if isinstance(node, list):
            return [inlined(item) for item in node]
        return node

    schema = inlined(schema)
    media_type = "application/json"
    if file is not None:
        media_type = "multipart/form-data"
        schema["properties"] = {file: {"type": "string", "format": "binary"}, **schema["properties"]}
        schema["required"] = [file, *schema.get("required", [])]
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}
