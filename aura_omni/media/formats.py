"""Names of the formats that sound is written in and read from: those that requests use, and the suffixes of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aura_omni.errors import BadRequest
from aura_omni.media.encoder import AudioFormat

AUDIO_FORMATS: Mapping[str, AudioFormat] = {
    "wav": "wav", "pcm": "pcm16", "pcm16": "pcm16", "flac": "flac", "mp3": "mp3", "opus": "opus", "aac": "aac",
}  # fmt: skip
# What requests call the format of a recording. Nothing follows from it, as the bytes say what they are; most clients take the suffix.
RECORDING_FORMATS = (
    "wav", "mp3", "m4a", "mp4", "aac", "flac", "ogg", "opus", "webm", "aiff", "amr", "3gp", "wma", "mkv", "mov", "caf", "au",
    "ac3", "pcm", "pcm16", "pcm24",
)  # fmt: skip
_OTHER_NAMES = {
    "wave", "vnd.wave", "mpeg", "mpga", "mp2", "mp4a-latm", "oga", "vorbis", "aif", "aifc", "3gpp", "ms-wma", "mka", "matroska",
    "quicktime", "basic",
}  # fmt: skip
_SUFFIXES = {"ogg": "opus", "raw": "pcm16"}


def audio_format_of(given: str | None, *, param: str) -> AudioFormat:
    """The format that a request names; WAV without a name. Raises BadRequest listing them."""
    name = "wav" if given is None else given.lower()
    if name not in AUDIO_FORMATS:
        raise BadRequest(f"Invalid audio format {name[:60]!r}; use one of {', '.join(AUDIO_FORMATS)}", param=param)
    return AUDIO_FORMATS[name]


def names_a_recording(given: str) -> bool:
    """Whether this is a format of recordings that anybody knows: by name, suffix or media type, in any case."""
    name = given.lower().partition(";")[0].strip().removeprefix("audio/").removeprefix("video/")
    return name.removeprefix("x-").removeprefix(".") in {"", *RECORDING_FORMATS, *_OTHER_NAMES}


def audio_format_of_file(path: Path) -> AudioFormat:
    """As its suffix says. Raises BadRequest listing the suffixes."""
    suffix = path.suffix[1:].lower()
    name = _SUFFIXES.get(suffix, suffix)
    if name not in AUDIO_FORMATS:
        known = ", ".join(f".{suffix}" for suffix in sorted({*AUDIO_FORMATS, *_SUFFIXES}))
        raise BadRequest(f"the format of {path.name!r} is not known; end it in one of {known}", param="output")
    return AUDIO_FORMATS[name]
