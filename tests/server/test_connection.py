"""When a connection stops reading: late enough for a turn's media to come at once, and before memory fills."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from aura_omni.server.connection import UNREAD, Connection

POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.socket = socket.socket()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

    def write(self, data: Any) -> None: ...

    def close(self) -> None:
        self.socket.close()

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def reads_nothing(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


async def reads_after(*pieces: bytes) -> bool:
    """Whether the connection still reads when an application that does not has been sent these."""
    connection = Connection(uvicorn.Config(reads_nothing, lifespan="off"), ServerState(), app_state={})
    transport = Transport()
    connection.connection_made(transport)
    for piece in pieces:
        connection.data_received(piece)
    for task in connection.tasks:
        task.cancel()
    connection.connection_lost(None)
    return transport.reading


@pytest.mark.parametrize(("size", "reads"), [(500_000, True), (UNREAD, True), (UNREAD + 1, False)])
def test_a_body_is_read_as_it_comes_up_to_a_limit(size: int, reads: bool) -> None:
    pieces = [bytes(50_000)] * (size // 50_000) + [bytes(size % 50_000)]
    assert asyncio.run(reads_after(POST % (2 * size), *pieces)) is reads


def test_a_request_behind_one_that_is_not_answered_waits_in_the_socket() -> None:
    body = bytes(100_000)
    assert not asyncio.run(reads_after(POST % len(body) + body, POST % len(body)))
