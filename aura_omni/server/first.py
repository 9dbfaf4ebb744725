"""What a server asks itself before it is ready, so that nobody else's request is the first one.

    ask_first(ServerConfig(), pipeline)     # takes as long as a short turn or two

The stages have worked by then (`aura_omni.warm_up`). This goes the whole way of a user's request, through an application of its
own, from JSON, base64 and files of sound and film to a stream of events: what is only set up, imported or allocated when it is
first needed is needed here.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from aura_omni.flow import SPEECH_RATE
from aura_omni.media.encoder import encode
from aura_omni.media.film import film
from aura_omni.media.noise import swelling_noise
from aura_omni.server.app import ServerConfig, create_app
from aura_omni.server.turns import Pipeline

log = logging.getLogger(__name__)

_TOKENS = 4  # of each stage
_ERROR = '{"error":'  # begins an event that says so
_SOUND_S = 5.0
_FRAMES = [np.full((360, 640, 3), light, np.uint8) for light in (64, 128)]


@dataclass(frozen=True, slots=True)
class _Question:
    path: str
    body: dict[str, Any]
    file: bytes | None = None  # a form instead of JSON


def ask_first(config: ServerConfig, pipeline: Pipeline) -> None:
    """Not on an event loop. Raises nothing: what fails is logged, and whoever asks next gets the same and is told why."""
    began_s = time.monotonic()
    app = create_app(replace(config, api_keys=(), voices_dir=None), pipeline)
    try:
        asyncio.run(_ask(httpx.ASGITransport(app, raise_app_exceptions=False), list(_questions(pipeline))))
    except Exception:  # PyAV without an H.264 encoder, say: no reason not to serve
        log.warning("the first requests could not be asked", exc_info=True)
        return
    log.info("first requests answered in %.1f s", time.monotonic() - began_s)


async def _ask(transport: httpx.ASGITransport, questions: list[_Question]) -> None:
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
        for question in questions:
            if question.file is None:
                answer = await client.post(question.path, json=question.body)
            else:
                answer = await client.post(question.path, data=question.body, files={"file": ("a.wav", question.file)})
            refused = answer.is_client_error  # limits of this server are smaller than the question: nothing is wrong
            if answer.status_code != httpx.codes.OK or _ERROR in answer.text:
                level = logging.INFO if refused else logging.WARNING
                log.log(level, "the first request to %s failed: %s", question.path, answer.text[:300])


def _questions(pipeline: Pipeline) -> Iterator[_Question]:
    stages, model = pipeline.stages, pipeline.served_names[0]
    speaks = pipeline.voice_task == "CustomVoice"  # others need a recording or a description with every request
    sound = swelling_noise(np.random.default_rng(0), _SOUND_S, SPEECH_RATE)
    if "aura" in stages:
        content = [
            {"type": "audio_url", "audio_url": {"url": _data_url("audio/wav", _wav(sound))}},
            {"type": "video_url", "video_url": {"url": _data_url("video/mp4", film(_FRAMES))}},
            {"type": "text", "text": "Hello."},
        ]
        few = [{} if stage == "code2wav" else {"max_tokens": _TOKENS} for stage in stages]
        body = {
            "messages": [{"role": "user", "content": content if "asr" in stages else content[1:]}],
            "modalities": ["text", "audio"] if speaks else ["text"],
            "sampling_params_list": few,
            "stream": True,
        }
        yield _Question("/v1/chat/completions", {"model": model, **body})
    if speaks:
        body = {"input": "Hello.", "max_new_tokens": _TOKENS, "response_format": "pcm", "stream_format": "audio"}
        yield _Question("/v1/audio/speech", {"model": model, **body})
    if "asr" in stages:
        # Silence goes all the way but through the network, which would write as much as it likes: this request sets no limit.
        yield _Question("/v1/audio/transcriptions", {"model": model}, _wav(np.zeros_like(sound)))


def _wav(samples: np.ndarray) -> bytes:
    return encode(samples, SPEECH_RATE, "wav")


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
