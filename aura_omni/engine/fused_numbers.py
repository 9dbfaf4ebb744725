"""The Triton kernel that a step of one row per sequence begins with: it takes the host's numbers apart, and gathers what they name.

A dozen launches of next to no work otherwise, in front of the first layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1_024  # numbers of a row, or of its pages, that a program copies


@triton.jit(do_not_specialize=["row_stride", "number_stride", "batch", "pages"])
def _begin_kernel(
    numbers_ptr, row_stride, number_stride, held_ptr, rates_ptr, axis_ptr, columns_ptr, length_ptr, table_ptr, x_ptr, cos_ptr,
    sin_ptr, batch, width, pages, hidden, half,
    SEAT: tl.constexpr, LENGTH: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part): BLOCK pages, and as much of the seat's row; the first part also what there is one of."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers = numbers_ptr + row * row_stride
    at = part * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(numbers + (width + at).to(tl.int64) * number_stride, mask=at < pages, other=0)
    seat = tl.load(numbers + SEAT * number_stride).to(tl.int64)
    x = tl.load(held_ptr + seat * hidden + at, mask=at < hidden, other=0.0)
    if part == 0:
        column, pair = tl.arange(0, WIDTH), tl.arange(0, HALF)
        number = tl.load(numbers + column * number_stride, mask=column < width, other=0)
        tl.store(columns_ptr + column * batch + row, number.to(tl.int64), mask=column < width)
        tl.store(length_ptr + row, tl.load(numbers + LENGTH * number_stride))
        axis = tl.load(axis_ptr + pair, mask=pair < half, other=0)
        rate = tl.load(rates_ptr + pair, mask=pair < half, other=0.0)
        angle = tl.load(numbers + (FIRST + axis) * number_stride).to(tl.float32) * rate
        cos, sin = tl.cos(angle).to(cos_ptr.dtype.element_ty), tl.sin(angle).to(sin_ptr.dtype.element_ty)
        turn = row * 2 * half + pair
        tl.store(cos_ptr + turn, cos, mask=pair < half)
        tl.store(cos_ptr + half + turn, cos, mask=pair < half)
        tl.store(sin_ptr + turn, sin, mask=pair < half)
        tl.store(sin_ptr + half + turn, sin, mask=pair < half)
    tl.store(x_ptr + row * hidden + at, x, mask=at < hidden)
    tl.store(table_ptr + row * pages + at, page, mask=at < pages)


def begun(
    numbers: Tensor, rows: Tensor, rates: Tensor, axis: Tensor, *, width: int, columns: tuple[int, int, int], axes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `numbers.StepNumbers.begun`: numbers int32 [B, n] of any strides, of which `width` come before the pages; columns: where seat,
    length and positions are; rows [seats + 1, H] contiguous; rates, axis [D / 2] of a `Rope`, the latter 0 of one axis.

    Returns all numbers but pages int64 [width, B], lengths int32 [B], pages int32 [B, P], x [B, H], cos and sin [B, D].
    """
    batch, hidden, half = len(numbers), rows.shape[1], len(rates)
    pages = numbers.shape[1] - width
    taken = numbers.new_empty(width, batch, dtype=torch.int64)
    length = numbers.new_empty(batch)
    table = numbers[:, width:]
    copied = 0 if table.stride(1) == 1 else pages  # rows that are whole are read where they are
    if copied:
        table = numbers.new_empty(batch, pages)
    x = rows.new_empty(batch, hidden)
    cos, sin = rows.new_empty(2, batch, 2 * half)
    seat, at_length, first = columns
    _begin_kernel[(batch, triton.cdiv(max(hidden, copied), BLOCK))](
        numbers, numbers.stride(0), numbers.stride(1), rows, rates, axis, taken, length, table, x, cos, sin, batch, width,
        copied, hidden, half, SEAT=seat, LENGTH=at_length, FIRST=first, WIDTH=triton.next_power_of_2(width),
        HALF=triton.next_power_of_2(half), BLOCK=BLOCK,
    )  # fmt: skip
    return taken, length, table, x, cos, sin
