"""A voice that is not the server's own, through the whole server: brought, used, and taken away again.

The voice is one that no training heard (`tests/nano/spoken/rms.opus`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aura_omni.flow import FRAME_SAMPLES, SPEECH_RATE
from aura_omni.media.audio import decode_audio
from aura_omni.server.app import ServerConfig
from tests.cases.conftest import Served, served_with, shipped
from tests.cases.test_reports_sound import pcm, post
from tests.media_files import make_audio
from tests.served import ROOT
from training.asr.opus import clips

TEXT = "The red circle is on the left."
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "modalities": ["text", "audio"], "seed": 5}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(shipped("nano:tts-base"), ServerConfig(voices_dir=tmp_path_factory.mktemp("voices"))) as served:
        yield served


@cache
def reference() -> tuple[bytes, str]:
    """The longest of the recordings, as a file, and its words."""
    samples, text = max(clips(ROOT / "tests/nano/spoken/rms.opus"), key=lambda clip: len(clip[0]))
    return make_audio(samples.astype(np.float32) / 32_768, SPEECH_RATE, "wav", "pcm_s16le", "s16"), text


def in_voice(served: Served, **fields: Any) -> np.ndarray:
    return pcm(post(f"{served.url}/v1/audio/speech", {"input": TEXT, "seed": 5, "response_format": "pcm", **fields}))


def data_url(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


def brought(ref_text: str | None = None) -> dict[str, Any]:
    """The recording as fields of a request; without its words it is used for its timbre alone."""
    said = {"x_vector_only_mode": True} if ref_text is None else {"ref_text": ref_text}
    return {"ref_audio": data_url(reference()[0]), **said}


@pytest.fixture
def ada(base: Served, request: pytest.FixtureRequest) -> Iterator[str]:
    """An uploaded voice, with what its recording says or without."""
    more = {"ref_text": reference()[1]} if request.param else None
    voice = base.client.audio.voices.create(
        name="Ada", audio_sample=("ada.wav", reference()[0], "audio/wav"), consent="Ada, 2026-11-30", extra_body=more
    )
    yield voice.name
    httpx.delete(f"{base.url}/v1/audio/voices/Ada").raise_for_status()
    with pytest.raises(openai.BadRequestError, match="unknown; none is uploaded yet"):
        base.client.audio.speech.create(input=TEXT, model=base.model, voice="Ada")


@pytest.mark.parametrize("ada", [False, True], ids=["its timbre", "continued"], indirect=True)
def test_an_uploaded_voice_speaks_as_the_same_recording_in_the_request_does(base: Served, ada: str) -> None:
    (listed,) = httpx.get(f"{base.url}/v1/audio/voices").json()["uploaded_voices"]
    assert (listed["name"], listed["consent"]) == (ada, "Ada, 2026-11-30")
    by_name = in_voice(base, voice=ada)
    np.testing.assert_array_equal(by_name, in_voice(base, **brought(listed.get("ref_text"))))
    assert 10 * FRAME_SAMPLES < len(by_name) < 60 * FRAME_SAMPLES, "seven words"


@pytest.mark.parametrize("ada", [False], ids=["its timbre"], indirect=True)
def test_an_uploaded_voice_answers_in_a_chat(base: Served, ada: str) -> None:
    answer = base.client.chat.completions.create(model=base.model, **HELLO, audio={"voice": ada, "format": "wav"})
    (choice,) = answer.choices
    assert choice.message.content == "Hello! Ask me about the shapes you show me."
    assert decode_audio(base64.b64decode(choice.message.audio.data), max_s=60).duration_s > 1
    assert choice.model_extra["audio_finish_reason"] == "stop"


def test_streamed_sound_of_a_cloned_voice_is_whole_sound(base: Served) -> None:
    for said in (None, reference()[1]):
        whole = in_voice(base, **brought(said), response_format="wav")
        streamed = in_voice(base, **brought(said), stream_format="audio")
        np.testing.assert_array_equal(streamed, whole)


@pytest.mark.parametrize(
    "ref_text", ["No.", "Far more than anybody says in so short a time. " * 20], ids=["less", "more"]
)
def test_a_transcript_that_does_not_fit_is_refused_with_both_numbers(base: Served, ref_text: str) -> None:
    sound = np.tile(decode_audio(reference()[0], max_s=60).samples, 4)
    fields = {"ref_audio": data_url(make_audio(sound, SPEECH_RATE, "wav", "pcm_s16le", "s16")), "ref_text": ref_text}
    before = len(base.witness.requests)
    words = rf"syllables, the recording {len(sound) / SPEECH_RATE:.1f} s"
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        base.client.audio.speech.create(input=TEXT, model=base.model, voice="", extra_body=fields)
    assert refusal.value.param == "ref_text"
    assert len(base.witness.requests) == before


def test_a_recording_in_which_nobody_speaks_is_refused_in_a_request_as_in_an_upload(base: Served) -> None:
    half = np.sin(np.arange(3 * SPEECH_RATE) * 0.05).astype(np.float32) / 2
    mixed = make_audio(np.stack([half, -half], axis=1), SPEECH_RATE, "wav", "pcm_s16le", "s16", layout="stereo")
    for file in (make_audio(half * 0, SPEECH_RATE, "wav", "pcm_s16le", "s16"), mixed):
        fields = {"ref_audio": data_url(file), "x_vector_only_mode": True}
        with pytest.raises(openai.BadRequestError, match="nobody speaks in ref_audio") as refusal:
            base.client.audio.speech.create(input=TEXT, model=base.model, voice="", extra_body=fields)
        assert refusal.value.param == "ref_audio"
        with pytest.raises(openai.BadRequestError, match="nobody speaks"):
            base.client.audio.voices.create(name="Eve", audio_sample=("a.wav", file, "audio/wav"), consent="Eve")


def test_a_transcript_without_a_word_is_refused(base: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="ref_text has no letter or digit") as refusal:
        base.client.audio.speech.create(input=TEXT, model=base.model, voice="", extra_body=brought("😀👍"))
    assert refusal.value.param == "ref_text"


def test_without_a_voice_the_request_is_refused_and_the_next_is_answered(base: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="ref_audio"):
        base.client.chat.completions.create(model=base.model, **HELLO)
    assert len(in_voice(base, **brought())) > 10 * FRAME_SAMPLES
