"""Segments with times as SubRip (srt) and WebVTT files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aura_omni.server.transcript import TimedText


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
