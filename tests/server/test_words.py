"""Refusals are in our words: what was given, what is taken, the way out; never those of a library."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake import FakePipeline, serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakePipeline()) as url:
        yield url


def message(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("content", "kind", "phrase"),
    [
        (b"hello", "multipart/form-data", "no boundary; let your client set"),
        (b"hello", "multipart/form-data; boundary=x", "not a form as its Content-Type announces"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n", "multipart/form-data; boundary=x", "no name"),
    ],
)
def test_a_form_that_is_none(url: str, content: bytes, kind: str, phrase: str) -> None:
    answer = httpx.post(f"{url}/v1/audio/transcriptions", content=content, headers={"content-type": kind})
    assert phrase in message(answer, 400)


def test_a_form_with_too_much(url: str) -> None:
    post = f"{url}/v1/audio/transcriptions"
    files = [("file", ("a.wav", b"RIFF")), ("file", ("b.wav", b"RIFF"))]
    assert "more than one file; send one, named 'file'" in message(httpx.post(post, files=files), 400)
    many = {f"f{number}": "1" for number in range(101)}
    assert "more than 100 fields" in message(httpx.post(post, files=files[:1], data=many), 400)
    long = {"prompt": "x" * 1_100_000}
    assert "more than 1,048,576 bytes" in message(httpx.post(post, files=files[:1], data=long), 400)


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        ({"input": 5}, "input is 5; it must be a string"),
        ({"input": "a", "speed": 9}, "speed is 9; it must be at most 4"),
        ({"input": "a", "max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"input": "a", "max_new_tokens": 2**40}, "max_new_tokens is 1099511627776; it must be at most 2147483647"),
        ({"input": "a", "ref_audio": 5}, "ref_audio is 5; it must be a string or a list"),
        ({"input": "a", "stream_format": "x"}, "stream_format is 'x'; it must be 'audio' or 'sse'"),
    ],
)
def test_a_field_of_the_wrong_kind(url: str, body: dict[str, object], phrase: str) -> None:
    assert message(httpx.post(f"{url}/v1/audio/speech", json=body), 400) == phrase


def test_an_endpoint_that_is_none_names_the_near_one(url: str) -> None:
    said = message(httpx.post(f"{url}/v1/chat/completion", json={}), 404)
    assert (
        said
        == "there is no '/v1/chat/completion'; did you mean /v1/chat/completions? GET /docs describes what there is"
    )
    assert "GET /docs" in message(httpx.get(f"{url}/favicon.ico"), 404)


def test_a_method_that_is_none_names_those_of_the_path(url: str) -> None:
    said = message(httpx.get(f"{url}/v1/audio/speech"), 405)
    assert said == "'/v1/audio/speech' takes POST, not GET; GET /docs describes what there is"


def test_files_of_the_server_are_refused_with_the_flag_that_allows_them(url: str) -> None:
    content = [{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    assert "--allowed-local-media-path" in message(httpx.post(f"{url}/v1/chat/completions", json=body), 403)
