"""A name that an object has twice is refused, wherever it is and however much lies around it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aura_omni.errors import BadRequest
from aura_omni.server.twice import refuse_names_twice
from tests.server.fake import FakePipeline, serving

LONG = "x" * 5_000
TEXTS = st.text(max_size=20) | st.sampled_from([LONG, LONG + '"', LONG + "\\", "\\" * 3_001, LONG + '\\"' + LONG])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"model": "AURA", "model": "other"}', "model"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "b"),
        ('[{"a": [{"seed": 1, "\\u0073eed": 2}]}]', "seed"),
        (f'{{"data": "{LONG}", "data": "{LONG}"}}', "data"),
        (f'{{"a": "{LONG}' + '\\\\\\"", "b": 1, "b": 2}', "b"),
    ],
)
def test_the_name_is_told(body: str, name: str) -> None:
    json.loads(body)
    with pytest.raises(BadRequest, match="twice") as refused:
        refuse_names_twice(body.encode())
    assert refused.value.param == name


@given(JSON_VALUES)
def test_what_has_no_name_twice_is_left_alone(value: Any) -> None:
    refuse_names_twice(json.dumps(value).encode())
    refuse_names_twice(json.dumps(value, ensure_ascii=False, indent=1).encode())


@given(JSON_VALUES, JSON_VALUES)
def test_a_name_is_found_between_any_others(before: Any, after: Any) -> None:
    body = f'[{json.dumps(before)}, {{"seed": 1, "x": {json.dumps(after)}, "seed": 2}}]'
    with pytest.raises(BadRequest, match="'seed'"):
        refuse_names_twice(body.encode())


def test_a_request_with_a_name_twice_is_refused_by_name() -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as url:
        answer = httpx.post(
            f"{url}/v1/audio/speech",
            content=b'{"input": "Hello.", "voice": "vivian", "voice": "ryan"}',
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "voice"
    assert not pipeline.requests
