"""What of an answer leaves, when, and whether it is silence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni.stages.silent import AnswerReader
from aura_omni.stages.tokenizer import TextTokenizer
from tests.aura_tiny import IDS, tokenizer

TOKENIZER = TextTokenizer(tokenizer(), "toy")
MARKER = "<|silent|>"


def ids_of(*pieces: str) -> list[int]:
    """Control tokens by name, everything else as text."""
    return [token for piece in pieces for token in ([IDS[piece]] if piece in IDS else TOKENIZER.encode(piece))]


def read(
    ids: list[int], *, stop: tuple[str, ...] = (), silent_text: str | None = MARKER
) -> tuple[list[str], AnswerReader]:
    reader = AnswerReader(TOKENIZER, silent_text=silent_text, stop=stop)
    deltas = [reader.push(token) for token in ids] + [reader.end(chosen=True)]
    return deltas, reader


def answer(*pieces: str, stop: tuple[str, ...] = ()) -> tuple[str, str | None]:
    deltas, reader = read(ids_of(*pieces), stop=stop)
    return "".join(deltas), reader.decision


SILENT = [
    (),
    (MARKER,),
    ("<|im_end|>",),
    ("<|endoftext|>",),
    (" \n",),
    (" ﹑",),
    ("...！？",),
    ("<|silent|", ">"),  # letter by letter
    (" \n<|sil", "ent|> "),
    ("... ", MARKER),
    ("<think>", "\n\n", "</think>", "\n\n"),
    ("<think>", "a secret", "</think>", MARKER),
    ("<think>", "a secret without end"),
    ("</think>",),
    ("<think>spelled</think> .",),
]


@pytest.mark.parametrize("pieces", SILENT, ids=repr)
def test_nothing_worth_saying_is_silence(pieces: tuple[str, ...]) -> None:
    assert answer(*pieces) == ("", "silent")


def test_the_marker_spelled_in_letters_is_silence() -> None:
    deltas, reader = read(TOKENIZER.encode(MARKER))
    assert (deltas[-1], set(deltas), reader.decision) == ("", {""}, "silent")


SPOKEN = [
    (("Hello",), "Hello"),
    (("  Hello ",), "Hello "),
    (("好的。",), "好的。"),
    (("... so",), "... so"),
    (("Sure ", MARKER), "Sure "),
    (("Sure ", MARKER, " yes"), "Sure  yes"),
    (("Su", MARKER, "re"), "Sure"),
    (("<|im_start|>", "Hi"), "Hi"),
    (("<think>", "hm <b>", "</think>", "Yes"), "Yes"),
    (("A", "<think>", "hm"), "A"),
    (("A</think>B",), "AB"),
    (("a < b",), "a < b"),
    (("a <|sil",), "a <|sil"),
    (("👍",), "👍"),
    (("7",), "7"),
    (("ok<|im_start|>user",), "okuser"),
]


@pytest.mark.parametrize(("pieces", "text"), SPOKEN, ids=repr)
def test_an_answer_is_cleaned_and_shown(pieces: tuple[str, ...], text: str) -> None:
    assert answer(*pieces) == (text, "speak")


def test_spelled_markers_are_taken_out_of_an_answer() -> None:
    deltas, reader = read(TOKENIZER.encode(f"Sure {MARKER}, <|im_end|>yes"))
    assert "".join(deltas) == "Sure , yes"
    assert reader.decision == "speak"


def test_taking_a_marker_out_makes_no_new_one() -> None:
    deltas, reader = read(TOKENIZER.encode("<|si<think>x</think><|silent|>lent|>"))
    assert "".join(deltas) == ""
    assert reader.decision == "silent"


def test_the_first_token_decides() -> None:
    for marker in (MARKER, "<|im_end|>"):
        reader = AnswerReader(TOKENIZER, silent_text=MARKER)
        assert reader.push(IDS[marker]) == ""
        assert reader.decision == "silent"
        assert [reader.push(token) for token in ids_of("late")] == [""] * 4
        assert reader.end(chosen=True) == ""


def test_a_model_without_the_marker_is_silent_only_when_empty() -> None:
    deltas, reader = read(ids_of(MARKER, "said"), silent_text=None)
    assert ("".join(deltas), reader.decision) == ("said", "speak")
    assert read([], silent_text=None)[1].decision == "silent"


def test_text_leaves_as_early_as_the_rules_allow() -> None:
    deltas, _ = read(TOKENIZER.encode(".. Hi <b>!"))
    assert deltas == ["", "", "", ".. H", "i", " ", "", "<b", ">", "!", ""]
    reader = AnswerReader(TOKENIZER, silent_text=MARKER)
    assert reader.push(TOKENIZER.encode("H")[0]) == "H"
    assert reader.decision == "speak"


def test_text_is_cut_before_a_stop_string() -> None:
    deltas, reader = read(TOKENIZER.encode("One. Two"), stop=("wo", ". T"))
    assert "".join(deltas) == "One"
    assert reader.stopped
    assert deltas[3:] == ["", "", "", "", "", ""]


def test_the_start_of_a_stop_string_is_held_back_until_it_cannot_be_one() -> None:
    deltas, reader = read(TOKENIZER.encode("abcabd"), stop=("abd!", "bca"))
    assert "".join(deltas) == "a"
    deltas, reader = read(TOKENIZER.encode("xabcx"), stop=("abd",))
    assert deltas == ["x", "", "", "abc", "x", ""]
    assert not reader.stopped
    deltas, reader = read(TOKENIZER.encode("xab"), stop=("abd",))
    assert deltas == ["x", "", "", "ab"]


def test_a_stop_string_at_the_very_start_leaves_no_text_and_no_silence() -> None:
    deltas, reader = read(TOKENIZER.encode("END of it"), stop=("END",))
    assert ("".join(deltas), reader.decision, reader.stopped) == ("", "speak", True)


def test_a_held_start_of_a_stop_string_is_no_silence() -> None:
    reader = AnswerReader(TOKENIZER, silent_text=MARKER, stop=("Hello",))
    assert [reader.push(token) for token in ids_of("Hel", "<|im_end|>")] == [""] * 4
    assert reader.end(chosen=True) == "Hel"


@given(
    st.lists(
        st.sampled_from(["<|", "<|si", "lent|>", "silent", "|>", "<think>", "</think>", " ", ".", "ab", "好", *IDS]),
        max_size=12,
    )
)
def test_joined_deltas_never_hold_a_marker_or_a_thought(pieces: list[str]) -> None:
    text, decision = answer(*pieces)
    for tag in (MARKER, "<think>", "</think>", "<|im_end|>"):
        assert tag not in text
    assert (decision == "silent") == (text == "")


@given(st.text(alphabet="ab. <|silent>好", max_size=20))
def test_ordinary_text_comes_out_whole(text: str) -> None:
    found, decision = answer("x" + text)
    if MARKER not in text:
        assert found == "x" + text
    assert decision == "speak"


@pytest.mark.parametrize("text", ["", ".", " , ...", "<think>never closed", "<|sil"])
def test_only_an_answer_that_ends_by_itself_chooses_silence(text: str) -> None:
    for chosen, decision in ((True, "silent"), (False, "speak")):
        reader = AnswerReader(TOKENIZER, silent_text="<|silent|>")
        deltas = [reader.push(token) for token in TOKENIZER.encode(text)] + [reader.end(chosen=chosen)]
        if text == "<|sil":  # letters, which are worth showing once no marker comes of them
            assert reader.decision == "speak"
            continue
        assert ("".join(deltas), reader.decision) == ("", decision)
