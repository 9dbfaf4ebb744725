"""THE decoder: one Qwen3 implementation for ASR, AURA, the Talker and its code predictor.

Takes embeddings and positions, returns the final-normed hidden rows. Embedding tables, heads, sampling and caches are
outside, because only they differ between the four.

    hidden = decoder(x, positions, kv)            # x [N, H] of all sequences of the step, one after another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aura_omni.models import fp8
from aura_omni.models.fields import positive, rope_theta, whole
from aura_omni.models.layers import (
    KeyValues,
    RawKeyValues,
    RMSNorm,
    Rope,
    SwiGLU,
    few,
    fused,
    fused_linear,
    fusible,
    normed_sum,
    rotate,
)
from aura_omni.models.weights import Linear, StackedLinear


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int  # what the model was trained for; rope itself has no end
    mrope_section: tuple[int, int, int] | None = None

    @classmethod
    def from_json(cls, text: Mapping[str, Any], *, mrope: bool = False) -> DecoderConfig:
        """From a published config.json section. mrope=True only where the three position rows can differ (AURA).

        Newer files keep rope settings in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`.
        """
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        section = rope.get("mrope_section") if mrope else None
        config = cls(
            layers=whole(text, "num_hidden_layers"),
            hidden=whole(text, "hidden_size"),
            intermediate=whole(text, "intermediate_size"),
            heads=whole(text, "num_attention_heads"),
            kv_heads=whole(text, "num_key_value_heads"),
            head_dim=whole(text, "head_dim"),
            rms_eps=positive(text, "rms_norm_eps"),
            rope_theta=rope_theta(text, rope),
            max_positions=whole(text, "max_position_embeddings"),
            mrope_section=None if section is None else (section[0], section[1], section[2]),
        )
        if config.head_dim % 2 or config.heads % config.kv_heads:
            raise ValueError(
                f"head_dim is {config.head_dim} and num_attention_heads {config.heads}; they must be multiples of 2 and of "
                f"num_key_value_heads, {config.kv_heads}"
            )
        return config


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, config.heads, config.kv_heads, config.head_dim
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv_proj = StackedLinear(config.hidden, {"q_proj": wide, "k_proj": narrow, "v_proj": narrow})
        self.o_proj = Linear(wide, config.hidden)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps)

    def forward(self, x: Tensor | fp8.Rows, cos: Tensor, sin: Tensor, kv: KeyValues) -> Tensor:
        return self.o_proj(self.attended(self.qkv_proj(x), cos, sin, kv))

    def attended(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: KeyValues) -> Tensor:
        """From what `qkv_proj` makes of the rows to what `o_proj` reads."""
        rows = len(qkv)
        if isinstance(kv, RawKeyValues) and kv.takes_raw(qkv):
            return kv.attend_raw(self.layer, qkv, self.q_norm, self.k_norm, cos, sin)
        q, k, v = self.qkv_proj.split(qkv)
        if fusible(qkv):
            q, k = fused().qk_norm_rope(
                qkv,
                self.q_norm.weight,
                self.k_norm.weight,
                cos,
                sin,
                self.q_norm.eps,
                heads=self.heads,
                kv_heads=self.kv_heads,
            )
        else:
            q = rotate(self.q_norm(q.view(rows, self.heads, self.head_dim)), cos, sin)
            k = rotate(self.k_norm(k.view(rows, self.kv_heads, self.head_dim)), cos, sin)
        return kv.attend(self.layer, q, k, v.reshape(rows, self.kv_heads, self.head_dim)).reshape(rows, -1)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = SwiGLU(config.hidden, config.intermediate)

    def forward(
        self, x: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor, kv: KeyValues
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream as two summands, before and after; whoever reads it adds them up and norms them at once.

        Of a few rows it is already summed.
        """
        if few(x):
            return self._of_few(_summed(x, more), cos, sin, kv), None
        attention, mlp = self.self_attn, self.mlp
        x, normed = normed_sum(self.input_layernorm, attention.qkv_proj, x, more)
        x, normed = normed_sum(self.post_attention_layernorm, mlp.gate_up_proj, x, attention(normed, cos, sin, kv))
        return x, mlp(normed)

    def _of_few(self, x: Tensor, cos: Tensor, sin: Tensor, kv: KeyValues) -> Tensor:
        kernels, attention, mlp = fused_linear(), self.self_attn, self.mlp
        before, after = self.input_layernorm, self.post_attention_layernorm
        qkv, out, gate_up, down = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        mixed = kernels.normed_linear(x, before.weight, before.eps, qkv.weight, scale=qkv.scale)
        x = kernels.linear_added(attention.attended(mixed, cos, sin, kv), out.weight, x, scale=out.scale)
        inner = kernels.normed_swiglu(x, after.weight, after.eps, gate_up.weight, scale=gate_up.scale)
        return kernels.linear_added(inner, down.weight, x, scale=down.scale)


def _summed(x: Tensor, more: Tensor | None) -> Tensor:
    return x if more is None else x + more


class Decoder(nn.Module):
    """Published names: `layers.N...`, `norm.weight`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = Rope(config.head_dim, config.rope_theta, config.mrope_section)
        self.layers = nn.ModuleList(DecoderLayer(config, n) for n in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)

    def forward(
        self, x: Tensor, positions: Tensor, kv: KeyValues, adds: Sequence[Tensor] = (), add_rows: Tensor | None = None
    ) -> Tensor:
        """x [N, H] embeddings; positions int64 [N] or [3, N] (T, H, W) -> final-normed hidden [N, H].

        adds: `adds[k]` [R, H] is added to rows `add_rows` int64 [R] (None: to all) of the residual stream after layer k
        (deepstack features).
        """
        cos, sin = self.rope.tables(positions, x.dtype)
        return self.turned(x, cos, sin, kv, adds, add_rows)

    def turned(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: KeyValues,
        adds: Sequence[Tensor] = (),
        add_rows: Tensor | None = None,
    ) -> Tensor:
        """`forward`, with what `rope.tables` gives for the positions."""
        return self.norm.of_sum(*self.stream(x, cos, sin, kv, adds, add_rows))[1]

    def stream(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: KeyValues,
        adds: Sequence[Tensor] = (),
        add_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`turned` before the last norm: the residual stream as the layers leave it, as one summand or two."""
        more: Tensor | None = None
        for number, layer in enumerate(self.layers):
            x, more = layer(x, more, cos, sin, kv)
            if number < len(adds):
                x, more = _summed(x, more), None
                x = x + adds[number] if add_rows is None else x.index_add(0, add_rows, adds[number])
        return x, more

    def kv_bytes_per_token(self, dtype: torch.dtype, *, eight_bits: bool = False) -> int:
        """eight_bits: of keys and values, each vector of which has a float32 scale then."""
        size = self.config.head_dim
        vector = size + torch.float32.itemsize if eight_bits else size * dtype.itemsize
        return 2 * self.config.layers * self.config.kv_heads * vector
