"""Triton kernels that steps begin with: they take the host's numbers apart, and gather what they name.

One for rows that are in seats, one for those of prompts. Each is a dozen launches or two of next to no work otherwise, in front of
the first layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1_024  # numbers of a row, or of its pages, that a program copies


@triton.jit
def _turn(
    numbers, number_stride, rates_ptr, axis_ptr, cos_ptr, sin_ptr, row, half, FIRST: tl.constexpr, HALF: tl.constexpr
):
    """A row's rotations, as `layers.Rope.tables` has them, of positions that begin at FIRST of its numbers."""
    pair = tl.arange(0, HALF)
    real = pair < half
    axis, rate = tl.load(axis_ptr + pair, mask=real, other=0), tl.load(rates_ptr + pair, mask=real, other=0.0)
    angle = tl.load(numbers + (FIRST + axis) * number_stride).to(tl.float32) * rate
    cos, sin = tl.cos(angle).to(cos_ptr.dtype.element_ty), tl.sin(angle).to(sin_ptr.dtype.element_ty)
    at = row * 2 * half + pair
    tl.store(cos_ptr + at, cos, mask=real)
    tl.store(cos_ptr + half + at, cos, mask=real)
    tl.store(sin_ptr + at, sin, mask=real)
    tl.store(sin_ptr + half + at, sin, mask=real)


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
        column = tl.arange(0, WIDTH)
        number = tl.load(numbers + column * number_stride, mask=column < width, other=0)
        tl.store(columns_ptr + column * batch + row, number.to(tl.int64), mask=column < width)
        tl.store(length_ptr + row, tl.load(numbers + LENGTH * number_stride))
        _turn(numbers, number_stride, rates_ptr, axis_ptr, cos_ptr, sin_ptr, row, half, FIRST, HALF)
    tl.store(x_ptr + row * hidden + at, x, mask=at < hidden)
    tl.store(table_ptr + row * pages + at, page, mask=at < pages)


def begun(
    numbers: Tensor, rows: Tensor, rates: Tensor, axis: Tensor, *, width: int, columns: tuple[int, int, int]
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


@triton.jit
def _gather_kernel(
    numbers_ptr, width, media_ptr, base_ptr, rates_ptr, axis_ptr, slots_ptr, x_ptr, adds_ptr, cos_ptr, sin_ptr, rows, hidden,
    half,
    SLOT: tl.constexpr, MEDIUM: tl.constexpr, FIRST: tl.constexpr, ID: tl.constexpr, LOOKED_UP: tl.constexpr,
    ADDS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, BLOCK of it); the first block also what there is one of. LOOKED_UP: base is a table, else a row for each."""
    row, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers, inside = numbers_ptr + row * width, dims < hidden
    medium = tl.load(numbers + MEDIUM).to(tl.int64)
    base = tl.load(numbers + ID).to(tl.int64) if LOOKED_UP else row
    x = tl.load(base_ptr + base * hidden + dims, mask=inside & (base >= 0), other=0.0)
    media = media_ptr + medium * (1 + ADDS) * hidden + dims
    here = inside & (medium >= 0)
    x = (x.to(tl.float32) + tl.load(media, mask=here, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(x_ptr + row * hidden + dims, x, mask=inside)
    for number in tl.static_range(ADDS):
        add = tl.load(media + (1 + number) * hidden, mask=here, other=0.0)
        tl.store(adds_ptr + (number * rows + row) * hidden + dims, add, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(slots_ptr + row, tl.load(numbers + SLOT).to(tl.int64))
        _turn(numbers, 1, rates_ptr, axis_ptr, cos_ptr, sin_ptr, row, half, FIRST, HALF)


def gathered(
    numbers: Tensor, media: Tensor, base: Tensor, rates: Tensor, axis: Tensor, *, columns: tuple[int, int, int, int],
    looked_up: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows of prompts as `steps.Steps` packs them: numbers int32 [N, n]; columns: where slot, medium, positions and ids are.

    base [N, H]: what the rows are without media; or, looked_up, [V, H], of which ids name rows, negative ones none. media
    [M, 1 + adds, H]. Returns x [N, H]; cos, sin [N, D]; adds [adds, N, H]; slots int64 [N].
    """
    numbers, media, base = numbers.contiguous(), media.contiguous(), base.contiguous()
    (rows, width), hidden, half, adds = numbers.shape, base.shape[1], len(rates), media.shape[1] - 1
    slots = numbers.new_empty(rows, dtype=torch.int64)
    x, added = base.new_empty(rows, hidden), base.new_empty(adds, rows, hidden)
    cos, sin = base.new_empty(2, rows, 2 * half)
    slot, medium, first, ids = columns
    _gather_kernel[(rows, triton.cdiv(hidden, BLOCK))](
        numbers, width, media, base, rates, axis, slots, x, added if adds else x, cos, sin, rows, hidden, half, SLOT=slot,
        MEDIUM=medium, FIRST=first, ID=ids, LOOKED_UP=looked_up, ADDS=adds, HALF=triton.next_power_of_2(half), BLOCK=BLOCK,
    )  # fmt: skip
    return x, cos, sin, added, slots
