"""The example clients, as a user runs them, against a server without models."""

from __future__ import annotations

import os
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from aura_omni.errors import Overloaded
from aura_omni.flow import FRAME_SAMPLES, SILENT_TEXT, Audio, Ended, Event, Text, TextDelta, TurnRequest, Video
from aura_omni.server.app import ServerConfig
from tests.server.conftest import mp4_bytes, wav_bytes
from tests.server.fake import FakePipeline, serving
from tests.server.test_run import free_port

EXAMPLES = Path(__file__).parents[2] / "examples/online_serving/aura_omni"
CLIENT = EXAMPLES / "openai_chat_completion_client.py"
SCRIPT = EXAMPLES / "run_curl_multimodal_query.sh"


@pytest.fixture
def clips(tmp_path: Path) -> tuple[Path, Path]:
    audio, video = tmp_path / "question.wav", tmp_path / "clip.mp4"
    audio.write_bytes(wav_bytes())
    video.write_bytes(mp4_bytes())
    return audio, video


def run(command: list[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "no_proxy": "*", **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def client(port: str, *arguments: str | Path) -> list[str | Path]:
    return [sys.executable, CLIENT, "--host", "127.0.0.1", "--port", port, *arguments]


def assert_spoken(folder: Path) -> None:
    assert (folder / "aura_output/answer.txt").read_text() == "Hello there.\n"
    with wave.open(str(folder / "aura_output/answer.wav")) as reader:
        assert reader.getframerate() == 24_000
        assert reader.getnframes() == 4 * FRAME_SAMPLES


@pytest.mark.parametrize("stream", [False, True])
def test_the_python_client_sends_files_and_writes_the_answer(
    clips: tuple[Path, Path], tmp_path: Path, stream: bool
) -> None:
    pipeline = FakePipeline()
    audio, video = clips
    with serving(pipeline) as url:
        options = ["--stream"] if stream else []
        command = client(
            url.rpartition(":")[2], "--audio-path", audio, "--video-path", video, "--prompt", "And?", *options
        )
        done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Hello there.", "text: aura_output/answer.txt", "audio: aura_output/answer.wav"]
    assert_spoken(tmp_path)
    kinds = [type(part) for part in pipeline.requests[0].messages[0].parts]
    assert kinds == [Video, Audio, Text]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_the_python_client_says_once_why_there_is_no_answer(tmp_path: Path, stream: bool, begun: bool) -> None:
    def fails(_: TurnRequest) -> Iterator[Event]:
        if begun:
            yield TextDelta("Hel")
        yield Ended("error", error=Overloaded("64 turns wait, the limit; ask again"))

    with serving(FakePipeline(fails)) as url:
        command = client(url.rpartition(":")[2], "--prompt", "Hi", *(["--stream"] if stream else []))
        done = run(command, tmp_path)
    why = "the answer is not whole" if stream and begun else "the server refused with status 429"
    assert (done.returncode, done.stderr) == (1, f"error: {why}: 64 turns wait, the limit; ask again\n")


def test_the_python_client_passes_every_option(clips: tuple[Path, Path], tmp_path: Path) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        command = client(
            url.rpartition(":")[2], "--prompt", "Hi", "--modalities", "text,audio", "--model", "aurateam/AURA",
            "--aura-system-prompt", "Be kind.", "--tts-task-type", "Base", "--tts-language", "English",
            "--tts-speaker", "Vivian", "--tts-instruct", "slowly", "--tts-ref-audio", clips[0], "--tts-ref-text", "ref",
            "--tts-x-vector-only-mode", "--tts-pass-token-ids", "--timeout", "30", "--output-dir", tmp_path / "out",
        )  # fmt: skip
        done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/answer.wav").is_file()
    (request,) = pipeline.requests
    voice = request.voice
    assert request.system_prompt == "Be kind."
    assert (voice.task, voice.language, voice.speaker) == ("Base", "English", "Vivian")
    assert (voice.instruct, voice.ref_text) == ("slowly", "ref")
    assert (voice.x_vector_only, voice.pass_token_ids) == (True, True)
    assert voice.ref_audio is not None
    assert voice.ref_audio.rate == 16_000


def test_the_python_client_says_when_the_model_stays_silent(tmp_path: Path) -> None:
    with serving(FakePipeline(lambda _: [Ended("silent")])) as url:
        done = run(client(url.rpartition(":")[2], "--prompt", "."), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stay silent" in done.stdout
    assert (tmp_path / "aura_output/answer.txt").read_text() == f"{SILENT_TEXT}\n"
    assert not (tmp_path / "aura_output/answer.wav").exists()


def test_the_clients_say_when_no_server_answers(clips: tuple[Path, Path], tmp_path: Path) -> None:
    port = str(free_port())
    for command in (client(port, "--prompt", "Hi"), ["bash", SCRIPT, port]):
        done = run(command, tmp_path, HOST="127.0.0.1", AUDIO=str(clips[0]), VIDEO=str(clips[1]))
        assert done.returncode == 1
        assert f"no server answers at http://127.0.0.1:{port}" in done.stderr
        assert "aura-omni serve" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_clients_show_why_the_server_refused(clips: tuple[Path, Path], tmp_path: Path) -> None:
    with serving(FakePipeline(), ServerConfig(api_keys=("secret",))) as url:
        port = url.rpartition(":")[2]
        for command in (client(port, "--prompt", "Hi"), ["bash", SCRIPT, port]):
            environment = {"HOST": "127.0.0.1", "AUDIO": str(clips[0]), "VIDEO": str(clips[1])}
            refused = run(command, tmp_path, **environment, OPENAI_API_KEY="wrong")
            assert refused.returncode == 1
            assert "status 401" in refused.stderr
            assert "API key missing or wrong" in refused.stderr
            assert run(command, tmp_path, **environment, OPENAI_API_KEY="secret").returncode == 0


def test_the_curl_script_sends_files_and_writes_the_answer(clips: tuple[Path, Path], tmp_path: Path) -> None:
    pipeline = FakePipeline()
    audio, video = clips
    with serving(pipeline) as url:
        port = url.rpartition(":")[2]
        done = run(["bash", SCRIPT, port], tmp_path, HOST="127.0.0.1", AUDIO=str(audio), VIDEO=str(video))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Hello there.", "text: aura_output/answer.txt", "audio: aura_output/answer.wav"]
    assert_spoken(tmp_path)
    assert [type(part) for part in pipeline.requests[0].messages[0].parts] == [Video, Audio]


def test_without_arguments_the_clients_send_the_samples(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        port = url.rpartition(":")[2]
        for command in (client(port), ["bash", SCRIPT, port]):
            done = run(command, tmp_path, HOST="127.0.0.1")
            assert done.returncode == 0, done.stderr
    for request in pipeline.requests:
        video, audio = request.messages[0].parts
        assert isinstance(video, Video)
        assert isinstance(audio, Audio)
        assert audio.duration_s > 1
        assert len(video.frames) >= 2
    assert len(pipeline.requests) == 2
