"""Numbers in eight bits: float8_e4m3fn, and one float32 scale for each row of a matrix.

    weight = quantized(weight)              # is about weight.values * weight.scale[:, None]
    out = linear(x, *weight)

A row's largest number becomes the largest that eight bits hold, 448; each is then within 1/16 of what it was, or within 2^-10
of the row's unit where it is small. Tensor cores multiply eight bits by eight bits, so the rows of x are rounded likewise on the way, and
on a CPU too, so that what is computed does not depend on where. Only few rows on a GPU stay as they are (`fused_linear`): there it is the
weights whose reading takes the time.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 2.0**-100  # a row of zeros has some scale too
MULTIPLE = 16  # of which both sizes of a matrix are, for tensor cores
LEAST_CAPABILITY = (8, 9)  # of an NVIDIA GPU that multiplies such numbers


class Rows(NamedTuple):
    """values FP8 [N, H]; scale float32 [N], by which the rows are to be multiplied."""

    values: Tensor
    scale: Tensor


def quantized(x: Tensor) -> Rows:
    """x [N, H] in eight bits."""
    if not x.is_cpu:
        return Rows(*kernels().quantized(x))
    wide = x.float()
    scale = wide.abs().amax(1).clamp_min(LEAST) / LARGEST
    return Rows((wide / scale[:, None]).to(FP8), scale)


def meant(x: Tensor) -> Rows:
    """Room for x [N, H] in eight bits, where it is."""
    return Rows(torch.empty_like(x, dtype=FP8), x.new_empty(len(x), dtype=torch.float32))


def linear(x: Tensor | Rows, weight: Tensor, scale: Tensor) -> Tensor:
    """x [N, H] times weight FP8 [O, H], whose rows have the scale float32 [O] -> [N, O] in the dtype of x; on CUDA bfloat16.

    Rows of x in eight bits already come from CUDA's kernels only.
    """
    rows = x if isinstance(x, Rows) else quantized(x)
    if not rows.values.is_cpu:
        # Fast accumulation is off by up to 0.3 % of the spread of the sums, eight bits by 3.7 %, and takes up to 20 % less time (H200, 2026-11-30).
        return torch._scaled_mm(
            rows.values, weight.t(), rows.scale[:, None], scale[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
    assert isinstance(x, Tensor)
    return (F.linear(rows.values.float(), weight.float()) * rows.scale[:, None] * scale).to(x.dtype)


@cache
def kernels() -> ModuleType:
    """`models.fused_fp8`, imported on first use: Triton only exists where CUDA does."""
    from aura_omni.models import fused_fp8

    return fused_fp8
