"""One request, and when what of its answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from aura_omni.bench.work import Request
from aura_omni.flow import VOICE_RATE

WAV_HEADER = 44  # bytes


@dataclass(slots=True)
class Answer:
    """Times in seconds since the request was sent; sound: (time, seconds of sound) of each piece."""

    started: float  # time.monotonic()
    heard_s: float = 0.0  # sound that the request brought
    error: str | None = None
    first_text_s: float | None = None
    last_text_s: float | None = None
    ended_s: float = 0.0
    silent: bool = False
    sound: list[tuple[float, float]] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, request: Request) -> Answer:
    """A refusal or a broken stream is an answer with an error."""
    answer = Answer(time.monotonic(), request.heard_s)
    try:
        await _read(client, request, answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_s = time.monotonic() - answer.started
    return answer


async def _read(client: httpx.AsyncClient, request: Request, answer: Answer) -> None:
    headers = {"content-type": request.content_type}
    async with client.stream("POST", request.path, content=request.body, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise ValueError(f"status {response.status_code}: {text[:300]}")
        if request.sound == "body":
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
            size = _decoded_size(data) - (0 if answer.sound else WAV_HEADER)
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


def _decoded_size(base64: str) -> int:
    """Bytes; decoding them would keep the client from its other answers."""
    return len(base64) // 4 * 3 - base64[-2:].count("=")
