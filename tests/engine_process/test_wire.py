"""Objects that cross a socket come out as they went in."""

from __future__ import annotations

import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from aura_omni.engine_process.wire import OWN_BUFFER, Link, Outbox
from aura_omni.errors import AuraError, BadMedia, BadVoice, CodeOutOfRange, Overloaded


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    here, there = map(Link, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def across(links: tuple[Link, Link], message: object) -> object:
    """From another thread: a socket's own memory is small."""
    sending = threading.Thread(target=links[0].send, args=(message,))
    sending.start()
    received = links[1].receive()
    sending.join()
    return received


@pytest.mark.parametrize("count", [0, 1, OWN_BUFFER - 1, OWN_BUFFER, 5_000_000])
def test_arrays_of_any_size_arrive_whole(links, count):
    sent = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    received = across(links, {"array": sent, "more": [sent[::2], "text"]})
    assert np.array_equal(received["array"], sent)
    assert np.array_equal(received["more"][0], sent[::2])
    assert received["more"][1] == "text"


def test_a_message_may_have_more_arrays_than_a_system_call_takes(links):
    sent = [np.full(OWN_BUFFER, number % 256, np.uint8) for number in range(1_500)]
    received = across(links, sent)
    assert [len(array) for array in received] == [OWN_BUFFER] * 1_500
    assert all((array == number % 256).all() for number, array in enumerate(received))


def test_what_arrives_is_memory_of_its_own(links):
    sent = np.zeros(OWN_BUFFER)
    received = across(links, sent)
    received += 1  # also may be written to
    assert not sent.any()


def test_memory_for_an_array_is_not_written_before_the_array_comes(links):
    """Python would fill it with zeros and keep the interpreter from the engine meanwhile."""
    size = 256 * 2**20
    used = psutil.Process().memory_info().rss

    def receive() -> None:
        with pytest.raises(EOFError):
            links[1].receive()

    receiving = threading.Thread(target=receive)
    receiving.start()
    links[0]._socket.sendall(struct.pack("<IQQ", 2, 1, size) + b"N")
    time.sleep(0.5)
    grown = psutil.Process().memory_info().rss - used
    links[0].close()
    receiving.join()
    assert grown < size / 2


def test_messages_of_many_threads_do_not_mix(links):
    def send(number: int) -> None:
        for _ in range(20):
            links[0].send((number, np.full(100_000, number)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(80):
        number, array = links[1].receive()
        assert (array == number).all()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", [AuraError, BadMedia, BadVoice, Overloaded, CodeOutOfRange])
def test_errors_keep_their_kind_message_and_field(links, kind):
    received = across(links, kind("it is 3; at most 2", param="voice"))
    assert type(received) is kind
    assert (received.message, received.param, str(received)) == ("it is 3; at most 2", "voice", "it is 3; at most 2")


def test_the_end_of_the_other_side_is_the_end_of_file(links):
    links[0].send("last")
    links[0].close()
    assert links[1].receive() == "last"
    with pytest.raises(EOFError):
        links[1].receive()
    with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
        links[1].send(np.zeros(10_000_000))


def test_closing_frees_whoever_waits_for_a_message(links):
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EOFError):
            links[0].receive()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    links[0].close()
    assert ended.wait(10)


def test_a_message_that_breaks_off_is_the_end_of_file():
    here, there = socket.socketpair()
    here.sendall(b"\x01\x00\x00\x00\xff")
    here.close()
    link = Link(there)
    with pytest.raises(EOFError):
        link.receive()
    link.close()


def test_an_outbox_holds_nothing_that_it_has_sent(links):
    class Message(str):
        __slots__ = ("__weakref__",)

        def __reduce__(self):
            return str, ("sent",)

    outbox, message = Outbox(links[0]), Message("waits")
    held = weakref.ref(message)
    outbox.put(message)
    del message
    assert links[1].receive() == "sent"
    for _ in range(200):
        if held() is None:
            break
        time.sleep(0.01)
    assert held() is None
    outbox.close()
