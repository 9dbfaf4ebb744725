"""The model's output becomes a Transcript by the published rules."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME, _detect_and_fix_repetitions

from aura_omni.errors import BadRequest
from aura_omni.flow import Transcript
from aura_omni.stages.tokenizer import TextTokenizer
from aura_omni.stages.transcript import LANGUAGES, joined, language_name, parse_transcript, transcript_of
from tests.asr_tiny import IDS, byte_tokenizer

TOKENIZER = TextTokenizer(byte_tokenizer(IDS), "tiny")
TAG = IDS["<asr_text>"]


def ids_of(output: str) -> list[int]:
    head, tag, tail = output.partition("<asr_text>")
    return [*TOKENIZER.encode(head), *([TAG] if tag else []), *TOKENIZER.encode(tail)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("language English<asr_text>What is this?", Transcript("What is this?", "English")),
        ("  language Chinese<asr_text> 你好。 \n", Transcript("你好。", "Chinese")),
        ("language ENGLISH\n<asr_text>Hi", Transcript("Hi", "English")),
        ("Language english<asr_text>Hi", Transcript("Hi", "English")),
        ("language None<asr_text>", Transcript("", None)),
        ("language none<asr_text>  ", Transcript("", None)),
        ("language None<asr_text>Hm?", Transcript("Hm?", None)),
        ("language <asr_text>Hi", Transcript("Hi", None)),
        ("<asr_text>Hi", Transcript("Hi", None)),
        ("\nlanguage French\nmore<asr_text>Bonjour", Transcript("Bonjour", "French")),
        ("more\nlanguage French<asr_text>Bonjour", Transcript("Bonjour", None)),
        ("language English<asr_text>a<asr_text>b", Transcript("a<asr_text>b", "English")),
        ("language English<asr_text>", Transcript("", "English")),
        ("What is this?", Transcript("What is this?", None)),
        ("", Transcript("", None)),
        ("   ", Transcript("", None)),
        # A head whose text never came is not what somebody said
        ("language English", Transcript("", None)),
        ("language None", Transcript("", None)),
    ],
)
def test_parsing(output, expected):
    assert parse_transcript(output) == expected


@pytest.mark.parametrize(
    "speech",
    [
        "Language models are wonderful.",
        "language models are",
        "Language English is spoken here.",
        "language None of it",
    ],
)
def test_speech_that_begins_with_language_is_not_eaten(speech):
    assert parse_transcript(speech).text == speech
    assert parse_transcript("language English<asr_text>" + speech) == Transcript(speech, "English")
    assert parse_transcript(speech, "English") == Transcript(speech, "English")
    for forced, output in ((None, speech), (None, "language English<asr_text>" + speech), ("English", speech)):
        assert transcript_of(ids_of(output), TOKENIZER, forced).text == speech


def test_a_forced_language_makes_everything_text():
    assert parse_transcript(" language French<asr_text>x ", "German") == Transcript(
        "language French<asr_text>x", "German"
    )
    assert parse_transcript("", "German") == Transcript("", "German")


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("a" * 21 + "b", "ab"),
        ("a" * 20 + "b", "a" * 20 + "b"),  # too near to the end to be looked at
        ("ha" * 20, "ha"),
        ("ha" * 19, "ha" * 19),
        ("I said " + "no, " * 30 + "stop", "I said no, stop"),
        ("你好" * 25 + "。", "你好。"),
        ("\n" * 50 + "x", "\nx"),
        ("abcdefghijklmnopqrst" * 20, "abcdefghijklmnopqrst"),
        ("abcdefghijklmnopqrstu" * 20, "abcdefghijklmnopqrstu" * 20),
        ("ha" * 20 + " " + "ho" * 25 + "!", "ha ho!"),
    ],
)
def test_runaway_repetitions_are_written_once(text, fixed):
    assert parse_transcript(f"language English<asr_text>.{text}").text == "." + fixed


_runs = st.lists(
    st.tuples(st.text("ab \n好", min_size=1, max_size=4), st.sampled_from([1, 2, 18, 19, 20, 21, 22, 45])), max_size=5
)


@pytest.mark.reference
@given(_runs)
@example([("a", 20), ("b", 20)])
def test_the_repetition_rule_is_the_published_one(runs):
    text = "x" + "".join(pattern * times for pattern, times in runs) + "x"
    assert parse_transcript(text, "English").text == _detect_and_fix_repetitions(text)


def test_control_tokens_write_nothing():
    ids = [*ids_of("language English<asr_text>a"), IDS["<|audio_pad|>"], TAG, *ids_of("b"), 999]
    assert transcript_of(ids, TOKENIZER) == Transcript("ab", "English")


def test_the_names_are_the_published_ones():
    assert len(LANGUAGES) == 30
    assert set(LANGUAGES) == set(LANGUAGE_CODE_TO_NAME.values())
    assert all(language_name(code) == name for code, name in LANGUAGE_CODE_TO_NAME.items())
    assert all(language_name(name) == name for name in LANGUAGES)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("EN", "English"),
        ("en-US", "English"),
        ("zh_Hans_CN", "Chinese"),
        (" french ", "French"),
        ("YUE", "Cantonese"),
        ("tl", "Filipino"),
    ],
)
def test_any_spelling_of_a_language_is_understood(value, name):
    assert language_name(value) == name


@pytest.mark.parametrize("value", ["", "xx", "Klingon", "english please", "None"])
def test_an_unknown_language_is_refused_with_the_list(value):
    with pytest.raises(BadRequest, match=r"Arabic, Cantonese.*Vietnamese") as caught:
        language_name(value)
    assert caught.value.param == "language"


def test_parts_are_joined_in_order():
    parts = [
        Transcript("Good.", "English"),
        Transcript("", None),
        Transcript("Day.", "English"),
        Transcript("好。", "Chinese"),
        Transcript("天", "Chinese"),
    ]
    assert joined(parts) == Transcript("Good. Day.好。天", "English,Chinese")
    assert joined([Transcript("안녕", "Korean"), Transcript("하세요", "Korean")]) == Transcript("안녕 하세요", "Korean")
    assert joined([]) == Transcript("", None)
