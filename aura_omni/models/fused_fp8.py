"""Triton kernel of `fp8.quantized`: one launch where PyTorch would do six. Rounds as the plain code does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aura_omni.models.fp8 import FP8, LARGEST, LEAST


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, size, LARGEST_: tl.constexpr, LEAST_: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), 0), LEAST_), LARGEST_)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * size + dims, tl.math.div_rn(x, scale).to(out_ptr.dtype.element_ty), mask=inside)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8.quantized`."""
    x = x.contiguous()
    rows, size = x.shape
    out, scale = torch.empty_like(x, dtype=FP8), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    # Numbers that a thread holds: of long rows not more than 16.
    warps = min(16, max(4, block // 512))
    _quantize_kernel[(rows,)](x, out, scale, size, LARGEST_=LARGEST, LEAST_=LEAST, BLOCK=block, num_warps=warps)
    return out, scale
