"""A text that is written bit by bit, to the ids of what is spoken of it.

Joined, they are the ids of the whole spoken text without white space in front, however the text was cut.
"""

from __future__ import annotations

from aura_omni.stages.silent import speakable
from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.tokenizer import Encoder


class SpokenIds:
    def __init__(self, encoder: Encoder, text: SpeechText | None) -> None:
        """text: None when what is written is what is spoken."""
        self._encoder, self._text = encoder, text
        self._begun = False
        self.speakable = False  # whether there was a word to speak

    def push(self, delta: str) -> list[int]:
        """More of what is written -> the ids of it that are certain."""
        return self._encode(delta if self._text is None else self._text.feed(delta))

    def end(self) -> list[int]:
        """The ids that are left, when no more is written."""
        return self._encode("" if self._text is None else self._text.finish()) + self._encoder.flush()

    def _encode(self, spoken: str) -> list[int]:
        spoken = spoken if self._begun else spoken.lstrip()
        self._begun = self._begun or spoken != ""
        self.speakable = self.speakable or speakable(spoken)
        return self._encoder.push(spoken, apart=self._text is not None and self._text.apart)
