"""Codes of reference audio against the published implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aura_omni.engine.loader import Checkpoint
from aura_omni.models.codec_encoder import ENCODER_LAYOUT, CodecEncoder, CodecEncoderConfig
from tests.models.codec_reference import PUBLISHED, TINY, ours, reference, tiny


@pytest.fixture(scope="module")
def pair() -> tuple[torch.nn.Module, CodecEncoder]:
    theirs = reference(TINY)
    return theirs, ours(TINY, theirs)[1]


def clip(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) * 0.3


def published_codes(theirs: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(1, len(samples), dtype=torch.int64)
    codes: torch.Tensor = theirs.encode(samples[None], mask, return_dict=True).audio_codes[0]
    return codes


@pytest.mark.reference
@pytest.mark.parametrize("samples", [1, 959, 1919, 1920, 1921, 24_000, 30_011])
def test_codes_are_those_of_the_published_encoder(pair: tuple[torch.nn.Module, CodecEncoder], samples: int) -> None:
    theirs, mine = pair
    codes = mine.encode(clip(samples, seed=samples))
    assert codes.shape == (-(-samples // 1920), 16)
    assert codes.dtype == torch.int64
    assert torch.equal(codes, published_codes(theirs, clip(samples, seed=samples)))


@pytest.mark.reference
def test_attention_reaches_back_more_than_ten_seconds_as_the_published_codes_did(
    pair: tuple[torch.nn.Module, CodecEncoder],
) -> None:
    theirs, mine = pair
    samples = clip(12 * 24_000 + 7)
    codes = mine.encode(samples)
    assert torch.equal(codes, published_codes(theirs, samples))
    assert codes.unique().numel() > 500  # a comparison of varied codes
    early = samples.clone()
    early[:4000] *= -1.0
    assert not torch.equal(mine.encode(early)[-10:], codes[-10:])


@pytest.mark.reference
def test_a_sparse_published_configuration_gives_the_published_encoder() -> None:
    theirs = reference(PUBLISHED)
    _, mine = ours(PUBLISHED, theirs)
    samples = clip(2 * 1920 + 100)
    assert torch.equal(mine.encode(samples), published_codes(theirs, samples))


@pytest.mark.reference
def test_a_published_file_loads_without_missing_or_unused_tensors(
    pair: tuple[torch.nn.Module, CodecEncoder], tmp_path: Path
) -> None:
    theirs, mine = pair
    save_file({name: value.contiguous() for name, value in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        network = CodecEncoder(CodecEncoderConfig.from_json(TINY))
    checkpoint = Checkpoint.find(str(tmp_path))
    checkpoint.load(network, ENCODER_LAYOUT, device=torch.device("cpu"), dtype=torch.float32, own="encoder.")
    assert torch.equal(network.encode(clip(5000)), mine.encode(clip(5000)))


def test_codes_of_whole_frames_do_not_depend_on_what_follows() -> None:
    encoder = tiny()[1]
    samples = clip(10 * 1920)
    codes = encoder.encode(samples)
    assert codes.unique().numel() > 20
    assert torch.equal(codes[:6], encoder.encode(samples[: 6 * 1920]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_causal_conv", False), ("pad_mode", "reflect"), ("use_conv_shortcut", True), ("hidden_act", "relu")],
)
def test_an_architecture_that_changes_the_maths_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        CodecEncoderConfig.from_json({**TINY, "encoder_config": {**TINY["encoder_config"], name: value}})


def test_another_number_of_codebooks_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder_valid_num_quantizers is 8; only 16"):
        CodecEncoderConfig.from_json({**TINY, "encoder_valid_num_quantizers": 8})
