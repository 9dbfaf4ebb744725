"""Text as AURA writes it, to what the Talker reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni.engine.loader import Checkpoint
from aura_omni.stages.speech_text import SpeechText
from aura_omni.stages.spoken_ids import SpokenIds
from aura_omni.stages.tokenizer import Encoder, TextTokenizer
from tests.family import family
from tests.stages.speech_text import whole

TEXTS = ["\n\n# Hi\nIt is **2.5 kg**, or $7.20. 😀", "好的，2个。", "```x```", "a_b_c", "", "```\ncode\n```\n", "...",
         "so → that | is , it . e\u0301 \u0301a ok好 a 好b 5 apples 3 m e.g. This isn 't\n\n- it x" + 30 * "long"]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(Checkpoint.find(str(family() / "tts_custom_voice")))


@given(text=st.sampled_from(TEXTS), sizes=st.lists(st.integers(1, 5), min_size=1), raw=st.booleans())
def test_ids_of_deltas_are_those_of_the_whole_spoken_text(tokenizer, text, sizes, raw):
    reader = SpokenIds(Encoder(tokenizer), None if raw else SpeechText("english"))
    ids, rest = [], text
    while rest:
        for size in sizes:
            ids += reader.push(rest[:size])
            rest = rest[size:]
    ids += reader.end()
    spoken = (text if raw else whole(text, "english")).lstrip()
    assert ids == (tokenizer.encode(spoken) if spoken else [])
    assert reader.speakable == any(character.isalnum() for character in spoken)


def test_a_word_leaves_with_the_white_space_behind_it(tokenizer):
    reader = SpokenIds(Encoder(tokenizer), SpeechText("english"))
    assert reader.push(" Chinese") == []
    assert reader.push(" is") == tokenizer.encode("Chinese")
    assert reader.push(" 5") == tokenizer.encode(" is")
    assert reader.push(" kg") == []  # the number waits for what follows it
