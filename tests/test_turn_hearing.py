"""Many and long recordings, and ASR alone."""

import pytest

from aura_omni.errors import BadRequest
from aura_omni.flow import (
    Audio,
    Message,
    Text,
    TextDelta,
    Transcript,
    TurnRequest,
    Voice,
)
from tests.family import WORDS, Listener, ask, config, recording, running, spoken


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
    assert "cut a transcript" not in caplog.text, "the request wanted no more"


def test_a_transcript_that_the_servers_budget_cut_is_logged(caplog):
    with running(config(pipeline="qwen3_asr.yaml", asr={"default_sampling_params": {"max_tokens": 3}})) as pipeline:
        turn = heard_by(pipeline, recording())
    assert turn.end.reason == "length"
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
        (["sound"], {"system_prompt": "Be brief."}, "system_prompt"),
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
        hearing.submit(TurnRequest((Message("user", (Text("Hello"),)),), part="speech"), Listener())
