"""Uploaded voices on disk: what a name stands for, and the recordings, each kept once however many names it has.

    store = VoiceStore(folder)                         # reads what an earlier process left
    store.add(name="Ada", recording=data, ...)         # or Conflict
    store.get("ada"), store.recording(voice), store.delete("Ada")

Knows files, not sound and not HTTP. Names are looked up without regard to case. A voice is a JSON file whose name is a hash of
the voice's, a recording is a file whose name is the hash of its content, so that no name of a user reaches the file
system. Files appear whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from aura_omni.errors import BadRequest, ConfigError, Conflict, NotFound, shown

MOST_VOICES = 1_000
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class UploadedVoice:
    """content: the hash of the recording; created_at: seconds since 1970."""

    name: str
    consent: str
    ref_text: str | None
    speaker_description: str | None
    content: str
    mime_type: str
    file_size: int
    duration_s: float
    created_at: int


class VoiceStore:
    """Thread-safe. One process writes to a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that cannot be used, or a file in it that is no voice."""
        self._folder = folder
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for partial in folder.glob(f"*{_PARTIAL}"):
                partial.unlink()  # of a process that was killed while it wrote
            found = [_read(path) for path in sorted(folder.glob("*.json"))]
            (folder / f"{uuid.uuid4().hex}{_PARTIAL}").touch()
            for probe in folder.glob(f"*{_PARTIAL}"):
                probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"custom_voice_dir {shown(str(folder))} cannot be used: {error.strerror}; name another folder"
            ) from error
        self._voices = {_key(voice.name): voice for voice in found}
        for voice in found:
            if not self._path_of(voice.content).is_file():
                raise ConfigError(
                    f"custom_voice_dir {shown(str(folder))}: the recording of voice {voice.name!r} is missing; restore "
                    f"{voice.content}.audio or delete {_key(voice.name)}.json"
                )

    def all(self) -> list[UploadedVoice]:
        """In the order of their names."""
        with self._lock:
            return sorted(self._voices.values(), key=lambda voice: voice.name.casefold())

    def get(self, name: str) -> UploadedVoice | None:
        with self._lock:
            return self._voices.get(_key(name))

    def recording(self, voice: UploadedVoice) -> bytes:
        """The file as it was uploaded. Raises NotFound if the voice was deleted meanwhile."""
        try:
            return self._path_of(voice.content).read_bytes()
        except FileNotFoundError:
            raise _no_voice(voice.name) from None

    def add(
        self,
        *,
        name: str,
        recording: bytes,
        mime_type: str,
        duration_s: float,
        consent: str,
        ref_text: str | None,
        speaker_description: str | None,
    ) -> UploadedVoice:
        """Keep a voice. The same once more changes nothing; Conflict when the name stands for something else."""
        content = hashlib.blake2b(recording, digest_size=20).hexdigest()
        with self._lock:
            kept = self._voices.get(_key(name))
            if kept is not None:
                if (kept.content, kept.ref_text) != (content, ref_text):
                    raise Conflict(f"voice {kept.name!r} exists; delete it first, or choose another name", param="name")
                return kept
            if len(self._voices) >= MOST_VOICES:
                raise BadRequest(f"this server keeps {MOST_VOICES:,} voices, and has them; delete one", param="name")
            voice = UploadedVoice(
                name=name,
                consent=consent,
                ref_text=ref_text,
                speaker_description=speaker_description,
                content=content,
                mime_type=mime_type,
                file_size=len(recording),
                duration_s=round(duration_s, 3),
                created_at=int(time.time()),
            )
            path = self._path_of(content)
            if not path.is_file():
                _write(path, recording)
            _write(self._folder / f"{_key(name)}.json", json.dumps(asdict(voice), indent=1).encode())
            self._voices[_key(name)] = voice
        return voice

    def delete(self, name: str) -> UploadedVoice:
        """Forget a voice, and its recording when no other name has it. Raises NotFound."""
        with self._lock:
            voice = self._voices.get(_key(name))
            if voice is None:
                raise _no_voice(name)
            (self._folder / f"{_key(name)}.json").unlink(missing_ok=True)
            del self._voices[_key(name)]
            if all(other.content != voice.content for other in self._voices.values()):
                self._path_of(voice.content).unlink(missing_ok=True)
        return voice

    def _path_of(self, content: str) -> Path:
        return self._folder / f"{content}.audio"


def _key(name: str) -> str:
    return hashlib.blake2b(name.casefold().encode(), digest_size=20).hexdigest()


def _no_voice(name: str) -> NotFound:
    return NotFound(f"Voice {name[:60]!r} not found; GET /v1/audio/voices lists those there are", param="name")


def _read(path: Path) -> UploadedVoice:
    try:
        voice = UploadedVoice(**json.loads(path.read_bytes()))
        known = f"{_key(voice.name)}.json" == path.name and set(voice.content) <= set("0123456789abcdef")
    except (ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise ConfigError(f"{path} is not a voice that this server wrote; delete it, or restore it from a backup")
    return voice


def _write(path: Path, data: bytes) -> None:
    """The file appears with all of its content, also when the machine stops in between; only its owner may read it."""
    partial = path.with_name(f"{uuid.uuid4().hex}{_PARTIAL}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
