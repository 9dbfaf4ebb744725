"""Clips from bytes: frames with the times at which they are shown, upright, sampled evenly.

    clip = decode_video(data, fps=2.0, max_frames=128, max_pixels=50_000_000)    # flow.Video

The packets are read first, which tells the times; then they are decoded one frame at a time, and only the frame nearest to
each wanted time is kept. The sound track is not used. Pixels are taken as square, as the model was trained.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from aura_omni.errors import BadMedia
from aura_omni.flow import Video
from aura_omni.media.budget import Budget
from aura_omni.media.container import opened, packets, video_frames

CHUNK_FPS = 2.0  # frames per second that AURA watches

# What one clip may cost, whatever its size in bytes: a still scene of hours compresses to almost nothing.
MAX_DECODED_PIXELS = 20_000_000_000  # all frames of the file: five minutes of 1920x1080 at 30 frames per second
MAX_PACKETS = 200_000  # of one track, whatever their size: an hour at 50 frames per second
# Of all frames of a clip: they are decoded in 1 to 5 ms, of which threads save less than the 1 to 1.5 ms that 16 of them take to start.
_FEW_PIXELS = 2_000_000
MAX_KEPT_PIXELS = 2**28  # the sampled frames together: 0.8 GB as RGB, 129 frames of 1920x1080


def decode_video(
    data: bytes,
    *,
    max_frames: int,
    max_pixels: int,
    fps: float = CHUNK_FPS,
    budget: Budget | None = None,
    param: str | None = None,
) -> Video:
    """Frames of the first real video track, sampled at `fps`.

    Of a clip of d seconds, int(d * fps) frames are kept, at least 2 if it has them: those shown nearest to 0, 1/fps,
    2/fps, ... A source slower than `fps` gives each frame once. times_s are the true times of the kept frames from the
    clip's first frame. When that is more than `max_frames` (or than the memory for one clip), the allowed number is
    spread evenly from the first frame to the last and Video.fps says how dense it became: the whole span is always kept.

    Rotation and mirroring of the display matrix are applied; pixel aspect ratio is not. Cover pictures are no video.
    max_pixels is the limit of one frame; the budget is taken from before any is decoded. Raises BadMedia: unreadable, no video track, no frames, too large, too long.
    """
    with opened(data, param=param) as container:
        stream = _track(container, max_pixels, param=param)
        coded = _coded(container, stream, param=param)
        plan = _plan(stream, coded, max_frames, fps, param=param)
        size = stream.codec_context.width * stream.codec_context.height
        if budget is not None:
            budget.take("watched_pixels", len(coded) * size, param=param)
            budget.take("pixels", plan.count * size, param=param)
        if len(coded) * size > _FEW_PIXELS:
            stream.thread_type = "AUTO"
        else:
            stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(max_pixels)}  # the track may be larger than its header says
        frames, times_s = _picked(stream, coded, plan, max_pixels, param=param)
    return video_of(frames, times_s, fps=plan.fps)


def video_of(frames: np.ndarray, times_s: tuple[float, ...], *, fps: float, still: bool = False) -> Video:
    """Video from uint8 [n, h, w, 3] and n times in seconds, with its key."""
    # Processors have instructions for SHA-256: it takes a third of blake2b's time, which was 3 ms.
    key = hashlib.sha256(frames.reshape(-1))
    key.update(np.array([*frames.shape, *times_s], np.float64).tobytes())
    return Video(frames=frames, times_s=times_s, fps=fps, key=key.digest()[:16], still=still)


def _track(container: InputContainer, max_pixels: int, *, param: str | None) -> VideoStream:
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:  # the cover of a song
            continue
        if stream.codec_context is None:
            raise BadMedia("the video track uses a codec that this server cannot decode", param=param)
        _check_size(stream.codec_context.width, stream.codec_context.height, max_pixels, param=param)
        return stream
    raise BadMedia("the file has no video track; send sound alone as audio", param=param)


def _check_size(width: int, height: int, max_pixels: int, *, param: str | None) -> None:
    if width * height > max_pixels:
        raise BadMedia(
            f"a frame has {width} x {height} = {width * height:,} pixels, more than the limit of {max_pixels:,}; "
            "send a smaller video, or raise media.max_pixels in the deploy file",
            param=param,
        )


def _coded(container: InputContainer, stream: VideoStream, *, param: str | None) -> list[Packet[Any]]:
    """All packets of the track, undecoded: no more bytes than the file has."""
    size = max(stream.codec_context.width * stream.codec_context.height, 1)
    limit = min(MAX_PACKETS, MAX_DECODED_PIXELS // size)
    coded: list[Packet[Any]] = []
    for packet in packets(container, stream):
        coded.append(packet)
        if packet.size and len(coded) > limit:
            raise BadMedia(
                f"the video has more than {limit:,} frames, the most that this server decodes of {size:,} pixels each; "
                "send a shorter or smaller clip",
                param=param,
            )
    return coded


# ---------------------------------------------------------------- which times


@dataclass(frozen=True, slots=True)
class _Plan:
    """targets_s None: keep every frame, `count` at most."""

    targets_s: tuple[float, ...] | None
    count: int
    fps: float


def _plan(stream: VideoStream, coded: list[Packet[Any]], max_frames: int, fps: float, *, param: str | None) -> _Plan:
    """From packet times alone; container durations are not used, since live recordings have none."""
    base_s = float(_time_base_s(stream))
    shown = [packet for packet in coded if packet.size and not packet.is_discard]
    if not shown:
        raise BadMedia("the video track has no frames", param=param)
    total, size = len(shown), stream.codec_context.width * stream.codec_context.height
    times_s = sorted(base_s * _ticks(packet) for packet in shown)
    last_s = times_s[-1] - times_s[0]
    duration_s = last_s + _shown_s(shown, base_s, last_s)

    wanted = max(int(duration_s * fps + 1e-6), 2)
    allowed = min(max_frames, max(2, MAX_KEPT_PIXELS // max(size, 1)))
    if total <= min(wanted, allowed):
        return _Plan(None, total, fps)
    if wanted <= allowed:
        return _Plan(tuple(min(k / fps, last_s) for k in range(wanted)), wanted, fps)
    spread = np.linspace(0.0, last_s, allowed).tolist()
    return _Plan(tuple(spread), allowed, allowed / duration_s)


def _time_base_s(stream: VideoStream) -> Fraction:
    """Seconds per tick of the stream's times. Frames do not always carry it themselves."""
    assert stream.time_base is not None, "every opened stream has a time base"
    return stream.time_base


def _ticks(packet: Packet[Any]) -> int:
    """AVI stores only the order of decoding, which is its order of showing."""
    return packet.pts if packet.pts is not None else packet.dts or 0


def _shown_s(shown: list[Packet[Any]], base_s: float, last_s: float) -> float:
    """How long the last frame stays: as its packet says, else as long as the others did on average."""
    last = max(shown, key=_ticks)
    if last.duration:
        return base_s * last.duration
    return last_s / (len(shown) - 1) if len(shown) > 1 else 0.0


# ---------------------------------------------------------------- which frames


def _picked(
    stream: VideoStream, coded: list[Packet[Any]], plan: _Plan, max_pixels: int, *, param: str | None
) -> tuple[np.ndarray, tuple[float, ...]]:
    """The planned frames uint8 [n, h, w, 3] and their times; only these are ever converted to RGB."""
    frames: np.ndarray | None = None
    times_s: list[float] = []
    # What a frame makes for itself has 16 threads, which take 5 ms to start for 0.1 ms of work.
    reformatter = VideoReformatter()
    for frame, time_s in _nearest(_timed(video_frames(stream, coded, param=param), _time_base_s(stream)), plan):
        _check_size(frame.width, frame.height, max_pixels, param=param)
        if frames is None:
            width, height = frame.width, frame.height
            picture = _upright(frame, width, height, reformatter)
            frames = np.empty((plan.count, *picture.shape), np.uint8)
        else:
            # A shared screen may change its size: the first one holds.
            picture = _upright(frame, width, height, reformatter)
        frames[len(times_s)] = picture
        times_s.append(time_s)
    if frames is None:
        raise BadMedia("no frame of the video track can be decoded", param=param)
    return frames[: len(times_s)], tuple(times_s)


def _timed(decoded: Iterator[VideoFrame], base_s: Fraction) -> Iterator[tuple[VideoFrame, float]]:
    """Frames with seconds since the first one, strictly rising; a frame that is not later is never shown."""
    start: int | None = None
    before = -1.0
    for frame in decoded:
        ticks = frame.pts if frame.pts is not None else frame.dts
        if ticks is None:
            continue
        start = ticks if start is None else start
        time_s = float((ticks - start) * base_s)
        if time_s > before:
            before = time_s
            yield frame, time_s


def _nearest(timed: Iterator[tuple[VideoFrame, float]], plan: _Plan) -> Iterator[tuple[VideoFrame, float]]:
    """For each target the nearest frame, each frame at most once, and never only one when there are two.

    Holds two frames at a time: the one before a target and the one after it.
    """
    if plan.targets_s is None:
        for index, pair in enumerate(timed):
            if index < plan.count:
                yield pair
        return
    targets = iter(plan.targets_s)
    target: float | None = next(targets)
    before: tuple[VideoFrame, float] | None = None
    taken_s = [-1.0]
    for pair in timed:
        while target is not None and target <= pair[1]:
            nearest = before if before is not None and target - before[1] <= pair[1] - target else pair
            if nearest[1] > taken_s[-1]:
                taken_s.append(nearest[1])
                yield nearest
            target = next(targets, None)
        before = pair
    # The file ends before the last target (cut off), or all targets were nearest to one frame.
    if before is not None and before[1] > taken_s[-1] and (target is not None or len(taken_s) == 2):
        yield before


# ---------------------------------------------------------------- pixels


def _upright(frame: VideoFrame, width: int, height: int, reformatter: VideoReformatter) -> np.ndarray:
    """uint8 [h, w, 3] RGB as a player shows it; `width` and `height` are those before turning."""
    picture = reformatter.reformat(frame, width=width, height=height, format="rgb24", threads=1).to_ndarray()
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return picture
    # Shown at x' = a x + c y, y' = b x + d y, in units of 1/65536.
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
    if abs(b) + abs(c) > abs(a) + abs(d):
        picture, a, d = picture.transpose(1, 0, 2), c, b
    return picture[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
