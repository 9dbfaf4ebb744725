"""A file sent to the running server each way that a file can be sent, and what the engine got of it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from aura_omni.flow import Audio, Video
from tests.cases.conftest import Served

QUICKLY_S = 5.0  # a refusal; alone on the machine it takes milliseconds
TEXT: dict[str, Any] = {"modalities": ["text"], "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Answer:
    """media: the sounds, or the pictures and clips, that the engine got with the request."""

    text: str
    transcripts: list[str]
    media: list[Audio | Video]


def url_part(kind: str, data: bytes, media_type: str = "application/octet-stream") -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def chat(served: Served, *parts: dict[str, Any], **fields: Any) -> Answer:
    """The text of an answer to one message. A picture alone asks nothing, so a question goes with it."""
    content = [*parts, {"type": "text", "text": "What is that?"}]
    answer = served.client.chat.completions.create(
        model=served.witness.served_names[0], messages=[{"role": "user", "content": content}], **{**TEXT, **fields}
    )
    got = [part for part in served.witness.requests[-1].messages[-1].parts if isinstance(part, Audio | Video)]
    return Answer(answer.choices[0].message.content, answer.model_extra["aura"]["transcripts"], got)


def transcribe(served: Served, data: bytes, **fields: Any) -> Any:
    """As a browser sends a recording: without a name or a type that says anything."""
    return served.client.audio.transcriptions.create(
        model=served.witness.served_names[0], file=("blob", data, "application/octet-stream"), **fields
    )


def engine_got(served: Served) -> Audio | Video:
    (part,) = [part for part in served.witness.requests[-1].messages[-1].parts if isinstance(part, Audio | Video)]
    return part


def refused(served: Served, send: Callable[[], Any], param: str) -> str:
    """The message of a 400 in OpenAI's shape that names the part; the engine must hear nothing of it."""
    before, start_s = len(served.witness.requests), time.monotonic()
    with pytest.raises(openai.BadRequestError) as refusal:
        send()
    assert time.monotonic() - start_s < QUICKLY_S
    assert len(served.witness.requests) == before
    body = refusal.value.response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, "invalid_media")
    assert refusal.value.response.headers["x-request-id"]
    return body["error"]["message"]


def healthy(served: Served) -> bool:
    return httpx.get(f"{served.url}/health").status_code == 200
