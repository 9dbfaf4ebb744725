"""An answer that comes before the end of the upload: sent at once, and the connection closed behind it.

Most clients look for an answer only when they have sent all, and a connection that is closed under them hides it. So what
they still send is read and dropped, for a while. Plain ASGI around everything, so that every refusal has this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

QUIET_S = 2.0  # a client that sends nothing for so long waits for the answer, or for nothing
LINGER_S = 10.0  # longest wait for the end of an upload that was answered


class EarlyAnswers:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        whole = early = False

        async def watched() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            return message

        async def answered(message: Message) -> None:
            nonlocal early
            if message["type"] == "http.response.start":
                early = not whole
                if early:
                    MutableHeaders(scope=message)["connection"] = "close"
            if early and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                try:
                    await _drop_rest(watched, lambda: whole)
                finally:
                    await send({"type": "http.response.body", "body": b""})
                return
            await send(message)

        await self.app(scope, watched, answered)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def _drop_rest(receive: Receive, whole: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while not whole():
                async with asyncio.timeout(QUIET_S):
                    await receive()
    except (TimeoutError, asyncio.CancelledError):  # a server that stops cancels, and the answer was given
        pass
