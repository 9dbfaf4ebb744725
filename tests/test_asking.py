"""What a program asks of a pipeline without a server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import aura_omni
from aura_omni.errors import BadMedia, BadRequest, TooLarge
from aura_omni.flow import FRAME_SAMPLES, Audio, AudioChunk, Coming, Ended, Message, Text, TextDelta, Transcript, Voice
from aura_omni.media.audio import decode_audio
from aura_omni.media.encoder import encode
from aura_omni.pipeline import Pipeline
from aura_omni.transcription import Transcription
from tests.family import DATA, WORDS, ask, clip, recording, spoken

VOICE, CLIP = DATA / "human_a.wav", DATA / "bikes.mp4"


def test_the_package_gives_the_pipeline_and_imports_nothing_heavy_before():
    assert aura_omni.Pipeline is Pipeline
    code = "import sys, aura_omni; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    with pytest.raises(AttributeError, match="pipline"):
        getattr(aura_omni, "pipline")  # noqa: B009


def test_chat_is_the_turn_that_the_server_runs(pipeline):
    answer = pipeline.chat("What do you see?", audio=VOICE, video=[clip()], sampling=WORDS)
    turn = ask(pipeline, spoken(clip(), recording(), Text("What do you see?")))
    assert answer.text == turn.text
    assert answer.transcripts == turn.heard
    assert not answer.silent
    np.testing.assert_allclose(answer.sound(), turn.samples, atol=5e-5)
    assert answer.end.usage.audio_frames * FRAME_SAMPLES == len(answer.sound())


@pytest.mark.parametrize("file", [str(VOICE), VOICE, VOICE.read_bytes(), recording()])
def test_a_file_is_a_path_bytes_or_decoded(pipeline, file):
    assert pipeline.transcribe(file).text == pipeline.transcribe(VOICE).text


def test_events_come_as_they_are_made_and_are_the_whole(pipeline):
    events = list(pipeline.chat_events("And?", audio=VOICE, sampling=WORDS))
    assert isinstance(events[0], Transcript)
    assert isinstance(events[-1], Ended)
    whole = pipeline.chat("And?", audio=VOICE, sampling=WORDS)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == whole.text
    chunks = [event.samples for event in events if isinstance(event, AudioChunk)]
    np.testing.assert_allclose(np.concatenate(chunks), whole.sound(), atol=5e-5)


def test_chunks_of_speech_are_the_whole_speech(pipeline):
    chunks = list(pipeline.say_chunks("Good morning.", voice=Voice(speaker="Vivian")))
    assert len(chunks) > 1
    whole = pipeline.say("Good morning.", voice=Voice(speaker="Vivian"))
    np.testing.assert_allclose(np.concatenate(chunks), whole.sound(), atol=5e-5)


def test_text_alone_speaks_nothing(pipeline):
    answer = pipeline.chat("Hello?", speak=False, history=[Message("system", (Text("Be kind."),))], sampling=WORDS)
    assert answer.text
    assert answer.samples == []
    assert answer.end.usage.audio_frames == 0


@pytest.mark.parametrize("suffix", ["wav", "mp3", "flac", "opus", "ogg"])
def test_an_answer_is_saved_in_the_format_of_its_suffix(pipeline, suffix, tmp_path):
    answer = pipeline.say("Hello.", sampling={"talker": {"max_tokens": 6}})
    answer.save(tmp_path / f"hello.{suffix}")
    saved = decode_audio((tmp_path / f"hello.{suffix}").read_bytes(), max_s=9)
    assert saved.duration_s == pytest.approx(len(answer.sound()) / 24_000, abs=0.15)
    with pytest.raises(BadRequest, match=r"\.flac, \.mp3"):
        answer.save(tmp_path / "hello.xyz")


def test_a_closed_iterator_has_freed_its_turn(pipeline):
    chunks = pipeline.say_chunks("A long text. " * 20)
    next(chunks)
    chunks.close()
    assert pipeline.parts.speech.vocoder.slots_used == 0
    assert pipeline.parts.ar_runners["talker"].counters.pages_used == 0


def test_an_interrupted_wait_has_freed_its_turn(pipeline, monkeypatch):
    events = pipeline.events(pipeline.speech_request("A long text. " * 20))
    next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    assert pipeline.parts.speech.vocoder.slots_used == 0


def test_a_turn_that_nobody_could_show_its_pictures_is_refused(pipeline):
    with pytest.raises(BadRequest, match="Coming"):
        list(pipeline.events(spoken(recording(), Coming())))


def test_threads_ask_together_and_get_their_own(pipeline):
    texts = [f"Number {number}." for number in range(6)]
    sampling = {"talker": {"max_tokens": 8}}
    alone = [pipeline.say(text, sampling=sampling).sound() for text in texts]
    together: dict[str, np.ndarray] = {}

    def say(text: str) -> None:
        together[text] = pipeline.say(text, sampling=sampling).sound()

    threads = [threading.Thread(target=say, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for text, sound in zip(texts, alone, strict=True):
        np.testing.assert_allclose(together[text], sound, atol=5e-5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"audio": "no/such.wav"}, BadMedia, r"cannot read no/such\.wav: No such file"),
        ({"audio": b"hello"}, BadMedia, "no audio or video file"),
        ({"audio": CLIP}, BadMedia, "no audio track"),
        ({"video": VOICE}, BadMedia, "no video track"),
        ({"image": b"hello"}, BadMedia, "not a picture"),
        ({"voice": Voice(speaker="nobody")}, BadRequest, "nobody"),
        ({"sampling": {"aura": {"temperature": -1}}}, BadRequest, "temperature"),
    ],
)
def test_what_is_refused_is_refused_in_words(pipeline, options, error, words):
    with pytest.raises(error, match=words):
        pipeline.chat("What?", **options)


def test_a_file_over_the_limit_is_not_read(pipeline, tmp_path):
    with (tmp_path / "large.wav").open("wb") as file:
        file.truncate(pipeline.config.media.max_bytes + 1)
    with pytest.raises(TooLarge, match=r"media\.max_bytes"):
        pipeline.chat(audio=tmp_path / "large.wav")


def test_a_long_recording_is_written_down_segment_by_segment(pipeline):
    voice = recording().samples
    minute = Audio(np.concatenate([voice] * 7), 16_000, b"minute")
    file = encode(minute.samples, minute.rate, "flac")
    said = Transcription()
    heard_s = [said.duration_s for _ in pipeline.transcribed(file, said)]
    assert len(heard_s) > 2
    assert heard_s == sorted(heard_s)
    assert said.duration_s == pytest.approx(minute.duration_s)
    starts_s = [segment.start_s for segment in said.segments]
    assert starts_s == sorted(starts_s)
    whole = pipeline.transcribe(file)
    assert (whole.text, whole.segments) == (said.text, said.segments)


def test_a_transcription_that_is_given_up_has_freed_its_turns(pipeline):
    file = encode(np.concatenate([recording().samples] * 7), 16_000, "flac")
    segments = pipeline.transcribed(file, Transcription())
    next(segments)
    segments.close()
    assert pipeline.parts.ar_runners["asr"].counters.pages_used == 0


def test_silence_is_an_empty_text(pipeline):
    silence = Audio(np.zeros(16_000, np.float32), 16_000, b"silence")
    assert pipeline.transcribe(silence).text == ""
    assert pipeline.chat(audio=silence).silent


def test_after_the_block_the_engine_is_stopped():
    with Pipeline.load("nano.yaml") as pipeline:
        assert pipeline.ready
    assert not pipeline.ready


def example(folder: Path, *arguments: str) -> list[str]:
    root = DATA.parents[1]
    done = subprocess.run(
        [sys.executable, root / "examples/offline.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_hears_sees_and_speaks(tmp_path):
    hears, writes, *chunks = example(tmp_path)
    assert (hears, writes) == ("['What is moving?'] The red circle is moving.", "What is moving?")
    assert len(chunks) > 1
    assert all(chunk.endswith(" s") for chunk in chunks)
    assert 0.5 < decode_audio((tmp_path / "morning.mp3").read_bytes(), max_s=9).duration_s < 3
    assert 1 < decode_audio((tmp_path / "answer.wav").read_bytes(), max_s=9).duration_s < 4
