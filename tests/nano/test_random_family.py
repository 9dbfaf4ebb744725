"""Random weights made up in a network are those that would have been written and read."""

from __future__ import annotations

from pathlib import Path

import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.models.qwen3_tts import TALKER_LAYOUT
from aura_omni.nano.random_family import fill, write_family
from aura_omni.stages.asr import AsrStage
from aura_omni.stages.talker import TalkerStage
from tests.family import SEED, family

CPU = torch.device("cpu")


def test_weights_that_are_filled_in_are_those_of_the_files() -> None:
    checkpoint = Checkpoint.find(str(family() / "asr"))
    read, filled = AsrStage.network_of(checkpoint), AsrStage.network_of(checkpoint)
    checkpoint.load(read, read.config.layout, device=CPU, dtype=torch.float32)
    fill(filled, filled.config.layout, device=CPU, dtype=torch.float32, seed=SEED)
    for (name, one), (_, other) in zip(read.state_dict().items(), filled.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert not any(weight.requires_grad for weight in filled.parameters())


def test_a_family_without_weights_is_all_that_is_needed_to_fill_them_in(tmp_path: Path) -> None:
    write_family(tmp_path, kinds=("custom_voice",), weights=False)
    assert not list(tmp_path.rglob("*.safetensors*"))
    talker, _ = TalkerStage.networks_of(Checkpoint.find(str(tmp_path / "tts_custom_voice")))
    fill(talker, TALKER_LAYOUT, device=CPU, dtype=torch.bfloat16)
    assert talker.text(torch.tensor([1, 2])).dtype == torch.bfloat16
    assert talker.text(torch.tensor([1, 2])).isfinite().all()
