"""`say`, `transcribe` and `chat` as a user types them."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
import wave
from pathlib import Path

import pytest

from aura_omni import cli
from aura_omni.media.audio import decode_audio
from tests.family import DATA, family

ROOT = Path(__file__).parent.parent
VOICE, CLIP = str(DATA / "human_a.wav"), str(DATA / "bikes.mp4")


@pytest.fixture(scope="module")
def deploy(tmp_path_factory) -> str:
    text = (ROOT / "aura_omni/deploy/tiny.yaml").read_text()
    for name, home in (("tiny:asr", "asr"), ("tiny:aura", "aura"), ("tiny:tts", "tts_custom_voice")):
        text = text.replace(name, str(family() / home))
    file = tmp_path_factory.mktemp("offline") / "family.yaml"
    file.write_text(text)
    return str(file)


@pytest.fixture
def run(deploy, capfdbinary, monkeypatch):
    """run(arguments, stdin) -> (status, stdout, stderr)"""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        status = cli.main([*arguments, "--deploy-config", deploy])
        sys.stdout.flush()
        out, error = capfdbinary.readouterr()
        return status, out, error.decode()

    return run


@pytest.mark.parametrize("suffix", ["wav", "mp3", "flac", "opus", "ogg"])
def test_say_writes_the_format_of_the_suffix(run, tmp_path, suffix):
    file = tmp_path / f"x.{suffix}"
    status, out, error = run("say", "Hello there.", "-o", str(file), "--voice", "Vivian", "--seed", "7")
    assert (status, out) == (0, b"")
    assert decode_audio(file.read_bytes(), max_s=60).duration_s > 0.3
    assert "speech in" not in error, "a progress bar is for people"


def test_say_reads_standard_input_and_writes_standard_output(run, tmp_path):
    run("say", "Hello there.", "-o", str(tmp_path / "x.wav"))
    status, out, _ = run("say", "-", "-o", "-", stdin=b"Hello there.")
    assert status == 0
    with wave.open(str(tmp_path / "x.wav")) as file:
        assert out[44:] == file.readframes(file.getnframes())
    assert out.count(b"RIFF") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["say", "Hi", "-o", "x.xyz"], "end it in one of .aac"),
        (["say", "Hi", "-o", "no/such/folder/x.wav"], "no/such/folder does not exist; make it first"),
        (["say", "Hi", "-o", "."], ". cannot be written: it is a folder"),
        (["say", " ", "-o", "x.wav"], "nothing to say"),
        (["say", "Hi", "-o", "x.wav", "--voice", "nobody"], "--voice 'nobody' is unknown"),
        (["say", "Hi", "-o", "x.wav", "--ref-text", "Hi"], "--ref-text is given, but"),
        (["chat", "Hi", "-o", "x.wav", "--language", "klingon"], "--language 'klingon' is unknown"),
        (["say", "Hi", "-o", "x.wav", "--ref-audio", "nothing.wav"], "cannot read nothing.wav"),
        (["chat", "Hi", "--audio", "nothing.wav"], "cannot read nothing.wav"),
        (["chat", "Hi", "--video", VOICE], "no video track"),
        (["chat", "Hi", "--image", VOICE], "human_a.wav: "),
        (["chat", "Hi", "--image", "."], "cannot read .: it is a folder"),
        (["chat"], "nothing to answer"),
        (["transcribe", VOICE, "--language", "klingon"], "klingon"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, out, error = run(*arguments)
    assert (status, out) == (1, b"")
    (line,) = [line for line in error.splitlines() if line.startswith("aura-omni: ")]
    assert words in line
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["say", " ", "-o", "x.wav"],
        ["say", "Hi", "-o", "no/such/x.wav"],
        ["say", "Hi", "-o", "x.wav", "--ref-audio", "nothing.wav"],
        ["chat"],
        ["say", "Hi", "-o", "x.wav", "--voice", "nobody"],
        ["say", "Hi", "-o", "x.wav", "--language", "klingon"],
        ["chat", "Hi", "-o", "x.wav", "--language", "xx"],
        ["chat", "Hi", "--language", "klingon"],
        ["chat", " ", "-o", "x.wav"],
        ["chat", "Hi", "--image", "nothing.png"],
        ["transcribe", VOICE, "--language", "klingon"],
    ],
)
def test_what_can_be_known_before_is_refused_before_anything_is_loaded(run, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aura_omni.offline.Pipeline.load", lambda _: pytest.fail("loaded"))
    status, out, error = run(*arguments)
    assert (status, out) == (1, b"")
    (line,) = [line for line in error.splitlines() if line.startswith("aura-omni: ")]
    assert "BadRequest" not in line


def test_transcribe_prints_each_file_in_the_servers_formats(run):
    status, out, _ = run("transcribe", VOICE, VOICE, "--format", "json")
    assert status == 0
    first, second = map(json.loads, out.decode().splitlines())
    assert first == second
    assert set(first) == {"text", "usage", "finish_reason"}
    _, verbose, _ = run("transcribe", VOICE, "--format", "verbose_json")
    assert json.loads(verbose)["duration"] == 8.3
    _, text, _ = run("transcribe", "-", stdin=Path(VOICE).read_bytes())
    assert text.decode() == first["text"] + "\n"


def test_transcribe_writes_files_into_a_folder_and_goes_on_after_a_bad_one(run, tmp_path):
    status, out, error = run("transcribe", CLIP, "no/such.wav", VOICE, "-o", str(tmp_path / "texts"))
    assert (status, out) == (1, b"")
    assert "bikes.mp4: the file has no audio track" in error
    assert "no/such.wav: cannot read" in error
    assert [file.name for file in (tmp_path / "texts").iterdir()] == ["human_a.txt"]


def test_transcribe_writes_subtitles(run, tmp_path):
    for form in ("srt", "vtt"):
        status, out, _ = run("transcribe", VOICE, "--format", form)
        assert status == 0
        assert b" --> 00:00:0" in out
        run("transcribe", VOICE, "--format", form, "-o", str(tmp_path))
        assert (tmp_path / f"human_a.{form}").read_bytes() == out


def test_transcribe_writes_no_file_over_another(run, tmp_path):
    status, _, error = run("transcribe", VOICE, VOICE, "-o", str(tmp_path / "texts"))
    assert status == 1
    assert "two files are named human_a" in error


def test_chat_prints_the_text_and_speaks_it_into_a_file(run, tmp_path):
    media = ["--audio", VOICE, "--video", CLIP]
    status, spoken, _ = run("chat", "What do you see?", *media, "-o", str(tmp_path / "answer.wav"))
    assert status == 0
    assert decode_audio((tmp_path / "answer.wav").read_bytes(), max_s=60).duration_s > 0.1
    status, text, _ = run("chat", "What do you see?", *media)
    assert (status, text) == (0, spoken)
    assert text.decode().strip()


def test_a_silent_answer_is_the_marker_and_no_file(run, tmp_path):
    silence = tmp_path / "silence.wav"
    with wave.open(str(silence), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(32_000))
    status, out, _ = run("chat", "--audio", str(silence), "-o", str(tmp_path / "answer.wav"))
    assert (status, out) == (0, b"<|silent|>\n")
    assert not (tmp_path / "answer.wav").exists()


def frames(count: int) -> str:
    """For --stage-overrides: speech of so many frames, 80 ms each."""
    sampling = {"min_tokens": count, "max_tokens": count}
    return json.dumps({"2": {"max_model_len": 4_000, "default_sampling_params": sampling}})


FOUR_MINUTES = frames(3_000)  # longer than the test that interrupts it


def started(deploy: str, *arguments: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "aura_omni", *arguments, "--deploy-config", deploy]
    # As a terminal starts it: what runs in the background of a script ignores Ctrl-C, and so would its children.
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **more)


def test_ctrl_c_ends_with_status_130_and_one_line(deploy):
    process = started(
        deploy, "say", "A long text.", "-o", "-", "--stage-overrides", FOUR_MINUTES,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.read(44)[:4] == b"RIFF"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.decode().splitlines()[-1] == "aura-omni: interrupted"
    assert b"Traceback" not in error


def test_who_stops_reading_ends_the_work_without_a_traceback(deploy):
    process = started(
        deploy, "say", "A long text.", "-o", "-", "--stage-overrides", FOUR_MINUTES,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.read(44)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(30) == 1
    assert b"Traceback" not in error
    assert b"Exception" not in error


def test_on_a_terminal_long_work_shows_its_progress(deploy, tmp_path):
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    process = started(
        deploy, "say", "A long text.", "-o", str(tmp_path / "x.wav"), "--stage-overrides", frames(300), stderr=terminal
    )
    os.close(terminal)
    shown = b""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            shown += os.read(screen, 4096)
        except OSError:  # the other side is closed
            break
    os.close(screen)
    assert process.wait(30) == 0
    assert b"s of speech in" in shown
