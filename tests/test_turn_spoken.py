"""What the Talker is given of an answer, and what becomes of speech that goes wrong."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest

from aura_omni.config import SpeechConfig
from aura_omni.engine.sequence import Sequence
from aura_omni.errors import BadRequest
from aura_omni.flow import FRAME_SAMPLES, AudioChunk, Playback, Text, TurnRequest, Voice
from aura_omni.pipeline import Pipeline
from aura_omni.stages.tokenizer import TextTokenizer
from tests.family import Listener, Script, ask, config, running, spoken
from tests.server.fake import serving

MARKED_UP = (
    "# Plan\n\nSome **bold** words for a_b_c and 2*3*4 in C#:\n- one\n- two\n\n| Name | Age |\n|---|---|\n| Ann | 7 |\n\n"
    "See [the shop](https://shop.test/x). 😀👩‍👩‍👧\n\n```py\nx = 1\n```\nIt is $7.20."
)  # fmt: skip
SPOKEN = (
    "Plan. Some bold words for a_b_c and 2*3*4 in C#: one. two. Name, Age. Ann, seven. See the shop. "
    "It is seven dollars and twenty cents."
)


Answer = Callable[..., tuple[Listener, str]]


@pytest.fixture
def answer(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """answer(text) has AURA say text, a character for each token: the turn, and what the Talker read of it."""
    talker = pipeline.parts.speech.talker
    read: list[int] = []
    prompt, feed = type(talker).prompt, type(talker).feed

    def prompted(self, speaking, body, reference=None):
        read.extend(body)
        return prompt(self, speaking, body, reference)

    def fed(self, sequence, ids):
        read.extend(ids)
        feed(self, sequence, ids)

    monkeypatch.setattr(type(talker), "prompt", prompted)
    monkeypatch.setattr(type(talker), "feed", fed)

    def say(text: str, *, frames: int = 4, **fields) -> tuple[Listener, str]:
        read.clear()
        monkeypatch.setattr(pipeline.parts.aura, "reader", lambda _: Script(text), raising=False)
        length = max(1, len(text))
        sampling = {
            "aura": {"max_tokens": length, "min_tokens": length},
            "talker": {"max_tokens": frames, "min_tokens": frames},
        }
        turn = ask(pipeline, spoken(Text("What is the plan, please?"), sampling=sampling, **fields))
        return turn, talker.writer.tokenizer.decode(read)

    return say


@pytest.mark.parametrize("whole", [False, True], ids=["as it is written", "all at once"])
def test_the_talker_reads_words_and_the_user_what_was_written(answer, whole):
    turn, read = answer(MARKED_UP, voice=Voice(non_streaming=whole), frames=4 if whole else 120)
    assert read == SPOKEN
    assert turn.text == MARKED_UP
    assert len(turn.samples)


def test_normalize_false_hands_on_what_was_written(answer):
    assert answer(MARKED_UP, voice=Voice(normalize=False), frames=240)[1] == MARKED_UP


def test_the_language_of_the_question_is_that_of_the_answer(answer):
    assert answer("2.5 kg")[1] == "two point five kilograms"


@pytest.mark.parametrize("written", ["```py\nx = 1\n```", "😀 👍🏽", "👩‍👩‍👧"])
@pytest.mark.parametrize("whole", [False, True], ids=["as it is written", "all at once"])
def test_without_a_word_to_speak_there_is_no_sound_and_the_reason_is_said(answer, pipeline, written, whole):
    steps = pipeline.parts.ar_runners["talker"].counters.steps
    turn, read = answer(written, voice=Voice(non_streaming=whole))
    assert turn.text == written
    assert (turn.end.reason, turn.end.speech_reason) == ("length", "empty")
    assert (read, len(turn.samples)) == ("", 0)
    assert pipeline.parts.ar_runners["talker"].counters.steps == steps


def test_token_ids_are_spoken_as_they_are(pipeline, monkeypatch):
    bodies = []
    prompt = type(pipeline.parts.speech.talker).prompt
    monkeypatch.setattr(
        type(pipeline.parts.speech.talker),
        "prompt",
        lambda self, *given: bodies.append(given[1]) or prompt(self, *given),
    )
    turn = ask(pipeline, spoken(voice=Voice(pass_token_ids=True)))
    assert pipeline.parts.aura.tokenizer.decode(bodies[0]).strip() == turn.text.strip()
    with pytest.raises(BadRequest, match="normalize is true"):
        pipeline.submit(spoken(voice=Voice(pass_token_ids=True, normalize=True)), Listener())


def test_token_ids_that_mean_other_words_to_the_talker_are_refused(pipeline, monkeypatch):
    asked = spoken(voice=Voice(pass_token_ids=True))
    monkeypatch.setattr(TextTokenizer, "agrees_with", lambda *_: False)
    with pytest.raises(BadRequest, match="vocabularies of this server's two checkpoints differ") as refused:
        pipeline.submit(asked, Listener())
    assert refused.value.param == "pass_token_ids"
    assert ask(pipeline, dataclasses.replace(asked, speak=False)).text, "nobody speaks them"


@pytest.mark.parametrize(
    ("normalize", "expected"), [(None, "It is two point five kilograms."), (False, "It is **2.5 kg**.")]
)
def test_a_speech_request_is_normalised_too(pipeline, normalize, expected):
    request = speech("It is **2.5 kg**.", voice=Voice(normalize=normalize), frames=3)
    body = pipeline._planners["speech"].plan(request).body
    assert pipeline.parts.speech.talker.writer.tokenizer.decode(body) == expected
    assert ask(pipeline, request).text == "It is **2.5 kg**."


def test_the_deploy_file_sets_what_requests_do_not(pipeline):
    raw = Pipeline(dataclasses.replace(config(), speech=SpeechConfig(normalize=False)), pipeline.parts)
    for asked, expected in ((None, False), (True, True)):
        plan = raw._planners["speech"].plan(speech("2 kg", voice=Voice(normalize=asked)))
        assert plan.normalize is expected


def speech(text: str, *, frames: int = 2_000, voice: Voice = Voice(), **fields) -> TurnRequest:  # noqa: B008
    sampling = {"talker": {"max_tokens": frames, **fields.pop("talker", {})}}
    return spoken(Text(text), part="speech", voice=voice, sampling=sampling, **fields)


# ---------------------------------------------------------------- speech that does not end

EOS = 2150
WHOLE = Playback(live=False)
NEVER_ENDS = {"logit_bias": {EOS: -100.0}}
STUCK = {"logit_bias": {5: 100.0}}


@pytest.fixture(scope="module")
def watched() -> Iterator[Pipeline]:
    changed = dataclasses.replace(
        config(pipeline="qwen3_tts.yaml", talker={"max_model_len": 1024}),
        speech=SpeechConfig(max_loop_s=1.0, max_silence_s=1.0, spare_frames=10, frames_per_token=3),
    )
    with running(changed) as pipeline:
        yield pipeline


def tries(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, *of_each: dict) -> list[Sequence]:
    """The Talker's sequences, whose sampling is changed: of the first as of_each[0] says, and so on."""
    talker = type(pipeline.parts.speech.talker)
    made: list[Sequence] = []
    original = talker.sequence

    def sequence(self, prompt, sampling, **more):
        changes = of_each[len(made)] if len(made) < len(of_each) else {}
        made.append(original(self, prompt, dataclasses.replace(sampling, **changes), **more))
        return made[-1]

    monkeypatch.setattr(talker, "sequence", sequence)
    return made


@pytest.mark.parametrize(
    ("sampling", "text", "fault"),
    [
        (NEVER_ENDS, "OK", "length"),
        (NEVER_ENDS, "A longer text that is spoken.", "length"),
        (STUCK, "one " * 30, "loop"),
    ],
)
def test_a_talker_that_never_stops_is_stopped(watched, sampling, text, fault, caplog):
    with caplog.at_level(logging.WARNING):
        turn = ask(watched, speech(text, talker=sampling))
    assert (turn.end.reason, turn.end.speech_reason) == ("stop", fault)
    assert len(turn.samples) == turn.end.usage.audio_frames * FRAME_SAMPLES
    assert turn.end.usage.audio_frames <= 10 + 3 * len(watched.parts.speech.talker.writer.body(text))
    assert fault in caplog.text


def test_a_talker_without_a_sound_is_stopped(watched, monkeypatch):
    decoder = watched.parts.speech.vocoder.decoder
    step = decoder.step
    monkeypatch.setattr(decoder, "step", lambda *given: step(*given) * 0, raising=False)
    turn = ask(watched, speech("one " * 30, talker=NEVER_ENDS))
    assert turn.end.speech_reason == "silence"
    assert 12 <= turn.end.usage.audio_frames < 60


@pytest.mark.parametrize("fault", [NEVER_ENDS, STUCK], ids=["never ends", "stuck"])
def test_speech_that_nobody_has_heard_is_made_again_with_another_seed(watched, fault, monkeypatch):
    made = tries(watched, monkeypatch, fault, {"logit_bias": {EOS: 100.0}})
    turn = ask(watched, speech("one " * 15, talker={"seed": 7}, playback=WHOLE))
    assert turn.end.speech_reason == "stop"
    assert [sequence.seed for sequence in made] == [7, 8]
    assert len(turn.samples) == 2 * FRAME_SAMPLES  # of the second try alone


def test_speech_that_ends_too_soon_for_its_text_says_so(watched, monkeypatch, caplog):
    made = tries(watched, monkeypatch)
    for live, count in ((True, 1), (False, 2)):
        made.clear()
        turn = ask(watched, speech("one " * 60, talker={"logit_bias": {EOS: 100.0}}, playback=Playback(live=live)))
        assert (turn.end.reason, turn.end.speech_reason, turn.end.speech_stopped) == ("stop", "short", True)
        assert len(made) == count  # once more where nobody has heard it
        assert len(turn.samples) == 2 * FRAME_SAMPLES
    assert "short" in caplog.text


def test_a_second_try_is_the_last(watched, monkeypatch):
    made = tries(watched, monkeypatch)
    turn = ask(watched, speech("OK", talker=NEVER_ENDS, playback=WHOLE))
    assert (turn.end.speech_reason, len(made)) == ("length", 2)
    assert len(turn.samples) == len(made[1].state.frames) * FRAME_SAMPLES


@pytest.mark.parametrize("why", ["streamed", "greedy", "as many frames as were asked for"])
def test_there_is_no_second_try_when_it_could_not_help(watched, why, monkeypatch):
    made = tries(watched, monkeypatch)
    sampling = NEVER_ENDS | ({"temperature": 0.0} if why == "greedy" else {})
    voice = Voice(max_frames=5) if why.startswith("as many") else Voice()
    turn = ask(watched, speech("OK", talker=sampling, voice=voice, playback=Playback(live=why == "streamed")))
    assert turn.end.speech_reason in ("length", "loop")
    assert len(made) == 1


def test_without_an_end_to_draw_the_talker_speaks_to_its_last_frame(pipeline):
    """The id that ends speech is no code: drawn and kept, it would be an error of Code2Wav."""
    text = "abcdefg " * 37
    for seed in range(3):
        turn = ask(pipeline, speech(text, frames=80, talker={"ignore_eos": True, "min_tokens": 0, "seed": seed}))
        assert turn.end.error is None
        assert turn.end.speech_reason == "length"
        assert len(turn.samples) == 80 * FRAME_SAMPLES


def test_whole_and_streamed_sound_is_the_same(watched):
    whole, streamed = (
        ask(watched, speech("Hello there", frames=12, talker={"seed": 3}, playback=Playback(live=kind)))
        for kind in (False, True)
    )
    np.testing.assert_array_equal(whole.samples, streamed.samples)
    sounds = [event for event in whole.events if isinstance(event, AudioChunk)]
    assert whole.events[-1 - len(sounds) : -1] == sounds  # at the end


def test_an_answer_is_spoken_again_from_its_start(pipeline, monkeypatch, answer):
    made = tries(pipeline, monkeypatch, {**NEVER_ENDS, "max_tokens": 900}, {})
    fast = SpeechConfig(spare_frames=2, frames_per_token=1)
    monkeypatch.setattr(pipeline, "config", dataclasses.replace(pipeline.config, speech=fast))
    turn, read = answer("This is the plan for all of us.", playback=WHOLE)
    assert len(made) == 2
    assert turn.end.speech_reason == "length"  # the four frames of the second
    assert read.endswith("This is the plan for all of us.")
    assert len(turn.samples) == 4 * FRAME_SAMPLES


def test_a_server_whose_talker_never_stops_answers_in_time_and_says_so():
    changed = config(
        pipeline="qwen3_tts.yaml",
        talker={"max_model_len": 1024, "default_sampling_params": {"logit_bias": {str(EOS): -100}, "max_tokens": 4000}},
    )
    with serving(Pipeline.load(changed)) as url, httpx.Client(base_url=url, timeout=60) as client:  # which closes it
        whole = client.post("/v1/audio/speech", json={"input": "OK"})
        assert (whole.status_code, whole.headers["x-audio-finish-reason"]) == (200, "length")
        assert len(whole.content) <= 44 + 2 * 24_000 * 5  # five seconds
        events = client.post("/v1/audio/speech", json={"input": "OK", "stream_format": "sse"}).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["audio_finish_reason"] == "length"
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "OK"}]}).json()
        assert chat["choices"][0]["audio_finish_reason"] == "length"
        assert chat["choices"][0]["finish_reason"] == "length"
        empty = client.post("/v1/audio/speech", json={"input": "```\ncode\n```"})
        assert (empty.status_code, empty.headers["x-audio-finish-reason"]) == (200, "empty")
        raw = client.post("/v1/audio/speech", json={"input": "```\ncode\n```", "normalize": False})
        assert raw.headers["x-audio-finish-reason"] == "length"
        assert base64.b64decode(chat["choices"][0]["message"]["audio"]["data"])


def test_speech_that_fills_the_talker_is_not_whole(watched):
    """The end of max_model_len is nobody's budget; max_tokens is."""
    text = "one " * 330  # of 1,024 rows
    turn = ask(watched, speech(text, talker=NEVER_ENDS | {"max_tokens": 4_000}))
    assert (turn.end.speech_reason, turn.end.speech_stopped) == ("length", True)
    turn = ask(watched, speech("Hello there", frames=3, talker=NEVER_ENDS))
    assert (turn.end.speech_reason, turn.end.speech_stopped) == ("length", False)
