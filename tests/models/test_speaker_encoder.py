"""The speaker encoder and its spectrogram against the public package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aura_omni.models.speaker_encoder import SPEAKER_LAYOUT, SpeakerEncoder, SpeakerEncoderConfig, log_mel
from aura_omni.models.weights import from_published, to_published
from tests.reference_tts import import_qwen_tts, randomise, reference_model, tts_config


def speech(samples: int) -> torch.Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(samples)).mul(0.3).clamp(-1, 1)


@pytest.fixture(scope="module")
def both() -> tuple[SpeakerEncoder, Any]:
    config = tts_config("base")
    model = reference_model(config)
    encoder = SpeakerEncoder(SpeakerEncoderConfig.from_json(config)).requires_grad_(False)
    from_published(encoder, SPEAKER_LAYOUT, model.state_dict())
    return encoder, model


@pytest.mark.reference
@pytest.mark.parametrize("samples", [1_280, 5_000, 24_000, 61_234])
def test_spectrogram_and_vector_equal_the_reference(both: tuple[SpeakerEncoder, Any], samples: int) -> None:
    encoder, model = both
    import_qwen_tts()
    from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram

    sound = speech(samples)
    mel = log_mel(sound)
    expected = mel_spectrogram(sound[None], 1024, 128, 24_000, 256, 1024, 0, 12_000)[0].T
    assert mel.shape == (samples // 256, 128)
    torch.testing.assert_close(mel, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(
        encoder(mel), model.extract_speaker_embedding(sound.numpy(), 24_000), atol=2e-5, rtol=2e-5
    )


@pytest.mark.reference
def test_published_sizes_equal_the_reference() -> None:
    import_qwen_tts()
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSSpeakerEncoderConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSSpeakerEncoder

    published = {"enc_dim": 2048, "sample_rate": 24_000}
    reference = Qwen3TTSSpeakerEncoder(Qwen3TTSSpeakerEncoderConfig(**published)).eval().requires_grad_(False)
    randomise(reference, 1, spread=0.03)
    encoder = SpeakerEncoder(SpeakerEncoderConfig.from_json({"speaker_encoder_config": published}))
    weights = {"speaker_encoder." + name: value for name, value in reference.state_dict().items()}
    from_published(encoder.requires_grad_(False), SPEAKER_LAYOUT, weights)
    assert to_published(encoder, SPEAKER_LAYOUT).keys() == weights.keys()
    assert sum(value.numel() for value in weights.values()) == 12_001_088  # 24.0 MB in bf16

    mel = log_mel(speech(12_000))
    expected = reference(mel[None])[0]
    torch.testing.assert_close(encoder(mel), expected, atol=2e-5, rtol=2e-5)
    assert expected.abs().max() > 0.1


@pytest.mark.reference
def test_the_least_recording_is_the_least_the_reference_takes(both: tuple[SpeakerEncoder, Any]) -> None:
    encoder, model = both
    assert encoder.config.least_samples == 1_280
    assert encoder(log_mel(speech(1_280))).isfinite().all()
    with pytest.raises(RuntimeError, match="Padding size"):
        model.extract_speaker_embedding(speech(1_279).numpy(), 24_000)


def test_an_unknown_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_rate 16000"):
        SpeakerEncoderConfig.from_json({"speaker_encoder_config": {"enc_dim": 64, "sample_rate": 16_000}})
