"""The kernel of `fused_linear` for more than two rows, up to 16, which tensor cores take at once.

A program holds whole rows of the weight here too, and asks for them, as many as its registers hold, before it waits for the kernel in
front of it. Its warps share out the inputs: each has a part of every sum, and they add those up once, at the end.

Tensor cores do not mind in which order inputs come, as long as it is one order for weights and rows. The one taken here lets a thread
load eight neighbours at once and have them where the cores expect its operands, so that neither goes through shared memory.

A norm's scale is applied to the sums, in float32: that rounds once less than the plain code of `layers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models.fused import starts_early

import os
POLICY: tl.constexpr = tl.constexpr(os.environ.get("POLICY", "evict_first"))
LINES = 16  # rows of the weight in one tile, as a tensor core takes them
PROGRAMS = (
    128  # what a large GPU runs at once; of so wide rows that a multiprocessor holds one program, no more are launched
)
WIDEST = 2_048  # inputs of a part


class Plan(NamedTuple):
    """How a product is shared out. Of its rows of the weight a program takes `tiles`, whose inputs come in `parts` of `part`."""

    warps: int
    lines: int  # rows of the weight in one tile: 16 or 32
    part: int  # a power of 2
    parts: int
    tiles: int
    held: int  # parts of the weight that are asked for before the wait
    read: int  # parts of the rows that are asked for after it


def plan(size_in: int, lines: int, *, normed: bool) -> Plan:
    """For a weight [lines, size_in]. What was fastest on an H200 for 8 rows; a thread has 255 registers.

    Four warps hold everything at once where it fits: the fewer of them, the sooner their sums are together.
    """
    part = max(32 * 8, triton.next_power_of_2(size_in))
    if part > WIDEST:
        part = WIDEST // 2
    parts = triton.cdiv(size_in, part)
    if size_in <= (1_024 if normed else 3_072):
        return Plan(4, LINES, part, parts, 1, parts, 1)
    if not normed:
        return Plan(8, LINES, part, parts, 1, min(parts, 4), min(parts, 2))
    tiles = max(1, lines // (LINES * PROGRAMS)) if parts == 1 else 1
    return Plan(8, LINES, part, parts, tiles, 2 if tiles == 2 else 1, 1)


@triton.jit
def nothing():
    """A tuple that grows as loops are unrolled."""
    return ()


@triton.jit
def _dims(part, SLICES: tl.constexpr, CHUNK: tl.constexpr, EACH: tl.constexpr, WORD: tl.constexpr):
    """Numbers of a part's inputs [4, 1, SLICES, CHUNK / 4 EACH, 1, EACH / WORD, WORD]: a thread's are EACH neighbours, of which it loads
    WORD at once. First axis and last two are thread and register of the tensor cores."""
    thread = tl.arange(0, 4)[:, None, None, None, None, None, None]
    slice_ = tl.arange(0, SLICES)[None, None, :, None, None, None, None]
    block = tl.arange(0, CHUNK // (4 * EACH))[None, None, None, :, None, None, None]
    word = tl.arange(0, EACH // WORD)[None, None, None, None, None, :, None]
    register = tl.arange(0, WORD)[None, None, None, None, None, None, :]
    return part * (SLICES * CHUNK) + slice_ * CHUNK + block * (4 * EACH) + thread * EACH + word * WORD + register


@triton.jit
def _lines(COUNT: tl.constexpr):
    """0..COUNT-1 as [1, 8, 1, 1, COUNT / 8, 1, 1]."""
    eights = tl.arange(0, COUNT // 8)[None, None, None, None, :, None, None]
    return eights * 8 + tl.arange(0, 8)[None, :, None, None, None, None, None]


@triton.jit
def _operand(x, COUNT: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr, EACH: tl.constexpr, LEFT: tl.constexpr):
    """[4, 8, SLICES, CHUNK / 4 EACH, COUNT / 8, EACH / WORD, WORD] -> [SLICES, COUNT, CHUNK] or, not LEFT, [SLICES, CHUNK, COUNT].

    The layouts of both are the tensor cores', so nothing moves: of 16 inputs a thread has two, and two that are eight further on.
    """
    x = tl.reshape(x, [4, 8, SLICES, CHUNK // (4 * EACH), COUNT // 8, 2, 2, EACH // 4])
    if LEFT:
        return tl.reshape(tl.permute(x, (2, 4, 1, 3, 5, 6, 0, 7)), [SLICES, COUNT, CHUNK])
    else:
        return tl.reshape(tl.permute(x, (2, 3, 5, 6, 0, 7, 4, 1)), [SLICES, CHUNK, COUNT])


@triton.jit
def _weights(
    weight_ptr, first, part,
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, COLUMNS: tl.constexpr, LINES_: tl.constexpr, SLICES: tl.constexpr,
    CHUNK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A part of the weight's rows for COLUMNS outputs from `first`: of the gates, and where LINES_ is twice that also of the ups."""
    line, dims = _lines(LINES_), _dims(part, SLICES, CHUNK, EACH, EACH)
    column = first + line % COLUMNS
    at = (column + line // COLUMNS * SIZE_OUT).to(tl.int64) * SIZE_IN + dims
    if SIZE_OUT % COLUMNS == 0 and SIZE_IN % (SLICES * CHUNK) == 0:
        return tl.load(weight_ptr + at, eviction_policy=POLICY)
    else:
        return tl.load(weight_ptr + at, mask=(column < SIZE_OUT) & (dims < SIZE_IN), other=0.0, eviction_policy=POLICY)


@triton.jit
def _norms(norm_ptr, part, SIZE_IN: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr, EACH: tl.constexpr):
    """A part of the norm's weight, for every thread: those of one row would have to send it to the others."""
    dims = tl.broadcast_to(_dims(part, SLICES, CHUNK, EACH, 8), [4, 8, SLICES, CHUNK // (4 * EACH), 1, EACH // 8, 8])
    if SIZE_IN % (SLICES * CHUNK) == 0:
        return tl.load(norm_ptr + dims)
    else:
        return tl.load(norm_ptr + dims, mask=dims < SIZE_IN, other=0.0)


@triton.jit
def _inputs(
    x_ptr, rows, part,
    SIZE_IN: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A part of all rows."""
    row, dims = _lines(ROWS), _dims(part, SLICES, CHUNK, EACH, 8)
    if SIZE_IN % (SLICES * CHUNK) == 0:
        return tl.load(x_ptr + row * SIZE_IN + dims, mask=row < rows, other=0.0)
    else:
        return tl.load(x_ptr + row * SIZE_IN + dims, mask=(row < rows) & (dims < SIZE_IN), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, more_ptr, out_ptr, rows, eps,
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    SCALED: tl.constexpr, LINES_: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr,
    EACH: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr, HELD: tl.constexpr, READ: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program: TILES times LINES_ outputs of all rows, or half as many where GATED; a tile's neighbour is another program's."""
    tl.static_assert(PARTS == 1 or TILES == 1)
    if EARLY:
        gdc_launch_dependents()
    COLUMNS: tl.constexpr = LINES_ // 2 if GATED else LINES_
    kind: tl.constexpr = x_ptr.dtype.element_ty
    first, stride = tl.program_id(0) * COLUMNS, tl.num_programs(0) * COLUMNS
    column, row = tl.arange(0, COLUMNS)[:, None], tl.arange(0, ROWS)[None, :]
    line = tl.arange(0, LINES_)[:, None]
    weights, x, norms = nothing(), nothing(), nothing()
    for n in tl.static_range(HELD):
        weights += (
            _weights(
                weight_ptr, first + n // PARTS * stride, n % PARTS, SIZE_IN, SIZE_OUT, COLUMNS, LINES_, SLICES, CHUNK, EACH
            ),
        )  # fmt: skip
    if NORMED:
        for part in tl.static_range(READ):
            norms += (_norms(norm_ptr, part, SIZE_IN, SLICES, CHUNK, EACH),)
    if EARLY:
        gdc_wait()
    for part in tl.static_range(READ):
        x += (_inputs(x_ptr, rows, part, SIZE_IN, ROWS, SLICES, CHUNK, EACH),)
    if ADDED:
        tl.static_assert(TILES == 1)
        real = (first + column < SIZE_OUT) & (row < rows)
        more = tl.load(more_ptr + row * SIZE_OUT + first + column, mask=real, other=0.0)
    if EARLY:
        # What was asked for is asked for here: the assembler would put it off until the products in front of it are done, but
        # moves nothing across a branch. There are always rows.
        tl.debug_barrier()
        if rows == 0:
            return
    squares = tl.zeros([4, 8, SLICES, ROWS // 8], tl.float32)
    for tile in tl.static_range(TILES):
        sums = tl.zeros([SLICES, LINES_, ROWS], tl.float32)
        for part in tl.static_range(PARTS):
            if tile * PARTS + part + HELD < TILES * PARTS:
                weights += (
                    _weights(
                        weight_ptr, first + (tile * PARTS + part + HELD) // PARTS * stride, (tile * PARTS + part + HELD) % PARTS,
                        SIZE_IN, SIZE_OUT, COLUMNS, LINES_, SLICES, CHUNK, EACH,
                    ),
                )  # fmt: skip
            if part + READ < PARTS:
                x += (_inputs(x_ptr, rows, part + READ, SIZE_IN, ROWS, SLICES, CHUNK, EACH),)
                if NORMED:
                    norms += (_norms(norm_ptr, part + READ, SIZE_IN, SLICES, CHUNK, EACH),)
            if tile == 0:
                inputs = x[part]
                if NORMED:
                    wide = inputs.to(tl.float32)
                    squares += tl.sum(tl.sum(tl.sum(wide * wide, 6), 5), 3)
                    inputs = (wide * norms[part].to(tl.float32)).to(kind)
            weight = weights[tile * PARTS + part]
            if weight.dtype != kind:
                weight = weight.to(tl.float32).to(kind)  # by itself the compiler takes slower conversions
            weight = _operand(weight, LINES_, SLICES, CHUNK, EACH, True)
            sums = tl.dot(weight, _operand(inputs, ROWS, SLICES, CHUNK, EACH, False), sums, input_precision="ieee")
        out = tl.sum(sums, 0)
        if NORMED:
            mean = tl.sum(tl.sum(squares, 2), 0) / SIZE_IN  # [8, ROWS / 8]
            out *= tl.reshape(tl.trans(tl.rsqrt(mean + eps)), [1, ROWS])
        at = first + tile * stride + column
        if SCALED:
            lines = first + tile * stride + line % COLUMNS
            out *= tl.load(scale_ptr + line // COLUMNS * SIZE_OUT + lines, mask=lines < SIZE_OUT, other=0.0)
        out = out.to(kind)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(out, [2, COLUMNS, ROWS]), (1, 2, 0)))
            gate = gate.to(tl.float32)
            out = (gate / (1.0 + tl.exp(-gate))).to(kind) * up
        if ADDED:
            out = (out.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(out_ptr + row * SIZE_OUT + at, out, mask=(at < SIZE_OUT) & (row < rows))


def launched(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None,
    eps: float,
    more: Tensor | None,
    scale: Tensor | None,
    gated: bool,
) -> Tensor:
    """x [N, H], contiguous, normed by norm [H]; weight [O, H], or gated [2 O, H], its rows times scale [O]; more [N, O] -> out [N, O]."""
    rows, size_in = x.shape
    warps, lines, part, parts, tiles, held, read = plan(size_in, len(weight), normed=norm is not None)
    early = starts_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _tiles_kernel[(triton.cdiv(triton.cdiv(len(weight), lines), tiles),)](
        x, x if norm is None else norm, weight, x if scale is None else scale, x if more is None else more, out, rows, eps,
        SIZE_IN=size_in, SIZE_OUT=out.shape[1], NORMED=norm is not None, GATED=gated, ADDED=more is not None,
        SCALED=scale is not None, LINES_=lines, ROWS=8 if rows <= 8 else 16, SLICES=warps, CHUNK=part // warps,
        EACH=16 if weight.itemsize == 1 else 8, PARTS=parts, TILES=tiles, HELD=held, READ=read, EARLY=early,
        num_warps=warps, **options,
    )  # fmt: skip
    return out
