"""The published codec as qwen-tts-hf computes it, small and with random weights, and ours with the same weights."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch

from aura_omni.models.codec import DECODER_LAYOUT, CodecConfig, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT, CodecEncoder, CodecEncoderConfig
from aura_omni.models.weights import Prepared, from_published
from tests.reference_package import import_qwen_tts

TINY: dict[str, Any] = {
    "encoder_valid_num_quantizers": 16,
    "input_sample_rate": 24_000,
    "output_sample_rate": 24_000,
    "encode_downsample_rate": 1920,
    "decode_upsample_rate": 1920,
    "decoder_config": {
        "codebook_dim": 32,
        "codebook_size": 2048,
        "num_quantizers": 16,
        "num_semantic_quantizers": 1,
        "latent_dim": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": 72,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8000,
        "layer_scale_initial_scale": 0.01,
        "hidden_act": "silu",
        "decoder_dim": 64,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    },
    "encoder_config": {
        "num_filters": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "upsample_groups": 32,
        "rope_theta": 10_000.0,
    },
}

PUBLISHED: dict[str, Any] = {
    **TINY,
    "decoder_config": {
        **TINY["decoder_config"],
        "codebook_dim": 512,
        "latent_dim": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "decoder_dim": 1536,
    },
    "encoder_config": {"num_quantizers": 32},  # sparse, as published files are
}


@cache
def _package() -> Any:
    import_qwen_tts()
    import qwen_tts._transformers_compat as compat
    from qwen_tts.core.tokenizer_12hz import configuration_qwen3_tts_tokenizer_v2 as configuration
    from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as modeling

    return types.SimpleNamespace(compat=compat, configuration=configuration, modeling=modeling)


def reference(config: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    """Qwen3TTSTokenizerV2Model with random weights in float32, with full attention in its encoder, as the package loads it."""
    package = _package()
    package.compat.patch_transformers_rope_registry()
    settings = package.configuration.Qwen3TTSTokenizerV2Config(**config)
    settings.encoder_config.rope_theta = 10_000.0  # transformers 5 keeps it elsewhere; random initialisation looks here
    model = package.modeling.Qwen3TTSTokenizerV2Model(settings).eval().requires_grad_(False)
    package.compat.restore_rope_buffers(model)
    package.compat.restore_mimi_full_attention(model)
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep every branch audible and the output unclipped."""
    random = torch.Generator().manual_seed(seed)

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.rand(like.shape, generator=random) * (high - low) + low

    for name, value in model.state_dict().items():
        if name.endswith("initialized"):
            continue
        if name.endswith("cluster_usage"):
            value.copy_(uniform(value, 0.5, 2.0))
        elif name.endswith(("embedding_sum", "embed_sum")):
            value.copy_(torch.randn(value.shape, generator=random))
        elif name.endswith((".scale", ".gamma")):
            value.copy_(uniform(value, 0.3, 1.0))
        elif name.endswith((".alpha", ".beta")):
            value.copy_(uniform(value, -0.5, 0.5))
        elif "norm" in name and name.endswith(".weight"):
            value.copy_(uniform(value, 0.5, 1.5))
        elif value.dim() < 2:
            value.copy_(torch.randn(value.shape, generator=random) * 0.05)
        else:
            fan_in = value[0].numel() if "block.1.conv" not in name else 2 * value.shape[0]
            # Branches of residual units stay small: large arguments of sin would amplify rounding past any tolerance.
            gain = 0.3 if ".conv2." in name else 1.0
            value.copy_(torch.randn(value.shape, generator=random) * gain * fan_in**-0.5)
    model.get_parameter("decoder.decoder.6.conv.weight").mul_(0.05)


def ours(config: dict[str, Any], model: torch.nn.Module) -> tuple[CodecDecoder, CodecEncoder]:
    """Our networks with the weights of `model`."""
    decoder, encoder = CodecDecoder(CodecConfig.from_json(config)), CodecEncoder(CodecEncoderConfig.from_json(config))
    for network, layout in ((decoder, DECODER_LAYOUT), (encoder, ENCODER_LAYOUT)):
        from_published(network, layout, model.state_dict())
        network.requires_grad_(False).eval()
    return decoder, encoder


def tiny(seed: int = 0) -> tuple[CodecDecoder, CodecEncoder]:
    """Ours alone, small, with random weights; needs no reference package."""
    encoder = CodecEncoder(CodecEncoderConfig.from_json(TINY))
    _prepare(encoder, seed)
    return random_decoder(TINY, seed), encoder


def random_decoder(config: dict[str, Any], seed: int = 0) -> CodecDecoder:
    """Ours with random weights."""
    decoder = CodecDecoder(CodecConfig.from_json(config))
    _prepare(decoder, seed)
    return decoder


def _prepare(network: torch.nn.Module, seed: int) -> None:
    network.requires_grad_(False).eval()
    if isinstance(network, CodecDecoder):
        holder = torch.nn.ModuleDict({"decoder": network})
        randomise(holder, seed)
    else:
        with torch.no_grad():
            random = torch.Generator().manual_seed(seed)
            for value in network.parameters():
                value.copy_(torch.rand(value.shape, generator=random) - 0.5)
    for part in network.modules():
        if isinstance(part, Prepared):
            part.prepare()


def random_codes(frames: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2048, (batch, frames, 16), generator=torch.Generator().manual_seed(seed))
