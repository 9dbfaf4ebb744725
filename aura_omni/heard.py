"""A turn as its listener collects it, and what became of it: one word for the server's answers and a program's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from aura_omni.errors import AuraError, EngineError, Unavailable
from aura_omni.flow import FRAME_SAMPLES, VOICE_RATE, AudioChunk, Ended, Event, TextDelta, Transcript
from aura_omni.media.encoder import encode
from aura_omni.media.formats import audio_format_of_file


@dataclass(slots=True)
class Heard:
    """All that a turn said, event by event.

    transcripts  what was heard, one for each recording of the messages
    language     of the last transcript; several, with commas, when it changes in a recording
    texts        deltas; joined they are `text`
    samples      deltas, float32 [n] each, mono at VOICE_RATE (24 kHz); joined they are `sound()`
    ended        how and why it ended, and its usage; None: not yet
    """

    transcripts: list[str] = field(default_factory=list)
    language: str | None = None
    texts: list[str] = field(default_factory=list)
    samples: list[np.ndarray] = field(default_factory=list)
    ended: Ended | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Heard:
        """The whole of a turn, from its events. Raises the AuraError that it failed with."""
        heard = cls()
        for event in events:
            heard.add(event)
        error = failure(heard.end)
        if error is not None:
            raise error
        return heard

    def add(self, event: Event) -> None:
        match event:
            case Transcript():
                self.transcripts.append(event.text)
                self.language = event.language
            case TextDelta():
                self.texts.append(event.text)
            case AudioChunk():
                self.samples.append(event.samples)
            case Ended():
                self.ended = event

    @property
    def end(self) -> Ended:
        assert self.ended is not None, "every turn ends with Ended"
        return self.ended

    @property
    def text(self) -> str:
        """Empty for a silent turn."""
        return "".join(self.texts)

    @property
    def silent(self) -> bool:
        """The turn chose not to answer."""
        return self.end.reason == "silent"

    def sound(self) -> np.ndarray:
        """float32 [n]. What has no speakable word still is a file that plays: one frame of silence."""
        return np.concatenate(self.samples) if self.samples else np.zeros(FRAME_SAMPLES, np.float32)

    def save(self, path: str | Path) -> None:
        """Write the sound, in the format that the suffix names. Raises BadRequest for another one, OSError."""
        path = Path(path)
        path.write_bytes(encode(self.sound(), VOICE_RATE, audio_format_of_file(path)))


def failure(ended: Ended) -> AuraError | None:
    """Why a turn has no answer, if it has none."""
    if ended.reason == "error":
        return ended.error or EngineError("a stage failed without a reason")
    if ended.reason == "cancelled":
        return Unavailable("the turn was cancelled by the server, which is stopping; ask again")
    return None


def finish_reason(ended: Ended) -> Literal["stop", "length"]:
    """OpenAI's word: "length" when a budget cut the text, or the speech is not whole."""
    cut = ended.reason == "length" or ended.speech_reason in ("length", "loop", "silence", "short")
    return "length" if cut else "stop"
