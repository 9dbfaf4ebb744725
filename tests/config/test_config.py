"""Devices, memory and the printed configuration."""

import pickle
from pathlib import Path

import pytest
import yaml

from aura_omni.config import Options, check_free_memory, cuda_index, load, to_yaml
from aura_omni.config.deploy_keys import CODEC_CHUNK_KEYS, STAGE_KEYS, TOP_KEYS
from aura_omni.errors import ConfigError, DoesNotFit

GIB = 2**30


@pytest.fixture
def config():
    return load(
        Options(deploy_config="aura_omni", api_key=["very-secret"], stage_overrides='{"3": {"devices": 1}}'),
        environ={},
        platform="cpu",
    )


def test_a_stage_runs_on_its_device_or_on_the_cpu(config):
    talker, code2wav = config.stages[2:]
    assert cuda_index(talker, cuda_devices=2) == 0
    assert cuda_index(code2wav, cuda_devices=2) == 1
    assert cuda_index(code2wav, cuda_devices=0) is None
    with pytest.raises(ConfigError, match=r"stage 3 \(code2wav\) asks for device 1, but this machine shows 1"):
        cuda_index(code2wav, cuda_devices=1)


def test_free_memory_is_checked_per_device_with_a_way_out(config):
    check_free_memory(config.stages, device=0, free_bytes=70 * GIB, total_bytes=100 * GIB)
    with pytest.raises(DoesNotFit, match=r"= 0.7 of 100.0 GiB = 70.0 GiB, but 60.0 GiB.*--gpu-memory-utilization 0.6,"):
        check_free_memory(config.stages, device=0, free_bytes=60 * GIB, total_bytes=100 * GIB)
    check_free_memory(config.stages, device=1, free_bytes=20 * GIB, total_bytes=100 * GIB)


def test_printed_configuration_is_yaml_with_origins_and_without_secrets(config):
    text = to_yaml(config)
    assert "very-secret" not in text + repr(config)
    content = yaml.safe_load(text)
    assert content["api_keys"] == 1
    assert content["served_model_name"] == ["aura_omni"]
    assert [stage["devices"] for stage in content["stages"]] == ["0", "0", "0", "1"]
    assert content["stages"][1]["max_model_len"] == 262144
    assert content["stages"][2]["default_sampling_params"]["seed"] == 42
    assert "devices: '1'  # flag --stage-overrides" in text
    assert "seed: 42  # aura_omni.yaml" in text


def test_configuration_travels_between_processes(config):
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_key_in_use_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [key for key in (*TOP_KEYS, *STAGE_KEYS, *CODEC_CHUNK_KEYS) if f"`{key}`" not in text] == []
