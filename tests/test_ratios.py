"""What must not become slow again, counted in steps and rows: a clock would tell more about the machine than about the code.

`benchmarks/` and `aura-omni bench` have the seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from aura_omni.counters import Counters
from aura_omni.flow import (
    SILENT_TEXT,
    SPEECH_RATE,
    Audio,
    AudioChunk,
    Event,
    Message,
    StageName,
    Text,
    TurnRequest,
    Video,
)
from aura_omni.media.noise import swelling_noise
from aura_omni.pipeline import Pipeline
from tests.family import Listener

ASR_TOKENS, AURA_TOKENS, FRAMES = 12, 36, 36
PAGE = 16  # rows


@dataclass(frozen=True)
class Done:
    """What the stages did between two readings of their counters."""

    before: Mapping[StageName, Counters]
    after: Mapping[StageName, Counters]

    def steps(self, stage: StageName) -> int:
        return self.after[stage].steps - self.before[stage].steps

    def rows(self, stage: StageName) -> int:
        return self.after[stage].computed_rows - self.before[stage].computed_rows

    def made(self, stage: StageName) -> int:
        return self.after[stage].generated_tokens - self.before[stage].generated_tokens


def run(pipeline: Pipeline, *requests: TurnRequest) -> Done:
    """Turns that all begin in the same pass of the engine's loop."""
    before, there = pipeline.counters, threading.Event()
    held = pipeline.engine.post(lambda: there.wait(60))
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        pipeline.submit(request, listener)
    there.set()
    assert held.result()
    for listener in listeners:
        assert listener.wait().end.error is None
    pipeline.engine.call(lambda: None)  # the step in which the last one ended is over
    return Done(before, pipeline.counters)


def clip(random: np.random.Generator) -> Video:
    frames = random.integers(0, 256, (2, 96, 128, 3), dtype=np.uint8)
    return Video(frames, (0.0, 0.5), 2.0, random.bytes(16))


def question(pipeline: Pipeline, number: int, *, silent: bool = False) -> TurnRequest:
    """2 s of speech and two frames, those of the number; lengths are forced, the text in whole words."""
    assert pipeline.parts.asr is not None
    assert pipeline.parts.aura is not None
    random = np.random.default_rng(number)
    sound = Audio(swelling_noise(random, 2.0, SPEECH_RATE), SPEECH_RATE, random.bytes(16))
    (heard,), (said,) = (part.tokenizer.encode(" circle") for part in (pipeline.parts.asr, pipeline.parts.aura))
    silence = pipeline.parts.aura.controls.silent
    return TurnRequest(
        (Message("user", (sound, clip(random))),),
        sampling={
            "asr": {"min_tokens": ASR_TOKENS, "max_tokens": ASR_TOKENS, "logit_bias": {heard: 100}},
            "aura": {"logit_bias": {silence: 100}}
            if silent
            else {"min_tokens": AURA_TOKENS, "max_tokens": AURA_TOKENS, "logit_bias": {said: 100}},
            "talker": {"min_tokens": FRAMES, "max_tokens": FRAMES},
        },
    )


def test_the_first_sound_comes_long_before_the_last_word_and_the_last_frame(pipeline: Pipeline) -> None:
    before, at_first = pipeline.counters, list[Counters]()
    listener = Listener()

    def sink(event: Event) -> None:
        if isinstance(event, AudioChunk) and not at_first:
            at_first.extend(pipeline.counters[stage] for stage in ("aura", "talker"))
        listener(event)

    pipeline.submit(question(pipeline, 1), sink)
    assert listener.wait().end.usage.audio_frames == FRAMES
    words, frames = (
        found.generated_tokens - before[stage].generated_tokens
        for found, stage in zip(at_first, ("aura", "talker"), strict=True)
    )
    assert frames <= 4, f"the first sound waited for {frames} frames of {FRAMES}"
    assert words <= AURA_TOKENS // 3, f"the first sound waited for {words} words of {AURA_TOKENS}"


def test_four_at_once_share_their_steps(pipeline: Pipeline) -> None:
    alone = run(pipeline, question(pipeline, 10))
    together = run(pipeline, *(question(pipeline, number) for number in range(11, 15)))
    for stage, longest in (("asr", ASR_TOKENS), ("aura", AURA_TOKENS), ("talker", FRAMES)):
        assert together.made(stage) == 4 * alone.made(stage) == 4 * longest
        assert together.rows(stage) <= 4 * alone.rows(stage)
        # One by one they would be four times as many.
        assert together.steps(stage) <= 1.25 * alone.steps(stage), stage


def test_no_step_computes_a_row_too_many(pipeline: Pipeline) -> None:
    assert pipeline.parts.aura is not None
    done = run(pipeline, question(pipeline, 20))
    for stage in ("asr", "aura", "talker"):
        prompt = done.after[stage].prompt_tokens - done.before[stage].prompt_tokens
        cached = done.after[stage].cached_rows - done.before[stage].cached_rows
        # The last id that a sequence draws needs no row.
        assert done.rows(stage) == prompt - cached + done.made(stage) - 1, stage
    assert done.rows("code2wav") == FRAMES


def test_a_silent_turn_is_one_step_of_aura_and_none_of_speech(pipeline: Pipeline) -> None:
    done = run(pipeline, question(pipeline, 30, silent=True))
    assert (done.steps("aura"), done.steps("talker"), done.steps("code2wav")) == (1, 0, 0)
    assert done.made("asr") == ASR_TOKENS


def test_a_turn_without_speech_asks_no_talker_and_one_without_sound_no_asr(pipeline: Pipeline) -> None:
    sampling = {"aura": {"min_tokens": 4, "max_tokens": 4}}
    request = TurnRequest((Message("user", (Text("what is red?"),)),), speak=False, sampling=sampling)
    done = run(pipeline, request)
    assert [done.steps(stage) for stage in ("asr", "aura", "talker", "code2wav")] == [0, 4, 0, 0]


def test_a_live_session_computes_its_newest_round_and_not_its_history(pipeline: Pipeline) -> None:
    assert pipeline.parts.aura is not None
    aura, random = pipeline.parts.aura, np.random.default_rng(40)
    sampling = {"aura": {"logit_bias": {aura.controls.silent: 100}}}
    messages: tuple[Message, ...] = ()
    lengths, computed = [], []
    for _ in range(8):
        messages += (Message("user", (clip(random),)),)
        lengths.append(len(aura.prompt(messages).tokens))
        computed.append(run(pipeline, TurnRequest(messages, sampling=sampling)).rows("aura"))
        messages += (Message("assistant", (Text(SILENT_TEXT),)),)
    for rows, before, length in zip(computed[1:], lengths, lengths[1:], strict=False):
        assert rows <= length - before + PAGE
    assert computed[-1] < lengths[-1] / 4


def test_nobody_steps_while_nobody_asks(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    run(pipeline, question(pipeline, 50))
    passes = 0

    def step() -> bool:
        nonlocal passes
        passes += 1
        return False

    monkeypatch.setattr(pipeline.parts.ar_runners["talker"], "step", step)
    before = pipeline.counters
    pipeline.engine.call(lambda: None)  # a pass of the loop, after which it may sleep
    time.sleep(0.3)
    assert passes <= 2, f"the loop went round {passes} times without anything to do"
    assert pipeline.counters == before


def test_a_speech_alone_decodes_each_frame_once(pipeline: Pipeline) -> None:
    request = TurnRequest(
        (Message("user", (Text("one red circle"),)),),
        part="speech",
        sampling={"talker": {"min_tokens": FRAMES, "max_tokens": FRAMES}},
    )
    done = run(pipeline, request)
    assert (done.made("talker"), done.rows("code2wav")) == (FRAMES, FRAMES)
    assert done.steps("talker") <= FRAMES + 1
