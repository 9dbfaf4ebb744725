"""Rows of the Talker's prompt: how many, which ids, and how text becomes ids."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import BadRequest, PromptTooLong
from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.talker_prompt import MOST_WRITTEN, PromptWriter, prefill_length
from aura_omni.stages.tokenizer import TextTokenizer
from aura_omni.stages.voices import Speaking
from tests.reference_tts import reference_ids, reference_tokenizer, special_ids, tts_config, write_tokenizer
from tests.stages.speech_text import whole

ID = special_ids()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(Checkpoint.find(str(folder)))


@pytest.fixture(scope="module")
def writer(tokenizer: TextTokenizer) -> PromptWriter:
    return PromptWriter(tokenizer, tts_config("base"), "tiny")


@pytest.fixture(scope="module")
def published(folder: Path) -> Any:
    return reference_tokenizer(folder)


def speaking(**changes: Any) -> Speaking:
    values: dict[str, Any] = {
        "task": "CustomVoice",
        "language_id": None,
        "speaker_id": 3065,
        "instruct": "",
        "clone": None,
        "non_streaming": False,
    }
    return Speaking(**{**values, **changes})


KINDS = {
    "CustomVoice": {"task": "CustomVoice", "speaker_id": 3065},
    "VoiceDesign": {"task": "VoiceDesign", "speaker_id": None},
    "Base, its sound alone": {"task": "Base", "speaker_id": None, "clone": "speaker"},
    "Base, continued": {"task": "Base", "speaker_id": None, "clone": "continue"},
}


@pytest.mark.parametrize(
    ("kind", "non_streaming", "language", "instruct", "from_ids"),
    list(product(KINDS, [False, True], [None, 2050], ["", "very slowly"], [False, True])),
)
def test_prompt_length_follows_from_counts_of_ids(
    writer: PromptWriter, kind: str, non_streaming: bool, language: int | None, instruct: str, from_ids: bool
) -> None:
    voice = speaking(**KINDS[kind], non_streaming=non_streaming, language_id=language, instruct=instruct)
    for text, frames in product(["a", "Hello the world", "héllo 你好 😀"], [1, 3, 40]):
        body = writer.body(text)
        if from_ids:
            body = writer.body_of_ids([*writer.role_ids, *body, ID["<|im_end|>"], *writer.body("x")])
        continued = voice.clone == "continue"
        reference = writer.body("the reference") if continued else []
        prefill = writer.prefill(voice, body, reference_ids=reference, reference_frames=frames if continued else None)
        codes = 1 + (frames if continued else 0)
        text_rows = len(reference) + len(body) + 1
        control = (4 if language else 3) + (0 if kind == "VoiceDesign" else 1) + 1
        instruct_rows = len(writer.instruct(instruct))
        expected = instruct_rows + 3 + control + (text_rows + codes if non_streaming else codes)
        assert prefill.length == len(prefill.text_ids) == expected
        assert expected == prefill_length(
            instruct_ids=instruct_rows,
            body_ids=len(body),
            language=language is not None,
            speaker=kind != "VoiceDesign",
            non_streaming=non_streaming,
            reference_ids=len(reference),
            reference_frames=frames if continued else None,
        )
        # No text is lost or doubled: what is not in the rows follows them, and the end is read once.
        read = [*prefill.text_ids, *prefill.trailing_ids]
        assert read.count(writer.ids.text_eos) == 1
        whole = [*reference, *body, writer.ids.text_eos]
        start = instruct_rows + 3 + control
        assert read[start : start + len(whole)] == whole


def test_the_shortest_prompts_have_nine_and_ten_rows(writer: PromptWriter) -> None:
    for text in ("a", "Hello the world, again and again"):
        body = writer.body(text)
        assert writer.prefill(speaking(), body).length == 9
        assert writer.prefill(speaking(language_id=2050), body).length == 10


def test_every_row_has_its_place(writer: PromptWriter) -> None:
    ids, role = writer.ids, tuple(writer.role_ids)
    pad, bos, eos = ids.text_pad, ids.text_bos, ids.text_eos

    prefill = writer.prefill(speaking(non_streaming=True, language_id=2050), [7, 8])
    assert prefill.text_ids == (*role, pad, pad, pad, pad, pad, bos, 7, 8, eos, pad)
    assert prefill.codec_rows == tuple(range(3, 13))
    assert prefill.codec_ids == (2154, 2156, 2050, 2157, 3065, 2148, 2148, 2148, 2148, 2149)
    assert prefill.trailing_ids == ()

    voice = speaking(task="Base", speaker_id=None, clone="continue")
    prefill = writer.prefill(voice, [7, 8], reference_ids=[5], reference_frames=2)
    assert prefill.text_ids == (*role, pad, pad, pad, pad, bos, 5, 7, 8)
    assert prefill.codec_rows == (3, 4, 5, 7, 8)
    assert prefill.codec_ids == (2155, 2156, 2157, 2148, 2149)
    assert (prefill.speaker_row, prefill.frames_row, prefill.frames) == (6, 9, 2)
    assert prefill.trailing_ids == (eos,)


@pytest.mark.reference
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("aH ello\n\r\t.é你 the1\u0301"), max_size=12))
def test_text_alone_has_the_ids_it_has_inside_the_published_template(
    writer: PromptWriter, published: Any, text: str
) -> None:
    if not text.strip():
        return
    inside = reference_ids(published, "target", text.lstrip())[0].tolist()
    assert inside[:3] == writer.role_ids
    assert writer.body(text) == inside[3:-5]
    assert writer.body(text) == reference_ids(published, "reference", text.lstrip())[0].tolist()[3:-2]
    assert writer.instruct(text) == reference_ids(published, "instruct", text)[0].tolist()


@pytest.mark.reference
def test_a_newline_in_front_would_shift_the_published_slice(published: Any, writer: PromptWriter) -> None:
    assert reference_ids(published, "target", "\nHello")[0].tolist()[:3] != writer.role_ids
    assert writer.body("\n \nHello") == writer.body("Hello")


def test_control_tokens_spelled_in_text_stay_text(writer: PromptWriter, tokenizer: TextTokenizer) -> None:
    spelled = "Hello<|im_end|> <tts_pad>"
    assert not set(writer.body(spelled)) & set(tokenizer.added)
    assert tokenizer.decode(writer.body(spelled)) == spelled
    instruct = writer.instruct("x<|im_end|>")
    assert instruct.count(ID["<|im_end|>"]) == 1


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_nothing_to_speak_is_refused(writer: PromptWriter, text: str) -> None:
    with pytest.raises(BadRequest, match="no text to speak"):
        writer.body(text)


def test_answer_ids_lose_what_is_not_spoken(writer: PromptWriter, tokenizer: TextTokenizer) -> None:
    hello, world, newline = tokenizer.encode("Hello"), tokenizer.encode(" world"), tokenizer.encode("\n")
    end, think, unthink, text_end = (ID[name] for name in ("<|im_end|>", "<think>", "</think>", "<|endoftext|>"))
    spoken = hello + world
    for ids in (
        spoken,
        writer.role_ids + spoken,
        [*spoken, end, *hello],
        [*spoken, *newline, text_end, *newline, end],
        [think, *world, unthink, *newline, *newline, *spoken],
        [*hello, think, *hello, unthink, *world],
        [*spoken, think, *hello],
        [*hello, unthink, *world],
        [*hello, text_end, *world],
    ):
        assert writer.body_of_ids(ids) == spoken
    assert writer.body_of_ids(hello + newline + world) == hello + newline + world


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_out_of_the_vocabulary_are_refused(writer: PromptWriter, bad: int) -> None:
    with pytest.raises(BadRequest, match=f"token id {bad} is not of the Talker's text vocabulary"):
        writer.body_of_ids([*writer.body("Hello"), bad])


def test_an_answer_of_control_tokens_alone_is_refused(writer: PromptWriter) -> None:
    with pytest.raises(BadRequest, match="no text to speak"):
        writer.body_of_ids([*writer.role_ids, ID["<think>"], *writer.body("x"), ID["<|im_end|>"]])


# ---------------------------------------------------------------- the spoken form of a whole text


@pytest.mark.parametrize(
    "written", ["\n# Hi\nIt is **2.5 kg**.", "so it was, " + "😀" * 9_000 + " 2 kg", "😀", "<!-- no word -->", "..."]
)
def test_the_ids_of_a_written_text_are_those_of_its_spoken_form(writer: PromptWriter, written: str) -> None:
    ids = writer.spoken(written, language="english", context="")
    words = any(character.isalnum() for character in whole(written, "english"))
    assert ids == (writer.body(whole(written, "english")) if words else None)


@pytest.fixture
def short(tokenizer: TextTokenizer) -> PromptWriter:
    return PromptWriter(tokenizer, tts_config("base"), "tiny", max_model_len=1_001)


def test_a_text_that_cannot_fit_is_not_read_to_its_end(short: PromptWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    feed = SpeechText.feed
    monkeypatch.setattr(SpeechText, "feed", lambda self, delta: read.append(len(delta)) or feed(self, delta))
    with pytest.raises(
        PromptTooLong, match=r"the first 4,096 of the text's 16,000 characters are [\d,]+ tokens; .* takes 1,000"
    ):
        short.spoken("no " * 5_333 + ".", language=None, context="")
    assert sum(read) == 4_096
    read.clear()
    with pytest.raises(
        PromptTooLong, match=r"4,000,000 characters; .* may have 16,000, 16 for each of the 1,000 tokens"
    ):
        short.spoken("😀" * 4_000_000, language=None, context="")
    assert not read
    assert short.spoken("😀" * (MOST_WRITTEN * 1_000 - 1) + "a", language=None, context="") is not None
