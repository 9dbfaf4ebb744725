"""What a browser needs to call the server from another page."""

from __future__ import annotations

import httpx
import pytest

from aura_omni.config import Options, load
from aura_omni.errors import ConfigError
from aura_omni.server.app import ServerConfig
from tests.server.fake import FakePipeline, serving

PAGE = "https://app.example"
CHAT = {"messages": [{"role": "user", "content": "Hello?"}]}


def preflight(url: str, path: str = "/v1/chat/completions", origin: str = PAGE) -> httpx.Response:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    return httpx.options(f"{url}{path}", headers=asked)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions", "/nowhere"])
def test_a_preflight_needs_no_key_and_allows_what_it_asks(path: str) -> None:
    with serving(FakePipeline(), ServerConfig(api_keys=("secret",), origins=(PAGE,))) as url:
        response = preflight(url, path)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["vary"] == "origin"
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in response.headers


def test_answers_streams_and_errors_carry_the_headers() -> None:
    headers = {"origin": PAGE, "authorization": "Bearer secret"}
    with serving(FakePipeline(), ServerConfig(api_keys=("secret",), origins=(PAGE,), max_body_bytes=10_000)) as url:
        chat = f"{url}/v1/chat/completions"
        answers = [
            httpx.post(chat, json=CHAT, headers={**headers, "authorization": "Bearer wrong"}),
            httpx.post(chat, json=CHAT, headers=headers),
            httpx.post(chat, json={**CHAT, "stream": True}, headers=headers),
            httpx.post(chat, json={**CHAT, "n": 3}, headers=headers),
            httpx.post(chat, content=b"x" * 20_000, headers=headers),
            httpx.get(f"{url}/nowhere", headers=headers),
            httpx.get(f"{url}/health", headers={"origin": PAGE}),
        ]
    assert [answer.status_code for answer in answers] == [401, 200, 200, 400, 413, 404, 200]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_a_bug_carries_the_headers_too() -> None:
    def bug(_: object) -> None:
        raise ZeroDivisionError

    with serving(FakePipeline(bug), ServerConfig(origins=("*",))) as url:  # type: ignore[arg-type]
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (("*",), PAGE, "*"),
        ((PAGE,), "https://app.example.evil", None),
        ((PAGE,), "http://app.example", None),
        (("http://localhost:*",), "http://localhost:3000", "http://localhost:3000"),
        (("http://localhost:*",), "http://localhost:3000.evil", None),
        (("http://localhost:*",), "http://localhost", "http://localhost"),
        (ServerConfig().origins, PAGE, None),
        (ServerConfig().origins, "http://127.0.0.1:5173", "http://127.0.0.1:5173"),
    ],
)
def test_only_the_origins_named_are_allowed(origins: tuple[str, ...], origin: str, allowed: str | None) -> None:
    with serving(FakePipeline(), ServerConfig(origins=origins)) as url:
        assert preflight(url, origin=origin).headers.get("access-control-allow-origin") == allowed
        answer = httpx.get(f"{url}/v1/models", headers={"origin": origin})
    assert answer.status_code == 200
    assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(
    ("options", "origins"),
    [
        ({"api_key": ["k"]}, ("*",)),
        ({}, ServerConfig().origins),
        ({"allowed_origins": ['["https://a.example", "https://b.example:8443"]']}, ("https://a.example", "https://b.example:8443")),
        ({"allowed_origins": ["*"]}, ("*",)),
    ],
)  # fmt: skip
def test_origins_are_configured_by_flag(options: dict, origins: tuple[str, ...]) -> None:
    assert load(Options(**options), environ={}, platform="cpu").allowed_origins == origins


@pytest.mark.parametrize("origin", ["app.example", "https://a.example/path", "ftp://a.example", "[1]", "[oops"])
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        load(Options(allowed_origins=[origin]), environ={}, platform="cpu")
