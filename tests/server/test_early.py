"""Who sends slowly, too much or not at all is answered while the upload still runs."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from aura_omni.server import connection, early
from aura_omni.server.app import ServerConfig
from tests.server.fake import WAIT_S, FakePipeline, serving

JSON = "Content-Type: application/json\r\n"
FORM = "Content-Type: multipart/form-data; boundary=b\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF'


@contextmanager
def raw(url: str, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=WAIT_S) as client:
        client.sendall(sent)
        yield client


def head(path: str, headers: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{headers}\r\n".encode()


def told(client: socket.socket) -> tuple[int, str, dict[str, Any]]:
    """Status, header and error of the answer; returns when the server has closed the connection."""
    answer = b"".join(iter(lambda: client.recv(65_536), b"")).decode()
    header, _, body = answer.partition("\r\n\r\n")
    return int(header.split()[1]), header.lower(), json.loads(body)["error"]


def until_told(client: socket.socket) -> bytes:
    """The whole answer, of a connection that may stay open."""
    answer = b""
    while not answer.endswith(b"}}"):
        answer += client.recv(65_536)
    return answer


@pytest.fixture(autouse=True)
def no_long_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "QUIET_S", 0.1)


UPLOADS = [
    ("/v1/chat/completions", JSON + "Content-Length: 1000\r\n", b"{"),
    ("/v1/chat/completions", JSON + "Content-Length: 1000\r\n", b""),
    ("/v1/audio/speech", JSON + "Transfer-Encoding: chunked\r\n", b"1\r\n{\r\n"),
    ("/v1/audio/transcriptions", FORM + "Content-Length: 1000\r\n", PART),
    ("/v1/audio/transcriptions", FORM + "Transfer-Encoding: chunked\r\n", b"%x\r\n%s\r\n" % (len(PART), PART)),
]


@pytest.mark.parametrize(("path", "headers", "begun"), UPLOADS)
def test_the_time_of_a_request_runs_while_its_body_comes(path: str, headers: str, begun: bytes) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url, raw(url, head(path, headers + "X-Request-Timeout: 0.3\r\n") + begun) as client:
        status, header, error = told(client)
    assert (status, error["code"], error["type"]) == (408, "request_timeout", "invalid_request_error")
    assert "0.3 s, as x-request-timeout asked" in error["message"]
    assert "connection: close" in header
    assert "x-should-retry: false" in header
    assert not pipeline.requests


def test_bytes_that_trickle_do_not_make_the_time_longer() -> None:
    done = threading.Event()
    begun = head("/v1/chat/completions", JSON + "Content-Length: 1000\r\n")
    with serving(FakePipeline(), ServerConfig(timeout_s=0.5)) as url, raw(url, begun) as client:

        def trickle() -> None:
            try:
                while not done.wait(0.05):
                    client.sendall(b" ")
            except OSError:
                pass  # the server has closed it

        sender = threading.Thread(target=trickle)
        sender.start()
        answer = until_told(client)
        done.set()
        sender.join(WAIT_S)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the limit of this server (--request-timeout)" in answer


@pytest.mark.parametrize("begun", [b"P", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Le"])
def test_a_header_that_does_not_end_is_answered_and_closed(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.3)
    with serving(FakePipeline()) as url, raw(url, begun) as client:
        status, _, error = told(client)
    assert (status, error["code"]) == (408, "request_timeout")
    assert "0.3 s" in error["message"]


def test_the_header_of_a_second_request_must_come_in_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.3)
    with serving(FakePipeline()) as url, raw(url, b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        first = b""
        while not first.endswith(b"}"):
            first += client.recv(65_536)
        client.sendall(b"GET /li")
        assert told(client)[0] == 408


def test_a_connection_without_a_byte_is_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.3)
    with serving(FakePipeline()) as url, raw(url, b"") as client:
        assert client.recv(100) == b""


def test_an_answer_may_take_longer_than_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_S", 0.2)
    with (
        serving(FakePipeline()) as url,
        raw(url, head("/v1/chat/completions", JSON + "Content-Length: 2\r\n")) as client,
    ):
        time.sleep(0.5)
        client.sendall(b"{}")
        assert client.recv(65_536).startswith(b"HTTP/1.1 400")


def test_what_is_no_http_is_refused_in_the_shape_of_every_error() -> None:
    with serving(FakePipeline()) as url, raw(url, b"hello there\r\n\r\n") as client:
        status, _, error = told(client)
    assert (status, error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_length_that_is_too_large_is_refused_before_any_of_it(expect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "QUIET_S", WAIT_S)
    monkeypatch.setattr(early, "LINGER_S", WAIT_S)
    announced = head("/v1/chat/completions", JSON + expect + "Content-Length: 2000000\r\n")
    with serving(FakePipeline(), ServerConfig(max_body_bytes=1_000_000)) as url, raw(url, announced) as client:
        answer = until_told(client)  # comes while the server still waits for the rest
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"2,000,000 bytes" in answer
    assert b"100 Continue" not in answer


def test_a_client_that_sends_all_of_a_refused_body_reads_the_answer() -> None:
    with serving(FakePipeline(), ServerConfig(api_keys=("secret",), max_body_bytes=1_000_000)) as url:
        kind = {"content-type": "application/json"}
        wrong = httpx.post(f"{url}/v1/chat/completions", content=b" " * 20_000_000, headers=kind)
        kind["authorization"] = "Bearer secret"
        large = httpx.post(f"{url}/v1/chat/completions", content=b" " * 20_000_000, headers=kind)
        pieces = httpx.post(f"{url}/v1/chat/completions", content=(b" " * 100_000 for _ in range(200)), headers=kind)
    assert [wrong.status_code, large.status_code, pieces.status_code] == [401, 413, 413]
    for answer in (wrong, large, pieces):
        assert answer.headers["connection"] == "close"


def test_a_body_that_was_read_leaves_the_connection_open() -> None:
    with serving(FakePipeline()) as url:
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": 3})
    assert refused.status_code == 400
    assert "connection" not in refused.headers
