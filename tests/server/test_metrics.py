"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aura_omni.errors import EngineError
from aura_omni.flow import AudioChunk, Ended, Event, TextDelta, TurnRequest
from aura_omni.pipeline import Pipeline
from aura_omni.server.app import ServerConfig
from tests.family import config
from tests.server.fake import WAIT_S, FakePipeline, Pause, serving, tone

CHAT = {"messages": [{"role": "user", "content": "Hello?"}]}


class Read:
    """The metrics of a server now."""

    def __init__(self, url: str) -> None:
        response = httpx.get(f"{url}/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        self.values = {
            (sample.name.removeprefix("aura_omni:"), tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)


def chat(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**CHAT, **fields}, timeout=WAIT_S)


def test_turns_are_counted_with_their_times_and_seconds_of_audio() -> None:
    with serving(FakePipeline()) as url:
        chat(url)
        chat(url, stream=True, modalities=["text"])
        httpx.post(f"{url}/v1/audio/speech", json={"input": "Hello."})
        read = Read(url)
    assert read("turns_total", part="turn", outcome="stop") == 2
    assert read("turns_total", part="speech", outcome="stop") == 1
    assert read("time_to_first_token_seconds_count", part="turn") == 2
    assert read("time_to_first_audio_seconds_count", part="turn") == 1
    assert read("time_to_first_audio_seconds_count", part="speech") == 1
    assert read("e2e_request_latency_seconds_count", part="turn") == 2
    assert read("audio_seconds_total") == pytest.approx(2 * 4 * 0.08)


def test_requests_are_counted_by_route_and_status_and_never_by_what_a_user_sent() -> None:
    with serving(FakePipeline(), ServerConfig(api_keys=("secret",), max_body_bytes=10_000)) as url:
        key = {"authorization": "Bearer secret"}
        httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=key)
        httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "n": 3}, headers=key)
        httpx.post(f"{url}/v1/chat/completions", json=CHAT)
        httpx.post(f"{url}/v1/chat/completions", content=b"x" * 20_000, headers=key)
        for name in ("a", "b"):
            httpx.get(f"{url}/v1/models/{name}", headers=key)
            httpx.get(f"{url}/{name}", headers=key)
        read = Read(url)
    requests = {labels: value for (name, labels), value in read.values.items() if name == "http_requests_total"}
    assert requests == {
        (("code", "200"), ("endpoint", "/v1/chat/completions")): 1,
        (("code", "400"), ("endpoint", "/v1/chat/completions")): 1,
        (("code", "404"), ("endpoint", "/v1/models/{name:path}")): 2,
        (("code", "404"), ("endpoint", "other")): 2,
        (("code", "401"), ("endpoint", "other")): 1,
        (("code", "413"), ("endpoint", "other")): 1,
    }
    failures = {
        labels[0][1]: value for (name, labels), value in read.values.items() if name == "request_failures_total"
    }
    assert failures == {
        "unsupported_option": 1,
        "model_not_found": 2,
        "not_found": 2,
        "invalid_api_key": 1,
        "request_too_large": 1,
    }


def test_silence_failures_and_cancellations_are_told_apart() -> None:
    def script(request: TurnRequest) -> Iterator[Event | Pause]:
        match request.messages[0].parts[0].text:  # type: ignore[union-attr]
            case "quiet":
                yield Ended("silent")
            case "broken":
                yield TextDelta("Hel")
                yield Ended("error", error=EngineError("out of pages"))
            case "bug":
                raise ZeroDivisionError
            case _:
                yield AudioChunk(tone(440, 1))
                yield Pause()
                yield Ended("stop")

    def said(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}

    pipeline = FakePipeline(script)
    with serving(pipeline, ServerConfig(timeout_s=0.5)) as url:
        post = f"{url}/v1/chat/completions"
        httpx.post(post, json=said("quiet"))
        httpx.post(post, json={**said("broken"), "stream": True})
        httpx.post(post, json=said("bug"))
        httpx.post(post, json=said("slow"))
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(post, json=said("leaves"), timeout=0.2)
        assert pipeline.turns[-1].ended.wait(WAIT_S)
        read = Read(url)
    assert read("turns_total", part="turn", outcome="silent") == 1
    assert read("turns_total", part="turn", outcome="error") == 1
    assert read("turns_total", part="turn", outcome="cancelled") == 2
    reasons = ("engine_error", "internal_error", "timeout")
    assert [read("request_failures_total", reason=reason) for reason in reasons] == [1, 1, 1]
    codes = ("200", "499", "500", "504")
    counts = [read("http_requests_total", endpoint="/v1/chat/completions", code=code) for code in codes]
    assert counts == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "speech", "outcome"),
    [
        ("stop", "stop", "stop"), ("stop", None, "stop"), ("stop", "empty", "stop"), ("stop", "length", "length"),
        ("stop", "loop", "loop"), ("stop", "silence", "silence"), ("length", "stop", "length"), ("length", "loop", "length"),
        ("silent", None, "silent"),
    ],
)  # fmt: skip
def test_speech_that_was_cut_or_stopped_is_counted_as_that(text: Any, speech: Any, outcome: str) -> None:
    with serving(FakePipeline(lambda _: [AudioChunk(tone(440, 1)), Ended(text, speech_reason=speech)])) as url:
        httpx.post(f"{url}/v1/audio/speech", json={"input": "Hello."})
        assert Read(url)("turns_total", part="speech", outcome=outcome) == 1


def test_stages_show_what_they_have_in_hand() -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        read = Read(url)
        pipeline.ready = False
        assert Read(url)("ready") == 0
    assert read("ready") == 1
    assert read("num_requests_running", stage="talker") == 2
    assert read("num_requests_waiting", stage="asr") == 2
    assert read("kv_cache_usage_perc", stage="aura") == 0.4
    assert (read("kv_pages", stage="aura"), read("kv_pages_used", stage="aura")) == (10, 4)
    assert (read("prefix_cache_queries_total", stage="asr"), read("prefix_cache_hits_total", stage="asr")) == (8, 5)
    assert (read("prompt_tokens_total", stage="asr"), read("generation_tokens_total", stage="asr")) == (8, 9)


def test_the_real_stages_count_their_tokens_and_frames() -> None:
    pipeline = Pipeline.load(config("tts_custom_voice"))
    with serving(pipeline) as url:  # type: ignore[arg-type]
        before = Read(url)
        body = {"input": "Hello there.", "max_new_tokens": 6, "seed": 5}
        assert httpx.post(f"{url}/v1/audio/speech", json=body, timeout=60).status_code == 200
        after = Read(url)
    made = [
        after("generation_tokens_total", stage=stage) - before("generation_tokens_total", stage=stage)
        for stage in ("asr", "aura", "talker", "code2wav")
    ]
    assert made == [0, 0, 6, 6]
    assert after("prompt_tokens_total", stage="talker") > before("prompt_tokens_total", stage="talker")
    assert after("audio_seconds_total") == pytest.approx(6 * 0.08)
    assert after("num_requests_running", stage="talker") == 0
