"""The kernel of `fused_linear` for more than one row, up to 16, which tensor cores take at once.

A program holds whole rows of the weight here too, part by part where its registers do not hold them: it asks for as many parts as
they do before it waits for the kernel in front of it, and for another whenever it has multiplied one. Its warps share out the inputs:
each has a part of every sum, and they add those up once, at the end.

Tensor cores do not mind in which order inputs come, as long as it is one order for weights and rows. The one taken here lets a thread
load 16 bytes of neighbours at once and have them where the cores expect its operands, so that neither goes through shared memory.

A norm's scale is applied to the sums, in float32: that rounds once less than the plain code of `layers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models.fused import starts_early


class Plan(NamedTuple):
    """How a product is shared out: a program has `lines` rows of the weight, whose inputs come in `parts` of `part`."""

    warps: int
    lines: int  # 16 or 32
    part: int  # a power of 2
    parts: int
    held: int  # parts of the weight that are asked for before the wait


def plan(size_in: int, lines: int, itemsize: int, rows: int, *, normed: bool) -> Plan:
    """For a weight [lines, size_in] of `itemsize` bytes a number. What was fastest on an H200; a thread has 255 registers."""

    def parted(warps: int, lines: int, part: int, held: int) -> Plan:
        parts = triton.cdiv(size_in, part)
        return Plan(warps, lines, part, parts, min(held, parts))

    if itemsize == 1:
        if not normed:
            return parted(8, 16, 1_024, held=2)
        if rows > 8 and lines >= 12_288:  # every program reads all rows, so there are fewer
            return parted(4, 32, 512, held=2)
        return parted(4, 16, 1_024, held=2)
    if size_in <= 3_072:
        return parted(4, 16, 512, held=4 if normed else 6)
    return parted(4, 16, 512, held=3) if normed else parted(8, 16, 512, held=4)


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
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, COLUMNS: tl.constexpr, LINES: tl.constexpr, SLICES: tl.constexpr,
    CHUNK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A part of the weight's rows for COLUMNS outputs from `first`: of the gates, and where LINES is twice that also of the ups."""
    line, dims = _lines(LINES), _dims(part, SLICES, CHUNK, EACH, EACH)
    column = first + line % COLUMNS
    at = (column + line // COLUMNS * SIZE_OUT).to(tl.int64) * SIZE_IN + dims
    if SIZE_OUT % COLUMNS == 0 and SIZE_IN % (SLICES * CHUNK) == 0:
        return tl.load(weight_ptr + at, eviction_policy="evict_first")
    else:
        return tl.load(
            weight_ptr + at, mask=(column < SIZE_OUT) & (dims < SIZE_IN), other=0.0, eviction_policy="evict_first"
        )


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
    SCALED: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr,
    EACH: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: LINES outputs of all rows, or half as many where GATED. EACH: neighbours in 16 bytes of weight."""
    if EARLY:
        gdc_launch_dependents()
    COLUMNS: tl.constexpr = LINES // 2 if GATED else LINES
    kind: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0) * COLUMNS
    column, row = first + tl.arange(0, COLUMNS)[:, None], tl.arange(0, ROWS)[None, :]
    real = (column < SIZE_OUT) & (row < rows)
    weights, norms, x = nothing(), nothing(), nothing()
    for part in tl.static_range(HELD):
        weights += (_weights(weight_ptr, first, part, SIZE_IN, SIZE_OUT, COLUMNS, LINES, SLICES, CHUNK, EACH),)
    if NORMED:
        norms += (_norms(norm_ptr, 0, SIZE_IN, SLICES, CHUNK, EACH),)
    if EARLY:
        gdc_wait()
    x += (_inputs(x_ptr, rows, 0, SIZE_IN, ROWS, SLICES, CHUNK, EACH),)
    if ADDED:
        more = tl.load(more_ptr + row * SIZE_OUT + column, mask=real, other=0.0)
    if EARLY:
        # What was asked for is asked for here: the assembler would put it off until the products in front of it are done, but
        # moves nothing across a branch. There are always rows.
        tl.debug_barrier()
        if rows == 0:
            return
    squares = tl.zeros([4, 8, SLICES, ROWS // 8], tl.float32)
    sums = tl.zeros([SLICES, LINES, ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        if part + HELD < PARTS:
            weights += (
                _weights(weight_ptr, first, part + HELD, SIZE_IN, SIZE_OUT, COLUMNS, LINES, SLICES, CHUNK, EACH),
            )
        if part + 1 < PARTS:
            x += (_inputs(x_ptr, rows, part + 1, SIZE_IN, ROWS, SLICES, CHUNK, EACH),)
            if NORMED:
                norms += (_norms(norm_ptr, part + 1, SIZE_IN, SLICES, CHUNK, EACH),)
        inputs, weight = x[part], weights[part]
        if NORMED:
            wide = inputs.to(tl.float32)
            squares += tl.sum(tl.sum(tl.sum(wide * wide, 6), 5), 3)
            inputs = (wide * norms[part].to(tl.float32)).to(kind)
        if weight.dtype != kind:
            weight = weight.to(tl.float32).to(kind)  # by itself the compiler takes slower conversions
        weight = _operand(weight, LINES, SLICES, CHUNK, EACH, True)
        sums = tl.dot(weight, _operand(inputs, ROWS, SLICES, CHUNK, EACH, False), sums, input_precision="ieee")
    out = tl.sum(sums, 0)
    if NORMED:
        mean = tl.sum(tl.sum(squares, 2), 0) / SIZE_IN  # [8, ROWS / 8]
        out *= tl.reshape(tl.trans(tl.rsqrt(mean + eps)), [1, ROWS])
    if SCALED:
        line = tl.arange(0, LINES)[:, None]
        to = first + line % COLUMNS
        out *= tl.load(scale_ptr + line // COLUMNS * SIZE_OUT + to, mask=to < SIZE_OUT, other=0.0)
    out = out.to(kind)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(out, [2, COLUMNS, ROWS]), (1, 2, 0)))
        gate = gate.to(tl.float32)
        out = (gate / (1.0 + tl.exp(-gate))).to(kind) * up
    if ADDED:
        out = (out.to(tl.float32) + more.to(tl.float32)).to(kind)
    tl.store(out_ptr + row * SIZE_OUT + column, out, mask=real)


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
    warps, lines, part, parts, held = plan(size_in, len(weight), weight.itemsize, rows, normed=norm is not None)
    early = starts_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _tiles_kernel[(triton.cdiv(len(weight), lines),)](
        x, x if norm is None else norm, weight, x if scale is None else scale, x if more is None else more, out, rows, eps,
        SIZE_IN=size_in, SIZE_OUT=out.shape[1], NORMED=norm is not None, GATED=gated, ADDED=more is not None,
        SCALED=scale is not None, LINES=lines, ROWS=8 if rows <= 8 else 16, SLICES=warps, CHUNK=part // warps,
        EACH=16 if weight.itemsize == 1 else 8, PARTS=parts, HELD=held, EARLY=early, num_warps=warps, **options,
    )  # fmt: skip
    return out
