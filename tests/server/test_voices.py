"""Uploaded voices, seen by the official client and by upstream's clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aura_omni.media.audio import decode_audio
from aura_omni.pipeline import Pipeline
from aura_omni.server.app import ServerConfig
from aura_omni.stages.pace import Pace
from tests.family import DATA, config
from tests.server.conftest import data_url, wav_bytes
from tests.server.fake import FakePipeline, serving

Served = Callable[..., openai.OpenAI]
RECORDING = (DATA / "human_a.wav").read_bytes()


class Cloner(FakePipeline):
    voice_task = "Base"
    speakers = ()


def kept_in(folder: Path) -> ServerConfig:
    return ServerConfig(voices_dir=folder)


def upload(client: openai.OpenAI, name: str = "Ada", recording: bytes = RECORDING, **more: Any) -> Any:
    return client.audio.voices.create(
        audio_sample=("ada.wav", recording, "audio/wav"), consent="Ada, 2026-11-30", name=name, extra_body=more or None
    )


def listed(client: openai.OpenAI) -> dict[str, Any]:
    return client.get("/audio/voices", cast_to=httpx.Response).json()


def test_an_upload_is_listed_with_its_details_and_kept_over_a_restart(served: Served, tmp_path: Path) -> None:
    voice = upload(served(Cloner(), kept_in(tmp_path)), ref_text="What is this?", speaker_description="calm")
    assert (voice.id, voice.name, voice.object, voice.type) == ("Ada", "Ada", "audio.voice", "audio_sample")
    assert voice.model_extra["success"] is True
    answer = listed(served(Cloner(), kept_in(tmp_path)))
    assert answer["voices"] == ["Ada"]
    (shown,) = answer["uploaded_voices"]
    assert shown == voice.model_extra["voice"]
    assert shown.pop("created_at") == voice.created_at
    assert shown == {
        "name": "Ada",
        "consent": "Ada, 2026-11-30",
        "file_size": len(RECORDING),
        "mime_type": "audio/wav",
        "duration_s": pytest.approx(8.3, abs=0.1),
        "embedding_source": "audio",
        "ref_text": "What is this?",
        "speaker_description": "calm",
    }


def test_a_deleted_voice_is_gone(served: Served, tmp_path: Path) -> None:
    client = served(Cloner(), kept_in(tmp_path))
    upload(client)
    assert client.delete("/audio/voices/ada", cast_to=httpx.Response).json()["success"] is True
    assert listed(client) == {"voices": [], "uploaded_voices": []}
    with pytest.raises(openai.NotFoundError, match="Voice 'ada' not found"):
        client.delete("/audio/voices/ada", cast_to=httpx.Response)
    with pytest.raises(openai.BadRequestError, match="unknown; none is uploaded yet"):
        client.audio.speech.create(input="Hello.", model="AURA", voice="ada")


@pytest.mark.parametrize("ref_text", [None, "What is this?"])
def test_the_name_stands_for_the_recording_in_speech_and_chat(
    served: Served, tmp_path: Path, ref_text: str | None
) -> None:
    pipeline = Cloner()
    client = served(pipeline, kept_in(tmp_path))
    upload(client, **({"ref_text": ref_text} if ref_text else {}))
    client.audio.speech.create(input="Hello.", model="AURA", voice=" ada ")
    hello: list[Any] = [{"role": "user", "content": "Hello?"}]
    client.chat.completions.create(model="AURA", messages=hello, audio={"voice": "Ada", "format": "wav"})
    for request in pipeline.requests:
        voice = request.voice
        assert voice.speaker is None
        assert voice.ref_audio is not None
        np.testing.assert_array_equal(voice.ref_audio.samples, decode_audio(RECORDING, max_s=60).samples)
        assert (voice.ref_text, voice.x_vector_only) == (ref_text, ref_text is None)
    silent: dict[str, Any] = {"model": "AURA", "messages": hello, "modalities": ["text"]}
    client.chat.completions.create(**silent, audio={"voice": "Ada", "format": "wav"})
    assert (pipeline.requests[-1].voice.ref_audio, pipeline.requests[-1].voice.speaker) == (None, None)
    with pytest.raises(openai.BadRequestError, match="'x' is unknown; there are Ada") as refusal:
        client.chat.completions.create(**silent, audio={"voice": "x", "format": "wav"})
    assert refusal.value.param == "audio.voice"


def test_a_talker_that_cannot_clone_says_so(served: Served, tmp_path: Path) -> None:
    client = served(FakePipeline(), kept_in(tmp_path))
    upload(client)
    answer = listed(client)
    assert answer["voices"] == ["vivian", "ryan"]
    assert [voice["name"] for voice in answer["uploaded_voices"]] == ["Ada"]
    with pytest.raises(openai.BadRequestError, match=r"CustomVoice.*cannot clone") as refusal:
        client.audio.speech.create(input="Hello.", model="AURA", voice="Ada")
    assert (refusal.value.param, refusal.value.code) == ("voice", "invalid_voice")


def test_two_recordings_for_one_speech_are_refused(served: Served, tmp_path: Path) -> None:
    client = served(Cloner(), kept_in(tmp_path))
    upload(client)
    more = {"ref_audio": data_url(wav_bytes(), "audio/wav")}
    with pytest.raises(openai.BadRequestError, match="give one") as refusal:
        client.audio.speech.create(input="Hello.", model="AURA", voice="Ada", extra_body=more)
    assert refusal.value.param == "ref_audio"


def test_a_name_that_is_taken_is_a_conflict(served: Served, tmp_path: Path) -> None:
    client = served(FakePipeline(), kept_in(tmp_path))
    upload(client)
    upload(client)
    with pytest.raises(openai.ConflictError, match="exists"):
        upload(client, ref_text="another")
    with pytest.raises(openai.BadRequestError, match="voice of the checkpoint"):
        upload(client, "Vivian")


@pytest.mark.parametrize(
    ("fields", "file", "status", "param"),
    [
        ({"consent": None}, RECORDING, 400, "consent"),
        ({"consent": " "}, RECORDING, 400, "consent"),
        ({"consent": "false"}, RECORDING, 400, "consent"),
        ({"name": None}, RECORDING, 400, "name"),
        ({"name": "../ada"}, RECORDING, 400, "name"),
        ({"name": "a" * 65}, RECORDING, 400, "name"),
        ({"name": "\n"}, RECORDING, 400, "name"),
        ({"ref_text": "x" * 5_000}, RECORDING, 400, "ref_text"),
        ({"ref_text": "It was the best of times. " * 40}, RECORDING, 400, "ref_text"),
        ({"ref_text": "Oh."}, RECORDING, 400, "ref_text"),
        ({"ref_text": "😀 !"}, RECORDING, 400, "ref_text"),
        ({"speaker_embedding": "[0.1]"}, RECORDING, 400, "speaker_embedding"),
        ({"prompt": "a calm voice", "type": "prompt"}, RECORDING, 400, "prompt"),
        ({"colour": "red"}, RECORDING, 400, "colour"),
        ({}, None, 400, "audio_sample"),
        ({}, b"", 400, "audio_sample"),
        ({}, b"no sound", 400, "audio_sample"),
        ({}, wav_bytes(0.5), 400, "audio_sample"),
        ({}, wav_bytes(5), 400, "audio_sample"),  # a tone
        ({}, wav_bytes(31), 400, "audio_sample"),
        ({}, wav_bytes(330), 413, "audio_sample"),
    ],
)
def test_what_cannot_be_a_voice_is_refused_and_leaves_nothing(
    tmp_path: Path, fields: dict[str, Any], file: bytes | None, status: int, param: str
) -> None:
    form = {"name": "Ada", "consent": "yes", **fields}
    given = {name: (None, value) for name, value in form.items() if value is not None}
    with serving(Cloner(), kept_in(tmp_path)) as url:
        sent = given if file is None else {**given, "audio_sample": ("a.wav", file)}
        response = httpx.post(f"{url}/v1/audio/voices", files=sent)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_is_too_long_is_to_be_cut_since_nothing_raises_the_limit(
    served: Served, tmp_path: Path
) -> None:
    with pytest.raises(openai.BadRequestError, match="longer than 30 s; cut it") as refused:
        upload(served(Cloner(), kept_in(tmp_path)), recording=wav_bytes(31))
    assert "deploy file" not in refused.value.message


def test_a_transcript_of_something_else_is_refused_with_both_numbers(served: Served, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        upload(served(Cloner(), kept_in(tmp_path)), ref_text="It was the best of times. " * 40)
    for phrase in ("254 syllables", "8.3 s", "at most 128", "leave it out"):
        assert phrase in refused.value.message
    assert refused.value.code == "invalid_voice"


@pytest.mark.parametrize("declared", ["audio/mpeg", "text/html", "video/mp4"])
def test_the_type_of_a_recording_is_what_it_is_and_not_what_it_is_called(tmp_path: Path, declared: str) -> None:
    form = {"name": "Ada", "consent": "yes"}
    with serving(Cloner(), kept_in(tmp_path)) as url:
        sent = {"audio_sample": ("ada.mp3", RECORDING, declared)}
        kept = httpx.post(f"{url}/v1/audio/voices", data=form, files=sent).json()["voice"]
    assert kept["mime_type"] == "audio/wav"


def test_without_a_folder_nothing_is_taken_and_the_answer_says_what_to_do(served: Served) -> None:
    client = served(Cloner())
    assert listed(client) == {"voices": [], "uploaded_voices": []}
    with pytest.raises(openai.BadRequestError, match="--custom-voice-dir"):
        upload(client)
    with pytest.raises(openai.BadRequestError, match="--custom-voice-dir"):
        client.delete("/audio/voices/ada", cast_to=httpx.Response)


def test_a_server_that_does_not_speak_has_no_voices(served: Served, tmp_path: Path) -> None:
    pipeline = FakePipeline()
    pipeline.stages = ("asr",)
    with pytest.raises(openai.NotFoundError, match="does not speak"):
        upload(served(pipeline, kept_in(tmp_path)))


@pytest.mark.parametrize("ref_text", ["What is this?", None])
def test_an_uploaded_voice_sounds_as_its_recording_sent_along(
    tmp_path: Path, ref_text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tiny family: the whole way."""
    # For a listener who has no time: else a machine slower than real time sends, and so decodes, other frames together.
    monkeypatch.setitem(Pace.__init__.__kwdefaults__, "clock", lambda: 0.0)
    with (
        serving(Pipeline.load(config("tts_base")), kept_in(tmp_path)) as url,  # type: ignore[arg-type]
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        upload(client, **({"ref_text": ref_text} if ref_text else {}))
        asked: dict[str, Any] = {"input": "Hello there.", "response_format": "pcm", "seed": 5, "max_new_tokens": 6}
        by_name = httpx.post(f"{url}/v1/audio/speech", json={**asked, "voice": "Ada"}, timeout=60)
        reference = {"ref_audio": data_url(RECORDING, "audio/wav")}
        reference |= {"ref_text": ref_text} if ref_text else {"x_vector_only_mode": True}
        along = httpx.post(f"{url}/v1/audio/speech", json={**asked, **reference}, timeout=60)
    assert by_name.status_code == along.status_code == 200, by_name.text
    assert by_name.content == along.content
    assert len(by_name.content) == 6 * 2 * 1_920
