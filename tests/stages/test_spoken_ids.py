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

TEXTS = ["\n\n# Hi\nIt is **2.5 kg**, or $7.20. 😀", "好的，2个。", "```x```", "a_b_c", "", "```\ncode\n```\n", "..."]


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
