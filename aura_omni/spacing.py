"""Between two texts that follow each other, whether a space belongs there."""

from __future__ import annotations

import unicodedata


def space_between(before: str, after: str) -> str:
    """A space, unless one text is empty or the writing on either side of the joint does without."""
    if not before or not after or _unspaced(before[-1]) or _unspaced(after[0]):
        return ""
    return " "


def _unspaced(character: str) -> bool:
    """White space; Chinese, Japanese and Thai characters and the wide punctuation; Korean is wide but puts spaces."""
    name = unicodedata.name(character, "")
    wide = unicodedata.east_asian_width(character) in "WF"
    return character.isspace() or name.startswith("THAI") or (wide and not name.startswith("HANGUL"))
