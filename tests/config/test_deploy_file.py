"""YAML, `${...}` and `base_config`."""

import pytest

from aura_omni.config.deploy_file import read
from aura_omni.errors import ConfigError


@pytest.fixture
def content(tmp_path):
    def read_text(text, **environ):
        path = tmp_path / "deploy.yaml"
        path.write_text(text, encoding="utf-8")
        return read(str(path), environ=environ).content

    return read_text


def test_a_lone_reference_keeps_the_type(content):
    assert content("a: 3\nb: ${a}\nc: {d: [1, '${a}']}\ne: ${c}")["e"] == {"d": [1, 3]}


def test_references_stand_inside_text_and_nest(content):
    assert content("size: 8\nname: model-${size}B")["name"] == "model-8B"
    assert content("other: x\nname: ${oc.env:NAME,${other}}")["name"] == "x"
    assert content("which: a\na: 1\nname: ${${which}}")["name"] == 1


def test_list_items_are_named_by_position(content):
    assert content("items: [{m: x}, {m: y}]\nb: ${items.1.m}\nc: ${items[0].m}")["c"] == "x"


def test_environment_is_read_as_yaml_scalars(content):
    assert content("a: ${oc.env:A}\nb: ${oc.env:B}\nc: ${oc.env:C}", A="0.3", B="true", C="{x: 1}") == {
        "a": 0.3,
        "b": True,
        "c": "{x: 1}",
    }


def test_environment_cannot_smuggle_in_references(content):
    with pytest.raises(ConfigError, match="cannot stand inside a text"):
        content("a: x-${oc.env:A}", A="${oc.env:SECRET}", SECRET="s")
    assert content("a: ${oc.env:A}", A="${oc.env:SECRET}", SECRET="s")["a"] == "${oc.env:SECRET}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${oc.env:NOT_SET}", "NOT_SET is not set"),
        ("a: ${nowhere.b}", "has no 'nowhere'"),
        ("a: ${b}\nb: ${a}", "goes in a circle"),
        ("a: ${oc.decode:x}", r"only \$\{oc.env:NAME,default\}"),
        ("a: ${b", r"without its \}"),
        ("b: [1]\na: x${b}", "cannot stand inside a text"),
    ],
)
def test_wrong_references_are_refused(content, text, message):
    with pytest.raises(ConfigError, match=message):
        content(text)


def test_exponents_are_numbers(content):
    assert content("a: 1e-3\nb: 1e3\nc: x1e3") == {"a": 0.001, "b": 1000.0, "c": "x1e3"}


def test_merge_keys_are_yaml_not_repetition(content):
    assert content("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}


def test_base_config_is_found_beside_the_file_and_chains(tmp_path):
    (tmp_path / "low.yaml").write_text("pipeline: p\nstages: [{stage_id: 0, a: {x: 1, y: 1}}]\nduplex_session: {a: 1}")
    (tmp_path / "mid.yaml").write_text("base_config: low.yaml\nstages: [{stage_id: 1}, {stage_id: 0, a: {y: 2}}]")
    (tmp_path / "top.yaml").write_text("base_config: mid.yaml\nduplex_session: {b: 2}")
    assert read(str(tmp_path / "top.yaml"), environ={}).content == {
        "pipeline": "p",
        "stages": {0: {"a": {"x": 1, "y": 2}}, 1: {}},
        "duplex_session": {"b": 2},
    }


def test_base_config_in_a_circle_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("base_config: b.yaml")
    (tmp_path / "b.yaml").write_text("base_config: a.yaml")
    with pytest.raises(ConfigError, match="circle"):
        read(str(tmp_path / "a.yaml"), environ={})
