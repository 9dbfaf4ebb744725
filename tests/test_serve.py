"""The server as a user starts it: the command, the official client, the README's own words."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import subprocess
import sys
import time
import wave
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from aura_omni.flow import SILENT_TEXT
from aura_omni.media.audio import decode_audio
from tests.family import DATA, family
from tests.served import Server

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples/online_serving/aura_omni"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The reference command line, with the tiny family in the place of the published checkpoints."""
    folder = tmp_path_factory.mktemp("serve")
    deploy = folder / "aura_omni.yaml"
    text = (ROOT / "aura_omni/deploy/tiny.yaml").read_text()
    for name, home in (("tiny:asr", "asr"), ("tiny:aura", "aura"), ("tiny:tts", "tts_custom_voice")):
        text = text.replace(name, str(family() / home))
    deploy.write_text(text)
    command = [
        "aurateam/AURA",
        "--omni",
        "--deploy-config",
        str(deploy),
        "--served-model-name",
        "aurateam/AURA",
        "aura-nano",
    ]
    command += ["--trust-remote-code", "--allowed-local-media-path", str(DATA)]
    command += ["--custom-voice-dir", str(folder / "voices"), "--request-timeout", "50"]
    command += ["--allowed-origins", "https://app.example"]
    server = Server(*command, log=folder / "log")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def data_url(file: Path | bytes, kind: str) -> str:
    content = file if isinstance(file, bytes) else file.read_bytes()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def float_wav(samples: np.ndarray) -> bytes:
    data = samples.astype("<f4").tobytes()
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + len(data),
        b"WAVE",
        b"fmt ",
        16,
        3,
        1,
        16_000,
        64_000,
        4,
        32,
        b"data",
        len(data),
    )
    return header + data


def nan_wav() -> bytes:
    return float_wav(np.full(16_000, np.nan))


def empty_wav() -> bytes:
    return float_wav(np.zeros(0))


QUESTION = [
    {"type": "audio_url", "audio_url": {"url": data_url(DATA / "human_a.wav", "audio/wav")}},
    {"type": "video_url", "video_url": {"url": data_url(DATA / "bikes.mp4", "video/mp4")}},
    {"type": "text", "text": "What do you see?"},
]


def ask(client: openai.OpenAI, content=QUESTION, **fields):
    fields.setdefault("max_tokens", 16)
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="aurateam/AURA", messages=messages, **fields)


def wav(data: str) -> tuple[int, np.ndarray]:
    with wave.open(io.BytesIO(base64.b64decode(data))) as reader:
        assert (reader.getnchannels(), reader.getsampwidth()) == (1, 2)
        return reader.getframerate(), np.frombuffer(reader.readframes(reader.getnframes()), "<i2")


def test_a_recording_and_a_clip_come_back_as_text_and_speech(client):
    answer = ask(client)
    (choice,) = answer.choices
    assert choice.message.content
    assert choice.message.audio.transcript == choice.message.content
    rate, samples = wav(choice.message.audio.data)
    assert rate == 24_000
    assert len(samples) == answer.usage.completion_tokens_details.audio_tokens * 1_920
    assert np.abs(samples).max() > 300
    assert answer.usage.prompt_tokens_details.audio_tokens == 108


def assert_same_sound(one: bytes | np.ndarray, other: bytes | np.ndarray) -> None:
    """16-bit samples, equal but for rounding: a server that is short of time decodes in other chunks."""
    first, second = (np.frombuffer(sound, "<i2").astype(int) for sound in (one, other))
    np.testing.assert_allclose(first, second, rtol=0, atol=2)


def test_streamed_speech_equals_whole_speech(client):
    whole = ask(client)
    text, sound = "", b""
    for chunk in ask(client, stream=True, modalities=["text", "audio"], audio={"voice": "vivian", "format": "pcm16"}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.delta.audio is not None:
                sound += base64.b64decode(choice.delta.audio.data or "")
    assert text == whole.choices[0].message.content
    assert_same_sound(sound, wav(whole.choices[0].message.audio.data)[1])


def test_a_silent_turn_has_the_marker_and_no_speech(client):
    answer = ask(client, logit_bias={str(silent_id()): 100})
    (choice,) = answer.choices
    assert choice.message.content == SILENT_TEXT
    assert choice.message.audio is None
    assert choice.model_extra["silent"] is True
    assert answer.usage.completion_tokens_details.audio_tokens == 0


def silent_id() -> int:
    from aura_omni.engine.loader import Checkpoint
    from aura_omni.stages.tokenizer import TextTokenizer

    return TextTokenizer.load(Checkpoint.find(str(family() / "aura"))).id(SILENT_TEXT)


def test_text_alone_has_no_audio(client):
    choice = ask(client, modalities=["text"]).choices[0]
    assert choice.message.content
    assert choice.message.audio is None


def test_a_file_below_the_allowed_path_is_the_same_as_its_bytes(client):
    files = [
        {"type": "audio_url", "audio_url": {"url": (DATA / "human_a.wav").as_uri()}},
        {"type": "video_url", "video_url": {"url": (DATA / "bikes.mp4").as_uri()}},
        QUESTION[2],
    ]
    assert (
        ask(client, files, modalities=["text"]).choices[0].message.content
        == ask(client, modalities=["text"]).choices[0].message.content
    )
    with pytest.raises(openai.PermissionDeniedError, match="allowed"):
        ask(client, [{"type": "audio_url", "audio_url": {"url": (ROOT / "README.md").as_uri()}}])


def test_checkpoint_paths_are_not_model_names(server, client):
    listed = {model.id for model in client.models.list()}
    assert listed == {"aurateam/AURA", "aura-nano"}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=str(family() / "aura"), messages=[{"role": "user", "content": "hello"}])


def part(kind: str, url: str) -> list[dict]:
    return [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}]


def voice(**keys) -> dict:
    return {"extra_body": {"additional_information": keys}}


@pytest.mark.parametrize(
    ("content", "fields", "words", "param"),
    [
        (part("audio", "data:audio/wav;base64,aGVsbG8="), {}, "no audio", "messages[0].content[0].audio_url"),
        (part("audio", "data:audio/wav;base64,"), {}, "empty", "messages[0].content[0].audio_url"),
        (part("audio", data_url(nan_wav(), "audio/wav")), {}, "finite", "messages[0].content[0].audio_url"),
        (part("audio", data_url(empty_wav(), "audio/wav")), {}, "no ", "messages[0].content[0].audio_url"),
        (
            part("video", data_url(DATA / "human_a.wav", "video/mp4")),
            {},
            "no video",
            "messages[0].content[0].video_url",
        ),
        (part("image", "data:image/png;base64,aGVsbG8="), {}, "picture", "messages[0].content[0].image_url"),
        ("hello", voice(tts_speaker="nobody"), "nobody", "additional_information.tts_speaker"),
        ("hello", voice(tts_task_type="Base"), "Base", "additional_information.tts_task_type"),
        ("hello", voice(tts_task_type="Singing"), "Singing", "additional_information.tts_task_type"),
        ("hello", voice(tts_volume=3), "tts_volume", "additional_information.tts_volume"),
        ("hello " * 20_000, {}, "tokens", "messages"),
        ("hello", {"temperature": -1}, "temperature", "temperature"),
        ("hello", {"n": 2}, "n is 2; only 1 is served", "n"),
        (
            "hello",
            {"extra_body": {"sampling_params_list": [{"temperature": "hot"}]}},
            "temperature",
            "sampling_params_list[0].temperature",
        ),
    ],
)
def test_bad_input_is_refused_in_words_and_the_next_request_is_fine(client, content, fields, words, param):
    with pytest.raises(openai.BadRequestError, match=words) as refusal:
        ask(client, content, **fields)
    assert refusal.value.param == param
    assert refusal.value.code
    assert len(refusal.value.message) < 600
    assert ask(client, "hello", modalities=["text"], max_tokens=2).choices


def test_clients_of_the_examples_run_without_arguments_but_the_port(server, tmp_path):
    for command in (
        [
            sys.executable,
            str(EXAMPLES / "openai_chat_completion_client.py"),
            "--port",
            str(server.port),
            "--output-dir",
            str(tmp_path / "python"),
        ],
        ["bash", str(EXAMPLES / "run_curl_multimodal_query.sh"), str(server.port)],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    for output in (tmp_path / "python", tmp_path / "aura_output"):
        assert (output / "answer.txt").read_text(encoding="utf-8")


HELLO = {"model": "aurateam/AURA", "voice": "Vivian", "extra_body": {"seed": 7, "max_new_tokens": 12}}


def test_speech_is_the_same_whole_streamed_and_in_events(client):
    whole = client.audio.speech.create(input="Hello there.", **HELLO).content
    pcm = client.audio.speech.create(input="Hello there.", response_format="pcm", **HELLO).content
    assert len(pcm) == 12 * 2 * 1_920
    rate, samples = wav(base64.b64encode(whole).decode())
    assert rate == 24_000
    assert_same_sound(samples, pcm)
    with client.audio.speech.with_streaming_response.create(
        input="Hello there.", stream_format="audio", **HELLO
    ) as answer:
        streamed = b"".join(answer.iter_bytes())
    assert_same_sound(streamed[44:], pcm)
    assert streamed.count(b"RIFF") == 1
    events = client.audio.speech.create(input="Hello there.", stream_format="sse", **HELLO).text
    lines = [json.loads(line[6:]) for line in events.split("\n\n") if line]
    assert_same_sound(b"".join(base64.b64decode(line["audio"]) for line in lines[:-1])[44:], pcm)
    assert lines[-1]["usage"]["output_tokens"] == 12


@pytest.mark.parametrize("kind", ["wav", "pcm", "flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_every_format_streamed_and_as_events_is_the_whole_file(client, kind, speed):
    asked = {"input": "Hello there.", "response_format": kind, "speed": speed, **HELLO}
    want = played(client.audio.speech.create(**asked).content, kind)
    with client.audio.speech.with_streaming_response.create(stream_format="audio", **asked) as answer:
        streamed = played(b"".join(answer.iter_bytes()), kind)
    events = client.audio.speech.create(stream_format="sse", **asked).text
    lines = [json.loads(line[6:]) for line in events.split("\n\n") if line]
    assert lines[-1]["type"] == "speech.audio.done"
    sent = played(b"".join(base64.b64decode(line["audio"]) for line in lines[:-1]), kind)
    skipped = 1_105 if kind == "mp3" else 0  # the whole file says what to skip
    for sound in (streamed, sent):
        assert_plays_the_same(sound[skipped:][: len(want)], want)
    rate, padding = (48_000 if kind == "opus" else 24_000), (2_048 if kind == "aac" else 0)
    assert 0 <= len(want) / rate - 12 * 0.08 / speed <= padding / 24_000 + 0.001


def assert_plays_the_same(sound: np.ndarray, want: np.ndarray) -> None:
    """Also where the last bit of what goes into a codec was another (see assert_same_sound), which noise makes audible."""
    assert len(sound) == len(want)
    assert np.sqrt(np.mean((sound - want) ** 2)) < 0.2 * np.sqrt(np.mean(want**2))


def played(data: bytes, kind: str) -> np.ndarray:
    return np.frombuffer(data, "<i2") / 32_767 if kind == "pcm" else decode_audio(data, max_s=60).samples


@pytest.mark.parametrize("kind", ["wav", "pcm16", "flac", "mp3", "opus", "aac"])
def test_a_chat_speaks_every_format_while_it_is_made(client, kind):
    asked = {"modalities": ["text", "audio"], "audio": {"voice": "vivian", "format": kind}}
    want = played(base64.b64decode(ask(client, **asked).choices[0].message.audio.data), kind.removesuffix("16"))
    data = b""
    for chunk in ask(client, stream=True, **asked):
        for choice in chunk.choices:
            if choice.delta.audio is not None:
                data += base64.b64decode(choice.delta.audio.data or "")
    sound = played(data, kind.removesuffix("16"))[1_105 if kind == "mp3" else 0 :]
    assert_plays_the_same(sound[: len(want)], want)


def test_voices_are_listed_and_an_unknown_one_is_refused(server, client):
    names = httpx.get(f"{server.url}/v1/audio/voices").json()["voices"]
    assert "vivian" in names
    with pytest.raises(openai.BadRequestError, match="vivian") as refusal:
        client.audio.speech.create(input="Hello.", model="aurateam/AURA", voice="alloy")
    assert refusal.value.param == "voice"


def test_a_voice_is_kept_where_the_command_says(server, client):
    sample = ("ada.wav", (DATA / "human_a.wav").read_bytes(), "audio/wav")
    client.audio.voices.create(audio_sample=sample, consent="Ada, in person", name="Ada")
    (shown,) = httpx.get(f"{server.url}/v1/audio/voices").json()["uploaded_voices"]
    assert shown["name"] == "Ada"
    assert {path.suffix for path in (server.log.parent / "voices").iterdir()} == {".json", ".audio"}
    with pytest.raises(openai.BadRequestError, match="cannot clone"):
        client.audio.speech.create(input="Hello.", model="aurateam/AURA", voice="Ada")
    assert httpx.delete(f"{server.url}/v1/audio/voices/Ada").json()["success"] is True


def test_every_stage_is_ready_and_the_engine_has_worked(server):
    ready = httpx.get(f"{server.url}/ready").json()
    assert ready == {"status": "ready", "stages": dict.fromkeys(("asr", "aura", "talker", "code2wav"), "ready")}
    numbers = httpx.get(f"{server.url}/metrics").text
    for stage in ready["stages"]:
        steps = re.search(rf'^aura_omni:engine_steps_total{{stage="{stage}"}} (\S+)$', numbers, re.M)
        assert float(steps[1]) > 0


def test_the_page_that_the_command_names_may_call_and_others_may_not(server):
    for origin, allowed in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_a_turn_that_takes_too_long_ends_and_frees_every_stage(server, client):
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 256, "min_tokens": 200}
    late = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers={"x-request-timeout": "0.1"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    for _ in range(50):
        numbers = httpx.get(f"{server.url}/metrics").text
        running = re.findall(r"^aura_omni:(?:num_requests_running|kv_pages_used){.*} (\S+)$", numbers, re.M)
        if running and not any(map(float, running)):
            break
        time.sleep(0.02)
    assert not any(map(float, running))


def test_a_client_that_leaves_a_speech_frees_it(server, client):
    for _ in range(3):
        with client.audio.speech.with_streaming_response.create(
            input="Hello there. " * 20, model="aurateam/AURA", voice="Vivian", response_format="pcm"
        ) as answer:
            next(answer.iter_bytes(1_000))
    assert client.audio.speech.create(input="Hello there.", **HELLO).content


def transcribed(client, file: Path | bytes = DATA / "human_a.wav", **fields):
    file = file if isinstance(file, bytes) else file.read_bytes()
    return client.audio.transcriptions.create(model="aurateam/AURA", file=("clip.wav", file), **fields)


def test_a_transcript_is_what_the_chat_hears(client):
    heard = ask(client, modalities=["text"]).model_extra["aura"]["transcripts"]
    assert [transcribed(client).text] == heard
    assert transcribed(client, response_format="text") == heard[0]
    *deltas, done = transcribed(client, stream=True)
    assert "".join(event.delta for event in deltas) == done.text == heard[0]
    assert transcribed(client, response_format="verbose_json").duration == pytest.approx(8.3, abs=0.1)


TIMES_S = np.arange(80_000) / 16_000


@pytest.mark.parametrize(
    "sound",
    [np.zeros(80_000), 0.3 * np.random.default_rng(0).uniform(-1, 1, 80_000), 0.5 * np.sin(2 * np.pi * 440 * TIMES_S)],
    ids=["silence", "noise", "tone"],
)
def test_a_recording_in_which_nobody_speaks_is_transcribed_as_nothing(client, sound):
    heard = transcribed(client, float_wav(sound), response_format="verbose_json")
    assert (heard.text, heard.language, heard.segments) == ("", "", [])
    assert heard.duration == 5.0
    (part,) = [{"type": "input_audio", "input_audio": {"data": base64.b64encode(float_wav(sound)).decode()}}]
    assert ask(client, [part]).choices[0].model_extra["silent"] is True


def test_a_short_clip_has_its_true_duration(client):
    clip = float_wav(0.1 * np.random.default_rng(0).uniform(-1, 1, 160))
    assert transcribed(client, clip, response_format="verbose_json").duration == 0.01


def test_subtitles_of_a_recording_have_its_times(client):
    (block,) = transcribed(client, response_format="srt").strip().split("\n\n")
    number, times, text = block.split("\n", 2)
    assert number == "1"
    assert re.fullmatch(r"00:00:00,\d{3} --> 00:00:0[78],\d{3}", times)
    assert " ".join(text.split()) == " ".join(transcribed(client).text.split())


@pytest.mark.parametrize("language", ["en", "EN", "en-US", "English", "zh_CN", ""])
def test_a_language_is_known_in_every_spelling(client, language):
    assert transcribed(client, language=language).usage.input_tokens


def test_an_unknown_language_is_refused_with_the_known_ones(client):
    with pytest.raises(openai.BadRequestError, match=r"klingon.*English") as refusal:
        transcribed(client, language="klingon")
    assert refusal.value.param == "language"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_readme_curl_is_answered(server):
    (command,) = blocks("bash")
    done = subprocess.run(
        ["bash", "-c", command.replace("8091", str(server.port))], capture_output=True, text=True, timeout=60
    )
    assert '"chat.completion"' in done.stdout, done.stdout + done.stderr


def test_the_readme_python_runs(server, tmp_path):
    (code,) = blocks("python")
    code = code.replace("8091", str(server.port)).replace('Path("examples', f'Path("{ROOT}/examples')
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_tiny_family_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = Server("--deploy-config", "tiny.yaml", log=tmp_path / "log")
    try:
        server.wait()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["aura-tiny"]
            choice = client.chat.completions.create(
                model="aura-tiny", messages=[{"role": "user", "content": "hello"}]
            ).choices[0]
            assert choice.message.content
    finally:
        server.stop()
    assert "mean nothing" in server.log.read_text()
