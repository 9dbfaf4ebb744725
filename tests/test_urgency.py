"""Speech has deadlines, a prompt has none: what one session sends does not make the speech of another stutter."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from aura_omni.engine import holding
from aura_omni.engine.runner import SHARED_ROWS
from aura_omni.flow import AudioChunk, Event, Message, Text, TurnRequest
from aura_omni.pipeline import Pipeline
from aura_omni.stages.pace import Pace
from aura_omni.stages.vocoder import VocoderRunner
from tests.family import Listener, ask, clip, config, running, spoken


def test_a_video_is_read_in_short_steps_between_the_frames_of_somebody_elses_speech(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pipeline.parts.speech is not None
    talker, code2wav = pipeline.parts.ar_runners["talker"], pipeline.parts.speech.vocoder
    passes: list[tuple[str, int, bool]] = []  # stage, rows of its step, whether somebody's speech has work

    def watch(name: str, rows: Callable[[], int], launch: Callable[[], bool]) -> Callable[[], bool]:
        def watched() -> bool:
            before, speaks = rows(), talker.busy or code2wav.busy
            worked = launch()
            if rows() > before:
                passes.append((name, rows() - before, speaks))
            return worked

        return watched

    for name in ("talker", "aura", "asr"):
        runner = pipeline.parts.ar_runners[name]  # type: ignore[index]
        counted = watch(name, lambda runner=runner: runner.counters.computed_rows, runner.launch)  # type: ignore[misc]
        monkeypatch.setattr(runner, "launch", counted)
    speech, turn, there = Listener(), Listener(), threading.Event()
    held = pipeline.engine.post(lambda: there.wait(60))
    pipeline.submit(TurnRequest((Message("user", (Text("One two three four five."),)),), part="speech"), speech)
    pipeline.submit(spoken(clip(), clip(), clip(), Text("What is it?"), speak=False), turn)
    there.set()
    assert held.result()
    assert speech.wait().end.error is turn.wait().end.error is None
    beside = [number for number, (name, _, speaks) in enumerate(passes) if name == "aura" and speaks]
    assert len(beside) > 2
    assert max(passes[number][1] for number in beside) <= SHARED_ROWS["cpu"] + 1
    for one, next_one in pairwise(beside):
        assert any(name == "talker" for name, _, _ in passes[one + 1 : next_one]), "no frame between two steps of AURA"


def test_code2wav_is_told_when_the_listener_runs_out(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    due, push = list[float](), VocoderRunner.push

    def pushed(self: VocoderRunner, *args: object, due_s: float) -> None:
        due.append(due_s)
        push(self, *args, due_s=due_s)  # type: ignore[arg-type]

    monkeypatch.setattr(VocoderRunner, "push", pushed)
    assert len(ask(pipeline, spoken()).samples)
    assert due[0] == -math.inf
    assert len(due) > 2
    assert due[1:] == sorted(due[1:])
    assert min(due[1:]) > 0


def test_sound_and_what_is_waited_for_in_silence_go_first(pipeline: Pipeline) -> None:
    stages = pipeline.parts.runners()
    assert list(stages) == ["code2wav", "asr", "talker", "aura"]
    before = {name: pipeline.parts.ar_runners[name]._before for name in ("asr", "talker", "aura")}
    assert before["talker"] == (stages["code2wav"],)
    assert before["aura"] == before["asr"] == (stages["code2wav"], stages["talker"])


def test_speech_whose_talker_made_room_for_prompts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "IN_HAND_S", 0.0)
    pauses: list[bool] = []
    came = Pace.came

    def counted(self: Pace, *, paused: bool) -> None:
        pauses.append(paused)
        came(self, paused=paused)

    monkeypatch.setattr(Pace, "came", counted)
    request = spoken(sampling={"aura": {"max_tokens": 6}, "talker": {"min_tokens": 20, "max_tokens": 40, "seed": 3}})
    with running(config()) as other:
        want = ask(other, request)
        assert not any(pauses)
        other.parts.ar_runners["talker"].make_room_for(other.parts.ar_runners["aura"])
        listener, late = Listener(), threading.Event()

        def hear(event: Event) -> None:
            listener(event)
            if isinstance(event, AudioChunk) and not late.is_set():
                late.set()
                other.submit(spoken(clip(), clip(), clip(), clip(), Text("What is it?"), speak=False), Listener())

        other.submit(request, hear)
        got = listener.wait()
    assert any(pauses)
    assert got.text == want.text
    np.testing.assert_array_equal(got.samples, want.samples)
