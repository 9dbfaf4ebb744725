"""The spoken form of texts that are all there."""

from __future__ import annotations

from aura_omni.stages.speech_text import SpeechText


def whole(text: str, language: str | None = None) -> str:
    """A language that is not given is guessed from the text."""
    speech = SpeechText(language, context=text)
    return speech.feed(text) + speech.finish()
