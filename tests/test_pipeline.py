"""Turns through all stages, on tiny random models. What the words are does not matter here; that they are the same does."""

import dataclasses
import itertools
import threading
import time

import numpy as np
import pytest
import torch

from aura_omni.errors import BadMedia, BadRequest, BadVoice, ConfigError, EngineError, PromptTooLong, Unavailable
from aura_omni.flow import (
    FRAME_SAMPLES,
    SILENT_TEXT,
    Audio,
    AudioChunk,
    Ended,
    Message,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Video,
    Voice,
)
from aura_omni.pipeline import Pipeline
from tests.family import Listener, ask, clip, config, recording, running

WORDS = {"aura": {"max_tokens": 12}}


def spoken(*parts, **fields) -> TurnRequest:
    fields.setdefault("sampling", WORDS)
    return TurnRequest((Message("user", parts or (recording(), clip(), Text("What do you see?"))),), **fields)


def silent_id(pipeline: Pipeline) -> int:
    return pipeline.parts.aura.controls.silent


@pytest.fixture(scope="module")
def pipeline():
    with running(config()) as pipeline:
        yield pipeline


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


# ---------------------------------------------------------------- the Talker while AURA is still writing

LONG = {"aura": {"max_tokens": 60}, "talker": {"max_tokens": 40, "min_tokens": 40}}


def one_talker_prompt(pipeline, monkeypatch) -> list[int]:
    """Counts the prompts that the Talker is asked for."""
    talker = type(pipeline.parts.speech.talker)
    prompts = []
    original = talker.prompt

    def counted(self, *arguments):
        prompts.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(talker, "prompt", counted)
    return prompts


def test_speech_starts_before_the_text_has_ended(pipeline, monkeypatch):
    prompts = one_talker_prompt(pipeline, monkeypatch)
    kinds = [type(event).__name__ for event in ask(pipeline, spoken(sampling=LONG)).events]
    last_text = len(kinds) - 1 - kinds[::-1].index("TextDelta")
    assert kinds.index("AudioChunk") < last_text
    assert len(prompts) == 1


@pytest.mark.parametrize("pace", [1, 2, 7], ids=lambda pace: f"aura every {pace}")
def test_text_read_as_it_is_written_sounds_like_text_that_was_there(pipeline, pace, monkeypatch):
    runner = pipeline.parts.ar_runners["aura"]
    passes = itertools.count()
    step = runner.step
    # A slow AURA: the Talker runs out of text and has to wait for it.
    monkeypatch.setattr(runner, "step", lambda: step() if next(passes) % pace == 0 else runner.busy)
    written = ask(pipeline, spoken(sampling=LONG))
    np.testing.assert_allclose(written.samples, spoken_whole(pipeline, written.text), atol=5e-5)


def spoken_whole(pipeline, text: str) -> np.ndarray:
    """The Talker and Code2Wav on all of a text at once, in streaming order, without a Turn."""
    speech = pipeline.parts.speech
    speaking = dataclasses.replace(speech.talker.voices.resolve(Voice()), non_streaming=False)
    sampling = pipeline._planners["turn"].plan(spoken(sampling=LONG)).sampling["talker"]
    frames, done = [], threading.Event()

    def start():
        prompt = speech.talker.prompt(speaking, speech.talker.writer.body(text))
        sequence = speech.talker.sequence(
            prompt, sampling, predictor=speech.predictor, on_output=frames.append, on_end=lambda *_: done.set()
        )
        pipeline.parts.ar_runners["talker"].add(sequence)

    pipeline.engine.call(start)
    assert done.wait(30)
    codes = torch.from_numpy(np.stack(frames))[None]
    return speech.vocoder.decoder.whole(codes)[0].numpy()


def test_a_talker_that_ends_early_does_not_cut_the_text(pipeline):
    turn = ask(pipeline, spoken(sampling={"aura": {"max_tokens": 60}, "talker": {"max_tokens": 3}}))
    assert turn.end.usage.text_tokens == 60
    assert turn.end.usage.audio_frames <= 3
    assert turn.end.reason == "length"


def test_cancelling_while_both_run_frees_both(pipeline):
    listener = Listener()
    turns = []

    def sink(event):
        listener(event)
        if isinstance(event, AudioChunk):
            turns[0].cancel()

    sampling = {"aura": {"max_tokens": 3000, "min_tokens": 3000}, "talker": {"max_tokens": 500, "min_tokens": 500}}
    turns.append(pipeline.submit(spoken(sampling=sampling), sink))
    assert listener.wait().end.reason == "cancelled"
    pipeline.engine.check_integrity()
    assert all(runner.counters.pages_used == 0 for runner in pipeline.parts.ar_runners.values())


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
        np.testing.assert_allclose(other.samples, one.samples, atol=1e-5)
    assert len({turn.text for turn in alone}) > 5


def test_chunking_does_not_change_the_sound():
    sounds = []
    for first, chunk in [(1, 1), (8, 25), (2, 7)]:
        changed = dataclasses.replace(
            config(), audio_chunks=dataclasses.replace(config().audio_chunks, first_frames=first, frames=chunk)
        )
        with running(changed) as pipeline:
            turn = ask(pipeline, spoken())
            sizes = [len(event.samples) // FRAME_SAMPLES for event in turn.events if isinstance(event, AudioChunk)]
            assert sizes[0] <= first
            sounds.append(turn.samples)
    for sound in sounds[
        1:
    ]:  # exact but for rounding, which random weights magnify; tests/models/test_codec.py has the tight limits
        np.testing.assert_allclose(sound, sounds[0], atol=5e-5)


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


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (spoken(sampling={"aura": {"temperature": -1}}), BadRequest, "temperature is -1"),
        (spoken(voice=Voice(speaker="nobody")), BadVoice, "nobody"),
        (spoken(voice=Voice(task="Base", ref_audio=recording(), ref_text="it was")), BadVoice, "speaker encoder"),
        (spoken(voice=Voice(language="klingon")), BadVoice, "klingon"),
        (spoken(Text("long " * 20_000)), PromptTooLong, "8,191"),
        (spoken(Text("x" * 3_000_000)), PromptTooLong, "at least .* tokens"),
        (spoken(voice=Voice(instruct="a " * 1_500)), PromptTooLong, "1,023"),
        (spoken(voice=Voice(instruct="calm " * 500_000)), PromptTooLong, "at least .* tokens"),
        (spoken(system_prompt="x" * 3_000_000), PromptTooLong, "at least .* tokens"),
        (spoken(sampling={"aura": {"stop_token_ids": [*range(600)], "min_tokens": 5}}), BadRequest, "stop_token_ids"),
        (spoken(sampling={"talker": {"stop_token_ids": [*range(3000)]}}), BadRequest, "stop_token_ids"),
        (spoken(sampling={"talker": {"stop_token_ids": [*range(2048)]}}), BadRequest, "stop_token_ids"),
        (spoken(sampling={"asr": {"stop_token_ids": [*range(600)], "min_tokens": 1}}), BadRequest, "stop_token_ids"),
        (spoken(sampling={"talker": {"stop": ["."]}}), BadRequest, "stop is given to the Talker"),
        (spoken(sampling={"aura": {"logit_bias": {10**6: 1.0}}}), BadRequest, "logit_bias names token 1000000"),
        (spoken(Video(np.zeros((1, 10, 4000, 3), np.uint8), (0.0,), 2.0, b"thin")), BadMedia, "aspect ratio"),
        (TurnRequest((Message("assistant", (Text("hello"),)),)), BadRequest, "last message"),
        (TurnRequest(()), BadRequest, "last message"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_is_wrong_is_refused_before_the_engine(pipeline, request_, error, words):
    before = [runner.counters.steps for runner in pipeline.parts.ar_runners.values()]
    with pytest.raises(error, match=words):
        pipeline.submit(request_, lambda event: pytest.fail("an event of a refused turn"))
    assert [runner.counters.steps for runner in pipeline.parts.ar_runners.values()] == before


def test_a_broken_listener_harms_nobody_else(pipeline):
    def broken(event):
        raise RuntimeError("this listener is broken")

    pipeline.submit(spoken(), broken)
    assert ask(pipeline, spoken()).text


def test_a_failing_stage_ends_its_turn_with_an_error(pipeline, monkeypatch):
    talker = pipeline.parts.speech.talker

    def fail(*_, **__):
        raise RuntimeError("out of memory, say")

    with monkeypatch.context() as patch:
        patch.setattr(talker, "advance", fail)
        turn = ask(pipeline, spoken())
    assert turn.end.reason == "error"
    assert isinstance(turn.end.error, EngineError)
    assert len(ask(pipeline, spoken()).samples)


def test_a_closed_pipeline_takes_no_turns():
    pipeline = Pipeline.load(config())
    listener = Listener()
    pipeline.submit(spoken(sampling={"talker": {"max_tokens": 500, "min_tokens": 500}}), listener)
    pipeline.close()
    assert isinstance(listener.wait().end, Ended)
    assert not pipeline.ready
    with pytest.raises(Unavailable):
        pipeline.submit(spoken(), listener)


# ---------------------------------------------------------------- voices


REFERENCE = Voice(
    ref_audio=Audio(recording().samples[:32_000], recording().rate, b"reference"), ref_text="It was the best"
)


@pytest.mark.parametrize("non_streaming", [None, True, False])
@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize(
    ("tts", "voice"),
    [
        ("tts_custom_voice", Voice(speaker="RYAN", language="en")),
        ("tts_voice_design", Voice(instruct="a calm low voice")),
        ("tts_base", REFERENCE),
        ("tts_base", dataclasses.replace(REFERENCE, ref_text=None, x_vector_only=True)),
    ],
    ids=["custom", "design", "icl", "x_vector"],
)
def test_every_mode_speaks_with_a_prefill_of_the_length_its_ids_say(
    voices, tts, voice, ids, non_streaming, monkeypatch
):
    pipeline = voices[tts]
    talker = pipeline.parts.speech.talker
    lengths = []
    rows_of = type(talker).prompt_rows

    def counted(self, prompt):
        rows = rows_of(self, prompt)
        lengths.append((len(rows), prompt.prefill.length))
        return rows

    monkeypatch.setattr(type(talker), "prompt_rows", counted)
    asked = dataclasses.replace(voice, pass_token_ids=ids, non_streaming=non_streaming, max_frames=6)
    turn = ask(pipeline, spoken(Text("Say something."), voice=asked))
    assert turn.end.error is None
    assert len(turn.samples) == 6 * FRAME_SAMPLES
    assert lengths
    assert all(rows == length for rows, length in lengths)


@pytest.fixture(scope="module")
def voices():
    names = ("tts_custom_voice", "tts_voice_design", "tts_base")
    pipelines = {name: Pipeline.load(config(name)) for name in names}
    yield pipelines
    for pipeline in pipelines.values():
        pipeline.engine.check_integrity()
        pipeline.close()


def test_base_needs_its_reference_and_says_so(voices):
    with pytest.raises(BadVoice, match="ref_audio"):
        voices["tts_base"].submit(spoken(Text("hello")), Listener())
    with pytest.raises(BadVoice, match="ref_text"):
        voices["tts_base"].submit(
            spoken(Text("hello"), voice=dataclasses.replace(REFERENCE, ref_text=None)), Listener()
        )


def test_a_reference_is_encoded_once(voices, monkeypatch):
    pipeline = voices["tts_base"]
    count = threading.Semaphore(0)
    speaker = type(pipeline.parts.speech.talker).speaker

    def counted(self, samples):
        count.release()
        return speaker(self, samples)

    monkeypatch.setattr(type(pipeline.parts.speech.talker), "speaker", counted)
    voice = dataclasses.replace(
        REFERENCE, ref_audio=Audio(recording().samples[9_000:40_000], recording().rate, b"once"), max_frames=3
    )
    for _ in range(3):
        ask(pipeline, spoken(Text("hello"), voice=voice))
    assert count.acquire(blocking=False)
    assert not count.acquire(blocking=False)


def test_speech_alone_speaks_the_last_message():
    with running(
        config(pipeline="qwen3_tts.yaml", talker={"max_num_seqs": 2}, code2wav={"max_num_seqs": 2})
    ) as pipeline:
        turn = ask(pipeline, TurnRequest((Message("user", (Text("Hello world"),)),), voice=Voice(max_frames=4)))
        assert turn.text == "Hello world"
        assert len(turn.samples) == 4 * FRAME_SAMPLES
        assert turn.end.usage.prompt_text_tokens == len(pipeline.parts.speech.talker.writer.body("Hello world"))
        with pytest.raises(BadRequest, match="does not listen"):
            pipeline.submit(spoken(recording()), Listener())
        said = Message("user", (Text("Hello"),))
        for wrong, words in [
            (TurnRequest((said,), voice=Voice(pass_token_ids=True)), "pass_token_ids"),
            (TurnRequest((said,), system_prompt="Be brief."), "system prompt"),
            (TurnRequest((Message("system", (Text("Be brief."),)), said)), "system message"),
            (TurnRequest((said, Message("assistant", (Text("Hello?"),)), said)), "user message"),
            (TurnRequest((said,), sampling={"talker": {"stop": ["."]}}), "stop"),
            (TurnRequest((Message("user", (Text("x " * 3_000_000),)),)), "at least .* tokens"),
            (TurnRequest((Message("user", (Text("so " * 6_000),)),)), "4,095"),
        ]:
            with pytest.raises(BadRequest, match=words):
                pipeline.submit(wrong, Listener())


# ---------------------------------------------------------------- a part of a turn


def speech_of(words: str, *, whole: bool | None = None, **fields) -> TurnRequest:
    drawn = {"talker": {"seed": 5}}
    voice = Voice(max_frames=6, non_streaming=whole)
    return TurnRequest((Message("user", (Text(words),)),), part="speech", voice=voice, sampling=drawn, **fields)


@pytest.mark.parametrize("whole", [True, False], ids=["text at once", "text as it is written"])
def test_speech_of_a_text_is_how_an_answer_of_that_text_is_spoken(pipeline, whole):
    drawn = {"aura": {"max_tokens": 12}, "talker": {"seed": 5}}
    answer = ask(pipeline, spoken(sampling=drawn, voice=Voice(max_frames=6, non_streaming=whole)))
    before = [pipeline.parts.ar_runners[name].counters.steps for name in ("asr", "aura")]
    speech = ask(pipeline, speech_of(answer.text, whole=whole))
    assert speech.text == answer.text
    np.testing.assert_allclose(speech.samples, answer.samples, atol=5e-5)
    assert speech.end.usage.audio_frames == 6
    assert [pipeline.parts.ar_runners[name].counters.steps for name in ("asr", "aura")] == before


def test_a_transcript_is_what_a_turn_hears_and_nothing_more(pipeline):
    before = [pipeline.parts.ar_runners[name].counters.steps for name in ("aura", "talker")]
    request = TurnRequest((Message("user", (recording(),)),), part="transcript")
    transcript = ask(pipeline, request)
    assert [transcript.text] == transcript.heard == ask(pipeline, spoken()).heard
    assert not len(transcript.samples)
    after = [pipeline.parts.ar_runners[name].counters.steps for name in ("aura", "talker")]
    assert ask(pipeline, request).text == transcript.text
    assert transcript.end.usage.text_tokens > 0
    assert before[0] < after[0]  # of the whole turn alone
    assert [pipeline.parts.ar_runners[name].counters.steps for name in ("aura", "talker")] == after


def test_silence_has_an_empty_transcript_and_a_language_that_is_checked_all_the_same(pipeline):
    silence = Audio(np.zeros(16_000, np.float32), 16_000, b"silence")
    turn = ask(pipeline, TurnRequest((Message("user", (silence,)),), part="transcript"))
    assert turn.text == ""
    assert turn.heard == [""]
    with pytest.raises(BadRequest, match="klingon"):
        pipeline.submit(
            TurnRequest((Message("user", (silence,)),), part="transcript", voice=Voice(language="klingon")), Listener()
        )


def test_a_part_of_a_turn_refuses_what_it_does_not_use(pipeline):
    for wrong, words in [
        (TurnRequest((Message("user", (recording(),)),), part="speech"), "part 'speech'.*send text"),
        (TurnRequest((Message("user", (Text("Hello"),)),), part="transcript"), "audio part"),
        (TurnRequest((Message("user", (recording(), clip())),), part="transcript"), "does not see"),
        (speech_of("Hello", system_prompt="Be brief."), "system prompt"),
        (TurnRequest((Message("user", (recording(),)),), part="transcript", voice=Voice(speaker="ryan")), "speaker"),
    ]:
        with pytest.raises(BadRequest, match=words):
            pipeline.submit(wrong, Listener())


def test_a_long_transcript_comes_part_by_part_in_order(hearing):
    words = dict.fromkeys(hearing.parts.asr.tokenizer.encode("what is the shape of a red circle"), 100.0)
    drawn = {"max_tokens": 12, "logit_bias": words, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    asked = {"voice": Voice(language="en"), "sampling": {"asr": drawn}}
    turn = heard_by(hearing, recording(), slices(1)[0], part="transcript", **asked)
    assert turn.text == heard_by(hearing, recording(), slices(1)[0], **asked).text == "\n".join(turn.heard)
    deltas = [event for event in turn.events if isinstance(event, TextDelta)]
    assert len(deltas) > 2
    stop = turn.text[4:6]
    stopped = heard_by(
        hearing, recording(), part="transcript", voice=Voice(language="en"), sampling={"asr": {**drawn, "stop": [stop]}}
    )
    assert stopped.text == turn.text[: turn.text.index(stop)].rstrip()
    with pytest.raises(BadRequest, match="does not speak"):
        hearing.submit(speech_of("Hello"), Listener())


def test_cancelling_a_part_frees_everything(pipeline):
    for request in (speech_of("so " * 50), TurnRequest((Message("user", (recording(),)),), part="transcript")):
        listener = Listener()
        pipeline.submit(request, listener).cancel()
        assert listener.wait().end.reason in ("cancelled", "stop", "length")
        assert all(runner.counters.pages_used == 0 for runner in pipeline.parts.ar_runners.values())


# ---------------------------------------------------------------- many and long recordings


def slices(count: int) -> list[Audio]:
    """Short clips of the recording, every one different."""
    samples, rate = recording().samples, recording().rate
    first, length = 2 * rate, rate // 2
    return [
        Audio(samples[start : start + length], rate, f"slice {start}".encode())
        for start in range(first, first + count * 500, 500)
    ]


def test_one_request_with_many_recordings_never_fills_the_server(pipeline):
    turn = ask(pipeline, spoken(*slices(80), speak=False, sampling=WORDS | {"asr": {"max_tokens": 3}}))
    assert turn.end.error is None
    assert len(turn.heard) == 80


def test_two_requests_with_many_recordings_share_the_server(pipeline):
    request = spoken(*slices(70), speak=False, sampling=WORDS | {"asr": {"max_tokens": 3}})
    listeners = [Listener(), Listener()]
    for listener in listeners:
        pipeline.submit(request, listener)
    one, other = (listener.wait(120) for listener in listeners)
    assert one.end.error is other.end.error is None
    assert one.heard == other.heard


def test_a_transcript_that_its_budget_cut_says_so(pipeline, caplog):
    turn = ask(pipeline, spoken(speak=False, sampling=WORDS | {"asr": {"max_tokens": 3}}))
    (heard,) = [event for event in turn.events if isinstance(event, Transcript)]
    assert not heard.complete
    assert "max_tokens 3 of ASR cut a transcript" in caplog.text


@pytest.fixture(scope="module")
def hearing():
    short = {"max_num_seqs": 2, "max_model_len": 160, "max_num_batched_tokens": 160}
    with running(config(pipeline="qwen3_asr.yaml", asr=short)) as pipeline:
        yield pipeline


def heard_by(pipeline, *parts, **fields) -> Listener:
    return ask(pipeline, TurnRequest((Message("user", parts),), **fields))


def test_a_clip_longer_than_asr_holds_is_heard_in_parts(hearing):
    assert recording().duration_s > hearing.parts.asr.longest_part_s()
    turn = heard_by(hearing, recording())
    assert turn.end.error is None
    assert turn.end.usage.prompt_audio_tokens >= 108
    parts = hearing.parts.asr.parts(recording())
    assert len(parts) > 1
    assert sum(len(part.samples) for part in parts) == len(recording().samples)


def test_the_budget_of_a_transcript_grows_with_its_clip():
    with running(config(pipeline="qwen3_asr.yaml", asr={"max_num_seqs": 1})) as pipeline:
        turn = heard_by(pipeline, recording())
        if turn.end.reason == "length":  # random weights seldom end
            assert turn.end.usage.text_tokens == 16 + int(12 * recording().duration_s)


def test_the_answer_of_asr_alone_is_counted_and_cut_like_any_other(hearing):
    words = dict.fromkeys(hearing.parts.asr.tokenizer.encode("what is the shape of a red circle"), 100.0)
    drawn = {"max_tokens": 12, "logit_bias": words, "presence_penalty": 2.0, "frequency_penalty": 2.0}

    def said(**more) -> Listener:
        return heard_by(hearing, slices(1)[0], voice=Voice(language="en"), sampling={"asr": drawn | more})

    turn = said()
    assert len(turn.text) > 10
    assert turn.end.reason == "length"
    assert turn.end.usage.text_tokens == 12
    assert turn.end.usage.prompt_text_tokens > 0
    stop = turn.text[4:6]
    stopped = said(stop=[stop])
    assert stopped.text == turn.text[: turn.text.index(stop)].rstrip()
    assert stopped.heard == [stopped.text]
    assert stopped.end.reason == "stop"
    cut = said(stop=[turn.text[0]])
    assert (cut.text, cut.end.reason) == ("", "stop")


def test_text_beside_the_sound_is_context_and_is_not_answered(hearing):
    clip_, words = slices(1)[0], "names: Ada, Grace"
    plain = heard_by(hearing, clip_)
    told = heard_by(hearing, clip_, Text(words))
    assert words not in told.text
    more = told.end.usage.prompt_text_tokens - plain.end.usage.prompt_text_tokens
    asr = hearing.parts.asr
    assert more == len(asr.tokenizer.encode("system\n" + words)) - len(asr.tokenizer.encode("system\n"))


def test_a_language_is_forced_on_asr(hearing):
    turn = heard_by(hearing, slices(1)[0], voice=Voice(language="de"))
    (heard,) = [event for event in turn.events if isinstance(event, Transcript)]
    assert heard.language == "German"


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        (["sound"], {"voice": Voice(language="klingon")}, "klingon"),
        (["sound"], {"voice": Voice(speaker="ryan")}, "speaker"),
        (["sound"], {"voice": Voice(max_frames=4)}, "max_frames"),
        (["sound"], {"voice": Voice(pass_token_ids=True)}, "pass_token_ids"),
        (["sound"], {"system_prompt": "Be brief."}, "system prompt"),
        (["text"], {}, "needs an audio part"),
        (["sound", "text"], {}, "needs an audio part"),
        (["sound", "sound"], {}, "before the last one"),
        (["much"], {}, "context leaves"),
        (["endless"], {}, "at least .* tokens"),
    ],
)
def test_asr_alone_refuses_by_name_what_does_nothing(hearing, messages, fields, words):
    sound = slices(1)[0]
    parts = {
        "sound": (sound,),
        "text": (Text("hello"),),
        "much": (sound, Text("word " * 200)),
        "endless": (sound, Text("word " * 10**6)),
    }
    request = TurnRequest(tuple(Message("user", parts[name]) for name in messages), **fields)
    with pytest.raises(BadRequest, match=words):
        hearing.submit(request, Listener())


# ---------------------------------------------------------------- the ids that are spoken


@pytest.mark.parametrize("stop", [True, False])
def test_what_is_spoken_by_ids_is_what_is_shown(pipeline, monkeypatch, stop):
    whole = ask(pipeline, spoken(speak=False, sampling={"aura": {"max_tokens": 30}})).text
    bodies = []
    prompt = type(pipeline.parts.speech.talker).prompt
    monkeypatch.setattr(
        type(pipeline.parts.speech.talker),
        "prompt",
        lambda self, speaking, body, reference=None: bodies.append(body) or prompt(self, speaking, body, reference),
    )
    drawn = {"max_tokens": 30, **({"stop": [whole[6:9]]} if stop else {})}
    turn = ask(pipeline, spoken(voice=Voice(pass_token_ids=True, max_frames=2), sampling={"aura": drawn}))
    assert turn.text
    assert [pipeline.parts.aura.tokenizer.decode(body).strip() for body in bodies] == [turn.text.strip()]


# ---------------------------------------------------------------- refusals at start


@pytest.mark.parametrize(
    ("stage", "given", "words"),
    [
        ("aura", {"default_sampling_params": {"logit_bias": {"100000": 1.0}}}, r"stage 1 \(aura\).*logit_bias"),
        ("talker", {"default_sampling_params": {"stop": ["."]}}, r"stage 2 \(talker\).*stop"),
        ("talker", {"default_sampling_params": {"stop_token_ids": list(range(3000))}}, r"stop_token_ids"),
        ("aura", {"max_model_len": 40}, r"stage 1 \(aura\): max_model_len is too small"),
        ("asr", {"max_model_len": 40}, r"stage 0 \(asr\): max_model_len is too small"),
        ("talker", {"max_model_len": 6}, r"stage 2 \(talker\): max_model_len is too small"),
    ],
)
def test_what_would_refuse_every_request_is_refused_at_start(stage, given, words):
    with pytest.raises(ConfigError, match=words):
        Pipeline.load(config(**{stage: given}))
