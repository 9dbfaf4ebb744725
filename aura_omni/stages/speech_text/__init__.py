"""What is spoken of a text that is written: no markup, no code, no emoji, numbers as words.

    speech = SpeechText("english")
    spoken = speech.feed("It costs **$7")      # deltas in, deltas out; "It costs"
    spoken = speech.feed(".20**. ")            # " seven dollars and twenty cents."
    spoken = speech.finish()

However a text is cut into deltas, what comes out is the same, and so is the character at which each part of it comes. A delta
that comes out ends with a word; what is held back is at most a word, where a number and its unit are one, or what may become a
tag or a link's target, up to a longest form (`markup`). A word of more than 100 characters leaves as it comes. The work is
linear in the text, and so is what comes out. Pure Python: knows neither tokens nor tensors.

What becomes of
    headings, bullets, quotes, table cells   their words; each ends like a sentence, a cell with a comma
    bold, italic, struck, links, HTML tags   their words
    inline code                              as it is written (`snake_case`, `2*3*4` and `C#` are, anywhere)
    fenced code, HTML comments, scripts,     nothing
      style sheets, emoji
    web and mail addresses                   "shop dot test", in the language's words
    numbers, money, dates, times, units,     in English and Chinese words; in other languages as they are written, which the
      versions, sums, abbreviations          Talker reads by itself
"""

from __future__ import annotations

from aura_omni.stages.speech_text.language import LanguageGuess, guess
from aura_omni.stages.speech_text.markup import Markup
from aura_omni.stages.speech_text.reader import Reader

_MOST_CONTEXT = 20_000  # characters; they tell the language, and more would take time from the thread that asks


class SpeechText:
    """One text. Not thread-safe; feed it from one place."""

    def __init__(self, language: str | None = None, *, context: str = "") -> None:
        """language: lower-case English name; None: guessed from the text so far. context: text that is probably in the same
        language, which counts until this one says otherwise; the start of it is looked at."""
        self._markup = Markup()
        self._reader = Reader(language, LanguageGuess(guess(context[:_MOST_CONTEXT]) if language is None else None))

    def feed(self, delta: str) -> str:
        """More of the written text -> what of it can be spoken now. Delta."""
        return self._reader.push(self._markup.push(delta))

    @property
    def apart(self) -> bool:
        """Whether what came ends with a letter, and what follows, if anything, begins with a space or a mark: the word is whole."""
        return self._reader.apart

    def finish(self) -> str:
        """The rest, when no more text comes."""
        return self._reader.push(self._markup.end()) + self._reader.end()
