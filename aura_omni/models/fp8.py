"""Numbers in eight bits: float8_e4m3fn, and one float32 scale for each row of a matrix.

    values, scale = quantized(weight)       # weight is about values * scale[:, None]
    out = linear(x, values, scale)

A row's largest number becomes the largest that eight bits hold, 448; each is then within 1/16 of what it was, or within 2^-10
of the row's unit where it is small. Tensor cores multiply eight bits by eight bits, so the rows of x are rounded likewise on the way, and
everywhere else too, so that what is computed does not depend on where.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 2.0**-100  # a row of zeros has some scale too
MULTIPLE = 16  # of which both sizes of a matrix are, for tensor cores
LEAST_CAPABILITY = (8, 9)  # of an NVIDIA GPU that multiplies such numbers


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, H] -> FP8 [N, H] and float32 [N], by which its rows are to be multiplied."""
    if x.is_cuda:
        return _kernels().quantized(x)
    wide = x.float()
    scale = wide.abs().amax(1).clamp_min(LEAST) / LARGEST
    return (wide / scale[:, None]).to(FP8), scale


def linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [N, H] times weight FP8 [O, H], whose rows have the scale float32 [O] -> [N, O] in the dtype of x; on CUDA bfloat16."""
    rows, of_rows = quantized(x)
    if x.is_cuda:
        return torch._scaled_mm(rows, weight.t(), of_rows[:, None], scale[None], out_dtype=x.dtype)
    return (F.linear(rows.float(), weight.float()) * of_rows[:, None] * scale).to(x.dtype)


@cache
def _kernels() -> ModuleType:
    """Imported on first use: Triton only exists where CUDA does."""
    from aura_omni.models import fused_fp8 as kernels

    return kernels
