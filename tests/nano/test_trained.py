"""The checkpoints that ship, as a user meets them: `aura-omni serve` alone, asked over HTTP what no training showed or said.

The voices are two that ASR never heard (`spoken/`, see SOURCES.md), the pictures are drawn here. Shares over fixed sets, so
that getting worse fails and one lucky case does not pass.
"""

from __future__ import annotations

import base64
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from aura_omni import nano
from aura_omni.errors import CheckpointError
from aura_omni.flow import SILENT_TEXT, Message, Text
from aura_omni.media.video import CHUNK_FPS, video_of
from tests.nano import shown
from tests.nano.shown import CASES, CHANGED, CHANGES, WATCHES, Camera, colours_of, seen
from tests.served import ROOT, Server
from training.asr.opus import clips
from training.asr.sounds import sound
from training.asr.wer import words
from training.aura.data import Maker
from training.aura.looks import Album
from training.over_http import CHECKPOINT, Asked, conversations, nobody_speaks, spoken, wav

VOICES = ("rms", "espeak")
RECORDED = {
    voice: {text: samples.astype(np.float32) / 32768 for samples, text in clips(Path(__file__).parent / f"spoken/{voice}.opus")}
    for voice in VOICES
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(log=tmp_path_factory.mktemp("nano") / "log")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def written(server: Server) -> Asked:
    return Asked(server.url)


def aloud(server: Server, voice: str) -> Asked:
    return Asked(server.url, say=RECORDED[voice].__getitem__)


def asked_all(asked: Asked) -> list[tuple[str, str, str | None]]:
    """(question, right answer, answer) of all cases; every third scene is a picture where motion is not asked about."""
    found = []
    for number, (scene, questions) in enumerate(CASES.items()):
        still = number % 3 == 2 and not any("moving" in answer for _, answer in questions)
        medium = seen(scene, 100 + number, still=still)
        for question, right in questions:
            found.append((question, right, asked.answer([Message("user", (medium, Text(question)))], None)))
    return found


def test_written_questions_about_pictures_and_clips_are_answered_right(written: Asked) -> None:
    answers = asked_all(written)
    wrong = [answer for answer in answers if answer[1] != answer[2]]
    assert len(answers) == 54
    assert len(wrong) <= 3, wrong


@pytest.mark.parametrize("voice", VOICES)
def test_spoken_questions_of_voices_never_heard_are_answered_right(server: Server, voice: str) -> None:
    asked = aloud(server, voice)
    answers = asked_all(asked)
    wrong = [
        (*answer, heard) for answer, (_, heard) in zip(answers, asked.heard, strict=True) if answer[1] != answer[2]
    ]
    assert len(wrong) <= 4, wrong
    assert sum(words(said) == words(heard) for said, heard in asked.heard) >= 51, asked.heard


def test_a_question_outside_the_small_world_is_answered_with_what_nano_can_do(written: Asked) -> None:
    square = seen("red square", 5)
    for question in ("Who is the king of Spain?", "What is seven times eight?", "Can you call my mother?"):
        answer = written.answer([Message("user", (square, Text(question)))], None)
        assert answer == "I can only talk about the simple shapes and colours I see."
    assert written.answer([Message("user", (Text("What do you see?"),))], None) == "I do not see any picture."


def test_a_chunk_without_a_word_is_silence(written: Asked) -> None:
    said = [written.answer([Message("user", (seen(scene, 300 + n),))], None) for n, scene in enumerate(CASES)]
    assert [text for text in said if text is not None] == []


def test_sounds_that_are_no_speech_are_silence(written: Asked) -> None:
    rng, noise = random.Random(77), np.random.default_rng(77)
    quiet = [sound(rng) for _ in range(8)]
    quiet += [(noise.standard_normal(32_000) * level).astype(np.float32) for level in (1e-4, 1e-2, 0.1)]
    star = seen("green star left", 6)
    assert [text for samples in quiet if (text := written.overhears(star, samples)) is not None] == []


def watched(asked: Asked, number: int) -> list[str | None]:
    """What is said in each chunk of a session; the request is spoken with the first, and the history is the model's own."""
    request, shows, _ = WATCHES[number]
    scenes = [scene for scene, chunks in shows for _ in range(chunks)]
    camera = Camera(200 + number, colours=frozenset[int]().union(*map(colours_of, scenes)))
    messages: list[Message] = []
    said: list[str | None] = []
    for chunk, scene in enumerate(scenes):
        seconds = video_of(camera.chunk(scene), (0.0, 0.5), fps=CHUNK_FPS)
        messages.append(Message("user", (seconds, Text(request if chunk == 0 else ""))))
        said.append(asked.answer(messages, None))
        messages.append(Message("assistant", (Text(SILENT_TEXT if said[-1] is None else said[-1]),)))
    return said


def test_a_watch_request_is_acknowledged_then_kept_in_silence_until_the_alert(server: Server) -> None:
    asked = aloud(server, "rms")
    sessions = [watched(asked, number) for number in range(len(WATCHES))]
    pairs = list(zip(sessions, WATCHES, strict=True))
    acknowledged = [said[0] is not None and said[0].startswith("Okay, I will tell you") for said in sessions]
    alerts = [said[at] == alert for said, (_, _, due) in pairs for at, alert in due.items()]
    silences = [text is None for said, (_, _, due) in pairs for at, text in enumerate(said) if at and at not in due]
    report = [(heard, said) for (_, heard), said in zip(asked.heard, sessions, strict=True)]
    assert len(alerts) == 9
    assert len(silences) == 35
    assert all(acknowledged), report
    assert sum(alerts) >= 8, report
    assert sum(silences) >= 34, report
    # Once: after the alert of a request that asked for one, the thing is still there and nothing more is said.
    assert sum(sum(text is not None for text in said[1:]) == len(due) for said, (_, _, due) in pairs) >= 7, report


def test_what_changed_from_one_chunk_to_the_next_is_known_when_asked_aloud(server: Server) -> None:
    asked = aloud(server, "espeak")
    said = []
    for number, (before, after) in enumerate(CHANGES):
        camera = Camera(400 + number, colours=colours_of(f"{before}, {after}"))
        messages: list[Message] = []
        for scene, text in ((before, ""), (before, ""), (after, CHANGED)):
            chunk = video_of(camera.chunk(scene), (0.0, 0.5), fps=CHUNK_FPS)
            messages.append(Message("user", (chunk, Text(text))))
            answer = asked.answer(messages, None)
            messages.append(Message("assistant", (Text(SILENT_TEXT if answer is None else answer),)))
        said.append(answer)
    assert len(said) == 5
    assert sum(one == right for one, right in zip(said, CHANGES.values(), strict=True)) >= 4, said


def test_drawn_conversations_and_sessions_are_held_as_the_readme_measures_it(written: Asked) -> None:
    maker = Maker(CHECKPOINT, Album((), ()), seed=12, unseen=None, slips=0.0)
    tally = conversations(written, maker, shown.PAINTER, looks=15, sessions=2, chunks=8)
    tally_of_sounds = nobody_speaks(written, maker, shown.PAINTER, 6)
    shares = {name: right / count for name, (right, count) in (tally.counts | tally_of_sounds.counts).items()}
    assert tally.counts["all answers"][1] >= 40
    assert shares["all answers"] >= 0.93, tally.shares()
    assert shares["silence decision"] >= 0.98, tally.shares()
    assert all(share == 1 for name, share in shares.items() if name.startswith("silent at"))


# ---------------------------------------------------------------- through the clients


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


HELLO = [{"role": "user", "content": "Hello."}]


def test_without_modalities_the_answer_is_text_and_sound(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model="aura-nano", messages=HELLO).choices[0].message
    assert message.audio.transcript == "Hello! Ask me about the shapes you show me."
    assert base64.b64decode(message.audio.data)[:4] == b"RIFF"


def test_a_silent_turn_says_so_and_has_no_audio(server: Server) -> None:
    content = [spoken(np.zeros(16_000, np.float32))]
    body = {"model": "aura-nano", "messages": [{"role": "user", "content": content}]}
    (choice,) = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    assert choice["message"]["content"] == SILENT_TEXT
    assert choice["silent"]
    assert not choice["message"].get("audio")


def test_a_spoken_question_is_written_down(client: openai.OpenAI) -> None:
    file = ("question.wav", wav(RECORDED["rms"]["What do you see?"]))
    assert client.audio.transcriptions.create(model="aura-nano", file=file).text == "What do you see?"


def test_the_clients_of_the_examples_get_the_answer_of_the_readme(server: Server, tmp_path: Path) -> None:
    examples = ROOT / "examples/online_serving/aura_omni"
    for command in (
        [sys.executable, str(examples / "openai_chat_completion_client.py"), "--port", str(server.port)],
        [sys.executable, str(examples / "openai_chat_completion_client.py"), "--port", str(server.port), "--stream"],
        ["bash", str(examples / "run_curl_multimodal_query.sh"), str(server.port)],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[0] == "The red circle is moving.", done.stderr
    assert "The red circle is moving." in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_checkpoint_that_does_not_ship_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        CheckpointError, match=r"'nano:tts-design'; there are nano:asr, nano:aura, nano:tts, nano:tts-base, tiny:asr"
    ):
        nano.folder_of("nano:tts-design")


def test_the_checkpoints_are_small_and_say_what_they_are() -> None:
    for name in ("asr", "aura"):
        folder = nano.folder_of(f"nano:{name}")
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "license: apache-2.0" in card
        assert sum(file.stat().st_size for file in folder.iterdir()) < 13.5e6
