"""The media files of `tests.media_files` as fixtures, and what they are made from."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from tests.media_files import make_audio, make_picture, make_video, make_wav


@pytest.fixture(scope="session")
def audio_file() -> Callable[..., bytes]:
    return make_audio


@pytest.fixture(scope="session")
def video_file() -> Callable[..., bytes]:
    return make_video


@pytest.fixture(scope="session")
def wav_file() -> Callable[..., bytes]:
    return make_wav


@pytest.fixture(scope="session")
def picture_file() -> Callable[..., bytes]:
    return make_picture


@pytest.fixture(scope="session")
def speech() -> np.ndarray:
    """float32 [96000], 2 s at 48 kHz: tones and pauses in the band of a voice, nowhere periodic."""
    time_s = np.arange(96_000) / 48_000
    tone = np.sin(2 * np.pi * (200 * time_s + 250 * time_s**2)) + 0.5 * np.sin(
        2 * np.pi * (900 * time_s + 120 * time_s**2)
    )
    return (0.3 * tone * np.abs(np.sin(2 * np.pi * 1.3 * time_s))).astype(np.float32)


@pytest.fixture(scope="session")
def picture() -> Image.Image:
    """100 x 80: a red bar on top, a blue bar at the bottom, white between with a black block at the left."""
    pixels = np.full((80, 100, 3), 255, np.uint8)
    pixels[:20], pixels[60:], pixels[30:50, :20] = (255, 0, 0), (0, 0, 255), (0, 0, 0)
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def cover(picture: Image.Image) -> bytes:
    return make_picture(picture, "JPEG")
