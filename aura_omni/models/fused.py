"""Triton kernels for the small operations between matrix products, where PyTorch would launch ten for one.

Each rounds exactly where the plain code of `layers` rounds, so they are interchangeable with it. Inference only: no gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + dims, (wide * scale).to(x.dtype) * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.RMSNorm`: x [..., D] -> [..., D]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    _rms_norm_kernel[(x.numel() // size,)](x, weight, out, size, eps, BLOCK=triton.next_power_of_2(size))
    return out


@triton.jit
def _turned(x_ptr, weight_ptr, cos, sin, dims, eps, D: tl.constexpr):
    """One head's vector, normalised and turned; dims are 0..D-1."""
    x = tl.load(x_ptr + dims)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * scale).to(x.dtype) * tl.load(weight_ptr + dims)
    half: tl.constexpr = D // 2
    other = tl.where(dims < half, dims + half, dims - half)
    mirrored = tl.load(x_ptr + other)
    mirrored = (mirrored.to(tl.float32) * scale).to(x.dtype) * tl.load(weight_ptr + other)
    mirrored = tl.where(dims < half, -mirrored, mirrored)
    return (normed * cos).to(x.dtype) + (mirrored * sin).to(x.dtype)


@triton.jit
def _qk_kernel(
    qkv_ptr, q_weight, k_weight, cos_ptr, sin_ptr, q_ptr, k_ptr, eps, heads, kv_heads, width, D: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, D)
    cos, sin = tl.load(cos_ptr + row * D + dims), tl.load(sin_ptr + row * D + dims)
    source = qkv_ptr + row * width + head * D
    if head < heads:
        tl.store(q_ptr + (row * heads + head) * D + dims, _turned(source, q_weight, cos, sin, dims, eps, D))
    else:
        out = k_ptr + (row * kv_heads + head - heads) * D + dims
        tl.store(out, _turned(source, k_weight, cos, sin, dims, eps, D))


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """qkv [N, (heads + 2 kv_heads) D] contiguous; cos, sin [N, D] -> q [N, heads, D], k [N, kv_heads, D], normed and turned."""
    rows, dim = cos.shape
    q = qkv.new_empty(rows, heads, dim)
    k = qkv.new_empty(rows, kv_heads, dim)
    _qk_kernel[(rows, heads + kv_heads)](
        qkv, q_weight, k_weight, cos, sin, q, k, eps, heads, kv_heads, qkv.shape[-1], D=dim
    )
    return q, k


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < size
    gate = tl.load(gate_up_ptr + row * 2 * size + dims, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + dims, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * size + dims, silu * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 I] -> silu(gate) * up [..., I]."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    _silu_mul_kernel[(out.numel() // size, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024)
    return out
