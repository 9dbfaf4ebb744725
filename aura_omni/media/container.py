"""Opens audio and video files from bytes, by content: never by name or declared type.

Knows demuxing and how damaged files end. Does not know samples or pixels; audio.py and video.py read those.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import av
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from aura_omni.errors import BadMedia

# FFmpeg also "demuxes" playlists and scripts that name further files and addresses; such formats could make the server
# open them. So only self-contained ones are read.
_CONTAINERS = "aac,ac3,aiff,amr,asf,au,avi,caf,eac3,flac,flv,gif,matroska,mov,mp3,mpeg,mpegts,ogg,w64,wav"
# Opening decodes the first frames to learn their true size, and drops them: unfiltered, which takes two thirds of the time. Frames that
# are wanted are decoded later, by a decoder that does not know this.
_OPENING = {"format_whitelist": _CONTAINERS, "skip_loop_filter": "all"}

_SUBTYPES = {
    "aac": "aac", "ac3": "ac3", "amr": "amr", "flac": "flac", "mov": "mp4", "mp3": "mpeg", "mpeg": "mpeg", "ogg": "ogg", "wav": "wav",
    "webm": "webm",
}  # fmt: skip


@contextmanager
def opened(data: bytes | BinaryIO, *, param: str | None) -> Iterator[InputContainer]:
    """The container in `data`, bytes or a file that can be sought in. Raises BadMedia when it is empty or no known
    container."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if not size:
        raise BadMedia("the file is empty (0 bytes); send the recording itself", param=param)
    try:
        # Tags in an unknown encoding are no reason to refuse the sound.
        container = av.open(file, "r", options=_OPENING, metadata_errors="replace")
    except FFmpegError:
        raise BadMedia(
            f"no audio or video file in these {size:,} bytes: the header is missing, damaged or of an unknown "
            "format, or nothing follows it; send a whole file, for example WAV, MP3, M4A, WebM or MP4",
            param=param,
        ) from None
    with container:
        yield container


def media_type_of(data: bytes, *, param: str | None) -> str:
    """What a recording is, for example "audio/wav" or "video/mp4", whatever somebody calls it. Raises BadMedia as `opened`."""
    with opened(data, param=param) as container:
        form = container.format.name.partition(",")[0]
        codecs = {stream.codec_context.name for stream in container.streams.audio if stream.codec_context is not None}
        if form == "matroska" and codecs <= {"opus", "vorbis", "libopus"}:
            form = "webm"
        covers = Disposition.attached_pic  # the picture of a song
        kind = "audio" if all(stream.disposition & covers for stream in container.streams.video) else "video"
    return f"{kind}/{_SUBTYPES.get(form, f'x-{form}')}"


def packets(container: InputContainer, stream: AudioStream | VideoStream) -> Iterator[Packet[Any]]:
    """The stream's packets. A file that is cut off ends there; the last packet is the empty one that flushes."""
    demuxed = container.demux(stream)
    while True:
        try:
            packet = next(demuxed, None)
        except FFmpegError:  # the container's own structure is cut: what came before it is good
            yield Packet(0)
            return
        if packet is None:
            return
        yield packet


def audio_frames(stream: AudioStream, source: Iterable[Packet[Any]], *, param: str | None) -> Iterator[AudioFrame]:
    """Decoded frames in order; see `_frames`."""
    return (frame for frame in _frames(stream, source, param=param) if isinstance(frame, AudioFrame))


def video_frames(stream: VideoStream, source: Iterable[Packet[Any]], *, param: str | None) -> Iterator[VideoFrame]:
    """Decoded frames in the order they are shown, one at a time; see `_frames`."""
    return (frame for frame in _frames(stream, source, param=param) if isinstance(frame, VideoFrame))


def _frames(
    stream: AudioStream | VideoStream, source: Iterable[Packet[Any]], *, param: str | None
) -> Iterator[AudioFrame | VideoFrame]:
    """Decode packet by packet. Single damaged packets are left out, as every player does; a stream that is mostly
    damaged is something else under a media name, and raises BadMedia at its end."""
    good = damaged = 0
    for packet in source:
        try:
            frames = stream.decode(packet if packet.size else None)
        except FFmpegError:
            damaged += 1
            continue
        for frame in frames:
            good += 1
            yield frame
    if damaged > good:
        raise BadMedia(
            f"{damaged:,} of {good + damaged:,} packets of the {stream.type} track do not decode: the file is damaged",
            param=param,
        )
