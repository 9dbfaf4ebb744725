"""One connection of a client, where uvicorn leaves something to be wished: around a request, its header and its end.

uvicorn has no limit for a header that never ends, refuses what is no HTTP with a bare text, stops reading at every 64 KiB of a
body, and takes an answer that is broken off, which is how a stream of bytes says that it failed, for a bug of the
application. asyncio leaves connections of a
listener that was made outside of it as they are: small pieces of an answer then wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import socket

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from aura_omni.errors import AuraError, BadRequest, UploadTimedOut
from aura_omni.server.errors import error_body

HEADER_S = 10.0  # from the connection, or from the first byte of a later request, to the end of its header
# Bytes of a body that may wait for the application. uvicorn has a sixteenth: a turn's media came in pieces of that size, and between
# each two of them everybody else was served.
UNREAD = 2**20


class Connection(H11Protocol):
    """uvicorn's, for `Config(http=Connection)`."""

    _header_is_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self)
        # Else a piece leaves when the client has acknowledged the one before, which may take its system 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.app = _breaking_off(self)
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg))

    def _watch_header(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_header()
        elif self._header_is_late is None:
            self._header_is_late = self.loop.call_later(HEADER_S, self._close_late)

    def _forget_header(self) -> None:
        if self._header_is_late is not None:
            self._header_is_late.cancel()
            self._header_is_late = None

    def _close_late(self) -> None:
        begun = bool(self.conn.trailing_data[0])
        if begun and not self.transport.is_closing() and self.conn.our_state is h11.IDLE:
            self._refuse(
                UploadTimedOut(f"the header of the request was not there within {HEADER_S:g} s; send it at once")
            )
        self.transport.close()

    def _refuse(self, error: AuraError) -> None:
        body = json.dumps(error_body(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        answer = (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        for event in answer:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Flow(FlowControl):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def pause_reading(self) -> None:
        in_body = self._connection.conn.their_state is h11.SEND_BODY
        if not in_body or len(self._connection.cycle.body) > UNREAD:
            super().pause_reading()


def _breaking_off(connection: Connection) -> ASGIApp:
    """The application; the connection is closed behind an answer that it leaves without an end."""
    app: ASGIApp = connection.config.loaded_app

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = connection.cycle
        await app(scope, receive, send)
        if cycle.response_started and not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True
            connection.transport.close()

    return run
