"""Every voice mode through a whole turn."""

import dataclasses
import threading

import pytest

from aura_omni.errors import BadRequest, BadVoice
from aura_omni.flow import (
    FRAME_SAMPLES,
    Audio,
    Message,
    Text,
    TurnRequest,
    Voice,
)
from aura_omni.pipeline import Pipeline
from tests.family import Listener, ask, config, recording, running, spoken

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
        lengths.append((len(rows.ids), prompt.prefill.length))
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
            (TurnRequest((said,), system_prompt="Be brief."), "system_prompt"),
            (TurnRequest((Message("system", (Text("Be brief."),)), said)), "system message"),
            (TurnRequest((said, Message("assistant", (Text("Hello?"),)), said)), "user message"),
            (TurnRequest((said,), sampling={"talker": {"stop": ["."]}}), "stop"),
            (TurnRequest((Message("user", (Text("x " * 3_000_000),)),)), "6,000,000 characters.*65,520"),
            (TurnRequest((Message("user", (Text("so " * 6_000),)),)), "5,460 tokens.*4,095"),
        ]:
            with pytest.raises(BadRequest, match=words):
                pipeline.submit(wrong, Listener())


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
