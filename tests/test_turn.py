"""Turns through all stages, on tiny random models. What the words are does not matter here; that they are the same does."""

import dataclasses
import time

import numpy as np
import pytest

from aura_omni.config import SpeechConfig
from aura_omni.flow import (
    FRAME_SAMPLES,
    SILENT_TEXT,
    Audio,
    AudioChunk,
    Message,
    Playback,
    Text,
    TextDelta,
    TurnRequest,
    Video,
    Voice,
)
from aura_omni.pipeline import Pipeline
from tests.family import WORDS, Listener, ask, clip, config, recording, running, spoken


def silent_id(pipeline: Pipeline) -> int:
    return pipeline.parts.aura.controls.silent


def test_a_turn_hears_answers_and_speaks(pipeline):
    turn = ask(pipeline, spoken())
    assert len(turn.heard) == 1
    assert turn.text
    assert turn.end.reason == "length"  # max_tokens 12
    assert len(turn.samples) == turn.end.usage.audio_frames * FRAME_SAMPLES > 0
    assert np.abs(turn.samples).max() > 0.01
    usage = turn.end.usage
    assert usage.text_tokens == 12
    assert usage.prompt_audio_tokens == 108  # 8.3 s: 8 x 13 + 4
    # four frames of 640x272, resized to 640x256: two groups of 20 x 8 cells
    assert usage.prompt_video_tokens == 320


def test_events_come_in_order_and_end_once(pipeline):
    for voice in (Voice(), Voice(non_streaming=True)):
        kinds = [type(event).__name__ for event in ask(pipeline, spoken(voice=voice)).events]
        assert kinds.index("TextDelta") < kinds.index("AudioChunk")
        assert kinds[0] == "Transcript"
        assert kinds[-1] == "Ended"
        assert kinds.count("Ended") == 1
        if voice.non_streaming:  # the whole text comes before any sound
            assert kinds == sorted(kinds, key=["Transcript", "TextDelta", "AudioChunk", "Ended"].index)


def test_the_deploy_file_may_have_the_talker_wait_for_the_whole_text(pipeline):
    waits = Pipeline(dataclasses.replace(config(), speech=SpeechConfig(non_streaming=True)), pipeline.parts)
    for whose, asked, expected in ((pipeline, None, False), (waits, None, True), (waits, False, False)):
        plan = whose._planners["turn"].plan(spoken(voice=Voice(non_streaming=asked)))
        assert plan.speaking.non_streaming is expected


@pytest.mark.parametrize(
    ("request_of", "first"), [({}, True), ({"speak": False}, False), ({"voice": Voice(non_streaming=True)}, False)]
)
def test_the_talker_waits_for_the_first_word_if_it_reads_along(pipeline, monkeypatch, request_of, first):
    urgent, found = [], []
    build = type(pipeline.parts.aura).sequence
    monkeypatch.setattr(
        type(pipeline.parts.aura),
        "sequence",
        lambda *args, **named: urgent.append(named["urgent"]) or build(*args, **named),
    )

    class Noting(Listener):
        def __call__(self, event):
            if urgent:
                found.append((type(event).__name__, urgent[0]()))
            super().__call__(event)

    listener = Noting()
    pipeline.submit(spoken(**request_of), listener)
    listener.wait()
    texts = [waits for kind, waits in found if kind == "TextDelta"]
    assert texts[0] is first
    assert first or not any(texts)
    assert not any(waits for kind, waits in found if kind == "AudioChunk")


def test_a_silent_turn_builds_nothing_for_the_talker(pipeline, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the Talker was asked to speak a silent turn")

    monkeypatch.setattr(type(pipeline.parts.speech.talker), "prompt", never)
    monkeypatch.setattr(type(pipeline.parts.speech.vocoder), "open", never)
    turn = ask(pipeline, spoken(sampling={"aura": {"logit_bias": {silent_id(pipeline): 100.0}}}))
    assert turn.end.reason == "silent"
    assert not turn.text
    assert not len(turn.samples)
    assert turn.end.usage.text_tokens == 1


@pytest.mark.parametrize(("parts", "written"), [((clip(), Text("what is it?")), 1), ((recording(), clip()), 2)])
def test_only_what_was_heard_makes_the_engine_write_the_prompt_again(pipeline, monkeypatch, parts, written):
    kind, prompts = type(pipeline.parts.aura), []
    write = kind.prompt
    monkeypatch.setattr(kind, "prompt", lambda *args, **kw: prompts.append(write(*args, **kw)) or prompts[-1])
    turn = ask(pipeline, spoken(*parts))
    assert turn.text
    assert len(prompts) == written
    assert turn.end.usage.prompt_text_tokens == prompts[-1].text_tokens


@pytest.mark.parametrize("filler", ["<|im_end|>", ".", ","])
def test_an_empty_or_punctuation_answer_is_silent(pipeline, filler):
    tokenizer = pipeline.parts.aura.tokenizer
    token = tokenizer.find(filler) or tokenizer.encode(filler)[0]
    # The penalty makes the end of the message win after a few of them.
    bias = {tokenizer.id("<|im_end|>"): 80.0, token: 100.0}
    drawn = {"logit_bias": bias, "presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 60}
    turn = ask(pipeline, spoken(sampling={"aura": drawn}))
    assert turn.end.reason == "silent"
    assert turn.end.usage.text_tokens < 60
    assert not any(isinstance(event, TextDelta | AudioChunk) for event in turn.events)


def cut_answers(tokenizer) -> dict[str, tuple[dict, str]]:
    dot, think = tokenizer.encode(".")[0], tokenizer.id("<think>")
    return {
        "stop string at once": ({"logit_bias": {dot: 100.0}, "stop": ["."], "max_tokens": 9}, "stop"),
        "stop token at once": ({"logit_bias": {dot: 100.0}, "stop_token_ids": [dot], "max_tokens": 9}, "stop"),
        "budget in punctuation": ({"logit_bias": {dot: 100.0}, "max_tokens": 3}, "length"),
        "budget in a think block": ({"logit_bias": {think: 100.0}, "max_tokens": 3}, "length"),
    }


@pytest.mark.parametrize(
    "name", ["stop string at once", "stop token at once", "budget in punctuation", "budget in a think block"]
)
def test_an_answer_that_was_cut_before_it_showed_anything_is_not_silent(pipeline, name):
    drawn, reason = cut_answers(pipeline.parts.aura.tokenizer)[name]
    turn = ask(pipeline, spoken(sampling={"aura": drawn}))
    assert turn.end.reason == reason
    assert turn.text == ""
    assert not len(turn.samples)


def test_text_only_runs_no_talker(pipeline):
    before = pipeline.parts.ar_runners["talker"].counters.steps
    turn = ask(pipeline, spoken(speak=False))
    assert turn.text
    assert not len(turn.samples)
    assert turn.end.speech_reason is None
    assert pipeline.parts.ar_runners["talker"].counters.steps == before


def test_the_same_turn_twice_is_the_same_and_reuses_the_prefix(pipeline):
    first, second = ask(pipeline, spoken()), ask(pipeline, spoken())
    assert first.text == second.text
    np.testing.assert_array_equal(first.samples, second.samples)
    assert second.end.usage.cached_tokens > 0.9 * second.end.usage.prompt_tokens - 120


def test_turns_together_equal_turns_alone(pipeline):
    def request(number: int) -> TurnRequest:
        sampling = {
            "aura": {"max_tokens": 6 + number, "temperature": 0.8, "seed": number},
            "talker": {"seed": number, "max_tokens": 4 + number},
        }
        return spoken(recording(), Text(f"question {number}"), sampling=sampling)

    alone = [ask(pipeline, request(number)) for number in range(10)]
    together = [Listener() for _ in range(10)]
    for number, listener in enumerate(together):
        pipeline.submit(request(number), listener)
    for one, other in zip(alone, together, strict=True):
        assert other.wait().text == one.text
        np.testing.assert_allclose(other.samples, one.samples, atol=5e-5)
    assert len({turn.text for turn in alone}) > 5


def test_chunking_does_not_change_the_sound():
    sounds = []
    for first, chunk in [(1, 1), (8, 25), (2, 7), (1, 25), (30, 30)]:
        changed = dataclasses.replace(
            config(), audio_chunks=dataclasses.replace(config().audio_chunks, first_frames=first, frames=chunk)
        )
        with running(changed) as pipeline:
            turn = ask(pipeline, spoken())
            sizes = [len(event.samples) // FRAME_SAMPLES for event in turn.events if isinstance(event, AudioChunk)]
            assert sizes[0] <= first
            sounds.append(turn.samples)
    for sound in sounds[1:]:
        np.testing.assert_array_equal(sound, sounds[0])


def test_sound_comes_from_the_first_frame_on_in_growing_chunks(pipeline):
    """A budget of 25 frames, in chunks that double; whole is the same for whoever has it at the end."""
    sampling = {"aura": {"max_tokens": 12}, "talker": {"min_tokens": 25, "max_tokens": 25}}
    for playback in (Playback(), Playback(live=False)):
        turn = ask(pipeline, spoken(sampling=sampling, playback=playback))
        sizes = [len(event.samples) // FRAME_SAMPLES for event in turn.events if isinstance(event, AudioChunk)]
        assert sum(sizes) == 25
        assert sizes[0] == 1
        if not playback.live:  # nobody listens, so no clock matters
            assert sizes == [1, 1, 2, 4, 8, 9]
    turn = ask(pipeline, spoken(sampling=sampling, playback=Playback(live=False, first_frames=4)))
    assert [len(event.samples) // FRAME_SAMPLES for event in turn.events if isinstance(event, AudioChunk)][:2] == [4, 4]


@pytest.mark.parametrize("moment", ["at once", "Transcript", "TextDelta", "AudioChunk"])
def test_cancelling_ends_the_turn_and_frees_everything(pipeline, moment):
    listener = Listener()
    turns = []

    def sink(event):
        listener(event)
        if type(event).__name__ == moment:
            turns[0].cancel()

    sampling = {"aura": {"max_tokens": 60}, "talker": {"max_tokens": 200, "min_tokens": 200}}
    turns.append(pipeline.submit(spoken(sampling=sampling), sink))
    if moment == "at once":
        turns[0].cancel()
    assert listener.wait().end.reason == "cancelled"
    assert pipeline.engine.call(lambda: pipeline.parts.speech.vocoder.slots_used) == 0
    for runner in pipeline.parts.ar_runners.values():
        assert pipeline.engine.call(lambda runner=runner: runner.counters.pages_used) == 0
    count = len(listener.events)
    turns[0].cancel()
    ask(pipeline, spoken(speak=False))
    assert len(listener.events) == count, "an event left after the end"


def test_a_hundred_cancelled_turns_leak_nothing(pipeline):
    listeners = []
    for number in range(100):
        listener = Listener()
        turn = pipeline.submit(spoken(Text(f"turn {number}")), listener)
        listeners.append(listener)
        if number % 3:
            time.sleep(0.001 * (number % 7))
        turn.cancel()
    assert {listener.wait().end.reason for listener in listeners} <= {"cancelled", "length", "stop", "silent"}
    pipeline.engine.check_integrity()


def test_a_stop_string_ends_the_text_before_it(pipeline):
    whole = ask(pipeline, spoken(speak=False, sampling={"aura": {"max_tokens": 30}})).text
    stop = whole[6:9]
    turn = ask(pipeline, spoken(speak=False, sampling={"aura": {"max_tokens": 30, "stop": [stop]}}))
    assert turn.text == whole[: whole.index(stop)].rstrip() or turn.text == whole[: whole.index(stop)]
    assert turn.end.reason == "stop"


def test_silence_and_nothing_else_is_no_turn(pipeline):
    before = pipeline.parts.ar_runners["aura"].counters.steps
    quiet = Audio(np.zeros(32_000, np.float32), 16_000, b"quiet")
    turn = ask(pipeline, spoken(quiet))
    assert turn.heard == [""]
    assert turn.end.reason == "silent"
    assert pipeline.parts.ar_runners["aura"].counters.steps == before


def test_several_recordings_and_clips_are_all_heard_and_seen(pipeline):
    image = Video(clip().frames[:1], (0.0,), 2.0, b"image", still=True)
    turn = ask(pipeline, spoken(recording(), clip(), image, recording(), Text("and this?")))
    assert len(turn.heard) == 2
    assert turn.heard[0] == turn.heard[1]
    assert turn.end.usage.prompt_video_tokens == 320 + 160


def test_history_and_system_messages_reach_aura(pipeline):
    ask_again = (
        Message("system", (Text("Answer in one word."),)),
        Message("user", (Text("What is red?"),)),
        Message("assistant", (Text(SILENT_TEXT),)),
        Message("user", (Text("And now?"),)),
    )
    full = ask(pipeline, TurnRequest(ask_again, speak=False, sampling=WORDS))
    short = ask(pipeline, TurnRequest(ask_again[-1:], speak=False, sampling=WORDS))
    assert full.end.usage.prompt_text_tokens > 20
    assert full.text != short.text


def test_a_frame_budget_is_kept_and_reported(pipeline):
    turn = ask(pipeline, spoken(voice=Voice(max_frames=5), sampling=WORDS | {"talker": {"min_tokens": 5}}))
    assert turn.end.usage.audio_frames == 5
    assert turn.end.speech_reason == "length"
    assert len(turn.samples) == 5 * FRAME_SAMPLES
