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
def _add_rms_norm_kernel(x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0)
    more = tl.load(more_ptr + row * size + dims, mask=inside, other=0.0)
    both = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * size + dims, both, mask=inside)
    wide = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + dims, (wide * scale).to(x.dtype) * weight, mask=inside)


def add_rms_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `layers.RMSNorm.of_sum`: x, more [..., D] -> their sum, and that normed."""
    x, more = x.contiguous(), more.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(x.numel() // size,)](x, more, weight, total, out, size, eps, BLOCK=block)
    return total, out


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
    qkv_ptr, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, q_ptr, k_ptr, eps, heads, kv_heads, width, D: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, D)
    cos, sin = tl.load(cos_ptr + row * turn_width + dims), tl.load(sin_ptr + row * turn_width + dims)
    source = qkv_ptr + row * width + head * D
    if head < heads:
        tl.store(q_ptr + (row * heads + head) * D + dims, _turned(source, q_weight, cos, sin, dims, eps, D))
    else:
        out = k_ptr + (row * kv_heads + head - heads) * D + dims
        tl.store(out, _turned(source, k_weight, cos, sin, dims, eps, D))


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """qkv [N, (heads + 2 kv_heads) D] contiguous; cos, sin [N, D] of equal strides, also one row expanded to N -> q [N, heads, D],
    k [N, kv_heads, D], normed and turned."""
    rows, dim = cos.shape
    q = qkv.new_empty(rows, heads, dim)
    k = qkv.new_empty(rows, kv_heads, dim)
    _qk_kernel[(rows, heads + kv_heads)](
        qkv, q_weight, k_weight, cos, sin, cos.stride(0), q, k, eps, heads, kv_heads, qkv.shape[-1], D=dim
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


MOST_DENSE_KEYS = 64  # one program holds all keys of a sequence and key head


@triton.jit
def _dense_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, out_ptr, v_width, capacity, start, scale, kv_heads,
    STEPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Program (sequence, key head): stores the new keys and values; then their GROUP query heads attend causally."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, place, row = tl.arange(0, D), tl.arange(0, KEYS), tl.arange(0, ROWS)
    new = (place >= start) & (place < start + STEPS)
    held = (sequence * kv_heads + head) * capacity * D + place[:, None] * D + dims[None, :]
    fresh = sequence * STEPS + place - start  # row of the step
    k_new = tl.load(k_ptr + (fresh[:, None] * kv_heads + head) * D + dims[None, :], mask=new[:, None], other=0.0)
    v_new = tl.load(v_ptr + fresh[:, None] * v_width + head * D + dims[None, :], mask=new[:, None], other=0.0)
    old = (place < start)[:, None]
    k = tl.load(keys_ptr + held, mask=old, other=0.0) + k_new
    v = tl.load(values_ptr + held, mask=old, other=0.0) + v_new
    tl.store(keys_ptr + held, k_new, mask=new[:, None])
    tl.store(values_ptr + held, v_new, mask=new[:, None])
    step, heads = row // GROUP, kv_heads * GROUP
    query = ((sequence * STEPS + step) * heads + head * GROUP + row % GROUP)[:, None] * D + dims[None, :]
    real = (row < STEPS * GROUP)[:, None]
    q = tl.load(q_ptr + query, mask=real, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(place[None, :] <= start + step[:, None], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / total[:, None]
    tl.store(out_ptr + query, out.to(out_ptr.dtype.element_ty), mask=real)


def dense_attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """As `layers.DenseKV.attend` in one layer, up to MOST_DENSE_KEYS keys.

    q [B T, heads, D], k [B T, kv_heads, D] contiguous, v the same with rows of any stride; keys, values [B, kv_heads, capacity, D]
    contiguous, in which `start` keys of each sequence are there already.
    """
    rows, heads, dim = q.shape
    batch, kv_heads, capacity, _ = keys.shape
    steps, group = rows // batch, heads // kv_heads
    out = torch.empty_like(q)
    _dense_kernel[(batch, kv_heads)](
        q, k, v, keys, values, out, v.stride(0), capacity, start, dim**-0.5, kv_heads,
        STEPS=steps, GROUP=group, ROWS=max(16, triton.next_power_of_2(steps * group)),
        KEYS=max(16, triton.next_power_of_2(start + steps)), D=dim,
    )  # fmt: skip
    return out
