"""Every kind of bad input is a clear 4xx in OpenAI's shape, never reaches the engine, and the server lives on."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image, ImageFile

from aura_omni.errors import BadVoice, Overloaded, PromptTooLong
from aura_omni.flow import Audio, Event, TurnRequest
from aura_omni.media import budget
from aura_omni.server import schemas
from aura_omni.server.app import ServerConfig
from aura_omni.server.parts import threads
from tests.server.conftest import data_url, wav_bytes
from tests.server.fake import FakePipeline, serving

WAV = base64.b64encode(wav_bytes(0.1)).decode()
HELLO = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture(scope="module")
def url(pipeline: FakePipeline) -> Iterator[str]:
    with serving(pipeline) as url:
        yield url


def part(kind: str, value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": kind, kind: value}]}]}


def messages(*several: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(several)}


def info(**keys: Any) -> dict[str, Any]:
    return {"additional_information": keys}


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    # the body: extra fields, expected param, a phrase of the message
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": None}, "messages", "list"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [3]}, "messages[0]", "must be an object"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"voice": 5}, "voice", "voice is 5; it must be a string or an object"),
    ({"voice": {"id": 5}}, "voice.id", "voice.id is 5; it must be a string"),
    ({"voice": {"name": "x"}}, "voice.name", "unknown field 'name'"),
    ({"voice": {}}, "voice.id", "voice.id is required"),
    ({"speaker": {"id": "x"}}, "speaker", "speaker is {'id': 'x'}; it must be a string"),
    ({"max_tokens": 10**10}, "max_tokens", "from 1 to 2147483648"),
    ({"seed": 2**64}, "seed", "to 9223372036854775807"),
    ({"temperature": -1}, "temperature", "from 0 to 100"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"tts_max_new_tokens": 5}, "tts_max_new_tokens", "belongs in additional_information"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "not",
    ),
    # known elsewhere, not served here
    ({"n": 2}, "n", "n is 2; only 1 is served"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not served"),
    ({"tool_choice": "required"}, "tool_choice", 'tool_choice is \'required\'; only "none" and "auto" are served'),
    ({"logprobs": True}, "logprobs", "not served"),
    ({"response_format": {"type": "json_object"}}, "response_format", 'only {"type": "text"} is served'),
    ({"guided_json": {"type": "object"}}, "guided_json", "not served"),
    ({"best_of": True}, "best_of", "best_of is true; only 1 is served"),
    ({"chat_template": "{{ x }}"}, "chat_template", "not served"),
    ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs", "not served"),
    ({"return_stage_metrics": True}, "return_stage_metrics", "not served"),
    ({"continue_final_message": True}, "continue_final_message", "not served"),
    # modalities and audio
    (
        {"modalities": "text"},
        "modalities",
        """modalities must be a list of strings, e.g. ["text", "audio"]; it is 'text'""",
    ),
    ({"modalities": [1]}, "modalities", "modalities must be a list of strings, e.g."),
    ({"modalities": []}, "modalities", "Unsupported output modalities"),
    ({"modalities": ["text", "video"]}, "modalities", "Unsupported output modalities ['video']"),
    ({"audio": {"format": "mp9"}}, "audio.format", "Invalid audio format"),
    ({"audio": {"format": "wav", "voise": "x"}}, "audio.voise", "did you mean 'voice'"),
    ({"audio": "wav"}, "audio", "must be an object"),
    # messages
    (
        messages({"role": "tool", "content": "x"}),
        "messages[0].role",
        "is 'tool'; it must be 'system', 'developer', 'user' or",
    ),
    (messages({"role": "user"}), "messages[0].content", "empty"),
    (messages({"role": "user", "content": []}), "messages[0].content", "empty"),
    (messages({"role": "user", "content": 5}), "messages[0].content", "is 5; it must be a string or a list"),
    (messages({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), "messages[1].role", "end with"),
    (messages({"role": "assistant", "audio": {"id": "audio-1"}}, *HELLO), "messages[0].content", "not kept"),
    (messages({"role": "assistant", "content": "", "tool_calls": [{}]}, *HELLO), "messages[0].tool_calls", "not"),
    (
        messages({"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, *HELLO),
        "messages[0].content[0]",
        "only the user",
    ),
    (
        part("smell_url", {"url": "x"}),
        "messages[0].content[1]",
        "content[1].type is 'smell_url'; it must be one of 'text'",
    ),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]", "type is required"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "must be an object"),
    (part("text", 3), "messages[0].content[1].text", "string"),
    (part("image_url", {"url": "data:,", "detail": "low"}), "messages[0].content[1].image_url.detail", "'auto'"),
    (part("input_audio", {"format": "wav"}), "messages[0].content[1].input_audio.data", "required"),
    (part("audio_url", 5), "messages[0].content[1].audio_url", "is 5; it must be a string or an object"),
    (
        part("input_audio", {"data": WAV, "format": "xyz"}),
        "messages[0].content[1].input_audio.format",
        "is 'xyz'; it must be one of wav, mp3",
    ),
    (part("audio_url", {"uri": "x"}), "messages[0].content[1].audio_url.uri", "did you mean 'url'"),
    # media
    (part("input_audio", {"data": ""}), "messages[0].content[1].input_audio", "empty"),
    (part("input_audio", {"data": WAV[:-1]}), "messages[0].content[1].input_audio", "cut off"),
    (
        part("input_audio", {"data": "!!!!"}),
        "messages[0].content[1].input_audio",
        "'!!!!' is neither a data:, http(s): or file: URL nor base64",
    ),
    (part("input_audio", {"data": "AAAA"}), "messages[0].content[1].input_audio", "no audio or video file"),
    (part("audio_url", {"url": "data:audio/wav,xyz"}), "messages[0].content[1].audio_url", ";base64"),
    (part("audio_url", {"url": "ftp://host.test/a.wav"}), "messages[0].content[1].audio_url", "ftp"),
    (part("video_url", {"url": data_url(wav_bytes(0.1), "video/mp4")}), "messages[0].content[1].video_url", "video"),
    (part("image_url", {"url": data_url(b"not a picture", "image/png")}), "messages[0].content[1].image_url", ""),
    # sampling
    ({"temperature": "hot"}, "temperature", "from 0 to 100"),
    ({"temperature": -1}, "temperature", "from 0 to 100"),
    ({"top_p": 1.5}, "top_p", "from 0 to 1"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "give one"),
    ({"seed": 1.5}, "seed", "seed is 1.5; it must be a whole number from -9223372036854775808 to"),
    ({"seed": 2**70}, "seed", "number"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop_token_ids": "151645"}, "stop_token_ids", "list of token ids"),
    ({"stop_token_ids": 5}, "stop_token_ids", "list of token ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 1000}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"5": 10**309}}, "logit_bias", "must map token ids to numbers"),
    ({"logit_bias": {"5": "nan"}}, "logit_bias", "is nan; weights must be from -100 to 100"),
    ({"logit_bias": {"5": "-inf"}}, "logit_bias", "is -inf; weights must be"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "must map token ids to numbers"),
    ({"logit_bias": {"9" * 400: 1}}, "logit_bias", "ids are from 0 to 2147483647"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token id -1; ids are from 0"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1,025 entries; at most 1,024"),
    ({"stop": ["x"] * 17}, "stop", "17 strings; at most 16"),
    ({"stop": "x" * 257}, "stop", "257 characters; at most 256"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "257 ids; at most 256"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids", "ids are from 0 to 2147483647"),
    ({"temperature": int("9" * 4300)}, "temperature", "bits>; it must be a number from 0 to 100"),
    ({"temperature": 10**400}, "temperature", "it must be a number from 0 to 100"),
    ({"temperature": "x" * 5000}, "temperature", "it must be a number from 0 to 100"),
    ({"temperature": [[["x" * 5000] * 20] * 20]}, "temperature", "it must be a number from 0 to 100"),
    ({"ignore_eos": "x" * 5000}, "ignore_eos", "it must be true or false"),
    ({"stop": {"x" * 5000: 1}}, "stop", "it must be a non-empty string or a list of them"),
    ({"stop_token_ids": ["x" * 5000]}, "stop_token_ids", "it must be a list of token ids"),
    ({"seed": int("9" * 4300)}, "seed", "it must be a whole number from"),
    (info(tts_max_new_tokens=int("9" * 4300)), "additional_information.tts_max_new_tokens", "to 2147483647"),
    # how much
    ({"messages": HELLO * 4097}, "messages", "4,097 messages; at most 4,096"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}] * 600}] * 2},
        "messages",
        "1,200 content parts; at most 1,024",
    ),
    ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"sampling_params_list": {"temperature": 1}}, "sampling_params_list", "each stage; it is {'temperature': 1}"),
    ({"sampling_params_list": [None]}, "sampling_params_list", "Invalid sampling params"),
    ({"sampling_params_list": [{}] * 5}, "sampling_params_list", "5 entries for 4 stages"),
    (
        {"sampling_params_list": [{}, {"top_p": 2}]},
        "sampling_params_list[1].top_p",
        "Invalid sampling params: sampling_params_list[1].top_p is 2",
    ),
    ({"sampling_params_list": [{"output_kind": 2}]}, "sampling_params_list[0].output_kind", "is 2; only 0 is served"),
    (
        {"sampling_params_list": [{"skip_special_tokens": False}]},
        "sampling_params_list[0].skip_special_tokens",
        "sampling_params_list[0].skip_special_tokens is false; only true is served",
    ),
    (
        {"sampling_params_list": [{"detokenize": "no"}]},
        "sampling_params_list[0].detokenize",
        "is 'no'; it must be true or false",
    ),
    ({"sampling_params_list": [{"temprature": 1}]}, "sampling_params_list[0].temprature", "did you mean"),
    # voice
    ({"additional_information": []}, "additional_information", "must be an object"),
    (info(tts_speker="Vivian"), "additional_information.tts_speker", "did you mean 'tts_speaker'"),
    (info(session_id="s"), "additional_information.session_id", "not served"),
    (info(tts_ref_code_length=12), "additional_information.tts_ref_code_length", "not served"),
    (info(tts_task_type="Shout"), "additional_information.tts_task_type", "Base, CustomVoice, VoiceDesign"),
    (
        info(tts_language=["a", "b"]),
        "additional_information.tts_language",
        "is ['a', 'b']; it must be a string or a list of one",
    ),
    (
        info(tts_x_vector_only_mode="maybe"),
        "additional_information.tts_x_vector_only_mode",
        "is 'maybe'; it must be true or false",
    ),
    (info(tts_max_new_tokens=0), "additional_information.tts_max_new_tokens", "is 0; it must be a whole number from 1"),
    (info(tts_ref_audio="AAAA"), "additional_information.tts_ref_audio", "no audio"),
    (
        info(tts_speaker="Ryan") | {"voice": "Vivian"},
        "voice",
        "voice 'Vivian' and additional_information.tts_speaker 'Ryan' differ",
    ),
    ({"audio": {"voice": "Ryan", "format": "wav"}, "speaker": "Vivian"}, "speaker", "differ"),
]


@pytest.mark.parametrize(("fields", "param", "phrase"), BAD, ids=[f"{param}-{phrase}"[:60] for _, param, phrase in BAD])
def test_bad_input_is_refused_by_name(
    pipeline: FakePipeline, url: str, fields: dict[str, Any], param: str | None, phrase: str
) -> None:
    before = len(pipeline.requests)
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, **fields})
    error = assert_error(response, 400)
    assert error["param"] == param
    assert phrase in error["message"]
    assert len(pipeline.requests) == before


def assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 1_000  # whatever was sent, it is not sent back
    return body["error"]


def test_the_official_client_raises_its_own_classes(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="AURA", messages=HELLO, n=2)  # type: ignore[arg-type]
    assert bad.value.param == "n"
    assert bad.value.code == "unsupported_option"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4o", messages=HELLO)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    assert "aurateam/AURA" in missing.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    forbidden = part("audio_url", {"url": "http://127.0.0.1:1/a.wav"})["messages"]
    with pytest.raises(openai.PermissionDeniedError) as closed:
        ask(model="AURA", messages=forbidden)
    assert closed.value.param == "messages[0].content[1].audio_url"


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        (b"", "empty; send a JSON object"),
        (b"  ", "empty; send a JSON object"),
        (b'{"a": {"b": 1', "not JSON: it ends after 13 bytes, before it is complete"),
        (b'{"messages": [],}', """line 1, column 17 has '}' after '{"messages": [],'"""),
        (b"{'a': 1}", """line 1, column 2 has "'a': 1}" after '{'"""),
        (b'{"a":\n  [1 2]}', "line 2, column 6 has '2]}' after"),
        (b"nothing", "line 1, column 2 has 'othing' after 'n'"),
        (b'{"a": 1}' * 200_000, "beyond line 1, column 9"),
        (b"{", "not JSON"),
        (b"[]", "the body is a list; it must be a JSON object"),
        (b'"x"', "JSON object"),
        (b'{"messages": [], "temperature": NaN}', "not JSON"),
        (b"[" * 202, "more than 201 levels"),
        (b"[" * 100_000, "more than 201 levels"),
        (b'{"user": "\xff"}', "not JSON"),
        (b'{"user": "\\ud800"}', "not JSON"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(url: str, body: bytes, phrase: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert phrase in assert_error(response, 400)["message"]


def test_the_content_type_must_be_json(url: str) -> None:
    body = json.dumps({"messages": HELLO}).encode()
    response = httpx.post(f"{url}/v1/chat/completions", content=body)
    way_out = "send the header 'Content-Type: application/json'"
    assert (
        assert_error(response, 400)["message"] == f"the body must be JSON, and its Content-Type is not given; {way_out}"
    )
    response = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert f"its Content-Type is 'text/plain'; {way_out}" in assert_error(response, 400)["message"]
    with_charset = {"content-type": "application/json; charset=utf-8"}
    assert httpx.post(f"{url}/v1/chat/completions", content=body, headers=with_charset).status_code == 200


def test_unknown_paths_and_methods_have_the_error_shape(url: str) -> None:
    error = assert_error(httpx.get(f"{url}/v1/embeddings"), 404)
    assert error["code"] == "not_found"
    assert "GET /docs" in error["message"]
    response = httpx.get(f"{url}/v1/chat/completions")
    assert assert_error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_a_long_value_is_not_echoed(url: str) -> None:
    for fields in ({"temperature": "x" * 100_000}, {"x" * 100_000: 1}, {"model": "x" * 100_000}):
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, **fields})
        assert_error(response, 404 if "model" in fields else 400)


def test_fields_that_ask_for_nothing_are_accepted(url: str) -> None:
    nothing = {
        "n": 1, "tools": None, "tool_choice": "auto", "logprobs": False, "top_logprobs": 0, "user": "me", "store": True,
        "response_format": {"type": "text"}, "metadata": {"a": "b"}, "stream": False, "parallel_tool_calls": True,
        "skip_special_tokens": True, "mm_processor_kwargs": {}, "return_stage_metrics": False, "stop": None,
        "additional_information": {"session_id": None}, "sampling_params_list": [{"detokenize": True, "n": 1}],
    }  # fmt: skip
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, **nothing})
    assert response.status_code == 200, response.text[:500]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (BadVoice("speaker 'Bob' is not one of Vivian, Ryan", param="voice"), openai.BadRequestError),
        (PromptTooLong("9,120 tokens, this model takes 8,192"), openai.BadRequestError),
        (Overloaded("64 turns wait, the limit; ask again"), openai.RateLimitError),
    ],
)
def test_what_the_pipeline_refuses_has_its_status(refusal: Any, kind: Any, stream: bool) -> None:
    def refuse(request: TurnRequest) -> Iterator[Event]:
        raise refusal
        yield  # a generator

    with serving(FakePipeline(refuse)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(kind) as raised:
            client.chat.completions.create(model="AURA", messages=HELLO, stream=stream)  # type: ignore[call-overload]
    assert raised.value.code == refusal.code
    assert refusal.message in str(raised.value)
    assert ("retry-after" in raised.value.response.headers) == isinstance(refusal, Overloaded)


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"messages": [{"role": "user", "content": "word " * 2_000_000}]}, "characters of text; at most 4,000,000"),
        ({"messages": [*HELLO * 3000, {"role": "user", "content": "x" * 4_000_000}]}, "4,000,000. Send less"),
        (info(aura_system_prompt="x" * 5_000_000), "characters of text; at most 4,000,000"),
        ({"metadata": [[]] * 2_000_000}, "commas and brackets; at most 1,000,000"),
    ],
)
def test_large_text_is_refused_at_once(url: str, fields: dict[str, Any], phrase: str) -> None:
    started_s = time.monotonic()
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, **fields}, timeout=20)
    assert phrase in assert_error(response, 413)["message"]
    assert time.monotonic() - started_s < 5


def test_a_large_body_is_read_beside_the_event_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[bool] = []
    read = schemas._read

    def watched(kind: Any, body: bytes) -> Any:
        beside.append(asyncio._get_running_loop() is None)
        return read(kind, body)

    monkeypatch.setattr(schemas, "_read", watched)
    for size in (10, 2_000_000):
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "user": "x" * size}).status_code == 200
    assert beside == [False, True]


@pytest.mark.parametrize(
    "name",
    [
        "wav",
        "mp3",
        "MP3",
        "audio/wav",
        "audio/x-m4a",
        "audio/webm;codecs=opus",
        "video/mp4",
        ".ogg",
        "pcm16",
        "mpeg",
        "",
        None,
    ],
)
def test_a_format_of_recordings_may_have_any_of_its_names_and_the_bytes_decide(url: str, name: str | None) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json=part("input_audio", {"data": WAV, "format": name}))
    assert response.status_code == 200, response.text[:500]


def test_large_media_are_no_text(url: str) -> None:
    sound = base64.b64encode(wav_bytes(150.0)).decode()  # 6.4 million characters
    response = httpx.post(f"{url}/v1/chat/completions", json=part("input_audio", {"data": sound}), timeout=20)
    assert response.status_code == 200, response.text[:500]


def test_pictures_that_are_large_together_are_refused_before_they_are_decoded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: (decoded.append(1), load(image))[1])
    monkeypatch.setitem(budget._MOST, "pixels", 2_500_000)
    file = io.BytesIO()
    Image.new("1", (1_000, 1_000)).save(file, "PNG")
    picture = {"type": "image_url", "image_url": {"url": data_url(file.getvalue(), "image/png")}}
    decoded.clear()
    body = messages({"role": "user", "content": [picture] * 30})
    error = assert_error(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20), 400)
    assert "3,000,000 pixels (pictures and kept video frames); at most 2,500,000 in one request" in error["message"]
    assert len(set(decoded)) <= 2


def test_media_of_all_requests_are_decoded_a_few_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    running: set[int] = set()
    lock = threading.Lock()

    def decode(data: bytes, **_: Any) -> Audio:
        with lock:
            running.add(threading.get_ident())
            at_once.append(len(running))
        time.sleep(0.02)
        with lock:
            running.discard(threading.get_ident())
        return Audio(np.zeros(1, np.float32), 16_000, b"")

    monkeypatch.setattr("aura_omni.server.parts.decode_audio", decode)
    monkeypatch.setattr("aura_omni.server.parts.SHORT_WAV", 0)
    sound = {"type": "input_audio", "input_audio": {"data": WAV}}
    body = messages({"role": "user", "content": [sound] * 10})
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=20) for _ in range(3)]
        assert [response.result().status_code for response in asked] == [200] * 3
    assert 1 < max(at_once) <= threads(os.cpu_count() or 1)


def test_more_media_than_the_server_takes_is_refused_before_decoding() -> None:
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [clip, {"type": "text", "text": "?"}, clip]}]}
    with serving(FakePipeline(), ServerConfig(media_limits={"video": 1})) as url:
        error = assert_error(httpx.post(f"{url}/v1/chat/completions", json=body), 400)
    assert error["param"] == "messages[0].content[2]"
    assert "more than 1 video" in error["message"]


# ---------------------------------------------------------------- around a request


def test_without_the_key_only_health_answers() -> None:
    with serving(FakePipeline(), ServerConfig(api_keys=("first", "sécret"))) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic first"},
            {"authorization": "first"},
        ):
            response = httpx.get(f"{url}/v1/models", headers=headers)
            assert assert_error(response, 401)["code"] == "invalid_api_key"
        assert_error(httpx.get(f"{url}/nope"), 401)
        for key in ("first", "sécret"):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_body_over_the_limit_is_refused_with_numbers() -> None:
    with serving(FakePipeline(), ServerConfig(max_body_bytes=300_000)) as url:
        large = "x" * 400_000
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.create(model="AURA", messages=[{"role": "user", "content": large}])
        assert raised.value.status_code == 413
        assert raised.value.code == "request_too_large"
        assert "300,000 bytes" in raised.value.message

        def chunked() -> Iterator[bytes]:
            for _ in range(8):
                yield b"x" * 50_000

        headers = {"content-type": "application/json"}
        response = httpx.post(f"{url}/v1/chat/completions", content=chunked(), headers=headers)
        assert "300,000 bytes" in assert_error(response, 413)["message"]
        ok = client.chat.completions.create(model="AURA", messages=[{"role": "user", "content": "x" * 200_000}])
        assert ok.choices[0].message.content == "Hello there."


def test_the_callers_request_id_comes_back_if_it_is_harmless(url: str) -> None:
    assert httpx.get(f"{url}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for strange in ("a b", "x" * 200, "<script>"):
        assert httpx.get(f"{url}/health", headers={"x-request-id": strange}).headers["x-request-id"] != strange


def test_a_bug_is_a_500_in_shape_its_reason_is_in_the_log_and_the_server_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bug(request: TurnRequest) -> Iterator[Event]:
        raise ZeroDivisionError("details that stay in the log")
        yield  # a generator

    pipeline = FakePipeline(bug)
    with serving(pipeline) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
        error = assert_error(response, 500)
        assert "details" not in error["message"]
        assert response.headers["x-request-id"] in error["message"]
        assert httpx.get(f"{url}/health").status_code == 200
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert response.headers["x-request-id"] in record.getMessage()
    assert record.exc_info is not None
    assert "details that stay in the log" in str(record.exc_info[1])
