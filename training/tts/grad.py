"""What the product's networks need to be trained: attention without a cache, memory without a past, live derived tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models.codec_layers import CausalUpsample, SnakeBeta
from aura_omni.models.codec_state import Tail


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
    """Make the derived tables of Code2Wav's layers again, as part of the graph. Call once before every forward."""
    for part in network.modules():
        if isinstance(part, SnakeBeta):
            part.register_buffer("rate", part.alpha.exp(), persistent=False)
            part.register_buffer("gain", 1.0 / (part.beta.exp() + 1e-9), persistent=False)
        elif isinstance(part, CausalUpsample):
            assert part.conv.bias is not None
            part.register_buffer("bias", part.conv.bias.repeat(part.rate), persistent=False)


def count(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def average(into: dict[str, Tensor], network: nn.Module, decay: float) -> None:
    """Exponential moving average of the weights."""
    weights = dict(network.named_parameters())
    with torch.no_grad():
        torch._foreach_lerp_(
            [into[name] for name in weights], [weight.detach() for weight in weights.values()], 1.0 - decay
        )
