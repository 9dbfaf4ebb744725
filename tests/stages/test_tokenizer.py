"""Long text: known to be too long without being encoded, and encoded without stopping everybody else."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni import nano
from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import PromptTooLong
from aura_omni.stages.tokenizer import Encoder, TextTokenizer
from tests.family import family


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(Checkpoint.find(str(family() / "aura")))


def test_no_token_stands_for_more_characters_than_the_longest(tokenizer):
    longest = max(len(tokenizer.decode([token])) for token in range(tokenizer.size))
    assert tokenizer.longest_token_characters >= longest


@pytest.mark.parametrize(
    "text", ["what is the colour " * 40, "e\u0301" * 300, "\u1112\u1161\u11ab" * 200, "\U0001f600" * 50]
)
def test_what_is_refused_unread_would_have_been_too_long(tokenizer, text):
    tokens = len(tokenizer.encode(text))
    tokenizer.refuse_endless([text], limit=tokens, way_out="")  # what fits is never refused
    limit = 1
    while True:
        try:
            tokenizer.refuse_endless([text], limit=limit, way_out="")
        except PromptTooLong:
            limit += 1
        else:
            break
    assert limit <= tokens


def test_ten_megabytes_are_refused_at_once_with_numbers(tokenizer):
    texts = ["so what is the colour " * 250_000] * 2
    start = time.monotonic()
    with pytest.raises(
        PromptTooLong, match=r"11,000,000 characters, which are at least [\d,]+ tokens; this model takes 8,191"
    ):
        tokenizer.refuse_endless(texts, limit=8_191, way_out="Send less.")
    assert time.monotonic() - start < 1.0


def test_encoding_a_long_text_lets_other_threads_run(tokenizer):
    text = "hello there, what is the colour of it? " * 20_000
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10


def test_a_long_text_has_the_tokens_of_its_lines(tokenizer):
    line = "what is the colour of it?\n"
    assert tokenizer.encode(line * 1_000) == tokenizer.encode(line) * 1_000


@given(st.text(alphabet="aZé ß'.,!?\n\t 12你好。，\u0301🙂-", max_size=60), st.lists(st.integers(1, 5), max_size=60))
def test_text_in_pieces_has_the_ids_of_the_whole(tokenizer, text, sizes):
    encoder, ids, at = Encoder(tokenizer), [], 0
    for size in [*sizes, len(text)]:
        ids += encoder.push(text[at : at + size])
        at += size
    assert ids + encoder.flush() == tokenizer.encode(text)


def test_a_word_leaves_with_the_character_behind_it(tokenizer):
    encoder = Encoder(tokenizer)
    assert encoder.push("assis") == []
    assert encoder.push("tant") == []
    assert encoder.push(" ") == tokenizer.encode("assistant")


class Watched(str):
    """Counts the characters that are looked at."""

    looks = 0

    def __getitem__(self, at):
        Watched.looks += 1
        return super().__getitem__(at)

    def __add__(self, other):
        return Watched(super().__add__(other))


@pytest.mark.parametrize("filling", ["1", "!", "a", "好"])
def test_text_without_the_end_of_a_word_is_not_searched_for_it_twice(tokenizer, monkeypatch, filling):
    encoder = Encoder(tokenizer)
    encoder._open = Watched()
    monkeypatch.setattr(Watched, "looks", 0)
    for _ in range(2_000):
        assert encoder.push(filling) == []
    assert Watched.looks <= 2 * 2_000


def test_tokenizers_agree_where_ids_are_the_same_words() -> None:
    aura, talker = (TextTokenizer.load(Checkpoint.find(str(family() / name))) for name in ("aura", "tts_custom_voice"))
    assert aura.added != talker.added
    assert aura.agrees_with(talker)
    small, other = (
        TextTokenizer.load(Checkpoint.find(str(nano.folder_of(name)))) for name in ("nano:aura", "nano:tts")
    )
    assert small.agrees_with(small)
    assert not small.agrees_with(other)
