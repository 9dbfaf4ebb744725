"""Fields that a message names are called as each request calls them."""

from __future__ import annotations

import pickle

import pytest

from aura_omni.errors import BadRequest, BadVoice, Overloaded, field_name, fields_named, shown


def refusal() -> BadVoice:
    return BadVoice(f"{field_name('ref_text')} or {field_name('task')}, not ref_text", param="ref_text")


def test_fields_have_the_pipelines_names_until_a_request_names_them() -> None:
    error = refusal()
    assert (str(error), error.message, error.param) == (*["ref_text or task, not ref_text"] * 2, "ref_text")
    with pytest.raises(BadVoice) as named, fields_named({"ref_text": "tts_ref_text", "speaker": "voice"}):
        raise error
    assert str(named.value) == error.message == "tts_ref_text or task, not ref_text"
    assert error.param == "tts_ref_text"


def test_fields_can_be_named_in_steps_and_on_the_other_side_of_a_process() -> None:
    error = refusal()
    error.name_fields({"ref_text": "talker.ref_text"})
    other = pickle.loads(pickle.dumps(error))
    other.name_fields({"talker.ref_text": "list[2].ref_text"})
    assert (type(other), other.message) == (BadVoice, "list[2].ref_text or task, not ref_text")
    assert (other.param, error.param) == ("list[2].ref_text", "talker.ref_text")


def test_what_is_no_refusal_and_what_a_user_wrote_is_left_alone() -> None:
    with pytest.raises(BadRequest) as wrote, fields_named({"task": "task_type"}):
        raise BadRequest(f"{field_name('task')} is {shown(field_name('task'))}")
    assert wrote.value.message == r"task_type is '\x02task\x03'"
    with pytest.raises(Overloaded, match="full"), fields_named({}):
        raise Overloaded("full")


def test_values_are_shown_as_a_request_has_them() -> None:
    assert shown([True, False, None, 1.5, "x"]) == "[true, false, null, 1.5, 'x']"
