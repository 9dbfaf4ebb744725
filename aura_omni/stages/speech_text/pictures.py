"""Characters that are pictures or invisible, and are not spoken."""

from __future__ import annotations

import unicodedata

_SPOKEN_SYMBOLS = "°℃℉№"
_SELECTORS = "\ufe0e\ufe0f\u20e3"  # how the character before is drawn; a box around a digit


def unspoken(character: str) -> bool:
    """Whether it is (a part of) an emoji or other picture, or nothing that can be seen.

    Symbols of kind "other" are pictures but for a few; the block of emoji is asked for by number, because new ones are
    unknown to the Unicode tables of older Pythons. Joiners, flags' tags and marks of direction are of kind "format".
    """
    if character in _SPOKEN_SYMBOLS or (character.isascii() and character.isprintable()):
        return False
    if 0x1F000 <= ord(character) <= 0x1FBFF or character in _SELECTORS:
        return True
    kind = unicodedata.category(character)
    if kind == "So":
        return not "\u3200" <= character <= "\u33ff"  # units and words in one character
    return kind in ("Cc", "Cf", "Co", "Cs")
