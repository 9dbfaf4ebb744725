"""What is no transcript of a recording, and how it is told."""

import pytest

from aura_omni.errors import BadVoice
from aura_omni.media.spoken import check_transcript


@pytest.mark.parametrize("text", ["Hello there.", "你好", "½", "42"])
def test_a_text_with_a_letter_or_a_digit_may_be_a_transcript(text: str) -> None:
    check_transcript(text, 3.0, way_out="leave it out")


@pytest.mark.parametrize("text", ["😀", " … !", "(👍)", "\u200b"])
def test_a_text_without_one_is_none_and_refused_by_name(text: str) -> None:
    with pytest.raises(BadVoice, match="ref_text has no letter or digit") as refusal:
        check_transcript(text, 3.0, way_out="leave it out")
    assert refusal.value.param == "ref_text"


def test_a_recording_that_is_hardly_too_long_is_not_said_to_be_as_long_as_what_fits() -> None:
    check_transcript("no", 6.0, way_out="leave it out")
    with pytest.raises(BadVoice, match=r"the recording 6\.1 s; at most 6 s"):
        check_transcript("no", 6.01, way_out="leave it out")
