"""Whatever fails, on whatever path, fails in one shape; the official client raises the class that belongs to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from aura_omni.errors import EngineError, Overloaded, Unavailable
from aura_omni.flow import Ended, Event, TurnRequest
from aura_omni.server.app import ServerConfig
from tests.server.conftest import wav_bytes
from tests.server.fake import FakePipeline, Pause, serving

SECRET = "a text that only its sender may see " * 40
KEY = {"authorization": "Bearer secret"}

CHAT = {"json": {"messages": [{"role": "user", "content": SECRET}]}}
SPEECH = {"json": {"input": SECRET}}
FILE = {"files": {"file": ("a.wav", wav_bytes())}, "data": {"prompt": SECRET}}
VOICE = {"files": {"audio_sample": ("a.wav", wav_bytes())}, "data": {"name": "Ada", "consent": SECRET}}
TURNS = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/audio/speech", SPEECH),
    ("POST", "/v1/audio/transcriptions", FILE),
]
OTHERS = [
    ("POST", "/v1/audio/translations", FILE),
    ("POST", "/v1/audio/voices", VOICE),
    ("GET", "/v1/audio/voices", {}),
    ("DELETE", "/v1/audio/voices/ada", {}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/AURA", {}),
]
EVERY = [*TURNS, *OTHERS]
OPEN = ["/live", "/ready", "/health", "/metrics", "/docs", "/openapi.json"]


def send(url: str, method: str, path: str, sent: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.request(method, f"{url}{path}", headers={**KEY, **headers}, timeout=20, **sent)


def check_shape(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == code
    assert error["type"].endswith("_error")
    assert error["message"]
    assert len(error["message"]) <= 500
    assert SECRET[:30] not in response.text


def check_class(
    url: str, kind: type[openai.APIStatusError], method: str, path: str, sent: dict[str, Any], **headers: str
) -> None:
    """As the official client sees it; its own methods for these paths end in the same call."""
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, default_headers=headers) as client:
        options: Any = {"body": sent["json"]} if "json" in sent else {}
        if "files" in sent:
            options = {
                "files": sent["files"],
                "body": sent["data"],
                "options": {"headers": {"Content-Type": "multipart/form-data"}},
            }
        call = {"POST": client.post, "GET": client.get, "DELETE": client.delete}[method]
        with pytest.raises(openai.APIStatusError) as raised:
            call(path, cast_to=httpx.Response, **options)
    assert type(raised.value) is kind
    assert raised.value.code
    assert raised.value.request_id


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("voices")
    config = ServerConfig(api_keys=("secret",), max_body_bytes=60_000, voices_dir=folder)
    with serving(FakePipeline(), config) as url:
        yield url


@pytest.mark.parametrize(("method", "path", "sent"), EVERY)
def test_without_the_key_nobody_gets_in(guarded: str, method: str, path: str, sent: dict[str, Any]) -> None:
    for given in ("Bearer wrong", "secret", ""):
        response = send(guarded, method, path, sent, authorization=given)
        check_shape(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    check_class(guarded, openai.AuthenticationError, method, path, sent, authorization="Bearer wrong")


@pytest.mark.parametrize("path", OPEN)
def test_what_says_how_the_server_is_needs_no_key(guarded: str, path: str) -> None:
    assert httpx.get(f"{guarded}{path}").status_code == 200


@pytest.mark.parametrize(("method", "path", "sent"), TURNS)
def test_a_model_that_is_not_there(guarded: str, method: str, path: str, sent: dict[str, Any]) -> None:
    field = "json" if "json" in sent else "data"
    asked = {**sent, field: {**sent[field], "model": "gpt-4o"}}
    check_shape(send(guarded, method, path, asked), 404, "model_not_found")
    check_class(guarded, openai.NotFoundError, method, path, asked)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/models/gpt-4o", "model_not_found"),
        ("DELETE", "/v1/audio/voices/nobody", "not_found"),
        ("DELETE", "/v1/audio/voices/..%2F..%2Fetc%2Fpasswd", "not_found"),
        ("GET", "/v1/nowhere", "not_found"),
        ("POST", "/v1/completions", "not_found"),
        ("GET", "/%00%ff", "not_found"),
    ],
)
def test_what_is_not_there(guarded: str, method: str, path: str, code: str) -> None:
    check_shape(send(guarded, method, path, {}), 404, code)


@pytest.mark.parametrize(("method", "path", "sent"), EVERY)
def test_a_wrong_method_is_told_the_right_ones(guarded: str, method: str, path: str, sent: dict[str, Any]) -> None:
    response = send(guarded, "PATCH", path, {})
    check_shape(response, 405, "method_not_allowed")
    assert method in response.headers["allow"]
    assert method in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "sent"), [case for case in EVERY if case[0] == "POST"])
def test_a_body_over_the_limit(guarded: str, method: str, path: str, sent: dict[str, Any]) -> None:
    kind = "multipart/form-data; boundary=x" if "files" in sent else "application/json"
    large = {"content": SECRET.encode() * 100}
    check_shape(send(guarded, method, path, large, **{"content-type": kind}), 413, "request_too_large")
    check_class(guarded, openai.APIStatusError, method, path, {"json": {"x": SECRET * 100}})


@pytest.mark.parametrize(("method", "path", "sent"), [case for case in EVERY if case[0] == "POST"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 5_000, "application/json"),
        (json.dumps(SECRET).encode(), "application/json"),
        (b"null", "application/json"),
        (SECRET.encode(), "text/plain"),
        (SECRET.encode(), "multipart/form-data"),
        (SECRET.encode(), "multipart/form-data; boundary=x"),
        (b"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n", "multipart/form-data; boundary=x"),
        (b"", ""),
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_a_bad_request(
    guarded: str, method: str, path: str, sent: dict[str, Any], content: bytes, kind: str
) -> None:
    response = send(guarded, method, path, {"content": content}, **{"content-type": kind})
    code = "unsupported_option" if path.endswith("translations") else "invalid_request"
    check_shape(response, 400, code)


def test_a_name_that_is_taken(guarded: str) -> None:
    speech = {"audio_sample": ("a.wav", (Path(__file__).parents[1] / "data/human_a.wav").read_bytes()[:50_000])}
    first = send(guarded, "POST", "/v1/audio/voices", {"files": speech, "data": {"name": "Eve", "consent": "yes"}})
    assert first.status_code == 200, first.text
    asked = {"files": speech, "data": {"name": "Eve", "consent": "yes", "ref_text": "x"}}
    check_shape(send(guarded, "POST", "/v1/audio/voices", asked), 409, "conflict")
    check_class(guarded, openai.ConflictError, "POST", "/v1/audio/voices", asked)


@pytest.mark.parametrize(("method", "path", "sent"), [*TURNS, *OTHERS[1:]])
def test_a_server_that_is_not_ready_says_when_to_ask_again(method: str, path: str, sent: dict[str, Any]) -> None:
    pipeline = FakePipeline()
    pipeline.ready, pipeline.reason = False, "the server is loading"
    with serving(pipeline) as url:
        response = send(url, method, path, sent)
        check_shape(response, 503, "unavailable")
        assert response.headers["retry-after"] == "5"
        check_class(url, openai.InternalServerError, method, path, sent)


def fails_with(error: Exception) -> FakePipeline:
    def script(_: TurnRequest) -> Iterator[Event | Pause]:
        if isinstance(error, EngineError | Overloaded | Unavailable):
            yield Ended("error", error=error)
        else:
            raise error

    return FakePipeline(script)


@pytest.mark.parametrize(("method", "path", "sent"), TURNS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (Overloaded("full"), 429, "overloaded", openai.RateLimitError),
        (EngineError("out of pages " * 100), 500, "engine_error", openai.InternalServerError),
        (ZeroDivisionError(SECRET), 500, "internal_error", openai.InternalServerError),
        (Unavailable("stopping"), 503, "unavailable", openai.InternalServerError),
    ],
)
def test_a_turn_that_fails_before_it_says_anything(
    method: str,
    path: str,
    sent: dict[str, Any],
    stream: bool,
    error: Exception,
    status: int,
    code: str,
    kind: type[openai.APIStatusError],
) -> None:
    field = "json" if "json" in sent else "data"
    asked = {**sent, field: {**sent[field], "stream": stream if field == "json" else str(stream).lower()}}
    with serving(fails_with(error)) as url:
        response = send(url, method, path, asked, **{"x-request-id": "mine"})
        check_shape(response, status, code)
        assert response.headers["x-request-id"] == "mine"
        assert ("retry-after" in response.headers) == (status in (429, 503))
        check_class(url, kind, method, path, asked)


@pytest.mark.parametrize("given", ["a b", "x" * 200, "<script>", "é"])
def test_an_id_that_is_not_harmless_is_replaced(guarded: str, given: str) -> None:
    response = httpx.get(f"{guarded}/live", headers={"x-request-id": given.encode()})
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 32


def test_what_is_no_http_is_refused_and_the_server_lives_on(guarded: str) -> None:
    address = ("127.0.0.1", int(guarded.rpartition(":")[2]))
    for garbage in (
        b"\x16\x03\x01\x02\x00\n\n",
        b"POST /v1/models HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(garbage)
            assert b" 400 " in connection.recv(65_536).partition(b"\r\n")[0]
    assert httpx.get(f"{guarded}/live").status_code == 200
