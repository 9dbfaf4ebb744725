"""Where an HTML tag or the target of a link ends, read as it comes."""

from __future__ import annotations

import re
from typing import Literal

_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"'<>`]+)"""
_ATTRIBUTES = rf"(?:\s+[\w:.-]+\s*=\s*{_VALUE})*"
_TAG = re.compile(rf"</?([A-Za-z][A-Za-z0-9-]*){_ATTRIBUTES}(?:\s+[\w-]+)?\s*/?>")
_OPEN_VALUE = r"""(?:"[^"]*|'[^']*|[^\s"'<>`]*)"""
_OPEN = re.compile(
    rf"<|</?(?:[A-Za-z][A-Za-z0-9-]*(?:{_ATTRIBUTES}(?:\s*/?|\s+[\w:.-]*\s*|\s+[\w:.-]+\s*=\s*{_OPEN_VALUE}))?)?"
)
_LINK = re.compile(r"<((?:https?|mailto|ftp):[^\s<>]+)>")
_OPEN_LINK = re.compile(r"<(?:https?|mailto|ftp):[^\s<>]*")
_LONGEST = 300  # characters; of what is longer nothing is a tag or a target
_LONGEST_TARGET = 2_000
_COMMENT, _END_COMMENT = "<!--", "-->"
_BLOCKS = frozenset(("br", "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
                     "blockquote", "pre", "section", "article"))  # fmt: skip
_CELLS = frozenset(("td", "th"))


def read(text: str) -> str | None:
    """text starts with "<". The name of the tag that it is, lower-case; "" when it is none; None while that is open."""
    if text.startswith(_COMMENT):
        return "!" if text.endswith(_END_COMMENT) and len(text) >= len(_COMMENT) + len(_END_COMMENT) else None
    if _COMMENT.startswith(text):
        return None
    if text[-1] == ">" and (tag := _TAG.fullmatch(text)):
        return tag[1].lower()
    return None if len(text) <= _LONGEST and _OPEN.fullmatch(text) else ""


def link(text: str) -> str | None:
    """text starts with "<". The address that stands in it, up to ">"; "" when it is none; None while that is open."""
    if found := _LINK.fullmatch(text):
        return found[1]
    return None if len(text) <= _LONGEST and _OPEN_LINK.fullmatch(text) else ""


def pause(name: str) -> Literal["block", "cell"] | None:
    """What a tag of this name is to the ear."""
    if name in _BLOCKS:
        return "block"
    return "cell" if name in _CELLS else None


def target(text: str, *, last: bool) -> int | None:
    """text starts with "(" or "[" right after a link's words: the length of the target; 0: it is none; None: not known yet.

    last: no more text comes.
    """
    if text[0] == "[":
        end = text.find("]")
        if end > 0:
            return end + 1
        return 0 if last or "\n" in text or " " in text else None
    if len(text) > _LONGEST_TARGET:
        return 0
    depth = 0
    for index, character in enumerate(text):
        if character == "\n":
            return 0
        if character.isspace():
            title = text[index:].lstrip(" \t")
            if not title:
                break
            if title[0] not in "\"'(":
                return 0
            closing = re.search(r"""["')]\s*\)""", title)
            if closing:
                return len(text) - len(title) + closing.end()
            return 0 if "\n" in title else (0 if last else None)
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index + 1
    return 0 if last else None
