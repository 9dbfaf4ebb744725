"""What the pipeline refuses before the engine hears of it, and parts of a turn."""

import dataclasses

import numpy as np
import pytest

from aura_omni.errors import BadMedia, BadRequest, BadVoice, ConfigError, EngineError, PromptTooLong, Unavailable
from aura_omni.flow import (
    Audio,
    Ended,
    Message,
    Text,
    TurnRequest,
    Video,
    Voice,
)
from aura_omni.pipeline import Pipeline
from tests.family import Listener, ask, clip, config, recording, running, spoken


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (spoken(sampling={"aura": {"temperature": -1}}), BadRequest, "temperature is -1"),
        (spoken(voice=Voice(speaker="nobody")), BadVoice, "nobody"),
        (spoken(voice=Voice(task="Base", ref_audio=recording(), ref_text="it was")), BadVoice, "speaker encoder"),
        (spoken(voice=Voice(language="klingon")), BadVoice, "klingon"),
        (spoken(speak=False, voice=Voice(speaker="nobody")), BadVoice, "nobody"),
        (spoken(speak=False, voice=Voice(language="klingon")), BadVoice, "klingon"),
        (spoken(speak=False, voice=Voice(task="Base")), BadVoice, "speaker encoder"),
        (spoken(Text("long " * 20_000)), PromptTooLong, "8,191"),
        (spoken(Text("x" * 3_000_000)), PromptTooLong, "at least .* tokens"),
        (spoken(voice=Voice(instruct="a " * 1_500)), PromptTooLong, "1,023"),
        (spoken(voice=Voice(instruct="calm " * 500_000)), PromptTooLong, "at least .* tokens"),
        (spoken(system_prompt="x" * 3_000_000), PromptTooLong, "at least .* tokens"),
        (
            spoken(sampling={"aura": {"stop_token_ids": [*range(600)], "min_tokens": 5}}),
            BadRequest,
            "stop_token_ids has 600 ids",
        ),
        (spoken(sampling={"talker": {"stop_token_ids": [*range(3000)]}}), BadRequest, "stop_token_ids"),
        (spoken(sampling={"talker": {"stop_token_ids": [*range(2048)]}}), BadRequest, "stop_token_ids"),
        (
            spoken(sampling={"asr": {"stop_token_ids": [*range(600)], "min_tokens": 1}}),
            BadRequest,
            "stop_token_ids has 600 ids",
        ),
        (spoken(sampling={"talker": {"stop": ["."]}}), BadRequest, r"^talker\.stop is given to the Talker"),
        (
            spoken(sampling={"aura": {"logit_bias": {10**6: 1.0}}}),
            BadRequest,
            r"^aura\.logit_bias has the token id 1000000; this model's ids are from 0 to",
        ),
        (
            spoken(sampling={"aura": {"stop_token_ids": [10**6]}}),
            BadRequest,
            r"^aura\.stop_token_ids has the token id 1000000",
        ),
        (
            spoken(sampling={"talker": {"stop_token_ids": [3072]}}),
            BadRequest,
            r"^talker\.stop_token_ids has the .* 3072; .* to 3071",
        ),
        (
            spoken(sampling={"aura": {"min_tokens": 10, "max_tokens": 5}}),
            BadRequest,
            r"^aura\.min_tokens is 10, more than aura\.max_tokens, which is 5; set it to 5 at most, or raise aura\.max_tokens$",
        ),
        (
            spoken(sampling={"aura": {"min_tokens": 5000}}),
            BadRequest,
            r"^aura\.min_tokens is 5000, more than aura\.max_tokens",
        ),
        (spoken(sampling={"asr": {"min_tokens": 10, "max_tokens": 5}}), BadRequest, r"^asr\.min_tokens is 10"),
        (spoken(recording(), sampling={"asr": {"min_tokens": 5000}}), BadRequest, r"^asr\.min_tokens is 5000"),
        (
            spoken(sampling={"code2wav": {"min_tokens": 10, "max_tokens": 5}}),
            BadRequest,
            r"^code2wav\.min_tokens is 10",
        ),
        (
            spoken(sampling={"talker": {"min_tokens": 10}}, voice=Voice(max_frames=5)),
            BadRequest,
            r"^talker\.min_tokens is 10, more than max_frames, which is 5; set it to 5 at most, or raise max_frames$",
        ),
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


def test_a_budget_of_frames_above_that_of_the_deploy_file_is_the_budget(pipeline):
    least = pipeline.config.stage("talker").sampling.get("max_tokens", 4096) + 1
    for asked, refused in (({}, False), ({"min_tokens": least}, False), ({"min_tokens": least + 1}, True)):
        request = spoken(voice=Voice(max_frames=least), sampling={"talker": asked} if asked else {})
        if refused:
            with pytest.raises(
                BadRequest, match=f"^talker.min_tokens is {least + 1}, more than max_frames, which is {least}"
            ):
                pipeline.submit(request, Listener())
        else:
            listener = Listener()
            pipeline.submit(request, listener).cancel()
            listener.wait()


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
        patch.setattr(talker, "complete", fail)
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


@pytest.mark.parametrize(("asked", "said"), [({}, 25), ({"max_frames": 40}, 40), ({"max_frames": 6}, 6)])
def test_frames_that_a_request_allows_go_before_those_of_the_deploy_file(pipeline, asked, said):
    request = speech_of("Hello there, all of you who listen to this.")
    ended = ask(pipeline, dataclasses.replace(request, voice=Voice(**asked))).end
    assert (ended.usage.audio_frames, ended.speech_reason) == (said, "length")


def test_a_request_that_limits_its_frames_twice_gets_the_smaller_number(pipeline):
    request = speech_of("Hello there.")
    request = dataclasses.replace(
        request, voice=Voice(max_frames=30), sampling={"talker": {"seed": 5, "max_tokens": 9}}
    )
    assert ask(pipeline, request).end.usage.audio_frames == 9


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
        (speech_of("Hello", system_prompt="Be brief."), "system_prompt has no effect"),
        (TurnRequest((Message("user", (recording(),)),), part="transcript", voice=Voice(speaker="ryan")), "speaker"),
    ]:
        with pytest.raises(BadRequest, match=words):
            pipeline.submit(wrong, Listener())


def test_cancelling_a_part_frees_everything(pipeline):
    for request in (speech_of("so " * 50), TurnRequest((Message("user", (recording(),)),), part="transcript")):
        listener = Listener()
        pipeline.submit(request, listener).cancel()
        assert listener.wait().end.reason in ("cancelled", "stop", "length")
        assert all(runner.counters.pages_used == 0 for runner in pipeline.parts.ar_runners.values())


@pytest.mark.parametrize(
    ("stage", "given", "words"),
    [
        ("aura", {"default_sampling_params": {"logit_bias": {"100000": 1.0}}}, r"stage 1 \(aura\).*logit_bias"),
        ("talker", {"default_sampling_params": {"stop": ["."]}}, r"stage 2 \(talker\).*stop"),
        ("talker", {"default_sampling_params": {"stop_token_ids": list(range(3000))}}, r"stop_token_ids"),
        (
            "aura",
            {"default_sampling_params": {"min_tokens": 9, "max_tokens": 8}},
            r"stage 1 \(aura\).*: min_tokens is 9, more",
        ),
        ("aura", {"max_model_len": 40}, r"stage 1 \(aura\): max_model_len is too small"),
        ("asr", {"max_model_len": 40}, r"stage 0 \(asr\): max_model_len is too small"),
        ("talker", {"max_model_len": 6}, r"stage 2 \(talker\): max_model_len is too small"),
    ],
)
def test_what_would_refuse_every_request_is_refused_at_start(stage, given, words):
    with pytest.raises(ConfigError, match=words):
        Pipeline.load(config(**{stage: given}))


def test_without_the_speaking_stages_a_question_is_answered_in_text():
    off = {"enabled": False}
    with running(config(talker=off, code2wav=off)) as mute:
        assert mute.stages == ("asr", "aura")
        answer = ask(mute, spoken(Text("what is this?")))
        assert answer.text
        assert answer.end.reason in ("stop", "length")
        assert not answer.samples.size
        assert ask(mute, TurnRequest((Message("user", (Text("what is this?"),)),))).text
