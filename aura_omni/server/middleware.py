"""What surrounds every request: its id, the API key, the size of its body. Plain ASGI, so streams pass untouched."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aura_omni.errors import AuraError, TooLarge, Unauthorized, Unavailable
from aura_omni.server.errors import error_response, log_failure, refuse

_LOG = logging.getLogger(__name__)
_USABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Who watches the server or reads about it has no key, and nobody's words are in it
_OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/metrics", "/docs", "/openapi.json"})


class Outermost:
    """Names every request, and answers it whatever happens inside.

    x-request-id is the caller's, if it is harmless to repeat, or a new one. A bug is logged under it and is a 500. A
    request that is cancelled, which happens when the server has no more time for it, is a 503.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begun = False

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        error: AuraError
        try:
            await self.app(scope, receive, named)
            return
        except ClientDisconnect:  # in the middle of its upload: nobody is left to answer
            return
        except asyncio.CancelledError:  # only the server that stops cancels a request, and it ends with this answer
            error = Unavailable("the server stops; ask again")
            log_failure(scope, error)
        except Exception:
            # The outermost frame of a request: what nobody has caught becomes a 500 that says where to look.
            _LOG.exception("%s %s %s failed", request_id, scope["method"], scope["path"])
            error = AuraError(f"the server failed; its log has the reason under {request_id}")
            scope["state"]["failed_with"] = error.code
        if not begun:
            await error_response(error)(scope, receive, named)


class ApiKeys:
    """Refuses requests without one of the keys; what says how the server is, and CORS preflights, stay open."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or scope["path"] in _OPEN_PATHS or scope.get("method") == "OPTIONS" or self._known(scope):
            await self.app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "API key missing or wrong"})
        else:
            error = Unauthorized("API key missing or wrong; send the header 'Authorization: Bearer KEY'")
            await refuse(error, scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        token = given.strip().encode("latin-1")  # as Starlette decoded it
        # Every key is compared, whichever matches
        matches = sum(hmac.compare_digest(token, key) for key in self._keys)
        return scheme.lower() == "bearer" and matches > 0


class BodyLimit:
    """Refuses bodies over a number of bytes: by Content-Length before any of it came or, without one, as they arrive."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = int(Headers(scope=scope).get("content-length", "0"))
        if announced > self._max_bytes:
            await refuse(self._error(f"{announced:,} bytes"), scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error("larger")
            return message

        await self.app(scope, limited, send)

    def _error(self, size: str) -> TooLarge:
        return TooLarge(
            f"the body is {size}; this server takes {self._max_bytes:,} bytes. Send a shorter clip, "
            "or raise media.max_body_bytes in the deploy file"
        )
