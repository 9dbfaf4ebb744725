"""Python objects over a stream socket between two processes of ours.

A message is pickled; the memory of its larger arrays goes beside the pickle, straight from where it lies, and is received
straight into where it will be used. Only for sockets whose other end is our own process: unpickling runs what it is told to.

    here, there = socket.socketpair()
    Link(here).send(message)
    message = Link(there).receive()
"""

from __future__ import annotations

import logging
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

OWN_BUFFER = 32 * 2**10  # bytes from which an array goes beside the pickle
_MOST_PARTS = 512  # of one system call; Linux takes 1,024
_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")


class Link:
    def __init__(self, end: socket.socket) -> None:
        """end: a connected stream socket, which the link owns."""
        self._socket = end
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """From any thread; returns when the system has taken all of it. Raises OSError when the other end is closed."""
        beside: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            """Whether the pickle itself holds it."""
            raw = buffer.raw()
            if raw.nbytes < OWN_BUFFER:
                return True
            beside.append(raw)
            return False

        pickled = pickle.dumps(message, protocol=5, buffer_callback=stays)
        sizes = [len(pickled), *(raw.nbytes for raw in beside)]
        head = _COUNT.pack(len(sizes)) + b"".join(map(_SIZE.pack, sizes))
        parts = [memoryview(head), memoryview(pickled), *beside]
        with self._sending:
            while parts:
                sent = self._socket.sendmsg(parts[:_MOST_PARTS])
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]

    def receive(self) -> Any:
        """The next message; one thread at a time. Raises EOFError when the other end is closed or its process has ended."""
        (count,) = _COUNT.unpack(self._exactly(_COUNT.size))
        sizes = [size for (size,) in _SIZE.iter_unpack(self._exactly(count * _SIZE.size))]
        pickled, *beside = [self._exactly(size) for size in sizes]
        return pickle.loads(pickled, buffers=beside)

    def close(self) -> None:
        """Both ends find that nothing more comes, also a thread that waits in `receive`. Idempotent."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> memoryview:
        # Python fills a bytearray with zeros first and keeps the interpreter from all threads meanwhile: 35 ms for 128 frames of 640x360.
        data = memoryview(np.empty(size, np.uint8))
        missing = data
        while missing:
            try:
                got = self._socket.recv_into(missing)
            except OSError as error:
                raise EOFError from error
            if not got:
                raise EOFError
            missing = missing[got:]
        return data


class Outbox:
    """Messages in the order of `put`, sent by a thread of its own, so that nobody waits until the other end reads."""

    def __init__(self, link: Link, joined: Callable[[list[object]], Iterable[object]] = iter) -> None:
        """joined: makes the messages that are sent of those that wait."""
        self._link, self._joined = link, joined
        self._waiting: deque[object] = deque()
        self._there = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """From any thread. What cannot be sent any more is dropped: whoever receives over the link finds out."""
        with self._there:
            self._waiting.append(message)
            if len(self._waiting) == 1:  # else it knows already
                self._there.notify()

    def close(self) -> None:
        """Send what waits, then close the link."""
        with self._there:
            self._closing = True
            self._there.notify()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        try:
            while taken := self._taken():
                self._send(taken)
                del taken  # nothing that was sent is held while there is nothing to send
        except OSError:
            pass  # the other end is gone
        except Exception:
            # Whoever waits for it at either end must not wait for ever.
            log.critical("a message cannot be sent to the other process; the link is closed", exc_info=True)
            self._link.close()

    def _taken(self) -> list[object]:
        """What waits, as soon as anything does; nothing: the end."""
        with self._there:
            self._there.wait_for(lambda: self._waiting or self._closing)
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def _send(self, taken: list[object]) -> None:
        for message in self._joined(taken):
            self._link.send(message)
