"""What a file is, told from its content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aura_omni.errors import BadMedia
from aura_omni.media.container import media_type_of

Make = Callable[..., bytes]


@pytest.mark.parametrize(
    ("form", "codec", "samples", "name"),
    [
        ("wav", "pcm_s16le", "s16", "audio/wav"),
        ("mp3", "libmp3lame", "fltp", "audio/mpeg"),
        ("flac", "flac", "s16", "audio/flac"),
        ("ogg", "libopus", "flt", "audio/ogg"),
        ("webm", "libopus", "flt", "audio/webm"),
        ("matroska", "pcm_s16le", "s16", "audio/x-matroska"),
        ("adts", "aac", "fltp", "audio/aac"),
        ("mp4", "aac", "fltp", "audio/mp4"),
        ("aiff", "pcm_s16be", "s16", "audio/x-aiff"),
    ],
)
def test_a_recording_has_the_type_of_its_content(
    audio_file: Make, speech: np.ndarray, form: str, codec: str, samples: str, name: str
) -> None:
    assert media_type_of(audio_file(speech, 48_000, form, codec, samples), param=None) == name


def test_the_picture_of_a_song_makes_it_no_video(audio_file: Make, speech: np.ndarray, cover: bytes) -> None:
    assert (
        media_type_of(audio_file(speech, 48_000, "mp3", "libmp3lame", "fltp", cover=cover), param=None) == "audio/mpeg"
    )


def test_pictures_with_their_times_are_a_video(video_file: Make) -> None:
    pictures = [np.zeros((48, 64, 3), np.uint8)] * 3
    assert media_type_of(video_file(pictures, [0, 500, 1000], "mp4", "mpeg4"), param=None).startswith("video/")


def test_what_is_no_recording_has_no_type() -> None:
    with pytest.raises(BadMedia):
        media_type_of(b"no sound", param=None)
