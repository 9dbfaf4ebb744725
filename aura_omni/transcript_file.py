"""A transcription in the form that was asked for: what the endpoint sends and the command writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from aura_omni.flow import TranscriptFormat, Usage
from aura_omni.transcription import TimedText, Transcription


def written(said: Transcription, form: TranscriptFormat, *, temperature: float = 0.0) -> str:
    """verbose_json has language, duration and segments, whose temperature is that of the request. finish_reason "length": a
    token budget cut the text."""
    match form:
        case "text":
            return said.text
        case "srt":
            return srt(said.segments)
        case "vtt":
            return vtt(said.segments)
    body: dict[str, Any] = {"text": said.text}
    if form == "verbose_json":
        body = {
            "task": "transcribe",
            "language": said.language.lower(),
            "duration": round(said.duration_s, 3),
            **body,
            "segments": [_segment(number, timed, temperature) for number, timed in enumerate(said.segments)],
        }
    body |= {"usage": transcript_usage(said.usage), "finish_reason": "length" if said.cut else "stop"}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def transcript_usage(used: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": used.prompt_tokens,
        "input_token_details": {"text_tokens": used.prompt_text_tokens, "audio_tokens": used.prompt_audio_tokens},
        "output_tokens": used.text_tokens,
        "total_tokens": used.prompt_tokens + used.text_tokens,
    }


def _segment(number: int, timed: TimedText, temperature: float) -> dict[str, Any]:
    """OpenAI's fields, but for those (tokens, log probabilities) that would have to be made up. seek counts 10 ms."""
    return {
        "id": number,
        "seek": round(timed.start_s * 100),
        "start": round(timed.start_s, 3),
        "end": round(timed.end_s, 3),
        "text": timed.text,
        "temperature": temperature,
    }


def srt(segments: Sequence[TimedText]) -> str:
    return "".join(
        f"{number}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n{_lines(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Sequence[TimedText]) -> str:
    cues = (
        f"{_time(segment.start_s, '.')} --> {_time(segment.end_s, '.')}\n{_escaped(_lines(segment.text))}\n\n"
        for segment in segments
    )
    return "".join(["WEBVTT\n\n", *cues])


def _time(seconds: float, point: str) -> str:
    """00:01:02,345 (at any length two digits of hours or more)."""
    whole, milliseconds = divmod(round(seconds * 1_000), 1_000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{milliseconds:03}"


def _lines(text: str) -> str:
    """An empty line would end the cue, and an arrow be read as times."""
    return re.sub(r"\s*\n\s*", "\n", text.strip()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
