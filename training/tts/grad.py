"""What the product's networks need to be trained: attention without a cache, memory without a past, live derived tables,
and the networks of references for many clips at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.codec_encoder import CodecEncoder
from aura_omni.models.codec_layers import CausalUpsample, SnakeBeta
from aura_omni.models.codec_state import Tail
from aura_omni.models.layers import rotate
from aura_omni.models.speaker_encoder import HOP_SAMPLES, SpeakerEncoder


class WholeKV:
    """Causal attention over B whole sequences of equal (padded) length, as a `KeyValues`. Padding is on the right."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, dim = q.shape
        groups = heads // k.shape[1]

        def by_sequence(x: Tensor) -> Tensor:
            return x.view(self.batch, rows // self.batch, -1, dim).transpose(1, 2)

        q, k, v = by_sequence(q), by_sequence(k), by_sequence(v)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, heads, dim)


class FreshMemory:
    """`StepMemory` of streams that have no past and will not be continued: zeros on the left."""

    def extend(self, tail: Tail, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, tail.rows, 0)) if tail.rows else x


def refresh(network: nn.Module) -> None:
    """Make the derived tables of Code2Wav's layers again, as part of the graph. Call once before every forward.

    The old ones go first: they would keep the last step's graph alive, and with it the stream that it ran on.
    """
    for part in network.modules():
        if isinstance(part, SnakeBeta):
            for name in ("rate", "gain"):
                part.register_buffer(name, None, persistent=False)
            part.register_buffer("rate", part.alpha.exp(), persistent=False)
            part.register_buffer("gain", 1.0 / (part.beta.exp() + 1e-9), persistent=False)
        elif isinstance(part, CausalUpsample):
            assert part.conv.bias is not None
            part.register_buffer("bias", None, persistent=False)
            part.register_buffer("bias", part.conv.bias.repeat(part.rate), persistent=False)


def count(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def encoder_latents(encoder: CodecEncoder, samples: Tensor) -> tuple[Tensor, Tensor]:
    """samples [B, n] -> what the semantic and the acoustic books see, each [B, T, codebook_dim]."""
    x = encoder.encoder(samples[:, None]).transpose(1, 2)
    b, length, _ = x.shape
    transformer = encoder.encoder_transformer
    cos, sin = transformer.rope.tables(torch.arange(length, device=x.device).repeat(b), x.dtype)
    for layer in transformer.layers:
        attention = layer.self_attn
        rows = attention.qkv_proj(layer.input_layernorm(x)).flatten(0, 1)
        q, k, v = (part.unflatten(-1, (attention.heads, attention.head_dim)) for part in attention.qkv_proj.split(rows))
        q, k, v = (
            part.unflatten(0, (b, length)).transpose(1, 2) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + layer.self_attn_layer_scale(attention.o_proj(out))
        x = x + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(x)))
    x = encoder.downsample(x.transpose(1, 2))
    books = encoder.quantizer
    first, rest = books.semantic_residual_vector_quantizer, books.acoustic_residual_vector_quantizer
    return first.input_proj(x).transpose(1, 2), rest.input_proj(x).transpose(1, 2)


def speaker_vectors(encoder: SpeakerEncoder, samples: Tensor, filters: Tensor) -> Tensor:
    """samples [B, n] -> [B, H], as `encoder(log_mel(..))` of each; filters: `mel_filters()` on the device."""
    edge, window = (1_024 - HOP_SAMPLES) // 2, torch.hann_window(1_024, device=samples.device)
    padded = F.pad(samples[:, None], (edge, edge), mode="reflect")[:, 0]
    found = torch.view_as_real(torch.stft(padded, 1_024, HOP_SAMPLES, window=window, center=False, return_complex=True))
    magnitude = (found.square().sum(-1) + 1e-9).sqrt()
    x = encoder.blocks[0]((filters @ magnitude).clamp_min(1e-5).log())
    outs = []
    for block in encoder.blocks[1:]:
        x = block(x)
        outs.append(x)
    return encoder.fc(encoder.asp(encoder.mfa(torch.cat(outs, dim=1))))[:, :, 0]
