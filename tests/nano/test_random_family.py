"""Weights made up by `load_format: dummy` are those that would have been written and read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.errors import CheckpointError
from aura_omni.models.qwen3_tts import TALKER_LAYOUT
from aura_omni.nano.random_family import write_family
from aura_omni.stages.asr import AsrStage
from aura_omni.stages.talker import TalkerStage

CPU = torch.device("cpu")


def test_a_dummy_has_the_weights_that_the_family_writes(tmp_path: Path) -> None:
    write_family(tmp_path, kinds=())
    read, made_up = (AsrStage.network_of(Checkpoint.find(str(tmp_path / "asr"))) for _ in range(2))
    for network, dummy in ((read, False), (made_up, True)):
        checkpoint = Checkpoint.find(str(tmp_path / "asr"), dummy=dummy)
        checkpoint.load(network, network.config.layout, device=CPU, dtype=torch.float32)
    for (name, one), (_, other) in zip(read.state_dict().items(), made_up.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert not any(weight.requires_grad for weight in made_up.parameters())


def test_a_dummy_needs_no_weights_and_nothing_else_does_without(tmp_path: Path) -> None:
    write_family(tmp_path, kinds=("custom_voice",), weights=False)
    assert not list(tmp_path.rglob("*.safetensors*"))
    folder = str(tmp_path / "tts_custom_voice")
    talker, _ = TalkerStage.networks_of(Checkpoint.find(folder))
    with pytest.raises(CheckpointError, match="safetensors"):
        Checkpoint.find(folder).load(talker, TALKER_LAYOUT, device=CPU, dtype=torch.bfloat16)
    Checkpoint.find(folder, dummy=True).load(talker, TALKER_LAYOUT, device=CPU, dtype=torch.bfloat16)
    assert talker.text(torch.tensor([1, 2])).dtype == torch.bfloat16
    assert talker.text(torch.tensor([1, 2])).isfinite().all()
    assert Checkpoint.find(folder, dummy=True).sub("speech_tokenizer").dummy
