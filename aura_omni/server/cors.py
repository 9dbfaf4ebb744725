"""Which web pages may call the server, and which may not. Plain ASGI.

CORS only hides answers: a form, or what a page sends as one, arrives without being asked about before. With API keys such a
request is refused for want of one; without them `ForeignPages` refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aura_omni.errors import ForeignPage, shown
from aura_omni.server.errors import refuse

_EXPOSED = "x-request-id, x-audio-finish-reason, retry-after"
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_PREFLIGHT_KEPT_S = 600


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Origins:
    """Of pages that may call: "*", "https://a.example", or "http://localhost:*" for any port."""

    def __init__(self, named: Sequence[str]) -> None:
        self.all = "*" in named
        self._exact = frozenset(named)
        self._any_port = tuple(origin.removesuffix(":*") for origin in named if origin.endswith(":*"))

    def allow(self, origin: str) -> bool:
        if self.all or origin in self._exact:
            return True
        host, _, port = origin.rpartition(":")
        return origin in self._any_port or (host in self._any_port and port.isdigit())


class ForeignPages:
    """Refuses what a browser sends for a page of another origin, before it does anything. A client that is no browser says
    no origin, and is served."""

    def __init__(self, app: ASGIApp, *, origins: Origins) -> None:
        self.app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            origin = Headers(scope=scope).get("origin")
            if origin is not None and not self._origins.allow(origin):
                error = ForeignPage(
                    f"pages of {shown(origin)} may not call this server, which asks for no API key; name them in "
                    "--allowed-origins, or set --api-key"
                )
                await refuse(error, scope, receive, send)
                return
        await self.app(scope, receive, send)


class Cors:
    """Tells browsers. Their credentials (cookies) are never asked for: API keys are a header that the page sets itself."""

    def __init__(self, app: ASGIApp, *, origins: Origins) -> None:
        self.app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        origin = headers.get("origin") if headers is not None else None
        if headers is None or origin is None:
            await self.app(scope, receive, send)
            return
        preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._mark(MutableHeaders(scope=message), origin)
            await send(message)

        if not preflight:
            await self.app(scope, receive, marked)
            return
        answer: Message = {"type": "http.response.start", "status": 204, "headers": []}
        if self._origins.allow(origin):
            more = MutableHeaders(scope=answer)
            more["access-control-allow-methods"] = _METHODS
            more["access-control-allow-headers"] = headers.get("access-control-request-headers", "*")
            more["access-control-max-age"] = str(_PREFLIGHT_KEPT_S)
        await marked(answer)
        await send({"type": "http.response.body", "body": b""})

    def _mark(self, headers: MutableHeaders, origin: str) -> None:
        if not self._origins.all:
            headers.add_vary_header("origin")
        if self._origins.allow(origin):
            headers["access-control-allow-origin"] = "*" if self._origins.all else origin
            headers["access-control-expose-headers"] = _EXPOSED
