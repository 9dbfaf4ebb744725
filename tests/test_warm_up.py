"""The server is ready when every stage has worked once, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aura_omni.errors import BadRequest, EngineError
from aura_omni.flow import Ended, Event, StageName, StagePhase, TurnRequest, Video
from aura_omni.pipeline import Pipeline
from aura_omni.warm_up import warm_up
from tests.family import config, running

Sink = Callable[[Event], None]


@pytest.mark.parametrize("tts", ["tts_custom_voice", "tts_base", "tts_voice_design"])
def test_every_stage_is_ready_only_after_it_has_worked(tts: str) -> None:
    told: list[tuple[StageName, StagePhase]] = []
    pipeline = Pipeline.load(config(tts), lambda name, phase: told.append((name, phase)))
    try:
        for name in pipeline.stages:
            assert [phase for stage, phase in told if stage == name] == ["waiting", "loading", "loaded", "ready"]
        assert all(runner.counters.steps > 0 for runner in pipeline.parts.ar_runners.values())
        assert dict(pipeline.progress) == dict.fromkeys(pipeline.stages, "ready")
    finally:
        pipeline.close()
    assert dict(pipeline.progress) == dict.fromkeys(pipeline.stages, "failed")


def test_a_start_says_nothing_of_transcripts_that_its_own_inference_cuts(caplog: pytest.LogCaptureFixture) -> None:
    with running(config(pipeline="tiny.yaml")):
        assert not [record for record in caplog.records if "cut a transcript" in record.getMessage()]


def test_a_stage_that_fails_its_first_inference_is_named() -> None:
    told: list[StageName] = []

    def submit(request: TurnRequest, sink: Sink) -> None:
        failed = request.part == "speech"
        sink(Ended("error", error=EngineError("no kernel")) if failed else Ended("stop"))

    with pytest.raises(EngineError, match=r"talker and code2wav failed: no kernel"):
        warm_up(
            submit,
            stages=("asr", "aura", "talker", "code2wav"),
            voice_task=None,
            report=lambda name, _: told.append(name),
        )
    assert told == ["asr", "aura"]


def test_a_context_without_room_for_a_picture_is_warmed_with_text() -> None:
    asked: list[TurnRequest] = []

    def submit(request: TurnRequest, sink: Sink) -> None:
        asked.append(request)
        if any(isinstance(part, Video) for part in request.messages[0].parts):
            raise BadRequest("too long")
        sink(Ended("stop"))

    warm_up(submit, stages=("aura",), voice_task=None, report=lambda name, phase: None)
    assert len(asked) == 2
