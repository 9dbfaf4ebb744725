"""The voice of the checkpoints that ship, over HTTP, heard by a recogniser that has nothing to do with this project.

What is said to the server was never trained on: questions of a voice that ASR never heard, and texts that the Talker's
training leaves out. Shares over fixed sets, as in `test_trained`.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from aura_omni import nano
from aura_omni.flow import SILENT_TEXT, VOICE_RATE
from tests.nano.shown import CASES, WATCHES, Camera, colours_of
from tests.served import Server
from training.asr.opus import clips as recorded
from training.over_http import mp4, spoken
from training.tts.ear import Ear, word_error
from training.tts.served import level_of, median_pitch, roughness
from training.tts.texts import clips

QUESTIONS = {text: samples.astype(np.float32) / 32768 for samples, text in recorded(Path(__file__).parent / "spoken/rms.opus")}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(log=tmp_path_factory.mktemp("nano") / "log")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def ear() -> Ear:
    return Ear()


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    sound: np.ndarray  # float32 [n] at 24 kHz; empty: none was sent
    finish: str | None
    first_sound_s: float | None


def chunk(frames: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(mp4(frames)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}


def seen(scene: str, seed: int) -> dict[str, Any]:
    return chunk(Camera(seed, colours=colours_of(scene)).chunk(scene))


def asked(server: Server, messages: list[dict[str, Any]]) -> Answer:
    """Streamed, in OpenAI's shape: text and sound as they are made."""
    body = {
        "model": "aura-nano", "modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": ""}, "stream": True,
        "messages": messages,
    }  # fmt: skip
    text, data, finish, first, started = "", b"", None, None, time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                audio = delta.get("audio") or {}
                text += audio.get("transcript") or ""
                data += base64.b64decode(audio.get("data") or "")
                finish = choice.get("audio_finish_reason") or finish
            if data and first is None:
                first = time.monotonic() - started
    return Answer(text, np.frombuffer(data, "<i2").astype(np.float32) / 32768, finish, first)


def speech(server: Server, text: str, **fields: Any) -> tuple[np.ndarray, str]:
    """(float32 [n], why it ended)"""
    body = {"model": "aura-nano", "input": text, "response_format": "wav", **fields}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == VOICE_RATE
    return samples, answer.headers["x-audio-finish-reason"]


@cache
def unseen(count: int) -> list[str]:
    """Texts of the domain that training leaves out."""
    return list(itertools.islice((text for text, held_out in clips("domain", 77) if held_out), count))


# ---------------------------------------------------------------- turns


@pytest.fixture(scope="module")
def turns(server: Server) -> list[tuple[str, str, Answer]]:
    """(question, right answer, answer): two spoken questions about each scene."""
    return [
        (question, right, asked(server, [{"role": "user", "content": [seen(scene, 700 + n), spoken(QUESTIONS[question])]}]))
        for n, (scene, questions) in enumerate(CASES.items())
        for question, right in questions[:2]
    ]  # fmt: skip


def test_spoken_questions_are_answered_right_and_the_answer_is_heard(turns: list, ear: Ear) -> None:
    assert len(turns) == 2 * len(CASES) == 30
    right = [answer.text == right for _, right, answer in turns]
    assert sum(right) >= 27, [(question, answer.text) for question, _, answer in turns]
    pairs = [(answer.text, ear.hear(answer.sound)) for _, _, answer in turns]
    assert word_error(pairs) <= 0.12, pairs
    assert [answer.finish for *_, answer in turns] == ["stop"] * len(turns)


def test_a_silent_turn_has_no_sound(server: Server) -> None:
    quiet = spoken(np.zeros(16_000, np.float32))
    for content in ([seen("red circle left", 31)], [quiet], [seen("", 32), quiet]):
        answer = asked(server, [{"role": "user", "content": content}])
        assert answer.text in ("", SILENT_TEXT)
        assert answer.sound.size == 0


def test_a_watch_request_is_answered_aloud_when_it_happens_and_not_before(server: Server, ear: Ear) -> None:
    request, shows, due = WATCHES[0]
    scenes = [scene for scene, chunks in shows for _ in range(chunks)]
    camera = Camera(205, colours=frozenset[int]().union(*map(colours_of, scenes)))
    messages: list[dict[str, Any]] = []
    said: list[Answer] = []
    for number, scene in enumerate(scenes):
        content = [chunk(camera.chunk(scene)), *([spoken(QUESTIONS[request])] if number == 0 else [])]
        messages.append({"role": "user", "content": content})
        said.append(asked(server, messages))
        messages.append({"role": "assistant", "content": said[-1].text or SILENT_TEXT})
    assert [answer.sound.size > 0 for answer in said] == [number == 0 or number in due for number in range(len(said))]
    for number, alert in due.items():
        assert said[number].text == alert
        assert word_error([(alert, ear.hear(said[number].sound))]) <= 0.2


# ---------------------------------------------------------------- speech


def test_texts_that_were_never_trained_on_are_heard_and_end_by_themselves(server: Server, ear: Ear) -> None:
    voices = itertools.cycle(("ryan", "vivian", "uncle_fu"))
    said = [(text, *speech(server, text, voice=voice)) for text, voice in zip(unseen(40), voices, strict=False)]
    assert {reason for *_, reason in said} == {"stop"}
    pairs = [(text, ear.hear(sound)) for text, sound, _ in said]
    assert word_error(pairs) <= 0.12, [pair for pair in pairs if word_error([pair])]
    levels = np.array([level_of(sound) for _, sound, _ in said])
    assert (levels[:, 0] > -32).all()
    assert (levels[:, 0] < -15).all()
    assert (levels[:, 1] < -1).all()  # nothing is clipped
    assert max(roughness(sound) for _, sound, _ in said) < 20  # a step of a fifth of full scale: more than 50


@pytest.mark.parametrize("text", ["Yes.", "Two.", "1", "OK", "A", "I", "7", "Hello! I am Aura."])
def test_the_shortest_texts_end_by_themselves(server: Server, text: str) -> None:
    sound, reason = speech(server, text, voice="ryan")
    assert reason == "stop"
    assert 0.2 < len(sound) / VOICE_RATE < 4
    assert level_of(sound)[0] > -35


@pytest.mark.parametrize("text", ["?!", "...", "🙂", "```\nx = 1\n```"])
def test_a_text_without_a_word_has_no_speech(server: Server, text: str) -> None:
    sound, reason = speech(server, text, voice="ryan")
    assert reason == "empty"
    assert not sound.any()


# ---------------------------------------------------------------- Base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    stages = json.dumps({stage: {"model": "nano:tts-base"} for stage in ("2", "3")})
    server = Server("--stage-overrides", stages, log=tmp_path_factory.mktemp("base") / "log")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["continues", "takes the vector of"])
def test_base_speaks_like_a_recording(server: Server, base: Server, ear: Ear, how: str) -> None:
    said = "I see a red circle and a blue square on the left."
    pitch = {}
    for voice in ("vivian", "uncle_fu"):
        recording, _ = speech(server, said, voice=voice)
        file = io.BytesIO()
        soundfile.write(file, recording, VOICE_RATE, format="WAV", subtype="PCM_16")
        url = f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"
        like = {"ref_text": said} if how == "continues" else {"x_vector_only_mode": True}
        spoken = [(text, *speech(base, text, ref_audio=url, **like)) for text in unseen(4)]
        assert {reason for *_, reason in spoken} == {"stop"}
        assert word_error([(text, ear.hear(sound)) for text, sound, _ in spoken]) <= 0.35
        pitch[voice] = (median_pitch(recording), np.nanmedian([median_pitch(sound) for _, sound, _ in spoken]))
    for reference, result in pitch.values():
        assert abs(np.log2(result / reference)) < 0.25, pitch


def test_base_without_a_recording_is_refused_with_what_it_needs(base: Server) -> None:
    answer = httpx.post(f"{base.url}/v1/audio/speech", json={"model": "aura-nano", "input": "Hello."}, timeout=60)
    assert answer.status_code == 400
    assert "ref_audio" in answer.json()["error"]["message"]


def test_the_voices_are_small_and_say_what_they_are() -> None:
    for name, most in (("tts", 31.5e6), ("tts-base", 1e6)):
        folder = nano.folder_of(f"nano:{name}")
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "license: apache-2.0" in card
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < most
    family = sum(file.stat().st_size for file in nano.CHECKPOINTS.rglob("*") if file.is_file())
    assert family <= 60e6
