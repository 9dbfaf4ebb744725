"""Which web pages may call the server. Plain ASGI around everything, so that errors and streams carry the headers too."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EXPOSED = "x-request-id, x-audio-finish-reason, retry-after"
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_PREFLIGHT_KEPT_S = 600


class Cors:
    """origins: "*", "https://a.example", or "http://localhost:*" for any port. Credentials of the browser (cookies) are
    never asked for: API keys are a header that the page sets itself."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        self.app = app
        self._all = "*" in origins
        self._exact = frozenset(origins)
        self._any_port = tuple(origin.removesuffix(":*") for origin in origins if origin.endswith(":*"))

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
        if self._allows(origin):
            more = MutableHeaders(scope=answer)
            more["access-control-allow-methods"] = _METHODS
            more["access-control-allow-headers"] = headers.get("access-control-request-headers", "*")
            more["access-control-max-age"] = str(_PREFLIGHT_KEPT_S)
        await marked(answer)
        await send({"type": "http.response.body", "body": b""})

    def _mark(self, headers: MutableHeaders, origin: str) -> None:
        if not self._all:
            headers.add_vary_header("origin")
        if self._allows(origin):
            headers["access-control-allow-origin"] = "*" if self._all else origin
            headers["access-control-expose-headers"] = _EXPOSED

    def _allows(self, origin: str) -> bool:
        if self._all or origin in self._exact:
            return True
        host, _, port = origin.rpartition(":")
        return origin in self._any_port or (host in self._any_port and port.isdigit())
