"""GET, POST and DELETE /v1/audio/voices: voices that the checkpoint has, and voices that users upload.

An uploaded voice is a recording with its consent, and its transcript where there is one. It can be a `voice` wherever
one is named, if the Talker clones (task Base): `Voiced` puts the recording in the place of the name, so that no endpoint
knows of it. Without a transcript only the sound of the voice is used.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request

from aura_omni.errors import BadMedia, BadRequest, BadVoice, NotFound, Unavailable, UnsupportedOption, field_name, shown
from aura_omni.flow import Audio, Event, TurnRequest, Voice, why_mute
from aura_omni.media.audio import decode_audio
from aura_omni.media.container import media_type_of
from aura_omni.media.level import may_be_speech
from aura_omni.media.spoken import check_transcript
from aura_omni.server.around import Around
from aura_omni.server.forms import closed_after, read_form
from aura_omni.server.schemas import VoiceUpload, documented
from aura_omni.server.turns import Pipeline, Turn
from aura_omni.server.voice_store import UploadedVoice, VoiceStore

MAX_RECORDING_BYTES = 10 * 2**20
LEAST_RECORDING_S, MAX_RECORDING_S = 1.0, 30.0
_FILE = "audio_sample"
_LONGEST_TEXT = 4_000  # characters
_NAME = re.compile(r"[^\W_][\w .-]{0,62}[\w.-]|[^\W_]")
_NO_CONSENT = ("", "false", "0", "no", "none", "null")
_DECODED = 16  # recordings kept decoded: at most 6 MB each


class Voiced(Around):
    """A pipeline whose speakers are also the uploaded voices."""

    def __init__(self, inner: Pipeline, store: VoiceStore) -> None:
        super().__init__(inner)
        self._store = store
        self._decoded = lru_cache(maxsize=_DECODED)(self._decode)

    def submit(self, request: TurnRequest, sink: Callable[[Event], None]) -> Turn:
        return super().submit(self._with_recording(request), sink)

    def _with_recording(self, request: TurnRequest) -> TurnRequest:
        voice = request.voice
        if request.part == "transcript" or not voice.speaker or self.voice_task is None:
            return request
        uploaded = self._store.get(voice.speaker.strip())
        if uploaded is not None:
            self._check_clones(voice, uploaded)
            # Where nothing is spoken the name is all that is checked.
            cloned = self._cloned(voice, uploaded) if request.speak else replace(voice, speaker=None)
            return replace(request, voice=cloned)
        if self.voice_task == "Base" and voice.ref_audio is None:
            names = ", ".join(kept.name for kept in self._store.all()[:20])
            there = f"there are {names}" if names else "none is uploaded yet"
            raise BadVoice(f"{field_name('speaker')} {shown(voice.speaker)} is unknown; {there}", param="speaker")
        return request

    def _check_clones(self, voice: Voice, uploaded: UploadedVoice) -> None:
        if self.voice_task != "Base":
            raise BadVoice(
                f"{field_name('speaker')} {uploaded.name!r} was uploaded, and this server's Talker ({self.voice_task}) cannot clone it; use "
                "one of GET /v1/audio/voices, or serve a Base checkpoint",
                param="speaker",
            )
        if voice.ref_audio is not None:
            raise BadVoice(
                f"{field_name('speaker')} {uploaded.name!r} was uploaded, and {field_name('ref_audio')} is given; give one",
                param="ref_audio",
            )

    def _cloned(self, voice: Voice, uploaded: UploadedVoice) -> Voice:
        ref_text = voice.ref_text or uploaded.ref_text
        return replace(
            voice,
            speaker=None,
            ref_audio=self._decoded(uploaded),
            ref_text=ref_text,
            x_vector_only=voice.x_vector_only or not ref_text,
        )

    def _decode(self, uploaded: UploadedVoice) -> Audio:
        return decode_audio(self._store.recording(uploaded), max_s=MAX_RECORDING_S + 1)


def router(pipeline: Pipeline, store: VoiceStore | None) -> APIRouter:
    routes = APIRouter()

    def check_speaks() -> None:
        if not pipeline.ready:
            raise Unavailable(pipeline.reason)
        if "talker" not in pipeline.stages:
            raise NotFound(why_mute(pipeline.stages))

    def kept() -> VoiceStore:
        check_speaks()
        if store is None:
            raise UnsupportedOption(
                "this server keeps no voices; start it with --custom-voice-dir FOLDER, or send ref_audio with each request to "
                "/v1/audio/speech"
            )
        return store

    @routes.get("/v1/audio/voices")
    async def voices() -> dict[str, list[Any]]:
        check_speaks()
        uploaded = [] if store is None else store.all()
        usable = [voice.name for voice in uploaded] if pipeline.voice_task == "Base" else []
        return {"voices": [*pipeline.speakers, *usable], "uploaded_voices": [_shown(voice) for voice in uploaded]}

    @routes.post("/v1/audio/voices", openapi_extra=documented(VoiceUpload, file=_FILE))
    async def upload(request: Request) -> dict[str, Any]:
        keeping = kept()
        way_out = f"Send {MAX_RECORDING_S:g} s of speech or less"
        body, file = await read_form(request, VoiceUpload, file=_FILE, longest=MAX_RECORDING_BYTES, way_out=way_out)
        async with closed_after(file):
            recording = await file.read()
        name = _name(body.name, pipeline.speakers)
        consent = _consent(body.consent)
        ref_text = _text(body.ref_text, "ref_text")
        description = _text(body.speaker_description, "speaker_description")

        def keep() -> UploadedVoice:
            sound = _checked_sound(recording)
            if ref_text is not None:
                check_transcript(
                    ref_text, sound.duration_s, recording="the recording", way_out="leave it out to use only its sound"
                )
            return keeping.add(
                name=name,
                recording=recording,
                mime_type=media_type_of(recording, param=_FILE),
                duration_s=sound.duration_s,
                consent=consent,
                ref_text=ref_text,
                speaker_description=description,
            )

        voice = await asyncio.to_thread(keep)
        openai = {"id": voice.name, "object": "audio.voice", "type": "audio_sample"}
        return {
            "success": True, "voice": _shown(voice), **openai, "name": voice.name, "created_at": voice.created_at
        }  # fmt: skip

    @routes.delete("/v1/audio/voices/{name}")
    async def delete(name: str) -> dict[str, Any]:
        deleted = await asyncio.to_thread(kept().delete, name)
        return {"success": True, "id": deleted.name, "object": "audio.voice.deleted", "deleted": True}

    return routes


def _shown(voice: UploadedVoice) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": voice.name,
        "consent": voice.consent,
        "created_at": voice.created_at,
        "file_size": voice.file_size,
        "mime_type": voice.mime_type,
        "duration_s": voice.duration_s,
        "embedding_source": "audio",
    }
    optional = {"ref_text": voice.ref_text, "speaker_description": voice.speaker_description}
    return shown | {key: text for key, text in optional.items() if text is not None}


def _name(given: str, speakers: tuple[str, ...]) -> str:
    name = given.strip()
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"name is {name[:60]!r}; it must be 1 to 64 letters, digits, spaces, dots, hyphens and underscores, and begin with "
            "a letter or a digit",
            param="name",
        )
    if name.casefold() in (speaker.casefold() for speaker in speakers):
        raise BadRequest(f"name {name!r} is a voice of the checkpoint; choose another", param="name")
    return name


def _consent(given: str) -> str:
    if given.strip().lower() in _NO_CONSENT:
        raise BadRequest(
            "consent is required: who agreed to the use of this voice and when, or the id of a recording of it",
            param="consent",
        )
    consent = _text(given, "consent")
    assert consent is not None
    return consent


def _text(given: str | None, field: str) -> str | None:
    text = (given or "").strip()
    if len(text) > _LONGEST_TEXT:
        raise BadRequest(f"{field} has {len(text):,} characters; at most {_LONGEST_TEXT:,}", param=field)
    return text or None


def _checked_sound(recording: bytes) -> Audio:
    sound = decode_audio(recording, max_s=MAX_RECORDING_S, max_s_key=None, param=_FILE)
    if sound.duration_s < LEAST_RECORDING_S:
        raise BadMedia(
            f"the recording lasts {math.floor(sound.duration_s * 100) / 100:.2f} s; a voice needs {LEAST_RECORDING_S:g} to {MAX_RECORDING_S:g} s",
            param=_FILE,
        )
    if not may_be_speech(sound.samples, sound.rate):
        raise BadMedia("nobody speaks in the recording: it is silence or one steady sound", param=_FILE)
    return sound
