"""The pieces that several networks share: RMSNorm, rotary positions, SwiGLU, and what attention asks of its caller."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aura_omni.models import fp8
from aura_omni.models.weights import Linear, StackedLinear


class KeyValues(Protocol):
    """Where keys and values of one step live, and who attends to whom. An argument of forward, never ambient."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] of the step's rows -> [N, heads, D].

        Keys are already rotated. Stores k and v, then attends causally with scale D**-0.5, softmax in float32.
        """
        ...


@runtime_checkable
class RawKeyValues(KeyValues, Protocol):
    """A KeyValues that norms and turns heads itself, on the way."""

    def takes_raw(self, qkv: Tensor) -> bool:
        """Whether `attend_raw` can be called with these rows."""
        ...

    def attend_raw(self, layer: int, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        """`attend` of heads that are neither normed nor turned yet: qkv [N, (heads + 2 kv_heads) D] -> [N, heads D]."""
        ...


def fusible(x: Tensor) -> bool:
    """Whether the kernels of `models.fused` apply: on CUDA (or on "meta", which stands for it), and nobody asks for gradients."""
    return not x.is_cpu and not torch.is_grad_enabled()


@cache
def fused() -> ModuleType:
    """`models.fused`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.models import fused as kernels

    return kernels


def few(x: Tensor) -> bool:
    """Whether x [N, H] is of so few rows that norms and sums are computed along with the products (`fused_linear`)."""
    return fusible(x) and fused_linear().takes(x)


@cache
def fused_linear() -> ModuleType:
    """`models.fused_linear`, likewise."""
    from aura_omni.models import fused_linear as kernels

    return kernels


@cache
def fused_audio() -> ModuleType:
    """`models.fused_audio`, likewise."""
    from aura_omni.models import fused_audio as kernels

    return kernels


@cache
def fused_mel() -> ModuleType:
    """`models.fused_mel`, likewise."""
    from aura_omni.models import fused_mel as kernels

    return kernels


def looked_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows [N, H] of the table for ids int64 [N]; zeros where an id is negative."""
    rows: Tensor = table(ids.clamp_min(0))
    return rows.masked_fill((ids < 0)[:, None], 0)


class RMSNorm(nn.Module):
    """Statistics and normalisation in float32, cast back, then the weight in the input's dtype (the order matters in bf16)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if fusible(x):
            return fused().rms_norm(x, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def of_sum(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + more (None: just x), and that normed."""
        if more is None:
            return x, self(x)
        if fusible(x):
            return fused().add_rms_norm(x, more, self.weight, self.eps)
        x = x + more
        return x, self(x)


def normed_linear(norm: RMSNorm, linear: nn.Linear, x: Tensor, more: Tensor | None) -> Tensor:
    """linear(norm(x + more)) for a linear without bias; of a few rows that are summed already in one launch."""
    if more is None and few(x):
        return fused_linear().normed_linear(x, norm.weight, norm.eps, linear.weight)
    return linear(norm.of_sum(x, more)[1])


def normed_sum(norm: RMSNorm, linear: Linear, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor | fp8.Rows]:
    """`norm.of_sum(x, more)`, the second as `linear` reads it fastest."""
    if linear.scale is None or not fusible(x):
        return norm.of_sum(x, more)
    x, rows = fp8.kernels().normed_sum(x, more, norm.weight, norm.eps)
    return x, fp8.Rows(*rows)


def layer_normed_sum(norm: nn.LayerNorm, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + more (None: just x), and that normed."""
    if more is None:
        return x, norm(x)
    if fusible(x):
        return fused().add_layer_norm(x, more, norm.weight, norm.bias, norm.eps)
    x = x + more
    return x, norm(x)


class Rope:
    """Rotary positions, half-split pairs (j, j + D/2).

    With `sections` = (T, H, W) pairs, three position rows are interleaved over the D/2 frequency pairs: pair j turns by H
    when j % 3 == 1 and j < 3 * sections[1], by W when j % 3 == 2 and j < 3 * sections[2], else by T (Qwen3-VL). Equal rows
    reduce to the ordinary kind.
    """

    def __init__(self, head_dim: int, theta: float, sections: tuple[int, int, int] | None = None) -> None:
        half = head_dim // 2
        # Kept as plain tensors, not buffers: a model built on the meta device must not lose them.
        self._rates = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
        axis = [0] * half
        if sections is not None:
            for j in range(half):
                if j % 3 and j < 3 * sections[j % 3]:
                    axis[j] = j % 3
        self._axis = torch.tensor(axis, device="cpu")
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """rates float32 [D / 2], by which a pair turns at each position; the axis of each pair, int64 [D / 2]."""
        if device not in self._on:
            self._on[device] = (self._rates.to(device), self._axis.to(device))
        return self._on[device]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int [N] or [3, N] -> (cos, sin), each [N, D] in dtype; angles are computed in float32."""
        rates, axis = self.on(positions.device)
        if positions.dim() == 1:
            angles = positions.float()[:, None] * rates
        else:
            angles = positions.float()[axis].T * rates
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] turned by cos, sin [N, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = StackedLinear(hidden, {"gate_proj": intermediate, "up_proj": intermediate})
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Tensor | fp8.Rows) -> Tensor:
        both: Tensor = self.gate_up_proj(x)
        if fusible(both):
            if self.down_proj.scale is not None:
                return self.down_proj(fp8.Rows(*fp8.kernels().silu_mul(both)))
            return self.down_proj(fused().silu_mul(both))
        gate, up = self.gate_up_proj.split(both)
        return self.down_proj(F.silu(gate) * up)


class DenseKV:
    """Keys and values of B sequences of equal length, whole or grown step by step. For the code predictor and for tests.

    Rows of a step are sequence-major: B sequences of T rows each. Call `advance` after every forward.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.batch, self.length, self._step = batch, 0, 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, dim = q.shape
        steps, start = rows // self.batch, self.length
        stop = start + steps
        self._step = steps

        def by_sequence(x: Tensor) -> Tensor:
            return x.view(self.batch, steps, -1, dim).transpose(1, 2)

        self.keys[layer, :, :, start:stop] = by_sequence(k)
        self.values[layer, :, :, start:stop] = by_sequence(v)
        mask = None
        if steps > 1:
            mask = torch.ones(steps, stop, dtype=torch.bool, device=q.device).tril(start)
        out = F.scaled_dot_product_attention(
            by_sequence(q),
            self.keys[layer, :, :, :stop],
            self.values[layer, :, :, :stop],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(rows, heads, dim)

    def takes_raw(self, qkv: Tensor) -> bool:
        return fusible(qkv) and self.length + len(qkv) // self.batch <= fused().MOST_DENSE_KEYS

    def attend_raw(self, layer: int, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        self._step = len(qkv) // self.batch
        keys, values = self.keys[layer], self.values[layer]
        return fused().dense_attend(
            qkv, q_norm.weight, k_norm.weight, cos, sin, q_norm.eps, keys=keys, values=values, start=self.length
        )

    def advance(self) -> None:
        self.length += self._step

    def reset(self) -> None:
        self.length = 0
