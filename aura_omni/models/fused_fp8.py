"""Triton kernels that make eight bits of rows (`fp8.quantized`), alone or of what a norm or an activation has just computed.

Each rounds where the plain code of `layers` and `fp8` does, so they are interchangeable with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aura_omni.models.fp8 import FP8, LARGEST, LEAST

WIDEST = 4_096  # numbers that a program of `_silu_mul_kernel` has in hand at once


@triton.jit
def scale_of(largest, LARGEST_: tl.constexpr, LEAST_: tl.constexpr):
    """Of rows with such a largest number."""
    return tl.math.div_rn(tl.maximum(largest, LEAST_), LARGEST_)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, size, LARGEST_: tl.constexpr, LEAST_: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 0), LARGEST_, LEAST_)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * size + dims, tl.math.div_rn(x, scale).to(out_ptr.dtype.element_ty), mask=inside)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8.quantized`."""
    x = x.contiguous()
    out, scale = _room(x, x.shape[1])
    block = triton.next_power_of_2(x.shape[1])
    _quantize_kernel[(len(x),)](
        x, out, scale, x.shape[1], LARGEST_=LARGEST, LEAST_=LEAST, BLOCK=block, num_warps=_warps(block)
    )  # fmt: skip
    return out, scale


@triton.jit
def _norm_kernel(
    x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, scale_ptr, size, eps,
    ADDED: tl.constexpr, LARGEST_: tl.constexpr, LEAST_: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(more_ptr + row * size + dims, mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * size + dims, x, mask=inside)
    wide = x.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    normed = ((wide * root).to(x.dtype) * weight).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(normed), 0), LARGEST_, LEAST_)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * size + dims, tl.math.div_rn(normed, scale).to(out_ptr.dtype.element_ty), mask=inside)


def normed_sum(x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x, more [N, H] -> their sum (None: x), and `quantized` of that normed by weight [H]."""
    x = x.contiguous()
    total = x if more is None else torch.empty_like(x)
    out, scale = _room(x, x.shape[1])
    block = triton.next_power_of_2(x.shape[1])
    _norm_kernel[(len(x),)](
        x, x if more is None else more.contiguous(), weight, total, out, scale, x.shape[1], eps,
        ADDED=more is not None, LARGEST_=LARGEST, LEAST_=LEAST, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return total, (out, scale)


@triton.jit
def _silu_mul(gate_up_ptr, dims, size):
    gate = tl.load(gate_up_ptr + dims, mask=dims < size, other=0.0)
    up = tl.load(gate_up_ptr + size + dims, mask=dims < size, other=0.0)
    wide = gate.to(tl.float32)
    return ((wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up).to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, scale_ptr, size, LARGEST_: tl.constexpr, LEAST_: tl.constexpr, BLOCK: tl.constexpr
):
    """Program: a row. It is computed twice, for its largest number and then for all, as registers do not hold so many."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    gate_up_ptr += row * 2 * size
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        largest = tl.maximum(largest, tl.abs(_silu_mul(gate_up_ptr, start + dims, size)))
    scale = scale_of(tl.max(largest, 0), LARGEST_, LEAST_)
    tl.store(scale_ptr + row, scale)
    for start in range(0, size, BLOCK):
        out = tl.math.div_rn(_silu_mul(gate_up_ptr, start + dims, size), scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * size + start + dims, out, mask=start + dims < size)


def silu_mul(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [N, 2 I] -> `quantized` of silu(gate) * up [N, I]."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[1] // 2
    out, scale = _room(gate_up, size)
    block = min(WIDEST, triton.next_power_of_2(size))
    _silu_mul_kernel[(len(gate_up),)](
        gate_up, out, scale, size, LARGEST_=LARGEST, LEAST_=LEAST, BLOCK=block, num_warps=_warps(block)
    )  # fmt: skip
    return out, scale


def _room(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For rows of that size in eight bits, and their scales."""
    return x.new_empty(len(x), size, dtype=FP8), x.new_empty(len(x), dtype=torch.float32)


def _warps(block: int) -> int:
    """Such that a thread has 16 numbers, of very wide rows 32."""
    return min(16, max(4, block // 512))
