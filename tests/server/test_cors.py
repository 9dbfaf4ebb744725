"""What a browser needs to call the server from another page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from aura_omni.config import Options, load
from aura_omni.errors import ConfigError
from aura_omni.server.app import ServerConfig
from tests.server.conftest import wav_bytes
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


FORM = {"file": ("a.wav", wav_bytes(), "audio/wav")}
VOICE = {"data": {"name": "Ada", "consent": "yes"}, "files": {"audio_sample": ("a.wav", wav_bytes(2.0), "audio/wav")}}


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost.evil.example", "http://192.168.0.9:8091"])
@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("POST", "/v1/audio/transcriptions", {"files": FORM}),
        ("POST", "/v1/audio/voices", VOICE),
        ("POST", "/v1/chat/completions", {"json": CHAT}),
        ("POST", "/v1/chat/completions", {"content": json.dumps(CHAT), "headers": {"content-type": "text/plain"}}),
        ("DELETE", "/v1/audio/voices/Eve", {}),
    ],
)
def test_without_keys_a_foreign_page_changes_nothing(
    origin: str, method: str, path: str, sent: dict[str, Any], tmp_path: Path
) -> None:
    pipeline = FakePipeline()
    with serving(pipeline, ServerConfig(voices_dir=tmp_path)) as url:
        headers = {**sent.get("headers", {}), "origin": origin}
        answer = httpx.request(method, url + path, **{**sent, "headers": headers})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("forbidden_origin", "permission_error")
    assert "--allowed-origins" in error["message"]
    assert "access-control-allow-origin" not in answer.headers
    assert not pipeline.requests
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "headers"),
    [
        (ServerConfig(), {}),
        (ServerConfig(), {"origin": "http://localhost:5173"}),
        (ServerConfig(origins=(PAGE,)), {"origin": PAGE}),
        (ServerConfig(origins=("*",)), {"origin": "null"}),
        (ServerConfig(api_keys=("secret",), origins=("*",)), {"origin": PAGE, "authorization": "Bearer secret"}),
    ],
)
def test_what_is_no_foreign_page_is_served(config: ServerConfig, headers: dict[str, str]) -> None:
    with serving(FakePipeline(), config) as url:
        chat = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers)
        form = httpx.post(f"{url}/v1/audio/transcriptions", files=FORM, headers=headers)
    assert [chat.status_code, form.status_code] == [200, 200]


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
