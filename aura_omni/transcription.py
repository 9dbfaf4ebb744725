"""A recording of any length as text: what its segments say, and when.

    transcription = Transcription()
    delta = transcription.add(heard, start_s=0.4, end_s=7.9)      # segment after segment, in order
    transcription.text, transcription.segments, transcription.language

Does not know who reads the recording or asks the pipeline: the server does it on its event loop, a program in its thread.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields

from aura_omni.flow import Usage
from aura_omni.heard import Heard, finish_reason
from aura_omni.spacing import space_between

SEGMENTS_AT_ONCE = 4  # of one recording; more would let one file fill the server


@dataclass(frozen=True, slots=True)
class TimedText:
    """What was said in one segment, and when its sound begins and ends."""

    text: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Transcription:
    """duration_s: of the recording. cut: a token budget ended the text of a segment."""

    text: str = ""
    segments: list[TimedText] = field(default_factory=list)
    duration_s: float = 0.0
    usage: Usage = field(default_factory=Usage)
    cut: bool = False
    _spoken_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def language(self) -> str:
        """In which most was said; "" when nothing was."""
        return max(self._spoken_s, key=lambda name: self._spoken_s[name], default="")

    def add(self, heard: Heard, *, start_s: float, end_s: float) -> str:
        """Write down a segment; the delta that it is to the text, empty where nobody speaks."""
        self.usage = _sum(self.usage, heard.end.usage)
        self.cut = self.cut or finish_reason(heard.end) == "length"
        text = heard.text.strip()
        if not text:
            return ""
        delta = space_between(self.text, text) + text
        self.text += delta
        self.segments.append(TimedText(text, start_s, end_s))
        if heard.language:
            self._spoken_s[heard.language.partition(",")[0]] += end_s - start_s
        return delta


def _sum(left: Usage, right: Usage) -> Usage:
    return Usage(**{item.name: getattr(left, item.name) + getattr(right, item.name) for item in fields(Usage)})
