"""Markdown and HTML taken off a text that arrives in pieces; its words stay.

Between blocks (headings, list items, quotes, rows, paragraphs) comes a BREAK, between table cells a CELL, both of which
`reader` turns into a pause. Not a full parser: what looks like markup and is not one is kept as it is written.

The work goes character by character: `_line` holds the marks at the start of a line, `_hold` those inside of it, until what
follows says what they are. What turns out to be none is read again without its first character. All that can be held has a
longest form (the constants below): what is longer is no mark, but plain text. So the work grows with the text and no faster.
"""

from __future__ import annotations

import html
import re
from typing import Literal

from aura_omni.stages.speech_text.pictures import unspoken
from aura_omni.stages.speech_text.tags import END, Scan, tag, target

BREAK, CELL = "\n", "\v"

LONGEST = 2_000  # characters of a tag, a comment, a script, a link's target
LONGEST_RUN = 1_000  # marks at the start of a line, or one mark again and again: the rest is dropped
LONGEST_INFO = 200  # what follows the opening of a fence on its line

_LINE_MARKS = frozenset(" \t>#*+-=_|:~`•")
_NUMBER = re.compile(r"[ \t>]*\d{1,3}[.)]?")  # of an ordered list
_QUOTE = re.compile(r"[ \t]*(?:>[ \t]*)*")
_ITEM = re.compile(r"(?:[*+\-•][ \t]+)+|#{1,6}[ \t]+|\|[ \t]*")
_ORDERED = re.compile(r"\d{1,3}[.)]")
_FENCE = re.compile(r"`{3,}|~{3,}")
_HELD = frozenset("*_~`<&[]!\\|")
_RUNS = frozenset("*_~`")
_ASIDE = re.compile(r"\[(?:\^?\d{0,3}\]?|\^[\w-]{0,20}\]?|[ xX]\]?)")  # a footnote or task box, or the start of one
_FIGURES = re.compile(r"\[\d{0,3}")  # the start of a footnote, or of the name of a link's target
_ANOTHER = re.compile(r"\[(?:\^|\d{1,3}\])")  # a footnote behind a footnote
_ENTITY = re.compile(r"&(?:#?[A-Za-z0-9]{0,31});?")
_LINE_ENDS = frozenset("\n\u2028\u2029\x85\x0b\x0c")

_Mode = Literal["line", "text", "info", "fence"]


class Markup:
    def __init__(self) -> None:
        self._out: list[str] = []
        self._mode: _Mode = "line"
        self._line = ""  # marks at the start of this line; in a fence, the line
        self._hold = ""
        self._scan: Scan | None = None  # what reads the held ones: a tag or a target
        self._again: list[str] = []  # characters to be read again, the last one first
        self._gap = ""  # before the next line: a BREAK, a space, or nothing
        self._block = False  # this line is an item, a heading, a row: it ends with a BREAK
        self._row = False
        self._fence = ""
        self._before = ""  # the character of the source before the held ones
        self._stars = 0  # the emphasis that is open
        self._code = 0  # backticks that opened the inline code
        self._brackets: list[bool] = []  # open ones; whether they are written out

    def push(self, text: str) -> str:
        for character in text:
            if character != END:
                self._take(character)
                self._reread()
        ready, self._out = "".join(self._out), []
        return ready

    def end(self) -> str:
        while self._hold or (self._mode == "line" and self._line):
            if self._mode == "line":
                self._begin_line("")
            elif self._scan is not None:
                self._scan.take(END)
                self._decide(self._scan)
            else:
                self._resolve(last=True)
            self._reread()
        return self.push("")

    def _reread(self) -> None:
        while self._again:
            self._take(self._again.pop())

    def _return(self, text: str) -> None:
        """Characters that are read again before all others."""
        self._again.extend(reversed(text))

    def _take(self, character: str) -> None:
        if character in _LINE_ENDS:
            character = "\n"
        elif character == "\r":
            character = " "
        match self._mode:
            case "line":
                self._take_mark(character)
            case "text":
                self._take_inline(character)
            case "info":
                self._take_info(character)
            case "fence":
                self._take_code(character)

    # ------------------------------------------------------------ the start of a line

    def _take_mark(self, character: str) -> None:
        counted = self._line[-1:].isdigit() or self._line[-1:] in (".", ")")
        if character in _LINE_MARKS and not counted:
            self._line += character if len(self._line) < LONGEST_RUN else ""
        elif _NUMBER.fullmatch(self._line + character):
            self._line += character
        else:
            self._begin_line(character)

    def _begin_line(self, character: str) -> None:
        """All marks are there; character follows ("" at the end of the text)."""
        line, self._line = self._line, ""
        quote = _QUOTE.match(line)
        assert quote is not None
        start, block = quote.end(), ">" in quote[0]
        while item := _ITEM.match(line, start):
            self._row = self._row or item[0][0] == "|"
            start, block = item.end(), True
        rest = line[start:]
        fence = _FENCE.match(rest)
        if fence:
            self._mode, self._fence, self._gap = "info", fence[0], BREAK
            self._return(rest[fence.end() :] + character)
            return
        if character in ("", "\n") and not any(mark.isalnum() for mark in rest):
            # A blank line, a rule, the line below a table's head: nothing is said and what follows is a new block.
            self._gap, self._row, self._block = BREAK, False, False
            return
        block = block or (character in (" ", "\t") and _ORDERED.fullmatch(rest) is not None)
        if self._gap and (block or self._block):
            self._gap = BREAK
        self._out.append(self._gap)
        self._gap, self._block, self._mode = "", block, "text"
        self._before, self._stars, self._code, self._brackets = "", 0, 0, []
        self._return(rest + character)

    def _end_line(self) -> None:
        self._gap = BREAK if self._gap == BREAK else " "
        if self._block:
            self._gap = BREAK
        self._mode, self._row = "line", False

    # ------------------------------------------------------------ code

    def _take_info(self, character: str) -> None:
        """What follows the opening of a fence on its line."""
        if character == "\n":
            self._mode, self._line = "fence", ""
        elif character == "`" == self._fence[0] or len(self._line) >= LONGEST_INFO:
            # ```code``` on one line is inline code.
            self._out.append(self._gap)
            self._gap, self._block, self._mode, self._code = "", False, "text", len(self._fence)
            info, self._line = self._line, ""
            self._return(info + character)
        else:
            self._line += character

    def _take_code(self, character: str) -> None:
        if character != "\n":
            if len(self._line) < 100:
                self._line += character
            return
        line, self._line = self._line.strip(" \t>"), ""
        if len(line) >= len(self._fence) and not line.strip(self._fence[0]):
            self._mode, self._gap, self._block = "line", BREAK, False

    # ------------------------------------------------------------ inside a line

    def _take_inline(self, character: str) -> None:
        if self._scan is not None:
            self._hold += character
            if self._scan.take(character) or (len(self._hold) >= LONGEST and self._scan.take(END)):
                self._decide(self._scan)
        elif self._hold:
            if character != self._hold[0] or character not in _RUNS:  # a run may be long: it is looked at once
                self._hold += character
                self._resolve()
            elif len(self._hold) < LONGEST_RUN:
                self._hold += character
        elif character == "\n":
            self._end_line()
        elif character == "`" or (character in _HELD and not self._code):
            self._hold = character
            if character == "<":
                self._scan = Scan(tag())
        else:
            self._write(character)

    def _write(self, text: str) -> None:
        self._before = text[-1:]
        self._out += [
            character for character in text.replace("\t", " ").replace("\xa0", " ") if not unspoken(character)
        ]

    def _resolve(self, *, last: bool = False) -> None:
        """Decide about the held characters, if what is there suffices; the last of them may be the one that decided.

        last: no more characters come.
        """
        held = self._hold
        match held[0]:
            case "*" | "_" | "~" | "`":
                size = len(held) - len(held.lstrip(held[0]))
                if size < len(held) or last:
                    self._release(size, self._said_of_run(held[:size], held[size : size + 1]))
            case "&":
                self._resolve_entity(held, last=last)
            case "[":
                self._resolve_opening(held, last=last)
            case "]":
                self._resolve_closing(held)
            case "|":
                self._resolve_bar(held)
            case "!":
                self._release(1, "" if held[1:] == "[" else "!")
            case _:  # a backslash
                escaped = (
                    held[1:2] if held[1:2].isascii() and held[1:2].isprintable() and not held[1:2].isalnum() else ""
                )
                keeps = escaped == "" or escaped == " "
                self._release(1 if keeps else 2, "\\" if keeps else escaped)

    def _release(self, size: int, said: str) -> None:
        """The first `size` held characters are spoken as said; the others are read again."""
        held, self._hold, self._scan = self._hold, "", None
        if said:
            self._write(said)
        self._before = held[size - 1]
        self._return(held[size:])

    def _said_of_run(self, run: str, after: str) -> str:
        """What is left of *, **, _, ~~, ` and their like between two characters."""
        before, mark, size = self._before, run[0], len(run)
        apart, closes = not before or before.isspace(), not after or after.isspace()
        if mark == "`":
            if not self._code:
                self._code = size
                return ""
            if size == self._code:
                self._code = 0
                return ""
            return run
        if apart and closes:
            return run if size == 1 else ""
        if mark == "~":
            return run if size == 1 else ""
        if mark == "_":
            return run if _joins(before) and _joins(after) else ""
        figures = before.isascii() and after.isascii() and (before.isalnum() or before == ")")
        if figures and (after.isalnum() or after == "("):
            if size == 1 and self._stars != 1:
                return run
            if size == 2 and before.isdigit() and after.isdigit() and self._stars != 2:
                return run
        self._stars = 0 if self._stars and not apart else size
        return ""

    def _decide(self, scan: Scan) -> None:
        """The scan of the held characters is over."""
        found = scan.found
        if self._hold[0] == "]":
            self._brackets.pop()
            self._release(1 if found is None else len(self._hold), " " if found is None else "")
        elif found is None:
            self._release(1, "<")
        else:
            self._release(len(self._hold) - found.behind, found.said)
            if found.pause:
                self._out.append(BREAK if found.pause == "block" else CELL)

    def _resolve_entity(self, held: str, *, last: bool) -> None:
        if _ENTITY.fullmatch(held) and not last and held[-1] != ";":
            return
        said = html.unescape(held) if held[-1] == ";" else held
        if said == held:
            self._release(1, "&")
        else:
            self._release(len(held), said)

    def _resolve_opening(self, held: str, *, last: bool) -> None:
        # As in a[i]; figures right behind a word are a citation far more often than an index.
        index = self._before.isascii() and self._before.isalnum() and held[1:2] != "^" and not held[1:2].isdigit()
        size = held.find("]") + 1
        if not index and size > 2 and _ASIDE.fullmatch(held, 0, size):
            self._resolve_aside(held, size, last=last)
        elif not index and _ASIDE.fullmatch(held):
            if last:
                self._release(len(held), held[1:])
        else:
            self._brackets.append(index)
            self._release(1, "[" if index else "")

    def _resolve_aside(self, held: str, size: int, *, last: bool) -> None:
        """A footnote or a task box of `size` characters is held: it is not spoken, unless a target makes it a link's words."""
        behind = held[size:]
        if not last and (not behind or _FIGURES.fullmatch(behind)):
            return
        if behind[:1] == "(" or (behind[:1] == "[" and not last and not _ANOTHER.match(behind)):
            if self._before in (")", "]"):
                self._write(" ")  # the figures of two links in a row are two numbers
            self._brackets.append(False)
            self._release(2 if held[1] == "^" else 1, "")
        else:
            self._release(size, "")

    def _resolve_closing(self, held: str) -> None:
        written = self._brackets[-1] if self._brackets else True
        if held[1:] in ("(", "[") and not written:
            self._scan = Scan(target())
            self._scan.take(held[1])
            return
        if self._brackets:
            self._brackets.pop()
        self._release(1, "]" if written else "")

    def _resolve_bar(self, held: str) -> None:
        """Between cells, or between two words that stand apart."""
        if self._row or (self._before == " " and held[1:2] in ("", " ")):
            self._release(1, "")
            self._out.append(CELL)
        else:
            self._release(1, "|")


def _joins(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")
