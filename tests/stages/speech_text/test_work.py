"""The work that a text costs grows with its length and no faster, whatever looks like markup in it: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.speech_text.language import LanguageGuess
from aura_omni.stages.speech_text.markup import LONGEST, LONGEST_INFO, LONGEST_RUN, Markup
from aura_omni.stages.speech_text.reader import Reader
from tests.stages.speech_text import whole

TOKENS = ["[", "](", "]", ")", "(", "!", "<", "<!--", "-->", "<script>", "</", "<a b=", "`", "```", "**", "_", "|", "\n", ">", "#",
          "- ", " ", "\\", "12", "a", ".", ":", "/", "@", "&", ";", "[1]", '"', "'", "😀", "好", "x=", "-", "%"]  # fmt: skip
DANGEROUS = ["[", "](", ")", "<", "<!--", "-->", "`", '"', " ", "\n", "a", "1"]
MOST_LOOKS = 30  # at each character, by all that looks at one
MOST_SPOKEN = 16  # characters for each written one


class Looks:
    """How many characters the code under test has looked at: one for each step of a scan, and all that an expression is given."""

    def __init__(self) -> None:
        self.count = 0

    def at(self, owner: type, name: str, size: Callable[..., int], patch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def counting(this: Any, *given: Any, **named: Any) -> Any:
            self.count += size(this, *given)
            return method(this, *given, **named)

        patch.setattr(owner, name, counting)


@pytest.fixture(scope="module")
def looks() -> Iterator[Looks]:
    looks = Looks()
    with pytest.MonkeyPatch.context() as patch:
        looks.at(Markup, "_take", lambda this, character: 1, patch)
        looks.at(Markup, "_take_mark", lambda this, mark: len(this._line) if mark.isalnum() else 1, patch)
        looks.at(Markup, "_begin_line", lambda this, character: len(this._line), patch)
        looks.at(Markup, "_resolve", lambda this: len(this._hold), patch)
        looks.at(Markup, "_release", lambda this, size, said: len(said), patch)
        looks.at(Reader, "_take", lambda this, character: 1, patch)
        looks.at(Reader, "_read", lambda this, word, after: len(word), patch)
        looks.at(Reader, "_read_core", lambda this, core, after, language: len(core), patch)
        looks.at(LanguageGuess, "add", lambda this, text: len(text), patch)
        yield looks


def check(looks: Looks, text: str, language: str | None) -> None:
    looks.count = 0
    spoken = whole(text, language)
    assert looks.count <= MOST_LOOKS * len(text), f"{text[:40]!r}: {looks.count / len(text):.0f} looks at a character"
    assert len(spoken) <= MOST_SPOKEN * len(text)
    looks.count = 0
    single = SpeechText(language, context=text)
    assert "".join(map(single.feed, text)) + single.finish() == spoken
    assert looks.count <= MOST_LOOKS * len(text)


@pytest.mark.parametrize("first", TOKENS, ids=repr)
def test_each_pair_of_marks_again_and_again_costs_work_in_its_length(looks, first):
    for tokens in chain([(first,)], product([first], TOKENS)):
        period = "".join(tokens)
        check(looks, period * (400 // len(period)), None if len(tokens) == 1 else "english")


@pytest.mark.parametrize("first", DANGEROUS, ids=repr)
def test_each_triple_of_dangerous_marks_costs_work_in_its_length(looks, first):
    for tokens in product([first], DANGEROUS, DANGEROUS):
        period = "".join(tokens)
        check(looks, period * (240 // len(period)), "english")


@given(
    before=st.lists(st.sampled_from(TOKENS), max_size=4).map("".join),
    period=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5).map("".join),
    language=st.sampled_from([None, "english", "chinese"]),
)
def test_any_marks_again_and_again_cost_work_in_their_length(looks, before, period, language):
    check(looks, before + period * (1_500 // len(period)), language)


@pytest.mark.parametrize(
    "period",
    ["[a](", "![a](", "<!--", '[a](b "', "[a](b '", "[a](b (", "[a](b \"[a](b '", "[a][", "<a b=\"<a c='", "<a ", "<script>", "<style>a",
     "</script", "&a", "[^", "[1]", "[1](", "[1][", "[^1][1", "[1](a)", "1.", "> ", "- ", "`", "```a", "*", "a", "a.", "1-", "1))))", "a:", "http://a/", "=", "1,", "<a" + " " * 290,
     "1-" * 40 + "x ", "\\", "[a]([b](c)"],
    ids=repr,
)  # fmt: skip
def test_a_long_text_costs_no_more_at_a_character_than_a_short_one(looks, period):
    check(looks, period * (20_000 // len(period)), "english")


@pytest.mark.parametrize(
    ("opening", "filling"),
    [("[a](", "b"), ('[a](b "', "c "), ("[a][", "b "), ("<!--", "a "), ("<script>", "a\n"), ('<a b="', "c "), ("<https:", "a"),
     ("&", "a"), ("[^", "a"), ("```", "a"), ("", "*"), ("", "- "), ("", "="), ("", "a"), ("```\n", "a"), ("https://a.test/", "b")],
)  # fmt: skip
def test_what_is_held_back_has_a_longest_form(opening, filling):
    markup, reader = Markup(), Reader("english", LanguageGuess())
    for character in opening + filling * 5_000:
        reader.push(markup.push(character))
        assert len(markup._hold) <= LONGEST
        assert len(markup._line) <= max(LONGEST_RUN + 4, LONGEST_INFO)
        assert not markup._again
        assert len(reader._word) <= 101


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("[a](" + "b" * 1_900 + ") c", "a c"),
        ("[a](" + "b" * 2_000 + ") c", "a (" + "b" * 2_000 + ") c"),
        ("<!--" + "b" * 1_900 + "--> c", "c"),
        ("<!--" + "b" * 2_000 + "--> c", "<!--" + "b" * 2_000 + "--> c"),
        ("```" + "b" * 190 + "\ncode", ""),
        ("```" + "b" * 300 + "\ncode", "b" * 300 + " code"),
        ("=" * 5_000 + "\nc", "c"),
        ("a " + "*" * 5_000 + "b**", "a b"),
    ],
    ids=lambda text: f"{text[:5]}, {len(text)} characters",
)
def test_what_is_longer_than_a_mark_can_be_is_plain_text(written, spoken):
    assert whole(written, "german") == spoken
