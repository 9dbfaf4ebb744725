"""The whole answer of a turn as one `chat.completion`: one choice, whose message carries text and audio together.

Beside OpenAI's fields a choice has `silent` (the turn chose not to answer; its content is then `<|silent|>`), and when
something was spoken `audio_metadata` {format, sample_rate_hz, frame_count (samples per channel), channels} and
`audio_finish_reason` (flow.SpeechReason; "length": the frame budget ended the speech). `aura.transcripts` is what was heard, one for each
audio part. Pictures count as video tokens.
"""

from __future__ import annotations

import base64
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from aura_omni.flow import SILENT_TEXT, VOICE_RATE, Ended, Usage
from aura_omni.heard import Heard, finish_reason
from aura_omni.media.encoder import AudioFormat
from aura_omni.server.sound import SoundFormat, whole_sound

AUDIO_KEPT_S = 24 * 3600  # what expires_at says; nothing is stored, the data is all there is


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a chat request wants back, and under which names it is answered."""

    model: str
    text: bool
    audio: bool
    audio_format: AudioFormat
    openai_audio: bool  # a stream speaks through delta.audio
    include_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    audio_id: str = field(default_factory=lambda: f"audio-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))


def usage(used: Usage) -> dict[str, Any]:
    completion_tokens = used.text_tokens + used.audio_frames
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": used.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "text_tokens": used.prompt_text_tokens,
            "audio_tokens": used.prompt_audio_tokens,
            "video_tokens": used.prompt_video_tokens,
            "cached_tokens": used.cached_tokens,
        },
        "completion_tokens_details": {"text_tokens": used.text_tokens, "audio_tokens": used.audio_frames},
    }


def audio_metadata(audio_format: AudioFormat, samples: int) -> dict[str, Any]:
    return {"format": audio_format, "sample_rate_hz": VOICE_RATE, "frame_count": samples, "channels": 1}


def completion(heard: Heard, ended: Ended, wanted: Wanted) -> dict[str, Any]:
    """The response body. Encodes audio (tens of ms for a minute of mp3): call it off the event loop."""
    silent = ended.reason == "silent"
    text = SILENT_TEXT if silent else heard.text
    message: dict[str, Any] = {"role": "assistant", "content": text if wanted.text or silent else None, "refusal": None}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason(ended),
        "logprobs": None,
        "silent": silent,
    }
    if wanted.audio and not silent:
        sound = whole_sound(heard.sound(), SoundFormat(wanted.audio_format))
        message["audio"] = {
            "id": wanted.audio_id,
            "data": base64.b64encode(sound.data).decode(),
            "expires_at": wanted.created + AUDIO_KEPT_S,
            "transcript": text,
        }
        choice["audio_metadata"] = audio_metadata(wanted.audio_format, sound.samples)
        choice["audio_finish_reason"] = ended.speech_reason or "stop"
    return {
        "id": wanted.id,
        "object": "chat.completion",
        "created": wanted.created,
        "model": wanted.model,
        "choices": [choice],
        "usage": usage(ended.usage),
        "aura": {"transcripts": heard.transcripts},
    }
