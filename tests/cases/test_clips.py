"""Every kind of clip, sent to the running server: seen as the frames it was made from, at their times, or refused in words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aura_omni.flow import Video
from tests.cases import clips
from tests.cases.ask import chat, refused, url_part
from tests.cases.clips import FAST_VPX, LIVE, QUIET, coded_clip, scene, scenes, sized
from tests.cases.conftest import Served, both

GOOD: dict[str, Callable[[], bytes]] = {
    "V01 mp4, h264 and aac": clips.base,
    "V02 webm, vp8": coded_clip("webm", "libvpx", options=FAST_VPX),
    "V02 webm, vp9": coded_clip("webm", "libvpx-vp9", options=FAST_VPX),
    "V03 recorder of a browser, live webm": coded_clip("webm", "libvpx", sound=True, options=FAST_VPX, **LIVE),
    "V04 mov of a phone, hevc": coded_clip(
        "mov", "libx265", sound=True, options={**QUIET, "preset": "ultrafast"}, tag="hvc1"
    ),
    "V05 no sound": clips.without_sound,
}


def watched(served: Served, data: bytes, media_type: str = "video/mp4") -> Video:
    answer = chat(served, url_part("video", data, media_type))
    assert answer.transcripts == [], "the sound of a clip is no question"
    (seen,) = answer.media
    assert isinstance(seen, Video)
    assert not seen.still
    return seen


def difference(seen: np.ndarray, made: np.ndarray) -> float:
    return float(np.abs(seen.astype(int) - made.astype(int)).mean())


@pytest.mark.parametrize("name", GOOD)
def test_a_good_clip_is_seen_as_the_frames_it_was_made_from(served: Served, name: str) -> None:
    seen = watched(served, GOOD[name]())
    assert seen.times_s == pytest.approx([k / 2 for k in range(8)], abs=0.02)
    for frame, time_s in zip(seen.frames, seen.times_s, strict=True):
        assert difference(frame, scenes()[round(time_s * clips.FPS)]) < 8
        assert difference(frame, scenes()[(round(time_s * clips.FPS) + 30) % clips.FRAMES]) > 16


@both
def test_v05_a_clip_is_the_same_with_and_without_its_sound(served: Served) -> None:
    with_sound = chat(served, url_part("video", clips.base()))
    without = chat(served, url_part("video", clips.without_sound()))
    assert with_sound.media[0].key == without.media[0].key
    assert with_sound.text == without.text


@both
def test_v06_sound_alone_is_no_clip(served: Served) -> None:
    part = url_part("video", clips.sound_alone(), "video/mp4")
    assert "no video track" in refused(served, lambda: chat(served, part), "messages[0].content[0].video_url")


@both
def test_v07_one_frame_is_a_clip(served: Served) -> None:
    seen = watched(served, clips.one_frame())
    assert seen.times_s == (0.0,)
    assert difference(seen.frames[0], scenes()[0]) < 8


@both
@pytest.mark.parametrize("size", [(641, 361), (16, 9), (2, 2), (4000, 40)])
def test_v08_a_clip_of_odd_size_is_seen_in_that_size(served: Served, size: tuple[int, int]) -> None:
    seen = watched(served, sized(*size)(), "video/webm")
    assert seen.frames.shape == (2, size[1], size[0], 3)
    assert seen.times_s == pytest.approx((0, 0.5), abs=0.01)
    shown, made = seen.frames[0].mean(axis=2), scene(0, *size).mean(axis=2)  # colours are coarser than 2x2
    assert difference(shown, made) < 16


@both
def test_v09_a_gif_is_a_clip_of_all_its_frames(served: Served) -> None:
    seen = watched(served, clips.animation(), "image/gif")
    assert seen.times_s == pytest.approx([k / 2 for k in range(6)])
    for frame, time_s in zip(seen.frames, seen.times_s, strict=True):
        assert difference(frame, scene(round(time_s * 10) * 4, *clips.SIZE)) < 8


@both
def test_m22_a_text_named_mp4_is_refused(served: Served) -> None:
    part = url_part("video", b"hello\n", "video/mp4")
    assert "no audio or video file" in refused(served, lambda: chat(served, part), "messages[0].content[0].video_url")
