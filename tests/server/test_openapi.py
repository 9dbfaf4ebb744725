"""The document that clients are generated from, and the page that people read, are complete and true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from aura_omni.errors import Overloaded
from aura_omni.flow import Event, TurnRequest
from aura_omni.pipeline import Pipeline
from aura_omni.server import schemas
from aura_omni.server.app import ServerConfig, create_app
from aura_omni.server.field_notes import IGNORED
from aura_omni.server.openapi import operations
from tests.family import DATA, config
from tests.server.fake import FakePipeline, Pause, serving

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
FEW = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 512}  # no request runs for long


SERVED = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/audio/translations"),
    ("GET", "/v1/audio/voices"),
    ("POST", "/v1/audio/voices"),
    ("DELETE", "/v1/audio/voices/{name}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/live"),
    ("GET", "/ready"),
    ("GET", "/health"),
    ("GET", "/metrics"),
}


def document() -> dict[str, Any]:
    return create_app(ServerConfig(), FakePipeline()).openapi()


def test_every_endpoint_is_in_the_document_with_its_answers() -> None:
    found = operations(document())
    assert {(method, path) for method, path, _ in found} == SERVED
    for _, path, operation in found:
        assert {"4XX", "5XX"} <= operation["responses"].keys()
        assert ("200" in operation["responses"]) == (path != "/v1/audio/translations")
    assert "HTTPValidationError" not in str(document())


def test_every_reference_in_the_document_leads_somewhere() -> None:
    made = document()
    found = set(re.findall(r"'#/components/schemas/(\w+)'", str(made)))
    assert found <= made["components"]["schemas"].keys()


def test_every_header_of_ours_is_in_the_document_and_on_the_page() -> None:
    made = document()
    described = set(made["components"]["headers"])
    for _, _, operation in operations(made):
        for answer in operation["responses"].values():
            for name, header in answer["headers"].items():
                assert header == {"$ref": f"#/components/headers/{name}"} or header["description"]
                described.add(name)

    def refuse(_: TurnRequest) -> Iterator[Event]:
        raise Overloaded("full")
        yield

    asked = {"input": "Hello."}
    with serving(FakePipeline()) as url, serving(FakePipeline(refuse), ServerConfig(api_keys=("secret",))) as other:
        page = httpx.get(f"{url}/docs").text
        key = {"authorization": "Bearer secret"}
        answers = [
            httpx.post(f"{url}/v1/audio/speech", json=asked),
            httpx.post(f"{url}/v1/audio/speech", json={**asked, "stream_format": "sse"}),
            httpx.get(f"{url}/v1/audio/speech"),
            httpx.post(f"{other}/v1/audio/speech", json=asked),
            httpx.post(f"{other}/v1/audio/speech", json=asked, headers=key),
        ]
        late = FakePipeline(lambda _: [Pause()])
        with serving(late) as slow:
            answers.append(httpx.post(f"{slow}/v1/audio/speech", json=asked, headers={"x-request-timeout": "0.1"}))
    assert [answer.status_code for answer in answers] == [200, 200, 405, 401, 429, 504]
    sent = {name for answer in answers for name in answer.headers}
    assert sent - {"content-type", "content-length", "transfer-encoding", "date", "server", "connection"} == described
    assert all(f"<code>{name}</code>" in page for name in described)


def test_bodies_may_have_the_short_forms_and_no_unknown_fields() -> None:
    (chat,) = document()["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"].values()
    message = chat["schema"]["properties"]["messages"]["items"]
    assert message["properties"]["content"]["anyOf"][0] == {"type": "string"}
    assert chat["schema"]["additionalProperties"] is message["additionalProperties"] is False


def test_every_field_says_what_it_means_unless_it_is_accepted_without_effect() -> None:
    harmless = set(re.findall(r"`(\w+)`", (schemas.__doc__ or "").partition("Harmless:")[2].partition("of a chat")[0]))
    for method, path, operation in operations(document()):
        assert operation["description"]
        for body in operation.get("requestBody", {}).get("content", {}).values():
            unexplained = {
                name for name, field in body["schema"]["properties"].items() if field["description"] == IGNORED
            }
            assert unexplained <= harmless, f"{method} {path}"


def test_the_page_has_every_endpoint_and_needs_nothing_from_elsewhere() -> None:
    with serving(FakePipeline(), ServerConfig(api_keys=("secret",))) as url:
        response = httpx.get(f"{url}/docs")
        made = httpx.get(f"{url}/openapi.json").json()
    assert response.status_code == 200
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in response.text
    links = set(re.findall(r"(?:src|href)='?([^'> ]+)", response.text))
    assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
    for method, path, _ in operations(made):
        assert f"id='{method}{path}'" in response.text
    for name in ("ErrorAnswer", "ChatCompletion", "Transcription"):
        assert f"<h3 id='{name}'>" in response.text
    assert "curl http://localhost:8091/v1/audio/speech" in response.text
    assert "-F &#x27;file=@question.wav&#x27;" in response.text


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("voices")
    pipeline = Pipeline.load(config(asr=FEW, aura=FEW, talker=FEW))
    with serving(pipeline, ServerConfig(voices_dir=folder, timeout_s=20)) as url:  # type: ignore[arg-type]
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), sorted(SERVED))
def test_what_the_document_allows_is_never_a_server_error_and_answered_as_it_says(
    schema: Any, method: str, path: str
) -> None:
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy())
    def check(case: Any) -> None:
        case.headers.pop("x-request-timeout", None)  # a tenth of a second may be too little, and is then a 504
        case.call_and_validate(checks=CHECKS)

    check()


HELLO = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4}
FILE = {"file": ("a.wav", (DATA / "human_a.wav").read_bytes(), "audio/wav")}
VOICE = {"audio_sample": FILE["file"]}
CONSENT = {"name": "Ada", "consent": "yes"}


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("POST", "/v1/chat/completions", {"json": HELLO}, 200),
        ("POST", "/v1/chat/completions", {"json": {**HELLO, "modalities": ["text"]}}, 200),
        ("POST", "/v1/chat/completions", {"json": {**HELLO, "stream": True}}, 200),
        ("POST", "/v1/chat/completions", {"json": {**HELLO, "n": 2}}, 400),
        ("POST", "/v1/chat/completions", {"json": {**HELLO, "model": "x"}}, 404),
        *(
            ("POST", "/v1/audio/speech", {"json": {"input": "Hello.", "max_new_tokens": 4, **more}}, 200)
            for more in (
                *({"response_format": name} for name in ("wav", "pcm", "flac", "mp3", "opus")),
                {"stream_format": "sse"},
                {"stream_format": "audio"},
            )
        ),
        *(
            ("POST", "/v1/audio/transcriptions", {"files": FILE, "data": {"response_format": name}}, 200)
            for name in ("json", "text", "verbose_json", "srt", "vtt")
        ),
        ("POST", "/v1/audio/transcriptions", {"files": FILE, "data": {"stream": "true"}}, 200),
        ("POST", "/v1/audio/translations", {"files": FILE}, 400),
        ("POST", "/v1/audio/voices", {"files": VOICE, "data": CONSENT}, 200),
        ("POST", "/v1/audio/voices", {"files": VOICE, "data": {**CONSENT, "ref_text": "What is this?"}}, 409),
        ("GET", "/v1/audio/voices", {}, 200),
        ("DELETE", "/v1/audio/voices/Ada", {}, 200),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/v1/models/aura-tiny", {}, 200),
        ("GET", "/live", {}, 200),
        ("GET", "/ready", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/metrics", {}, 200),
    ],
)
def test_real_answers_are_as_the_document_says(
    schema: Any, method: str, path: str, sent: dict[str, Any], status: int
) -> None:
    response = requests.request(method, f"{schema.get_base_url().rstrip('/')}{path}", timeout=60, **sent)
    assert response.status_code == status, response.text
    described = re.sub(r"(/voices|/models)/.*", r"\1/{name}", path)
    schema[described][method].validate_response(response)
