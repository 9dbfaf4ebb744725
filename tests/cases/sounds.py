"""5.63 s of a human voice, and every kind of file that it can come in."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from aura_omni.media.audio import resample
from aura_omni.media.encoder import pcm16
from tests.family import recording
from tests.media_files import make_audio, make_picture, make_wav

SECONDS = 5.63
RATE = 48_000
CLUSTER = bytes.fromhex("1f43b675")  # the id of a piece of a Matroska file
LIVE = {"live": "1"}
SURROUND = 6  # channels of 5.1


@cache
def voice() -> np.ndarray:
    """float32 [270240] at 48 kHz, each a whole number of 16-bit steps."""
    audio = recording()
    samples = resample(audio.samples[: int(SECONDS * audio.rate)], audio.rate, RATE)
    return np.frombuffer(pcm16(samples), "<i2").astype(np.float32) / 32_768


def base() -> bytes:
    return wav(voice())


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """float32 [n] or [n, channels], exactly, as a float WAV."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    return make_wav(samples.astype("<f4").tobytes(), rate, tag=3, bits=32, channels=channels)


def coded(container: str, codec: str, sample_format: str, *, rate: int = RATE, **more: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        return make_audio(resample(voice(), RATE, rate), rate, container, codec, sample_format, **more)

    return make


browser = cache(coded("webm", "libopus", "flt", live=True, options=LIVE))


def closed_tab() -> bytes:
    return browser()[: int(0.7 * len(browser()))]


def later_slice() -> bytes:
    """From the third cluster on: without the header that only the first slice has."""
    whole = coded("webm", "libopus", "flt", live=True, options={**LIVE, "cluster_time_limit": "1000"})()
    start = 0
    for _ in range(3):
        start = whole.index(CLUSTER, start + 1)
    return whole[start:]


def header_alone() -> bytes:
    return browser()[: browser().index(CLUSTER)]


def with_cover() -> bytes:
    cover = make_picture(Image.new("RGB", (600, 600), "green"), "JPEG")
    return coded("mp3", "libmp3lame", "fltp", cover=cover, options={"id3v2_version": "3"})()


def ogg_vorbis() -> bytes:
    file = io.BytesIO()  # PyAV has no Vorbis encoder that is meant to be used
    soundfile.write(file, voice(), RATE, format="OGG", subtype="VORBIS")
    return file.getvalue()


def extensible() -> bytes:
    return make_wav((voice() * 32_768).astype("<i2").tobytes(), RATE, tag=1, bits=16, extensible=True)


def one_of(channels: int) -> bytes:
    """The voice in the last channel alone."""
    samples = np.zeros((len(voice()), channels), np.float32)
    samples[:, -1] = voice()
    return wav(samples)


def surround(channel: int) -> bytes:
    """5.1, the voice in one channel alone."""
    samples = np.zeros((len(voice()), SURROUND), np.float32)
    samples[:, channel] = voice()
    return make_audio(samples, RATE, "wav", "pcm_s16le", "s16", layout="5.1")


def no_samples() -> bytes:
    return make_wav(b"", 16_000, tag=1, bits=16)


def silence() -> bytes:
    return make_wav(bytes(2 * 5 * 16_000), 16_000, tag=1, bits=16)


def faint_noise() -> bytes:
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, 5 * RATE)
    return wav(noise)


def tone() -> bytes:
    return wav(0.9 * np.sin(2 * np.pi * 440 * np.arange(5 * RATE) / RATE))


def ten_ms() -> bytes:
    return wav(voice()[RATE // 2 : RATE // 2 + RATE // 100])


def with_one(value: float) -> bytes:
    samples = voice().copy()
    samples[len(samples) // 2] = value
    return wav(samples)


def louder(decibels: float) -> bytes:
    """Cut at full scale, as a recorder does."""
    return wav(np.clip(voice() * 10 ** (decibels / 20), -1, 1))


def with_offset() -> bytes:
    return wav(np.clip(voice() + 0.4, -1, 1))
