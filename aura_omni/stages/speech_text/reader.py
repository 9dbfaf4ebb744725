"""Words as they are written to words as they are spoken, one word behind.

A word is what stands between spaces, or a single character of a script that is written without them. A number waits for the
word after it, which may be its unit; so does a month for its day.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from aura_omni.stages.speech_text import addresses, chinese, english
from aura_omni.stages.speech_text.language import LanguageGuess
from aura_omni.stages.speech_text.markup import BREAK, CELL

_LEAD = re.compile(r"""(?:(?!['’‘]\d0s)[(\["'“‘«<¿¡—–…{])*""")  # but not the mark of '90s
_TRAIL = frozenset(""")]"'”’»>,;:!?…—}.""")
_AWAITS_UNIT = re.compile(
    r"(?:[-−+~≈±<>]?(?:US\$|[$€£¥])?\d[\d.,:/]*(?:\s?[-–—~]\s?\d[\d.,]*)?(?<=\d)|[vV]ersion)(?:st|nd|rd|th)?"
)
_PAUSES = frozenset(".!?…:;,。！？；：，、")
_ENDS = frozenset(".,;:!?")  # behind an address they are the sentence's
_CLOSING = re.compile(r"[.,;:!?…。，！？；：、)\]”’»]+")
_SIGNS = frozenset(("→", "⇒", "->", "=>", "-->", "|", "•", "·"))  # between words; they are a pause
_LONGEST = 100  # characters; what is longer is no number, and leaves as it comes
_MOST_TRAILING = 3  # marks behind a word that may belong to it, as in "p.m.",
_STRENGTH = {"": 0, " ": 1, CELL: 2, BREAK: 3}


class Reader:
    def __init__(self, language: str | None, guess: LanguageGuess) -> None:
        self._language, self._guess = language, guess
        self._word, self._word_gap = "", ""
        self._long: Literal["no", "written", "address"] = "no"  # what the word is that has passed _LONGEST
        self._held: str | None = None  # a complete word that the next one may belong to
        self._held_gap = ""
        self._gap = ""  # since the last word
        self._out: list[str] = []
        self._last = ""  # the last character that was given out
        self._before = ""  # the last word, as it was written, lower-case
        self._dot = False  # the last word has a dot that is not spoken,
        self._stop = False  # which a capital letter behind it makes a full stop

    def push(self, text: str) -> str:
        for character in text:
            self._take(character)
        ready, self._out = "".join(self._out), []
        return ready

    @property
    def apart(self) -> bool:
        """Whether a letter was given out last, and something stands between it and the next word: then a space or mark comes first."""
        if self._long != "no" or not self._last.isalpha():
            return False  # a long word goes out as it comes
        if self._held is not None:
            return self._held_gap != ""
        return (self._word_gap if self._word else self._gap) != ""

    def end(self) -> str:
        self._end_word()
        self._let_go()
        if self._dot:
            self._write(".")
        return self.push("")

    def _take(self, character: str) -> None:
        if character.isspace():
            self._end_word()
            gap = character if character in (BREAK, CELL) else " "
            if gap != " ":
                self._let_go()
            if _STRENGTH[gap] > _STRENGTH[self._gap]:
                self._gap = gap
        elif _stands_alone(character):
            self._end_word(character)
            self._let_go(character)
            if self._language is None:
                self._guess.add(character)
            self._put(character, begins=character)
        else:
            if not self._word:
                self._word_gap, self._gap = self._gap, ""
            if self._long == "no":
                self._word += _narrow(character)
                if len(self._word) > _LONGEST:
                    self._begin_long()
            elif self._long == "written":
                self._write(character)
            else:
                self._word = character  # of an address, only the last one counts

    def _begin_long(self) -> None:
        """The word is longer than what is looked at: of an address its host is spoken, all else goes out as it comes."""
        word = self._word
        if self._language is None:
            self._guess.add(word)
        self._let_go(word[0])
        said = addresses.read(word, self._language or self._nearby(""))
        self._long = "written" if said is None else "address"
        self._say(word, word if said is None else said, self._word_gap)
        self._dot = self._stop = False

    def _end_long(self) -> None:
        if self._long == "address" and self._word in _ENDS:
            self._write(self._word)
        self._word, self._long = "", "no"

    def _end_word(self, after: str = "") -> None:
        """The word is complete. after: the character that ended it, where that is none of white space."""
        if self._long != "no":
            self._end_long()
            return
        word, gap = self._word, self._word_gap
        self._word = ""
        if not word:
            return
        if self._language is None:
            self._guess.add(word)
        if self._held is not None and gap == " ":
            joined = f"{self._held} {word}"
            said = self._read(joined, after, whole=True)
            if said is not None:
                gap, self._held = self._held_gap, None
                self._say(joined, said, gap)
                return
        self._let_go(word[0])
        if after in ("", "%") and self._awaits_more(word):
            self._held, self._held_gap = word, gap
            return
        said = self._read(word, after)
        self._say(word, word if said is None else said, gap)

    def _let_go(self, after: str = "") -> None:
        """Nothing belongs to the held word."""
        if self._held is None:
            return
        word, self._held = self._held, None
        said = self._read(word, after)
        self._say(word, word if said is None else said, self._held_gap)

    def _awaits_more(self, word: str) -> bool:
        if self._language not in (None, "english", "chinese"):
            return False
        lead = _LEAD.match(word)
        core = word[lead.end() :] if lead else word
        return _AWAITS_UNIT.fullmatch(core) is not None or (self._language != "chinese" and english.starts_unit(core))

    # ------------------------------------------------------------ what a word sounds like

    def _read(self, word: str, after: str, *, whole: bool = False) -> str | None:
        """The word in words, its quotes and punctuation kept; None: as it is written. whole: it is two words that must fit."""
        language = self._language or self._nearby(after)
        lead = _LEAD.match(word)
        start = lead.end() if lead else 0
        stop = len(word)
        while stop - 1 > start and word[stop - 1] in _TRAIL:
            stop -= 1
        stop = min(stop + _MOST_TRAILING, len(word))
        while True:
            core = word[start:stop]
            said = self._read_core(core, after if stop == len(word) else word[stop], language)
            if said is not None and not (whole and " " not in core):
                return word[:start] + said + word[stop:]
            if stop - 1 <= start or word[stop - 1] not in _TRAIL:
                return None
            stop -= 1

    def _read_core(self, core: str, after: str, language: str | None) -> str | None:
        said = None
        if language == "english":
            said = english.read(core, before=self._before)
        elif language == "chinese":
            said = chinese.read(core, before=self._last, after=after)
        return addresses.read(core, language) if said is None else said

    def _nearby(self, after: str) -> str | None:
        """The language of what stands around the word: beside a Chinese character it is Chinese, whatever the rest is."""
        guessed = self._guess.language
        if guessed != "japanese" and (_is_han(after) or (_is_han(self._last) and guessed != "english")):
            return "chinese"
        return guessed

    # ------------------------------------------------------------ out

    def _say(self, word: str, said: str, gap: str) -> None:
        if word in _SIGNS:
            self._gap = max(self._gap, gap, CELL, key=_STRENGTH.__getitem__)
            return
        after, self._gap = self._gap, gap
        self._put(said, begins=word)
        self._gap = after
        self._before = word.strip("""()[]"'“”‘’.,;:!?""").lower()
        self._dot = said != word and word[-1] == "." != said[-1]
        self._stop = self._dot and english.may_end_a_sentence(word)

    def _put(self, text: str, *, begins: str) -> None:
        """text after the gap. begins: as it is written: a capital letter begins a sentence after an abbreviation."""
        gap, self._gap = self._gap, ""
        stop, self._stop, self._dot = self._stop, False, False
        if gap in (BREAK, CELL) and self._last and self._last not in _PAUSES:
            wide = _stands_alone(self._last)
            self._write({BREAK: "。" if wide else ".", CELL: "，" if wide else ","}[gap])
        elif stop and gap and (begins[0].isupper() or _stands_alone(begins[0])):
            self._write(".")
        if gap and self._last and not _CLOSING.fullmatch(text) and not (gap != " " and _stands_alone(self._last)):
            self._write(" ")
        self._write(text)

    def _write(self, text: str) -> None:
        self._out.append(text)
        self._last = text[-1]


def _stands_alone(character: str) -> bool:
    """Whether it is of a script that is written without spaces, or its punctuation."""
    return (
        "\u2e80" <= character <= "\ua4cf"
        or "\uf900" <= character <= "\ufaff"
        or "\U00020000" <= character <= "\U0003ffff"
        or "\u0e00" <= character <= "\u109f"
        or "\u1780" <= character <= "\u17ff"
        or ("\uff00" <= character <= "\uffef" and _narrow(character) == character)
    ) and not "\u3200" <= character <= "\u33ff"


def _is_han(character: str) -> bool:
    return "\u3400" <= character <= "\u9fff"


def _narrow(character: str) -> str:
    """Full-width digits, letters and signs of numbers as plain ones, and units in one character as letters."""
    if "\uff01" <= character <= "\uffe5" or "\u3380" <= character <= "\u33df":
        plain = unicodedata.normalize("NFKC", character)
        return (
            plain
            if (plain.isalnum() and plain.isascii()) or plain in "%$+-./#~¥" or character < "\uff01"
            else character
        )
    return character
