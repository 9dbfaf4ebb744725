"""Names that one JSON object has twice. Parsers keep the last of them, and the sender never learns which counted."""

from __future__ import annotations

import json
from typing import Any

from aura_omni.errors import BadRequest, shown

_LONG = 1_000  # bytes of a text, which is then read as an empty one: media are megabytes, and no name is so long


def refuse_names_twice(body: bytes) -> None:
    """body: what is known to be JSON. Raises BadRequest naming the first one. 100 MB of media take 30 ms."""
    json.loads(_outline(body).decode(), object_pairs_hook=_once, parse_int=len, parse_float=len)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise BadRequest(f"{shown(name)} is there twice in one object; send it once", param=name[:60])
        seen.add(name)
    return found


def _outline(body: bytes) -> bytes:
    """The same objects and names, without the long texts."""
    if len(body) <= _LONG:
        return body
    parts = body.split(b'"')
    inside = False
    for index, part in enumerate(parts):
        # whether the quote behind it ends nothing
        escapes = inside and part.endswith(b"\\") and (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        if inside and len(part) > _LONG:
            parts[index] = b"\\" if escapes else b""
        inside = inside if escapes else not inside
    return b'"'.join(parts)
