"""How a request asks for its voice: of a chat OpenAI's `audio.voice`, vLLM-Omni's top-level fields and its `tts_*` keys; of a
speech request its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from aura_omni.errors import BadRequest, BadVoice, UnsupportedOption, shown
from aura_omni.flow import Voice, VoiceTask
from aura_omni.server.schemas import ChatRequest, SpeakerId, SpeechRequest, asks_nothing, hint, why_not_served

_WHERE = "additional_information"
_SERVED = (
    "aura_system_prompt",
    "tts_task_type",
    "tts_language",
    "tts_speaker",
    "tts_instruct",
    "tts_ref_audio",
    "tts_ref_text",
    "tts_x_vector_only_mode",
    "tts_pass_token_ids",
    "tts_non_streaming_mode",
    "tts_normalize",
    "tts_max_new_tokens",
    "initial_codec_chunk_frames",
)
# Keys that vLLM-Omni reads for its own bookkeeping or for a decoder that is not exact in chunks
_NOT_SERVED = frozenset({
    "tts_ref_code_length", "tts_tokenizer", "tts_model", "qwen3_tts_model", "session_id", "aura_session_id",
    "aura_duplex", "is_speech", "epoch", "turn_id", "realtime_item_id", "deferred_multi_modal_data",
    "aura_tts_partial", "aura_tts_close_only", "full_utterance_decode",
})  # fmt: skip
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


# What the pipeline calls a part of a turn, by the request's name of it; `chat_fields` and `speech_fields` know the spelling used
CHAT_FIELDS: Mapping[str, str] = {
    field: f"{_WHERE}.{key}"
    for field, key in (
        ("task", "tts_task_type"), ("language", "tts_language"), ("speaker", "tts_speaker"), ("instruct", "tts_instruct"),
        ("ref_audio", "tts_ref_audio"), ("ref_text", "tts_ref_text"), ("x_vector_only", "tts_x_vector_only_mode"),
        ("pass_token_ids", "tts_pass_token_ids"), ("non_streaming", "tts_non_streaming_mode"),
        ("normalize", "tts_normalize"), ("max_frames", "tts_max_new_tokens"), ("system_prompt", "aura_system_prompt"),
    )
}  # fmt: skip
SPEECH_FIELDS: Mapping[str, str] = {
    "messages": "input", "task": "task_type", "speaker": "voice", "instruct": "instructions",
    "x_vector_only": "x_vector_only_mode", "non_streaming": "non_streaming_mode", "max_frames": "max_new_tokens",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VoiceRequest:
    """voice without its ref_audio; ref_audio is a URL, a data URL or bare base64, still to be fetched.

    first_frames: of the first chunk.
    """

    voice: Voice
    system_prompt: str | None
    ref_audio: str | None
    first_frames: int | None


def voice_request(body: ChatRequest) -> VoiceRequest:
    """Collect the spellings; two that disagree are refused. Raises BadRequest naming the key."""
    given, spellings = _Keys(body.additional_information or {}), _chat_spellings(body)
    voice = Voice(
        task=given.task("tts_task_type"),
        language=_agreed({**spellings["language"], f"{_WHERE}.tts_language": given.text("tts_language")}),
        speaker=_agreed({**spellings["speaker"], f"{_WHERE}.tts_speaker": given.text("tts_speaker")}),
        instruct=_agreed({**spellings["instruct"], f"{_WHERE}.tts_instruct": given.text("tts_instruct")}),
        ref_text=given.text("tts_ref_text"),
        x_vector_only=given.flag("tts_x_vector_only_mode") or False,
        pass_token_ids=given.flag("tts_pass_token_ids") or False,
        non_streaming=given.flag("tts_non_streaming_mode"),
        normalize=given.flag("tts_normalize"),
        max_frames=given.count("tts_max_new_tokens"),
    )
    return VoiceRequest(
        voice,
        system_prompt=given.text("aura_system_prompt"),
        ref_audio=given.text("tts_ref_audio"),
        first_frames=given.count("initial_codec_chunk_frames", least=0),
    )


def speech_voice(body: SpeechRequest) -> Voice:
    """The voice of a speech request, without its ref_audio. Raises BadRequest naming the field."""
    return Voice(
        task=_task(body.task_type, "task_type"),
        language=body.language,
        speaker=_agreed(_speech_spellings(body)["speaker"]),
        instruct=body.instructions,
        ref_text=body.ref_text,
        x_vector_only=body.x_vector_only_mode or False,
        non_streaming=body.non_streaming_mode,
        normalize=body.normalize,
        max_frames=body.max_new_tokens,
    )


def chat_fields(body: ChatRequest) -> Mapping[str, str]:
    """CHAT_FIELDS with the fields that this body has."""
    return {**CHAT_FIELDS, **_used(_chat_spellings(body))}


def speech_fields(body: SpeechRequest) -> Mapping[str, str]:
    """SPEECH_FIELDS with the fields that this body has."""
    return {**SPEECH_FIELDS, **_used(_speech_spellings(body))}


_Spellings = Mapping[str, Mapping[str, str | None]]  # what the pipeline calls it -> fields of the body -> what they say


def _chat_spellings(body: ChatRequest) -> _Spellings:
    """Those beside `additional_information`."""
    return {
        "language": {"language": body.language},
        "speaker": {
            "voice": _speaker(body.voice),
            "speaker": body.speaker,
            "audio.voice": _speaker(body.audio.voice) if body.audio else None,
        },
        "instruct": {"instructions": body.instructions},
    }


def _speech_spellings(body: SpeechRequest) -> _Spellings:
    return {"speaker": {"voice": _speaker(body.voice), "speaker": body.speaker}}


def _used(spellings: _Spellings) -> dict[str, str]:
    """The first spelling of each that says something."""
    used: dict[str, str] = {}
    for ours, said in spellings.items():
        for field, value in said.items():
            if value and ours not in used:
                used[ours] = field
    return used


def _speaker(voice: str | SpeakerId | None) -> str | None:
    return voice.id if isinstance(voice, SpeakerId) else voice


def _agreed(spellings: Mapping[str, str | None]) -> str | None:
    said = {where: value for where, value in spellings.items() if value}
    if len(set(said.values())) > 1:
        places = " and ".join(f"{where} {shown(value)}" for where, value in said.items())
        raise BadRequest(f"{places} differ; give one of them", param=next(iter(said)))
    return next(iter(said.values()), None)


class _Keys:
    """additional_information, whose values are scalars or lists of one."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = {}
        for name, value in given.items():
            if name in _SERVED:
                self._values[name] = value[0] if isinstance(value, list) and len(value) == 1 else value
            elif name in _NOT_SERVED:
                if not asks_nothing(name, value):
                    raise UnsupportedOption(why_not_served(f"{_WHERE}.{name}", name, value), param=f"{_WHERE}.{name}")
            else:
                meant = hint(name, _SERVED)
                raise BadRequest(f"{_WHERE}: unknown key {name[:60]!r}{meant}", param=f"{_WHERE}.{name[:60]}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            where = f"{_WHERE}.{name}"
            raise BadRequest(f"{where} is {shown(value)}; it must be a string or a list of one", param=where)
        return value

    def flag(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is None:
            return None
        spelling = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
        if spelling in _TRUE:
            return True
        if spelling in _FALSE:
            return False
        where = f"{_WHERE}.{name}"
        raise BadRequest(f"{where} is {shown(value)}; it must be true or false", param=where)

    def count(self, name: str, *, least: int = 1) -> int | None:
        value = self._values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31):
            where = f"{_WHERE}.{name}"
            raise BadRequest(
                f"{where} is {shown(value)}; it must be a whole number from {least} to {2**31 - 1}", param=where
            )
        return value

    def task(self, name: str) -> VoiceTask | None:
        return _task(self.text(name), f"{_WHERE}.{name}")


def _task(value: str | None, where: str) -> VoiceTask | None:
    if not value:
        return None
    tasks: tuple[VoiceTask, ...] = get_args(VoiceTask)
    for task in tasks:
        if task.lower() == value.strip().lower():
            return task
    raise BadVoice(f"{where} is {shown(value)}; it must be one of {', '.join(tasks)}", param=where)
