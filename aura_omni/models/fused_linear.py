"""Triton kernels for products of very few rows, with the norm before them and what follows them in the same launch.

A decoder's step of a few rows reads each weight once and computes next to nothing, so its time is that of reading weights and of
launches. A program here holds whole rows of the weight: it asks for all of them at once, before it waits for the kernel in front of it
(programmatic dependent launch), for the weights are there already. What it then computes waits for nothing but its own inputs.
Rounds where the plain code of `layers` rounds, but for the norm of more than one row (`fused_tiles`).

Weights may be in eight bits, with a scale for each of their rows: they are multiplied as they are, and the sums by the scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models import fused_tiles
from aura_omni.models.fused import starts_early
from aura_omni.models.fused_tiles import nothing

MOST_ROWS = 16
WIDE, MOST_ROWS_OF_WIDE = 2_048, 8  # in wider layers more rows are as fast by themselves
WIDEST = 4_096


@triton.jit
def _product(weights, x, PARTS: tl.constexpr):
    """Sums [C] of the parts' weights [C, P] times their inputs [P]."""
    out = weights[0].to(tl.float32) * x[0][None, :]
    for part in tl.static_range(1, PARTS):
        out += weights[part].to(tl.float32) * x[part][None, :]
    return tl.sum(out, 1)


@triton.jit
def _row_kernel(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, more_ptr, out_ptr, size_in, size_out, eps,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: COLUMNS outputs. EARLY: it may begin before the kernel in front of it has ended."""
    tl.static_assert(PARTS == 1 or not NORMED)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted, ups = column < size_out, size_out.to(tl.int64) * size_in
    if EARLY:
        gdc_launch_dependents()
    weights, up_weights, x = nothing(), nothing(), nothing()
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        held = wanted[:, None] & (dims < size_in)[None, :]
        at = column[:, None].to(tl.int64) * size_in + dims[None, :]
        weights += (tl.load(weight_ptr + at, mask=held, other=0.0, eviction_policy="evict_first"),)
        if GATED:
            up_weights += (tl.load(weight_ptr + ups + at, mask=held, other=0.0, eviction_policy="evict_first"),)
    if SCALED:
        scale = tl.load(scale_ptr + column, mask=wanted, other=0.0)
        if GATED:
            up_scale = tl.load(scale_ptr + size_out + column, mask=wanted, other=0.0)
    if NORMED:
        norm = tl.load(norm_ptr + tl.arange(0, PART), mask=tl.arange(0, PART) < size_in, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    kind: tl.constexpr = x_ptr.dtype.element_ty
    for part in tl.static_range(PARTS):
        dims = part * PART + tl.arange(0, PART)
        x += (tl.load(x_ptr + dims, mask=dims < size_in, other=0.0).to(tl.float32),)
    if NORMED:
        root = tl.rsqrt(tl.sum(x[0] * x[0], 0) / size_in + eps)
        x = (((x[0] * root).to(kind).to(tl.float32) * norm).to(kind).to(tl.float32),)
    out = _product(weights, x, PARTS)
    if SCALED:
        out *= scale
    out = out.to(kind)
    if GATED:
        gate, up = out.to(tl.float32), _product(up_weights, x, PARTS)
        if SCALED:
            up *= up_scale
        out = (gate / (1.0 + tl.exp(-gate))).to(kind) * up.to(kind)
    if ADDED:
        more = tl.load(more_ptr + column, mask=wanted, other=0.0)
        out = (out.to(tl.float32) + more.to(tl.float32)).to(kind)
    tl.store(out_ptr + column, out, mask=wanted)


class Plan(NamedTuple):
    """Of a single row: how many outputs a program has, and of how many warps it is."""

    columns: int
    warps: int


def plan(size_out: int, row_bytes: int) -> Plan:
    """For outputs that take `row_bytes` of weight each. What was fastest on an H200.

    Programs hold 32 KB, as long as there are a few for each multiprocessor.
    """
    if size_out * row_bytes < 1 << 22:
        return Plan(4, 8)
    most = 1 << (max(1, size_out // 512).bit_length() - 1)
    columns = min(most, triton.next_power_of_2(triton.cdiv(32_768, row_bytes)))
    return Plan(columns, 4 if size_out // columns >= 1_024 else 8)


def _parted(size_in: int, *, normed: bool) -> tuple[int, int]:
    """Inputs as parts of a power of 2: of 12,288, three of 4,096. Length and number of them."""
    part = size_in & -size_in
    if normed or part < 1_024:
        part = max(16, triton.next_power_of_2(size_in))
    return part, triton.cdiv(size_in, part)


def _launched(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    more: Tensor | None = None,
    scale: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    rows, size_in = x.shape
    if rows > 1:
        return fused_tiles.launched(x, weight, out, norm=norm, eps=eps, more=more, scale=scale, gated=gated)
    size_out = out.shape[1]
    columns, warps = plan(size_out, size_in * weight.itemsize * (2 if gated else 1))
    part, parts = _parted(size_in, normed=norm is not None)
    early = starts_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _row_kernel[(triton.cdiv(size_out, columns),)](
        x, x if norm is None else norm, weight, x if scale is None else scale, x if more is None else more, out,
        size_in, size_out, eps, NORMED=norm is not None, GATED=gated, ADDED=more is not None, SCALED=scale is not None,
        PART=part, PARTS=parts, COLUMNS=columns, EARLY=early, num_warps=warps, **options,
    )  # fmt: skip
    return out


def takes(x: Tensor) -> bool:
    """Whether these kernels are for x [N, H]."""
    width = x.shape[1]
    most = MOST_ROWS if width <= WIDE else MOST_ROWS_OF_WIDE
    if x.dtype.itemsize != 2:
        most = 1  # tensor cores take no float32
    return len(x) <= most and width <= WIDEST


def normed_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """x [N, H], normed by norm [H], times weight [O, H] -> [N, O].

    scale: float32 [O], of a weight float8_e4m3fn, whose rows are to be multiplied by it; likewise below.
    """
    return _launched(x.contiguous(), weight, x.new_empty(len(x), len(weight)), norm=norm, eps=eps, scale=scale)


def normed_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """x [N, H], normed by norm [H] -> silu(gate) * up [N, I], of both of gate_up [2 I, H]."""
    out = x.new_empty(len(x), len(gate_up) // 2)
    return _launched(x.contiguous(), gate_up, out, norm=norm, eps=eps, scale=scale, gated=True)


def linear_added(x: Tensor, weight: Tensor, more: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """more [N, O] plus x [N, H] times weight [O, H], which is rounded before: -> [N, O]."""
    more = more.contiguous()
    return _launched(x.contiguous(), weight, torch.empty_like(more), more=more, scale=scale)
