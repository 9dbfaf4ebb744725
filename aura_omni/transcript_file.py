"""A transcript in the form that was asked for: what the endpoint sends and the command writes."""

from __future__ import annotations

import json
from typing import Any

from aura_omni.flow import TranscriptFormat, Usage
from aura_omni.heard import Heard, finish_reason


def written(heard: Heard, duration_s: float, form: TranscriptFormat) -> str:
    """The whole transcript of a sound that lasts duration_s.

    verbose_json has language and duration; no segments, for ASR gives no times. finish_reason "length": a token budget cut
    the text.
    """
    if form == "text":
        return heard.text
    body: dict[str, Any] = {"text": heard.text}
    if form == "verbose_json":
        body = {
            "task": "transcribe",
            "language": (heard.language or "").lower(),
            "duration": round(duration_s, 3),
            **body,
        }
    body |= {"usage": transcript_usage(heard.end.usage), "finish_reason": finish_reason(heard.end)}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def transcript_usage(used: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": used.prompt_tokens,
        "input_token_details": {"text_tokens": used.prompt_text_tokens, "audio_tokens": used.prompt_audio_tokens},
        "output_tokens": used.text_tokens,
        "total_tokens": used.prompt_tokens + used.text_tokens,
    }
