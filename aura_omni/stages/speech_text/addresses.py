"""Web and mail addresses in words: the parts that a listener can use."""

from __future__ import annotations

import re

# ".", "/", "@" by language
_WORDS = {
    "english": (" dot ", " slash ", " at "),
    "chinese": ("点", "斜杠", "艾特"),
    "german": (" Punkt ", " Schrägstrich ", " at "),
    "french": (" point ", " slash ", " arobase "),
    "spanish": (" punto ", " barra ", " arroba "),
    "italian": (" punto ", " barra ", " chiocciola "),
    "portuguese": (" ponto ", " barra ", " arroba "),
    "russian": (" точка ", " слэш ", " собака "),
    "japanese": ("ドット", "スラッシュ", "アットマーク"),
    "korean": (" 점 ", " 슬래시 ", " 골뱅이 "),
}
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[a-z]{2,}"
_WEB = re.compile(
    rf"(?P<scheme>[a-z][a-z0-9+.-]*://)?(?P<host>{_HOST}|(?<=://)[\w.-]*\w)(?P<port>:\d+)?(?P<rest>[/?#]\S*)?"
)
_MAIL = re.compile(rf"(?:mailto:)?([A-Za-z0-9._%+-]+)@({_HOST})")
_PART = re.compile(r"[A-Za-z][A-Za-z-]{0,19}")
_MOST_PARTS = 2
_LONGEST = 100
_LONG = re.compile(r"[a-z]{1,10}://[\w.-]{1,80}(?=[/?#])")


def read(text: str, language: str | None) -> str | None:
    """What is said of an address: its host, and its path if that is one or two plain words. None: it is no address."""
    if len(text) > _LONGEST:  # a query, say: where it leads is all there is to say
        begin = _LONG.match(text)
        return read(begin[0], language) if begin else None
    dot, slash, at = _WORDS.get(language or "english", _WORDS["english"])
    if mail := _MAIL.fullmatch(text):
        return f"{mail[1].replace('.', dot)}{at}{mail[2].replace('.', dot)}"
    web = _WEB.fullmatch(text)
    if web is None or (text[-1] in ".,;:!?" and not web["rest"]) or text[-1] in ".,;:!?)":
        return None
    host = (web["host"].removeprefix("www.") if web["scheme"] else web["host"]).replace(".", dot)
    parts = [part for part in re.split(r"[?#]", web["rest"] or "")[0].split("/") if part]
    plain = len(parts) <= _MOST_PARTS and all(_PART.fullmatch(part) for part in parts)
    return slash.join([host, *parts]) if plain else host
