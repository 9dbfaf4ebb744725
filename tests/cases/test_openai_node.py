"""OpenAI's client for Node drives every endpoint, and hears what the one for Python hears."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aura_omni.flow import VOICE_RATE
from aura_omni.media.audio import decode_audio
from aura_omni.server.app import ServerConfig
from tests.cases.conftest import Served
from tests.family import DATA
from tests.server.fake import serving

NODE = Path(__file__).parent / "node"
RECORDING = DATA / "human_a.wav"
CODER_S = 0.15  # what a coder may add at the ends
STEP = 2  # of 16 bits: alone and in a batch the same sound differs by rounding


@pytest.fixture(scope="module", params=["tiny", "nano"])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def driven(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules/openai").is_dir():
        reason = "needs Node and its packages: install nodejs and npm, then `make node`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with serving(served.witness, ServerConfig(voices_dir=tmp_path_factory.mktemp("voices"))) as url:
        done = subprocess.run(
            [node, NODE / "drive.mjs", f"{url}/v1", RECORDING], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    failed = {name: result["failed"] for name, result in results.items() if "failed" in (result or ())}
    assert not failed
    return results


def samples(encoded: str) -> np.ndarray:
    """int [n] of base64 pcm16 or WAV."""
    data = base64.b64decode(encoded)
    if data[:4] == b"RIFF":
        with wave.open(io.BytesIO(data)) as reader:
            data = reader.readframes(reader.getnframes())
    return np.frombuffer(data, "<i2").astype(int)


def seconds(encoded: str) -> float:
    return decode_audio(base64.b64decode(encoded), max_s=60).duration_s


def assert_same_sound(one: str, other: str) -> None:
    first, second = samples(one), samples(other)
    assert len(first) == len(second) > 0
    assert np.abs(first - second).max() <= STEP


def asked(served: Served) -> Any:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(RECORDING.read_bytes()).decode()}}
    sound["input_audio"]["format"] = "wav"
    return served.client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": [sound, {"type": "text", "text": "What is that?"}]}],
        temperature=0,
        seed=7,
        max_tokens=8,
        modalities=["text", "audio"],
        audio={"voice": "vivian", "format": "pcm16"},
    )


def test_models_are_listed_and_found(served: Served, driven: dict[str, Any]) -> None:
    assert driven["models"] == list(served.witness.served_names)
    assert driven["one_model"] == served.model


def test_a_whole_chat_is_the_same_for_both_clients(served: Served, driven: dict[str, Any]) -> None:
    answer = asked(served)
    message = answer.choices[0].message
    assert driven["chat"]["text"] == driven["chat"]["transcript"] == message.content
    assert driven["chat"]["finish_reason"] == answer.choices[0].finish_reason
    assert driven["chat"]["usage"]["total_tokens"] == answer.usage.total_tokens
    assert_same_sound(driven["chat"]["audio"], message.audio.data)


@pytest.mark.parametrize("audio_format", ["pcm16", "mp3"])
def test_a_streamed_chat_is_the_whole_chat(driven: dict[str, Any], audio_format: str) -> None:
    chat, streamed = driven["chat"], driven["chat_streams"][audio_format]
    assert streamed["text"] == streamed["transcript"] == chat["text"]
    assert streamed["finish_reasons"] == [chat["finish_reason"]]
    assert streamed["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
    assert (len(streamed["audio_ids"]), len(streamed["expires_at"])) == (1, 1)
    if audio_format == "pcm16":
        assert_same_sound(streamed["audio"], chat["audio"])
    else:
        assert seconds(streamed["audio"]) == pytest.approx(len(samples(chat["audio"])) / VOICE_RATE, abs=CODER_S)


def test_the_streaming_helper_of_the_client_gives_the_same_text(driven: dict[str, Any]) -> None:
    assert driven["chat_helper"]["text"] == driven["chat"]["text"]


def test_streamed_speech_is_whole_speech(driven: dict[str, Any]) -> None:
    assert_same_sound(driven["speech_stream"], driven["speech"]["wav"])
    assert_same_sound(driven["speech"]["pcm"], driven["speech"]["wav"])


def test_speech_in_events_is_whole_speech(driven: dict[str, Any]) -> None:
    events = driven["speech_events"]
    assert events["types"] == ["speech.audio.delta", "speech.audio.done"]
    assert events["usage"]["output_tokens"] > 0
    assert_same_sound(events["audio"], driven["speech"]["wav"])


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
def test_speech_comes_in_every_format(driven: dict[str, Any], audio_format: str) -> None:
    meant = len(samples(driven["speech"]["wav"])) / VOICE_RATE
    assert seconds(driven["speech"][audio_format]) == pytest.approx(meant, abs=CODER_S)


def test_a_voice_is_uploaded_listed_and_deleted(served: Served, driven: dict[str, Any]) -> None:
    voices = driven["voices"]
    speakers = list(served.witness.speakers)
    assert voices["before"] == voices["after"] == {"voices": speakers, "uploaded_voices": []}
    assert (voices["uploaded"]["id"], voices["uploaded"]["object"]) == ("Ada", "audio.voice")
    assert voices["between"] == {"voices": speakers, "uploaded_voices": [voices["uploaded"]["voice"]]}
    assert (voices["deleted"]["id"], voices["deleted"]["deleted"]) == ("Ada", True)
    assert (voices["again"]["name"], voices["again"]["status"]) == ("BadRequestError", 400)
    assert (voices["gone"]["name"], voices["gone"]["status"]) == ("NotFoundError", 404)


def test_a_transcript_is_the_same_for_both_clients_and_streamed(served: Served, driven: dict[str, Any]) -> None:
    heard = served.client.audio.transcriptions.create(model=served.model, file=RECORDING)
    assert driven["transcription"] == heard.text
    assert driven["transcription_stream"] == {"deltas": heard.text, "done": heard.text}


@pytest.mark.parametrize("response_format", ["json", "text", "verbose_json", "srt", "vtt"])
def test_a_transcript_in_every_format_is_the_same_for_both_clients(
    served: Served, driven: dict[str, Any], response_format: Any
) -> None:
    meant = served.client.audio.transcriptions.create(
        model=served.model, file=RECORDING, response_format=response_format
    )
    found = driven["transcription_formats"][response_format]
    assert found
    assert found == (meant if isinstance(meant, str) else json.loads(meant.to_json()))


def test_a_translation_is_refused_by_the_clients_own_error(driven: dict[str, Any]) -> None:
    assert driven["translation"].pop("id")
    assert driven["translation"] == {
        "name": "BadRequestError", "status": 400, "param": None, "code": "unsupported_option",
    }  # fmt: skip


def test_a_refusal_is_the_clients_own_error(driven: dict[str, Any]) -> None:
    assert driven["refusal"].pop("id")
    assert driven["refusal"] == {
        "name": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_request",
    }  # fmt: skip
    assert (driven["no_model"]["name"], driven["no_model"]["status"]) == ("NotFoundError", 404)
