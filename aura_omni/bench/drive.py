"""One request, and when what of its answer came."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from aura_omni.bench.work import Request

VOICE_RATE = 24_000  # Hz, of 16-bit samples
WAV_HEADER = 44  # bytes


@dataclass(slots=True)
class Answer:
    """Times in seconds since the request was sent; sound: (time, seconds of sound) of each piece."""

    started: float  # time.monotonic()
    error: str | None = None
    first_text_s: float | None = None
    last_text_s: float | None = None
    ended_s: float = 0.0
    silent: bool = False
    sound: list[tuple[float, float]] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, request: Request) -> Answer:
    """A refusal or a broken stream is an answer with an error."""
    answer = Answer(time.monotonic())
    try:
        await _read(client, request, answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_s = time.monotonic() - answer.started
    return answer


async def _read(client: httpx.AsyncClient, request: Request, answer: Answer) -> None:
    sent: dict[str, Any] = {"data": dict(request.body), "files": dict(request.files)}
    if not request.files:
        sent = {"json": request.body}
    async with client.stream("POST", request.path, **sent) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise ValueError(f"status {response.status_code}: {text[:300]}")
        if request.sound == "bytes":
            async for data in response.aiter_raw():
                answer.sound.append((time.monotonic() - answer.started, len(data) / 2 / VOICE_RATE))
        elif request.sound == "events":
            done = False
            async for line in response.aiter_lines():
                done |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    _note(json.loads(line[len("data: ") :]), answer)
            if not done:
                raise ValueError("the stream ended without [DONE]")
        else:
            await response.aread()
            answer.first_text_s = answer.last_text_s = time.monotonic() - answer.started


def _note(event: dict[str, Any], answer: Answer) -> None:
    now = time.monotonic() - answer.started
    if "error" in event:
        raise ValueError(f"the stream failed: {event['error']}")
    for choice in event.get("choices", ()):
        answer.silent |= bool(choice.get("silent"))
        delta = choice.get("delta") or {}
        for data in _sound(delta, event.get("modality")):
            size = len(base64.b64decode(data)) - (0 if answer.sound else WAV_HEADER)
            answer.sound.append((now, size / 2 / VOICE_RATE))
        if event.get("modality") != "audio" and delta.get("content"):
            answer.first_text_s = now if answer.first_text_s is None else answer.first_text_s
            answer.last_text_s = now


def _sound(delta: dict[str, Any], modality: str | None) -> Iterator[str]:
    """Base64 WAV in either of the two shapes that such servers speak."""
    if modality == "audio" and delta.get("content"):
        yield delta["content"]
    if isinstance(delta.get("audio"), dict) and delta["audio"].get("data"):
        yield delta["audio"]["data"]
