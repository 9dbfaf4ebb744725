"""A moving picture of 4 s, and every kind of file that it can come in."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import av
import numpy as np
from PIL import Image

from tests.cases.sounds import coded, voice
from tests.media_files import make_picture, make_video

FRAMES, FPS = 120, 30
SIZE = (320, 180)
FAST_VPX = {"deadline": "realtime", "cpu-used": "8"}
QUIET = {"x265-params": "log-level=none"}
LIVE: dict[str, Any] = {"live": True, "container_options": {"live": "1"}}


def scene(index: int, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: a ramp of colour, and a white block that goes from left to right; no two are alike."""
    across, down = np.linspace(40, 200, width), np.linspace(40, 200, height)
    red, green = np.broadcast_to(across, (height, width)), np.broadcast_to(down[:, None], (height, width))
    pixels = np.stack([red, green, np.full((height, width), 2.0 * index % 200)], axis=2).astype(np.uint8)
    left = index * max(1, width - width // 8) // FRAMES
    pixels[height // 3 : height // 3 + height // 4, left : left + max(1, width // 8)] = 255
    return pixels


@cache
def scenes() -> tuple[np.ndarray, ...]:
    return tuple(scene(index, *SIZE) for index in range(FRAMES))


def times_ms(frames: int, fps: int) -> list[int]:
    return [round(1_000 * index / fps) for index in range(frames)]


def coded_clip(container: str, codec: str, *, sound: bool = False, **more: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        track = voice()[: FRAMES // FPS * 48_000] if sound else None
        return make_video(scenes(), times_ms(FRAMES, FPS), container, codec, sound=track, **more)

    return make


base = cache(coded_clip("mp4", "libx264", sound=True))


def without_sound() -> bytes:
    """The same coded frames: an encoder does not write a clip twice the same."""
    file = io.BytesIO()
    with av.open(io.BytesIO(base())) as source, av.open(file, "w", format="mp4") as out:
        track = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = track
                out.mux(packet)
    return file.getvalue()


def sound_alone() -> bytes:
    return coded("mp4", "aac", "fltp")()


def one_frame() -> bytes:
    return make_video(scenes()[:1], [0], "mp4", "libx264")


def sized(width: int, height: int) -> Callable[[], bytes]:
    """VP9, which keeps odd sizes."""

    def make() -> bytes:
        pictures = [scene(index * 12, width, height) for index in range(10)]
        return make_video(pictures, times_ms(10, 10), "webm", "libvpx-vp9", options=FAST_VPX)

    return make


def animation() -> bytes:
    """3 s at 10 frames a second, as a gif."""
    return gif([scene(index * 4, *SIZE) for index in range(30)])


def gif(pictures: Sequence[np.ndarray]) -> bytes:
    images = [Image.fromarray(picture) for picture in pictures]
    return make_picture(images[0], "GIF", save_all=True, append_images=images[1:], duration=100)
