from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import av
import numpy as np
import openai
import pytest

from aura_omni.server.app import ServerConfig
from tests.server.fake import FakePipeline, serving


@pytest.fixture
def served() -> Iterator[Callable[..., openai.OpenAI]]:
    """served(pipeline, config) starts a server and returns the official client for it."""
    with ExitStack() as stack:

        def serve(pipeline: FakePipeline, config: ServerConfig | None = None, key: str = "none") -> openai.OpenAI:
            url = stack.enter_context(serving(pipeline, config))
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)
            return stack.enter_context(client)

        yield serve


def wav_bytes(seconds: float = 0.5, rate: int = 16_000) -> bytes:
    samples = (8000 * np.sin(2 * np.pi * 300 * np.arange(int(seconds * rate)) / rate)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def mp4_bytes(frames: int = 6, fps: int = 4) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(frames):
            picture = np.full((48, 64, 3), 40 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def png_bytes() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 24), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
