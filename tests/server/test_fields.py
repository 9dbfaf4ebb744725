"""Where the fields of a chat request go: sampling to stages, spellings of a voice to one Voice."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.errors import AuraError, BadRequest, BadVoice, field_name
from aura_omni.flow import STAGES, Ended, Event, Sampling, StageName, TurnRequest, Voice
from aura_omni.media.fetch import MediaPolicy
from aura_omni.server.chat import turn_request, wanted_of
from aura_omni.server.errors import error_body
from aura_omni.server.parts import MediaReader
from aura_omni.server.sampling import stage_sampling
from aura_omni.server.schemas import ChatRequest, checked
from aura_omni.server.voice import voice_request
from aura_omni.stages.voices import Voices
from tests.family import DATA
from tests.reference_tts import tts_config
from tests.server.conftest import wav_bytes
from tests.server.fake import FakePipeline, serving

HELLO = [{"role": "user", "content": "Hello?"}]


def body(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, **fields})


def test_openai_fields_drive_the_stage_that_writes_the_answer() -> None:
    asked = body(temperature=0.2, top_p=0.9, max_completion_tokens=64, stop="end", logit_bias={"5": -1})
    expected = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 64, "stop": ("end",), "logit_bias": {5: -1.0}}
    assert stage_sampling(asked, STAGES) == {"aura": expected}
    assert stage_sampling(asked, ("asr",)) == {"asr": expected}
    assert stage_sampling(body(), STAGES) == {}


def test_openai_fields_beat_the_entry_of_that_stage_only() -> None:
    entries = [{"max_tokens": 9}, {"max_tokens": 8, "top_k": 3}, {"max_tokens": 7, "detokenize": False}]
    asked = body(max_tokens=64, sampling_params_list=entries)
    expected = {"asr": {"max_tokens": 9}, "aura": {"max_tokens": 64, "top_k": 3}, "talker": {"max_tokens": 7}}
    assert stage_sampling(asked, STAGES) == expected


def test_the_seed_also_seeds_the_talker_unless_it_has_its_own() -> None:
    assert stage_sampling(body(seed=1), STAGES) == {"aura": {"seed": 1}, "talker": {"seed": 1}}
    own = body(seed=1, sampling_params_list=[{}, {}, {"seed": 42}])
    assert stage_sampling(own, STAGES) == {"aura": {"seed": 1}, "talker": {"seed": 42}}
    assert stage_sampling(body(seed=1), ("asr", "aura")) == {"aura": {"seed": 1}}


def test_all_keys_of_additional_information_are_read_as_scalars_or_lists_of_one() -> None:
    keys: dict[str, Any] = {
        "aura_system_prompt": "Be kind.",
        "tts_task_type": "customvoice",
        "tts_language": "English",
        "tts_speaker": "Vivian",
        "tts_instruct": "slowly",
        "tts_ref_audio": "AAAA",
        "tts_ref_text": "ref",
        "tts_x_vector_only_mode": "yes",
        "tts_pass_token_ids": 1,
        "tts_non_streaming_mode": "off",
        "tts_normalize": "no",
        "tts_max_new_tokens": 100,
    }
    expected = Voice(
        task="CustomVoice",
        language="English",
        speaker="Vivian",
        instruct="slowly",
        ref_text="ref",
        x_vector_only=True,
        pass_token_ids=True,
        non_streaming=False,
        normalize=False,
        max_frames=100,
    )
    for wrapped in (keys, {key: [value] for key, value in keys.items()}):
        asked = voice_request(body(additional_information=wrapped))
        assert asked.voice == expected
        assert asked.system_prompt == "Be kind."
        assert asked.ref_audio == "AAAA"


@pytest.mark.parametrize("true", [True, 1, "1", "true", "True", "yes", "on", ["ON"]])
def test_true_has_several_spellings(true: Any) -> None:
    assert voice_request(body(additional_information={"tts_pass_token_ids": true})).voice.pass_token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"voice": "Ryan"},
        {"voice": {"id": "Ryan"}},
        {"speaker": "Ryan"},
        {"audio": {"voice": "Ryan", "format": "wav"}},
        {"additional_information": {"tts_speaker": "Ryan"}},
        {"voice": "Ryan", "speaker": "Ryan"},
    ],
)
def test_a_speaker_has_several_spellings(fields: dict[str, Any]) -> None:
    assert voice_request(body(**fields)).voice.speaker == "Ryan"


@pytest.mark.parametrize(
    ("fields", "ours", "param"),
    [
        ({"voice": "bob"}, "speaker", "voice"),
        ({"voice": {"id": "bob"}}, "speaker", "voice"),
        ({"speaker": "bob"}, "speaker", "speaker"),
        ({"audio": {"voice": "bob", "format": "wav"}}, "speaker", "audio.voice"),
        ({"voice": "", "speaker": "bob"}, "speaker", "speaker"),
        ({"language": "klingon"}, "language", "language"),
        ({"instructions": "x"}, "instruct", "instructions"),
        ({"additional_information": {"tts_speaker": "bob"}}, "speaker", "additional_information.tts_speaker"),
        ({"additional_information": {"tts_language": "klingon"}}, "language", "additional_information.tts_language"),
        ({"additional_information": {"tts_instruct": "x"}}, "instruct", "additional_information.tts_instruct"),
        (
            {"additional_information": {"aura_system_prompt": "x"}},
            "system_prompt",
            "additional_information.aura_system_prompt",
        ),
        ({}, "instruct", "additional_information.tts_instruct"),
    ],
)
def test_what_is_refused_of_a_voice_is_named_as_the_client_spelled_it(
    fields: dict[str, Any], ours: str, param: str
) -> None:
    def refuse(_: TurnRequest) -> Iterator[Event]:
        raise BadVoice(f"{field_name(ours)} is refused", param=ours)
        yield

    with serving(FakePipeline(refuse)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, param, f"{param} is refused")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("audio_ref", "additional_information.tts_ref_audio is missing: .* as additional_information.tts_ref_text, or set "
                      "additional_information.tts_x_vector_only_mode to"),
        ("ref_text", "additional_information.tts_ref_text is missing: send the transcript of additional_information.tts_ref_audio, "
                     "or set additional_information.tts_x_vector_only_mode to"),
        ("wrong_text", "additional_information.tts_ref_text is not what is said in additional_information.tts_ref_audio: .* or set "
                       "additional_information.tts_x_vector_only_mode to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("endpoint", ["chat", "speech"])
def test_a_refusal_names_fields_that_the_endpoint_has(endpoint: str, field: str, message: str) -> None:
    base = Voices.from_json(tts_config("base"), "tiny")

    def speak(request: TurnRequest) -> Iterator[Event]:
        base.resolve(request.voice)
        yield Ended("stop", speech_reason="stop")

    sound = {"ref_audio": base64.b64encode((DATA / "human_a.wav").read_bytes()).decode()}
    fields = {"audio_ref": {}, "ref_text": sound, "wrong_text": {**sound, "ref_text": "far too long " * 99}}[field]
    way_out = {**(fields or sound), "x_vector_only_mode": True}
    path, written = {
        "chat": ("chat/completions", lambda of: {"additional_information": {f"tts_{name}": of[name] for name in of}}),
        "speech": ("audio/speech", lambda of: of),
    }[endpoint]
    expected = message if endpoint == "chat" else message.replace("additional_information.tts_", "")
    with serving(FakePipeline(speak)) as url:
        asked = {"messages": HELLO} if endpoint == "chat" else {"input": "Hello."}
        refused = httpx.post(f"{url}/v1/{path}", json={**asked, **written(fields)})
        assert refused.status_code == 400
        assert re.match(expected, refused.json()["error"]["message"]), refused.text
        assert refused.json()["error"]["param"] == expected.partition(" ")[0]
        taken = httpx.post(f"{url}/v1/{path}", json={**asked, **written(way_out)})
        assert taken.status_code == 200, taken.text


@pytest.mark.parametrize(
    ("fields", "refused", "name"),
    [
        ({"stop_token_ids": [1]}, "aura.stop_token_ids", "stop_token_ids"),
        (
            {"sampling_params_list": [{}, {"logit_bias": {"1": 1}}]},
            "aura.logit_bias",
            "sampling_params_list[1].logit_bias",
        ),
        ({"sampling_params_list": [{}, {"stop": "x"}], "stop": "y"}, "aura.stop", "stop"),
        ({"sampling_params_list": [{}, {}, {"stop": "x"}]}, "talker.stop", "sampling_params_list[2].stop"),
        ({"max_completion_tokens": 5}, "aura.max_tokens", "max_completion_tokens"),
        ({"min_tokens": 5}, "aura.max_tokens", "max_tokens"),
    ],
)
def test_a_sampling_field_is_named_where_the_request_has_it(fields: dict[str, Any], refused: str, name: str) -> None:
    def refuse(_: TurnRequest) -> Iterator[Event]:
        raise BadRequest(f"{field_name(refused)} is refused", param=refused)
        yield

    with serving(FakePipeline(refuse)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, **fields})
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (name, f"{name} is refused")


def test_instructions_and_language_have_short_spellings() -> None:
    voice = voice_request(body(instructions="slowly", language="German")).voice
    assert (voice.instruct, voice.language) == ("slowly", "German")


def test_a_reference_voice_is_decoded_at_its_own_rate_and_only_when_needed() -> None:
    pipeline = FakePipeline()
    reference = base64.b64encode(wav_bytes(0.2, rate=22_050)).decode()
    asked = {"messages": HELLO, "additional_information": {"tts_ref_audio": [reference]}}
    with serving(pipeline) as url:
        for more in ({}, {"modalities": ["text"]}):
            assert httpx.post(f"{url}/v1/chat/completions", json={**asked, **more}).status_code == 200
    spoken, written = pipeline.requests
    assert spoken.voice.ref_audio is not None
    assert spoken.voice.ref_audio.rate == 22_050
    assert written.voice.ref_audio is None
    assert not written.speak


@pytest.mark.parametrize(
    ("stages", "speak", "answering"),
    [(("asr", "aura"), False, "aura"), (("asr",), False, "asr"), (("talker", "code2wav"), True, "talker")],
)
def test_a_pipeline_answers_with_what_it_has(stages: Any, speak: bool, answering: StageName) -> None:
    pipeline = FakePipeline()
    pipeline.stages = stages
    with serving(pipeline) as url:
        body = {"messages": HELLO, "temperature": 0.25}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    (request,) = pipeline.requests
    assert request.speak is speak
    assert request.sampling == {answering: {"temperature": 0.25}}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted(ChatRequest.model_fields)) | st.sampled_from(sorted(ChatRequest.not_served))
MESSAGE_NAMES = st.sampled_from(["role", "content", "audio", "name", "tool_calls"])
STAGE_ENTRIES = st.dictionaries(st.sampled_from([item.name for item in fields(Sampling)]), JSON_VALUES, max_size=3)
INFORMATION = st.dictionaries(st.sampled_from(["tts_speaker", "tts_task_type", "tts_max_new_tokens"]), JSON_VALUES)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(NAMES, JSON_VALUES, max_size=3),
    st.dictionaries(MESSAGE_NAMES, JSON_VALUES, max_size=3),
    st.lists(STAGE_ENTRIES, max_size=4),
    INFORMATION,
)
def test_no_json_value_in_any_field_is_more_than_a_bad_request(
    top: dict[str, Any], message: dict[str, Any], entries: list[Any], information: dict[str, Any]
) -> None:
    raw = {"messages": [message, *HELLO], "sampling_params_list": entries, "additional_information": information, **top}
    refusal: AuraError | None = None

    async def read() -> None:
        asked = checked(ChatRequest, raw)
        async with turn_request(asked, STAGES, wanted_of(asked, FakePipeline()), MediaReader(MediaPolicy())):
            pass

    try:
        asyncio.run(read())
    except AuraError as error:
        refusal = error
    if refusal is not None:
        assert 400 <= refusal.status < 500
        assert len(error_body(refusal)["error"]["message"]) <= 500
