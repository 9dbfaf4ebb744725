"""What is asked: turns, speech or transcripts, each request with media of its own so that no cache answers it.

    work = Turns("aurateam/AURA", seed=7)
    request = work.request(12)      # the same seed and number give the same bytes

A request is bytes that are ready to be sent, so that making them takes no time from the answers that are measured.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import numpy as np

from aura_omni.flow import SPEECH_RATE
from aura_omni.media.encoder import encode
from aura_omni.media.film import film
from aura_omni.media.noise import sentences


@dataclass(frozen=True, slots=True)
class Request:
    """One POST. heard_s: seconds of sound that it brings."""

    path: str
    body: bytes
    content_type: str
    heard_s: float = 0.0
    sound: Literal["events", "body"] | None = (
        None  # where sound comes back: in the stream's events, or as the body itself
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Speech and frames in, text and sound out: chat completions, streamed."""

    model: str
    seed: int
    audio_s: float = 5.0
    frames: int = 2
    size: tuple[int, int] = (640, 360)  # width, height
    spoken: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)  # fields laid over each request

    def request(self, number: int) -> Request:
        random = np.random.default_rng((self.seed, number))
        content: list[dict[str, Any]] = []
        if self.audio_s:
            url = _data_url("audio/wav", noise(random, self.audio_s))
            content.append({"type": "audio_url", "audio_url": {"url": url}})
        if self.frames:
            url = _data_url("video/mp4", film(list(blocks(random, self.frames, self.size))))
            content.append({"type": "video_url", "video_url": {"url": url}})
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "modalities": ["text", "audio"] if self.spoken else ["text"],
            "stream": True,
            **self.more,
        }
        return _json("/v1/chat/completions", body, heard_s=self.audio_s, sound="events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeches:
    """Text in, sound out: speech as 16-bit samples, streamed."""

    model: str
    text: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def request(self, number: int) -> Request:
        body = {
            "model": self.model,
            "input": self.text,
            "response_format": "pcm",
            "stream_format": "audio",
            **self.more,
        }
        return _json("/v1/audio/speech", body, sound="body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts:
    """Sound in, text out."""

    model: str
    seed: int
    audio_s: float = 5.0
    more: Mapping[str, Any] = field(default_factory=dict)

    def request(self, number: int) -> Request:
        file = ("speech.wav", noise(np.random.default_rng((self.seed, number)), self.audio_s), "audio/wav")
        # httpx writes the form; its address is never asked.
        form = httpx.Request("POST", "http://form", data={"model": self.model, **self.more}, files={"file": file})
        return Request("/v1/audio/transcriptions", form.read(), form.headers["content-type"], heard_s=self.audio_s)


Work = Turns | Speeches | Transcripts


def noise(random: np.random.Generator, length_s: float) -> bytes:
    """A WAV file of noise that may be speech, 16 kHz mono."""
    return encode(sentences(random, length_s, SPEECH_RATE), SPEECH_RATE, "wav")


def blocks(random: np.random.Generator, frames: int, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Random pictures uint8 [h, w, 3]: blocks of colour, as noise of single pixels would make a large file and nothing else."""
    width, height = size
    for _ in range(frames):
        colours = random.integers(0, 256, (-(-height // 40), -(-width // 40), 3), dtype=np.uint8)
        yield colours.repeat(40, 0).repeat(40, 1)[:height, :width]


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _json(path: str, body: Mapping[str, Any], *, heard_s: float = 0.0, sound: Literal["events", "body"]) -> Request:
    return Request(path, json.dumps(body).encode(), "application/json", heard_s, sound)
