from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from aura_omni.errors import BadMedia
from aura_omni.media import video as video_module
from aura_omni.media.audio import decode_audio
from aura_omni.media.video import decode_video

PARAM = "messages[0].content[0].video_url"
LIMITS = {"max_frames": 64, "max_pixels": 10_000_000, "param": PARAM}
QUIET = {"x265-params": "log-level=none"}
FAST_VPX = {"deadline": "realtime", "cpu-used": "8"}
BIKES = Path(__file__).parents[1] / "data" / "bikes.mp4"


def greys(count: int, width: int = 64, height: int = 48) -> list[np.ndarray]:
    """Picture k is grey of level 4 k: a decoded frame tells which one it is."""
    return [np.full((height, width, 3), 4 * k, np.uint8) for k in range(count)]


def which(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 4) for frame in frames]


def refused(data: bytes, **changes: object) -> str:
    with pytest.raises(BadMedia) as caught:
        decode_video(data, **{**LIMITS, **changes})
    assert caught.value.param == PARAM
    return caught.value.message


def every(count: int, step_ms: int) -> range:
    return range(0, count * step_ms, step_ms)


def test_v01_two_frames_for_each_second_at_their_true_times(video_file, speech):
    clip = decode_video(video_file(greys(60), every(60, 50), "mp4", "libx264", sound=speech), **LIMITS)
    assert clip.times_s == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    assert which(clip.frames) == [0, 10, 20, 30, 40, 50]
    assert clip.frames.shape == (6, 48, 64, 3)
    assert clip.frames.dtype == np.uint8
    assert clip.fps == 2.0
    assert not clip.still


def test_real_clip_is_sampled_at_true_times():
    clip = decode_video(BIKES.read_bytes(), **LIMITS)
    assert clip.frames.shape == (20, 272, 640, 3)
    # 25 frames per second: half a second falls between two frames, of which the earlier is taken.
    assert clip.times_s[:4] == (0.0, 0.48, 1.0, 1.48)


def test_one_second_chunk_of_two_frames_has_the_mean_time_of_a_quarter_second(video_file):
    clip = decode_video(video_file(greys(2), every(2, 500), "mp4", "libx264"), **LIMITS)
    assert clip.times_s == (0.0, 0.5)
    assert which(clip.frames) == [0, 1]


@pytest.mark.parametrize(
    ("container", "codec"),
    [("webm", "libvpx"), ("webm", "libvpx-vp9"), ("mov", "libx265"), ("avi", "mpeg4"), ("mpegts", "libx264")],
)
def test_v02_v04_other_codecs_show_the_same_frames(video_file, container, codec):
    options = {"libx265": QUIET, "mpeg4": {"qmin": "1", "qmax": "2"}, "libx264": {}}.get(codec, FAST_VPX)
    pictures, times = greys(30), every(30, 100)
    clip = decode_video(video_file(pictures, times, container, codec, options=options), **LIMITS)
    assert clip.times_s == pytest.approx((0.0, 0.5, 1.0, 1.5, 2.0, 2.5), abs=0.002)
    assert which(clip.frames) == [0, 5, 10, 15, 20, 25]


def test_v03_live_recording_without_duration_is_seen_whole(video_file, speech):
    live = {"live": True, "container_options": {"live": "1"}, "options": FAST_VPX}
    data = video_file(greys(60), every(60, 33), "webm", "libvpx", sound=speech, **live)
    clip = decode_video(data, **LIMITS)
    assert clip.times_s == pytest.approx((0.0, 0.495, 0.99), abs=0.002)
    assert which(clip.frames) == [0, 15, 30]
    cut = decode_video(data[: len(data) // 3], **LIMITS)
    assert which(cut.frames)[0] == 0
    assert len(cut.times_s) >= 1


def test_v06_sound_alone_has_no_video_track(audio_file, speech):
    assert "no video track" in refused(audio_file(speech, 48_000, "mp4", "aac", "fltp"))


def test_m08_cover_picture_is_no_video(audio_file, speech, cover):
    data = audio_file(speech, 48_000, "mp3", "libmp3lame", "fltp", cover=cover)
    assert "no video track" in refused(data)


def test_v07_one_frame_gives_one(video_file):
    clip = decode_video(video_file(greys(1), [0], "mp4", "libx264"), **LIMITS)
    assert clip.times_s == (0.0,)
    assert len(clip.frames) == 1


@pytest.mark.parametrize(
    ("count", "step_ms", "times_s"),
    [(2, 33, (0.0, 0.033)), (20, 33, (0.0, 0.495)), (6, 50, (0.0, 0.25)), (3, 1_000, (0.0, 1.0, 2.0))],
)
def test_short_and_slow_clips_give_at_least_two_frames_and_none_twice(video_file, count, step_ms, times_s):
    clip = decode_video(video_file(greys(count), every(count, step_ms), "mp4", "libx264"), **LIMITS)
    assert clip.times_s == pytest.approx(times_s, abs=0.002)


@pytest.mark.parametrize("size", [(641, 361), (16, 9), (2, 2), (1_000, 10)])
def test_v08_odd_sizes_are_kept(video_file, size):
    pictures = [np.random.default_rng(k).integers(0, 255, (size[1], size[0], 3), np.uint8) for k in range(2)]
    clip = decode_video(video_file(pictures, [0, 500], "webm", "libvpx-vp9", options=FAST_VPX), **LIMITS)
    assert clip.frames.shape == (2, size[1], size[0], 3)


def test_v09_gif_shows_all_frames_at_their_times(picture_file):
    shades = [Image.fromarray(picture) for picture in greys(30)]
    data = picture_file(shades[0], "GIF", save_all=True, append_images=shades[1:], duration=100)
    clip = decode_video(data, fps=10.0, **LIMITS)
    assert clip.times_s == pytest.approx(tuple(k / 10 for k in range(30)))
    assert which(clip.frames) == list(range(30))
    assert which(decode_video(data, **LIMITS).frames) == [0, 5, 10, 15, 20, 25]


def test_variable_frame_times_are_real_times(video_file):
    times_ms = [0, 40, 80, 900, 940, 1_600, 2_380, 2_440, 3_000]
    clip = decode_video(video_file(greys(9), times_ms, "mp4", "libx264"), **LIMITS)
    assert {round(time_s * 1_000) for time_s in clip.times_s} <= set(times_ms)
    assert [times_ms.index(round(time_s * 1_000)) for time_s in clip.times_s] == which(clip.frames)
    assert which(clip.frames)[0] == 0
    assert clip.times_s == (0.0, 0.9, 0.94, 1.6, 2.38, 2.44)  # nearest to 0, 0.5, 1, 1.5, 2, 2.5


def test_chunk_times_start_at_zero_wherever_the_recording_was(video_file):
    clip = decode_video(video_file(greys(20), range(5_000, 6_000, 50), "webm", "libvpx", options=FAST_VPX), **LIMITS)
    assert clip.times_s == pytest.approx((0.0, 0.5), abs=0.002)


def test_too_many_frames_are_spread_over_the_whole_span(video_file):
    data = video_file(greys(60), every(60, 100), "mp4", "libx264")
    clip = decode_video(data, **{**LIMITS, "max_frames": 5})
    assert len(clip.times_s) == 5
    assert clip.times_s[0] == 0.0
    assert clip.times_s[-1] == 5.9
    assert np.diff(clip.times_s) == pytest.approx([1.475] * 4, abs=0.1)
    assert clip.fps == pytest.approx(5 / 6.0)


def test_memory_for_one_clip_is_bounded_by_spreading(video_file, monkeypatch):
    monkeypatch.setattr(video_module, "MAX_KEPT_PIXELS", 4 * 64 * 48)
    clip = decode_video(video_file(greys(60), every(60, 100), "mp4", "libx264"), **LIMITS)
    assert len(clip.times_s) == 4
    assert clip.times_s[-1] == 5.9


def test_work_for_one_clip_is_bounded_by_refusal(video_file, monkeypatch):
    monkeypatch.setattr(video_module, "MAX_DECODED_PIXELS", 59 * 64 * 48)
    data = video_file(greys(60), every(60, 100), "mp4", "libx264")
    assert "more than 59 frames" in refused(data)
    monkeypatch.setattr(video_module, "MAX_DECODED_PIXELS", 60 * 64 * 48)
    assert len(decode_video(data, **LIMITS).frames) == 12
    monkeypatch.setattr(video_module, "MAX_PACKETS", 58)
    assert "more than 58 frames" in refused(data)


def test_too_large_frames_are_refused_with_numbers(video_file):
    data = video_file(greys(2), every(2, 500), "mp4", "libx264")
    assert "64 x 48 = 3,072 pixels, more than the limit of 3,071" in refused(data, max_pixels=3_071)
    assert len(decode_video(data, **{**LIMITS, "max_pixels": 3_072}).frames) == 2


@pytest.mark.parametrize("container", ["mov", "webm"])
@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
@pytest.mark.parametrize("mirrored", [False, True])
def test_phone_clips_come_out_upright(video_file, picture, container, degrees, mirrored):
    # Stored so that turning counter-clockwise, then mirroring, shows the picture.
    shown = np.asarray(picture)
    stored = np.ascontiguousarray(np.rot90(shown[:, ::-1] if mirrored else shown, -(degrees // 90)))
    codec = "libx264" if container == "mov" else "libvpx"
    data = video_file([stored, stored], [0, 500], container, codec, rotation=(degrees, mirrored))
    clip = decode_video(data, **LIMITS)
    assert clip.frames.shape == (2, 80, 100, 3)
    assert clip.frames.flags.c_contiguous
    for frame in clip.frames:
        assert np.abs(frame.astype(int) - shown).mean() < 8


def test_only_sampled_frames_are_converted(video_file, monkeypatch):
    data, converted = video_file(greys(60), every(60, 50), "mp4", "libx264"), []
    upright = video_module._upright
    monkeypatch.setattr(video_module, "_upright", lambda *args: converted.append(1) or upright(*args))
    assert len(decode_video(data, **LIMITS).frames) == len(converted) == 6


@pytest.mark.parametrize("data", [b"", b"hello\n", b"\x89PNG\r\n\x1a\n", bytes(5_000)])
def test_what_is_no_video_is_refused(data):
    refused(data)


def test_picture_sent_as_video_is_refused(cover):
    refused(cover)


def test_cut_off_clip_is_good_up_to_the_cut():
    data = BIKES.read_bytes()
    if data.index(b"moov") < data.index(b"mdat"):
        clip = decode_video(data[: len(data) // 2], **LIMITS)
        assert 2 < clip.times_s[-1] < 8
    else:
        assert "header is missing" in refused(data[: len(data) // 2])


def test_key_depends_on_pixels_and_times(video_file):
    fast = decode_video(video_file(greys(2), [0, 250], "mp4", "libx264"), **LIMITS)
    slow = decode_video(video_file(greys(2), [0, 500], "mp4", "libx264"), **LIMITS)
    again = decode_video(video_file(greys(2), [0, 500], "mov", "libx264"), **LIMITS)
    assert slow.key == again.key
    assert slow.key != fast.key


@pytest.fixture(scope="module")
def good_clips(video_file) -> list[bytes]:
    return [
        video_file(greys(10), every(10, 100), "mp4", "libx264"),
        video_file(greys(10), every(10, 100), "webm", "libvpx", options=FAST_VPX),
        video_file(greys(10), every(10, 100), "gif", "gif", pix_fmt="rgb8"),
    ]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damaged_clips_are_decoded_or_refused_and_nothing_else(good_clips, data):
    file = bytearray(data.draw(st.sampled_from(good_clips)))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(file) - 1), st.integers(0, 255)), max_size=12)):
        file[place] = value
    try:
        clip = decode_video(bytes(file[: data.draw(st.integers(0, len(file)))]), **{**LIMITS, "max_pixels": 100_000})
    except BadMedia:
        return
    assert len(clip.frames) == len(clip.times_s) > 0
    assert clip.times_s[0] == 0.0
    assert list(clip.times_s) == sorted(set(clip.times_s))


def test_sample_inputs_of_the_examples_decode():
    examples = Path(__file__).parents[2] / "examples" / "online_serving" / "aura_omni"
    clip = decode_video((examples / "sample_clip.mp4").read_bytes(), **LIMITS)
    assert clip.frames.shape == (12, 272, 640, 3)
    question = decode_audio((examples / "sample_question.wav").read_bytes(), max_s=60)
    assert (question.rate, question.duration_s) == (16_000, 3.9)
