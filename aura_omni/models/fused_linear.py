"""Triton kernels for products of very few rows, with the norm before them and what follows them in the same launch.

A decoder's step of a few rows reads each weight once and computes next to nothing, so its time is that of reading weights and of
launches. A program here holds whole rows of the weight: it asks for all of them at once, before it waits for the kernel in front of it
(programmatic dependent launch), for the weights are there already. What it then computes waits for nothing but its own inputs.
Rounds where the plain code of `layers` rounds, but for the norm of more than two rows (`fused_tiles`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models import fused_tiles
from aura_omni.models.fused import starts_early

MOST_ROWS = 16
ONE_BY_ONE = 2  # up to so many rows are multiplied one by one; each takes 2 us, tensor cores take the same for all
MOST_WIDTH = 2_048  # wider layers do not wait for launches, and a program could not hold their rows
COLUMNS, WARPS = 4, 8  # outputs of one program


@triton.jit(do_not_specialize=["rows"])  # one program for 1 and for 2 rows
def _rows_kernel(
    x_ptr, norm_ptr, weight_ptr, more_ptr, out_ptr, rows, size_in, size_out, eps,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS_: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program: COLUMNS_ outputs of all rows. EARLY: it may begin before the kernel in front of it has ended."""
    column, dims = tl.program_id(0) * COLUMNS_ + tl.arange(0, COLUMNS_), tl.arange(0, WIDTH)
    wanted, inside = column < size_out, dims < size_in
    if EARLY:
        gdc_launch_dependents()
    held = wanted[:, None] & inside[None, :]
    at = column[:, None].to(tl.int64) * size_in + dims[None, :]
    weight = tl.load(weight_ptr + at, mask=held, other=0.0)
    if GATED:
        up = tl.load(weight_ptr + size_out.to(tl.int64) * size_in + at, mask=held, other=0.0)
    if NORMED:
        norm = tl.load(norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    kind: tl.constexpr = x_ptr.dtype.element_ty
    for row in range(rows):
        x = tl.load(x_ptr + row * size_in + dims, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(x * x, 0) / size_in + eps)
            x = ((x * scale).to(kind).to(tl.float32) * norm).to(kind).to(tl.float32)
        out = tl.sum(weight.to(tl.float32) * x[None, :], 1).to(kind)
        if GATED:
            gate = out.to(tl.float32)
            out = (gate / (1.0 + tl.exp(-gate))).to(kind) * tl.sum(up.to(tl.float32) * x[None, :], 1).to(kind)
        place = row * size_out + column
        if ADDED:
            more = tl.load(more_ptr + place, mask=wanted, other=0.0)
            out = (out.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(out_ptr + place, out, mask=wanted)


def _launched(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    more: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    rows, size_in = x.shape
    if rows > ONE_BY_ONE:
        return fused_tiles.launched(x, weight, out, norm=norm, eps=eps, more=more, gated=gated)
    size_out = out.shape[1]
    early = starts_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _rows_kernel[(triton.cdiv(size_out, COLUMNS),)](
        x, x if norm is None else norm, weight, x if more is None else more, out, rows, size_in, size_out, eps,
        NORMED=norm is not None, GATED=gated, ADDED=more is not None, WIDTH=max(16, triton.next_power_of_2(size_in)),
        COLUMNS_=COLUMNS, EARLY=early, num_warps=WARPS, **options,
    )  # fmt: skip
    return out


def takes(x: Tensor) -> bool:
    """Whether these kernels are for x [N, H]."""
    most = MOST_ROWS if x.dtype.itemsize == 2 else ONE_BY_ONE  # tensor cores take no float32
    return len(x) <= most and x.shape[1] <= MOST_WIDTH


def normed_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x [N, H], normed by norm [H], times weight [O, H] -> [N, O]."""
    return _launched(x.contiguous(), weight, x.new_empty(len(x), len(weight)), norm=norm, eps=eps)


def normed_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """x [N, H], normed by norm [H] -> silu(gate) * up [N, I], of both of gate_up [2 I, H]."""
    return _launched(x.contiguous(), gate_up, x.new_empty(len(x), len(gate_up) // 2), norm=norm, eps=eps, gated=True)


def linear_added(x: Tensor, weight: Tensor, more: Tensor) -> Tensor:
    """more [N, O] plus x [N, H] times weight [O, H], which is rounded before: -> [N, O]."""
    more = more.contiguous()
    return _launched(x.contiguous(), weight, torch.empty_like(more), more=more)
