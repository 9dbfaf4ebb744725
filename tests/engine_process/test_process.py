"""The stages in a real process of their own: the same answers as here, and an end for every turn whatever happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import openai
import psutil
import pytest

from aura_omni.engine_process.client import PipelineProcess
from aura_omni.errors import BadMedia, BadVoice, CheckpointError, EngineError, PromptTooLong, Unavailable
from aura_omni.flow import AudioChunk, Coming, Text, Video, Voice, unreported
from tests.family import Listener, clip, config, family, recording, spoken
from tests.served import Server


@pytest.fixture(scope="module")
def apart() -> Iterator[PipelineProcess]:
    process = PipelineProcess.load(config(), unreported)
    try:
        yield process
        assert all(stage.pages_used == 0 for stage in process.counters.values())
    finally:
        process.close()
    assert not psutil.pid_exists(process.pid)


def test_a_turn_there_is_a_turn_here(apart, pipeline):
    answers = []
    for asked in (pipeline, apart):
        heard = Listener()
        asked.submit(spoken(), heard)
        answers.append(heard.wait())
    here, there = answers
    assert there.text == here.text != ""
    assert there.heard == here.heard
    assert replace(there.end, usage=here.end.usage) == here.end  # what was cached may differ
    sound = [
        np.concatenate([event.samples for event in found.events if isinstance(event, AudioChunk)]) for found in answers
    ]
    assert np.array_equal(*sound)
    assert (apart.served_names, apart.stages) == (pipeline.served_names, pipeline.stages)
    assert (apart.speakers, apart.voice_task) == (pipeline.speakers, pipeline.voice_task)
    assert apart.counters["talker"].generated_tokens > 0


def test_a_turn_there_that_is_shown_its_pictures_later_is_a_turn_here(apart, pipeline):
    here, there = Listener(), Listener()
    pipeline.submit(spoken(), here)
    turn = apart.submit(spoken(recording(), Coming(), Text("What do you see?")), there)
    turn.show([clip()])
    assert there.wait().text == here.wait().text != ""
    assert there.heard == here.heard
    assert np.array_equal(there.samples, here.samples)
    assert replace(there.end, usage=here.end.usage) == here.end
    assert there.end.usage.prompt_tokens == here.end.usage.prompt_tokens


def test_refused_pictures_free_what_was_heard(apart):
    heard = Listener()
    turn = apart.submit(spoken(recording(), Coming()), heard)
    with pytest.raises(BadMedia, match="aspect ratio"):
        turn.show([Video(np.zeros((1, 10, 4000, 3), np.uint8), (0.0,), 2.0, b"thin")])
    assert heard.wait().end.reason == "cancelled"
    assert all(stage.running == stage.waiting == stage.pages_used == 0 for stage in apart.counters.values())


def test_refusals_are_those_of_the_pipeline(apart, pipeline):
    requests = {
        BadVoice: spoken(Text("hello"), voice=Voice(speaker="nobody")),
        PromptTooLong: spoken(Text("a long story " * 20_000)),
    }
    for kind, request in requests.items():
        messages = []
        for asked in (pipeline, apart):
            with pytest.raises(kind) as found:
                asked.submit(request, Listener())
            messages.append((found.value.message, found.value.param))
        assert messages[0] == messages[1]


def test_a_cancelled_turn_frees_what_it_held(apart):
    heard = Listener()
    apart.submit(spoken(sampling={"aura": {"max_tokens": 200, "min_tokens": 200}}), heard).cancel()
    assert heard.wait().end.reason == "cancelled"
    assert all(stage.running == stage.waiting == 0 for stage in apart.counters.values())


def test_when_the_process_is_killed_every_turn_ends_and_says_how():
    process = PipelineProcess.load(config(), unreported)
    try:
        heard = Listener()
        process.submit(spoken(sampling={"aura": {"max_tokens": 200, "min_tokens": 200}}), heard)
        os.kill(process.pid, signal.SIGKILL)
        end = heard.wait().end
        assert (end.reason, type(end.error)) == ("error", EngineError)
        assert "SIGKILL" in end.error.message
        assert "SIGKILL" in process.reason
        with pytest.raises(Unavailable, match="SIGKILL"):
            process.submit(spoken(), Listener())
    finally:
        process.close()


def test_what_cannot_be_loaded_there_is_raised_here(tmp_path):
    broken = config(aura={"model": str(tmp_path)})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        PipelineProcess.load(broken, unreported)


def test_the_process_reads_the_servers_modules_and_none_that_lie_where_it_was_started(tmp_path, monkeypatch):
    for name in ("queue.py", "aura_omni.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        PipelineProcess.load(config(aura={"model": str(tmp_path)}), unreported)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_as_the_process_begins_is_the_servers_to_hear(tmp_path, monkeypatch, number):
    def interrupted(*given, **named) -> subprocess.Popen[bytes]:
        process = begun(*given, **named)
        process.send_signal(number)  # as a terminal does, to both
        return process

    begun = subprocess.Popen
    monkeypatch.setattr("aura_omni.engine_process.client.subprocess.Popen", interrupted)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        PipelineProcess.load(config(aura={"model": str(tmp_path)}), unreported)


def test_served_with_the_flag_it_answers_and_both_processes_end_together(tmp_path):
    overrides = {"0": "asr", "1": "aura", "2": "tts_custom_voice", "3": "tts_custom_voice"}
    stages = ", ".join(f'"{number}": {{"model": "{family() / name}"}}' for number, name in overrides.items())
    server = Server(
        "--deploy-config", "tiny.yaml", "--stage-overrides", f"{{{stages}}}", "--engine-process", log=tmp_path / "log"
    )
    try:
        server.wait()
        (engine,) = psutil.Process(server.process.pid).children()
        assert not any("torch" in mapped.path for mapped in psutil.Process(server.process.pid).memory_maps())
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id, messages=[{"role": "user", "content": "hello"}], max_tokens=8
            )
        assert answer.choices[0].finish_reason in ("stop", "length")
    finally:
        server.stop()
    assert server.process.returncode == 0
    assert not engine.is_running()
