"""HTML tags, comments, addresses in angle brackets and targets of links, read one character at a time.

    scan = Scan(tag())                 # "<" was there
    while not scan.take(character):    # the characters behind it, and END when no more come
        ...
    scan.found                         # what it was; None: nothing of the kind

No character is looked at twice by one scan, and few scans can be open across one character: a tag ends at a "<" outside of
quotes, a comment at another one's start, a target after _DEEPEST open brackets. So a text costs time in its length even where
everything in it looks like a beginning.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

END = "\0"  # no tag or target has it in it
_DEEPEST = 4  # round brackets in each other
_SCHEMES = frozenset(("http", "https", "mailto", "ftp"))
_QUOTES = frozenset("\"'")
_NO_VALUE = frozenset("\"'<>`" + END)  # neither in a value without quotes
_RAW = frozenset(("script", "style"))  # what stands in them is for machines
_BLOCKS = frozenset(("br", "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
                     "blockquote", "pre", "section", "article", *_RAW))  # fmt: skip
_CELLS = frozenset(("td", "th"))


@dataclass(frozen=True, slots=True)
class Found:
    """said: what is spoken of it. pause: what it is to the ear. behind: how many of the characters sent come after it."""

    said: str = ""
    pause: Literal["block", "cell"] | None = None
    behind: int = 0


Grammar = Generator[None, str, Found | None]


class Scan:
    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.found: Found | None = None
        next(grammar)

    def take(self, character: str) -> bool:
        """Whether it is decided. END always decides."""
        try:
            self._grammar.send(character)
        except StopIteration as end:
            self.found = end.value
            return True
        return False


def tag() -> Grammar:
    """What follows "<"."""
    character = yield
    if character == "!":
        return (yield from _comment())
    closing = character == "/"
    if closing:
        character = yield
    name = ""
    while _is_name(character) or (name and (character == "-" or "0" <= character <= "9")):
        name += character
        character = yield
    if character == ":" and name in _SCHEMES and not closing:
        return (yield from _address(name))
    if not name or not (yield from _attributes(character)):
        return None
    name = name.lower()
    if name in _RAW and not closing:
        return (yield from _raw(name))
    return Found(pause=_pause(name))


def target() -> Grammar:
    """What follows the words of a link in square brackets: "(address "title")" or "[name]"."""
    character = yield
    if character == "[":
        while character != "]":
            if character in ("\n", END):
                return None
            character = yield
        return Found()
    depth = 1
    while depth:
        character = yield
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth > _DEEPEST or character in ("\n", END):
            return None
        if character.isspace():
            return (yield from _title()) if depth == 1 else None
    return Found()


def _comment() -> Grammar:
    for mark in "--":
        if (yield) != mark:
            return None
    last = ""
    while True:
        character = yield
        last = last[-3:] + character
        if last.endswith("-->"):
            return Found()
        if character == END or last == "<!--":
            return None


def _address(scheme: str) -> Grammar:
    address = [scheme + ":"]
    while (character := (yield)) != ">":
        if character.isspace() or character in ("<", END):
            return None
        address.append(character)
    return Found(said="".join(address)) if len(address) > 1 else None


def _attributes(character: str) -> Generator[None, str, bool]:
    """To the end of a tag, from the character behind its name on: values, and at last one name without a value."""
    bare = False
    while True:
        apart = character.isspace()
        while character.isspace():
            character = yield
        if character == "/":
            character = yield
            return character == ">"
        if character == ">":
            return True
        if bare or not apart:
            return False
        name = ""
        while character.isalnum() or character in ("_", "-", ":", "."):
            name += character
            character = yield
        if not name:
            return False
        while character.isspace():
            character = yield
        if character == "=":
            character = yield from _value()
            if character == END:
                return False
        elif ":" in name or "." in name or character not in ("/", ">"):
            return False
        else:
            bare = True


def _value() -> Generator[None, str, str]:
    """The character behind the value of an attribute; END: it is none."""
    character = yield
    while character.isspace():
        character = yield
    if character in _QUOTES:
        quote, character = character, (yield)
        while character != quote:
            if character == END:
                return END
            character = yield
        character = yield
        return character
    if character in _NO_VALUE:
        return END
    while not (character.isspace() or character in _NO_VALUE):
        character = yield
    return character


def _raw(name: str) -> Grammar:
    """What stands in <script> or <style>, to its end; if it has none, that was an ordinary tag."""
    size, last, end = 0, "", f"</{name}>"
    while True:
        character = yield
        size += 1
        last = (last + character.lower())[-len(end) :]
        if last == end:
            return Found(pause="block")
        if character == END or last.endswith("<" + name):
            return Found(behind=size - (character == END))


def _title() -> Grammar:
    """After white space in a target: a title in quotes or brackets, or nothing, and the closing bracket."""
    character = yield
    while character in (" ", "\t"):
        character = yield
    if character in ('"', "'", "("):
        closing = ")" if character == "(" else character
        opening = character
        while (character := (yield)) != closing:
            if character in ("\n", END) or (character == opening == "("):
                return None
        character = yield
        while character in (" ", "\t"):
            character = yield
    return Found() if character == ")" else None


def _pause(name: str) -> Literal["block", "cell"] | None:
    if name in _BLOCKS:
        return "block"
    return "cell" if name in _CELLS else None


def _is_name(character: str) -> bool:
    return character.isascii() and character.isalpha()
