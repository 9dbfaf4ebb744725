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

from tests.cases.conftest import Served
from tests.family import DATA

NODE = Path(__file__).parent / "node"
RECORDING = DATA / "human_a.wav"
STEP = 2  # of 16 bits: alone and in a batch the same sound differs by rounding


@pytest.fixture(scope="module")
def driven(served: Served) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules/openai").is_dir():
        reason = "needs Node and its packages: install nodejs and npm, then `make node`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        [node, NODE / "drive.mjs", f"{served.url}/v1", RECORDING], capture_output=True, text=True, timeout=120
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


def assert_same_sound(one: str, other: str) -> None:
    first, second = samples(one), samples(other)
    assert len(first) == len(second) > 0
    assert np.abs(first - second).max() <= STEP


def asked(served: Served) -> Any:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(RECORDING.read_bytes()).decode()}}
    sound["input_audio"]["format"] = "wav"
    return served.client.chat.completions.create(
        model=served.witness.served_names[0],
        messages=[{"role": "user", "content": [sound, {"type": "text", "text": "What is that?"}]}],
        temperature=0,
        seed=7,
        max_tokens=8,
        modalities=["text", "audio"],
        audio={"voice": "vivian", "format": "pcm16"},
    )


def test_models_are_listed_and_found(served: Served, driven: dict[str, Any]) -> None:
    assert driven["models"] == list(served.witness.served_names)
    assert driven["one_model"] == served.witness.served_names[0]


def test_a_whole_chat_is_the_same_for_both_clients(served: Served, driven: dict[str, Any]) -> None:
    answer = asked(served)
    message = answer.choices[0].message
    assert driven["chat"]["text"] == driven["chat"]["transcript"] == message.content
    assert driven["chat"]["finish_reason"] == answer.choices[0].finish_reason
    assert driven["chat"]["usage"]["total_tokens"] == answer.usage.total_tokens
    assert_same_sound(driven["chat"]["audio"], message.audio.data)


def test_a_streamed_chat_is_the_whole_chat(driven: dict[str, Any]) -> None:
    assert driven["chat_stream"]["text"] == driven["chat"]["text"]
    assert driven["chat_stream"]["finish_reasons"] == [driven["chat"]["finish_reason"]]
    assert driven["chat_stream"]["usage"]["total_tokens"] == driven["chat"]["usage"]["total_tokens"]
    assert_same_sound(driven["chat_stream"]["audio"], driven["chat"]["audio"])


def test_the_streaming_helper_of_the_client_gives_the_same_text(driven: dict[str, Any]) -> None:
    assert driven["chat_helper"]["text"] == driven["chat"]["text"]


def test_streamed_speech_is_whole_speech(driven: dict[str, Any]) -> None:
    assert_same_sound(driven["speech_stream"], driven["speech"])


def test_a_transcript_is_the_same_for_both_clients_and_streamed(served: Served, driven: dict[str, Any]) -> None:
    heard = served.client.audio.transcriptions.create(model=served.witness.served_names[0], file=RECORDING)
    assert driven["transcription"] == heard.text
    assert driven["transcription_stream"] == {"deltas": heard.text, "done": heard.text}


def test_a_refusal_is_the_clients_own_error(driven: dict[str, Any]) -> None:
    assert driven["refusal"].pop("id")
    assert driven["refusal"] == {
        "name": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_request",
    }  # fmt: skip
    assert driven["no_model"] == {"name": "NotFoundError", "status": 404}
