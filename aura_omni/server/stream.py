"""A turn as server-sent events, in one of two shapes.

vLLM-Omni's (default): every chunk says its `modality`; text is in `delta.content`, and so is audio, as base64.
OpenAI's (the request's `audio` object has a `voice`, as OpenAI's must; "" is the server's own): audio is in `delta.audio`
{id, data, transcript}; `expires_at` at the end.

In both, each audio delta is decoded from base64 by itself, and joined they are one file of the format asked for, with ONE
header. `audio_metadata.frame_count` is the samples that a delta adds. `aura.transcripts` comes with the first chunk, a silent turn is a delta `<|silent|>` with `silent: true` at the
end, and exactly one chunk has a finish_reason. Every line stays under 64 KiB, the limit of common line readers.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aura_omni.flow import SILENT_TEXT, AudioChunk, Ended, Event, TextDelta, Transcript
from aura_omni.heard import finish_reason
from aura_omni.server.completion import AUDIO_KEPT_S, Wanted, audio_metadata, usage
from aura_omni.server.sound import Piece, SoundFormat, SoundStream

DONE = b"data: [DONE]\n\n"
# Stands for a piece's base64 until the line is JSON: nothing in base64 needs an escape, and looking for it took half of a line's time.
# Nobody else can have written it.
_SOUND = uuid.uuid4().hex
PIECE_CHARACTERS = 2_000  # twice in a line at most, and up to 12 bytes each as escaped JSON


@dataclass(slots=True)
class ChunkStream:
    """Turns events into lines; no line comes before there is something to say, so that early failures get a status."""

    wanted: Wanted
    _transcripts: list[str] = field(default_factory=list)
    _begun: bool = False
    _sound: SoundStream | None = None  # once something is spoken

    def lines(self, event: Event) -> Iterator[bytes]:
        match event:
            case Transcript():
                self._transcripts.append(event.text)
            case TextDelta():
                for start in range(0, len(event.text), PIECE_CHARACTERS):
                    yield from self._text(event.text[start : start + PIECE_CHARACTERS])
            case AudioChunk() if self.wanted.audio and len(event.samples):
                if self._sound is None:
                    self._sound = SoundStream(SoundFormat(self.wanted.audio_format))
                yield from map(self._audio, self._sound.feed(event.samples))
            case Ended():
                yield from self._end(event)

    def _text(self, text: str) -> Iterator[bytes]:
        delta: dict[str, Any] = {"content": text} if self.wanted.text else {}
        if self.wanted.audio and self.wanted.openai_audio:
            delta["audio"] = {"id": self.wanted.audio_id, "transcript": text}
        if delta:
            yield self._chunk(delta, modality="text")

    def _audio(self, piece: Piece) -> bytes:
        if self.wanted.openai_audio:
            delta: dict[str, Any] = {"audio": {"id": self.wanted.audio_id, "data": _SOUND}}
        else:
            delta = {"content": _SOUND}
        metadata = audio_metadata(self.wanted.audio_format, piece.samples)
        line = self._chunk(delta, modality="audio", audio_metadata=metadata)
        return line.replace(_SOUND.encode(), base64.b64encode(piece.data), 1)

    def _end(self, ended: Ended) -> Iterator[bytes]:
        if self._sound is not None:
            yield from map(self._audio, self._sound.finish())
        if ended.reason == "silent":
            yield self._chunk({"content": SILENT_TEXT}, modality="text")
        delta: dict[str, Any] = {}
        more: dict[str, Any] = {"silent": ended.reason == "silent"}
        if self._sound is not None or ended.speech_reason is not None:
            more["audio_finish_reason"] = ended.speech_reason or "stop"
        if self._sound is not None and self.wanted.openai_audio:
            delta["audio"] = {"id": self.wanted.audio_id, "expires_at": self.wanted.created + AUDIO_KEPT_S}
        modality = "text" if self._sound is None else "audio"
        yield self._chunk(delta, modality=modality, finish_reason=finish_reason(ended), **more)
        if self.wanted.include_usage:
            yield self._line([], usage=usage(ended.usage))
        yield DONE

    def _chunk(self, delta: dict[str, Any], *, modality: str, finish_reason: str | None = None, **more: Any) -> bytes:
        if not self._begun:
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None, **more}
        return self._line([choice], modality=modality)

    def _line(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk: dict[str, Any] = {
            "id": self.wanted.id,
            "object": "chat.completion.chunk",
            "created": self.wanted.created,
            "model": self.wanted.model,
            "choices": choices,
        }
        if self.wanted.include_usage:
            chunk["usage"] = None
        if self._transcripts:
            chunk["aura"] = {"transcripts": self._transcripts}
            self._transcripts = []
        self._begun = True
        # ASCII only: readers that split at Unicode line ends (U+2028, U+0085) would tear a line apart
        return b"data: " + json.dumps({**chunk, **more}, separators=(",", ":")).encode() + b"\n\n"
