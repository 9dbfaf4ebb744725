"""What a deploy file means on this machine."""

import json

import pytest

from aura_omni.config import Options, load_here, machine, narrowed
from aura_omni.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
    ],
)
def test_hidden_devices_make_a_cpu_platform(environ, found, monkeypatch):
    monkeypatch.setattr(machine.Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert machine.platform(environ) == found


def test_narrowed_has_the_stages_of_one_pipeline_as_they_were():
    whole = load_here(Options(deploy_config="tiny.yaml"))
    speaks = narrowed(whole, "qwen3_tts")
    assert speaks.stages == whole.stages[2:]
    assert narrowed(whole, "qwen3_asr").stages == whole.stages[:1]
    with pytest.raises(ConfigError, match=r"tiny.yaml \(pipeline qwen3_tts\) has no asr"):
        narrowed(speaks, "qwen3_asr")


def test_a_deploy_file_whose_voice_is_off_says_so_to_who_wants_to_hear_it():
    off = json.dumps({"2": {"enabled": False}, "3": {"enabled": False}})
    with pytest.raises(ConfigError, match=r"voice.*switched off.*--deploy-config aura_omni\.yaml"):
        narrowed(load_here(Options(deploy_config="nano.yaml", stage_overrides=off)), "qwen3_tts")
