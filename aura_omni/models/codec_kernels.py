"""Triton kernels of Code2Wav: convolutions over what a stream remembers and the step's inputs, with all that follows them.

A layer that looks back reads its inputs from one tensor, `Led`: each stream's remembered rows and then its new ones. Whoever computes
the new ones writes them there, puts the remembered rows in front of them, and sets aside which rows the next step will have to remember;
`remember` moves those of all layers into the state at the end, when nobody reads it any more. So a convolution is one launch, with no
copies of windows: products of the rows at each tap, summed in float32, then bias, residual and activation before anything is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from aura_omni.models.codec_layers import Taps
from aura_omni.models.codec_state import StepMemory, Tail

MOST_FRAMES = 32  # of a stream in `attend`, where one program holds all of its keys


ARRIVALS = 1 << 13  # tiles of a step that several programs share, at most: some 40 layers of up to PROGRAMS


class Scratch:
    """Of one step: rows [B, E], what the streams will remember of elements `first` and on of the state; and counters for `conv`."""

    def __init__(self, memory: StepMemory, first: int) -> None:
        state, slots = memory.state.rows, memory.slots
        self.first = first
        self.rows = state.new_empty(len(slots), state.shape[1] - first)
        self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=state.device)
        self._used = 0

    def arrivals(self, count: int) -> Tensor:
        """Zeros int32 [count] that nobody else has."""
        self._used += count
        assert self._used <= ARRIVALS
        return self._arrivals[self._used - count : self._used]


@dataclass(frozen=True, slots=True)
class Led:
    """Inputs of a layer, x [B, rows + T, C]: the rows that its streams remember and then the new ones."""

    x: Tensor
    rows: int

    @classmethod
    def empty(cls, like: Tensor, batch: int, count: int, channels: int, tail: Tail | None) -> Led:
        rows = 0 if tail is None else tail.rows
        return cls(like.new_empty(batch, rows + count, channels), rows)

    @property
    def count(self) -> int:
        return self.x.shape[1] - self.rows


@triton.jit
def _lead(
    out_ptr, value, at, stream, inside, size, slots_ptr, state_ptr, state_width, kept_ptr, kept_width, tail, reaches
):  # fmt: skip
    """Store new inputs [R, N] of a layer behind the `tail` elements its streams remember; copy those and set aside the next ones.

    at [R, N]: which of all streams' new elements, `size` each; stream [R, 1]: of the step; state_ptr, kept_ptr: where the layer's part
    of the first row begins; reaches: whether any is among its stream's first `tail`.
    """
    tl.store(out_ptr + (at + (stream + 1) * tail), value, mask=inside)
    if tail > 0:
        place = at - stream * size
        late = place + tail - size
        tl.store(kept_ptr + stream * kept_width + late, value, mask=inside & (late >= 0))
        if reaches:
            slot = tl.load(slots_ptr + stream)
            for begin in range(0, tail, size):
                early = place + begin
                there = inside & (early < tail)
                old = tl.load(state_ptr + slot * state_width + early, mask=there, other=0.0)
                tl.store(out_ptr + stream * (tail + size) + early, old, mask=there)
                tl.store(kept_ptr + stream * kept_width + early - size, old, mask=there & (early >= size))


@triton.jit
def _sine_squared(x):
    """sin(x)^2 in float32 for |x| up to 10^4 without the branches of a sine for any x: its period is pi, and within half of it the first
    six terms of the series are exact to rounding."""
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = x - turns * 3.140625 - turns * 9.676535897932e-4  # pi in two parts: the first product is exact
    s = x * x
    sine = x * (1.0 + s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880 - s * (1 / 39916800))))))
    return sine * sine


# ---------------------------------------------------------------- convolutions


_NUMBERS = ("parts", "total", "count", "taps", "dilation", "scaled", "added", "wanted", "snake", "gelu")


@triton.jit(do_not_specialize=_NUMBERS)
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, gamma_ptr, more_ptr, rate_ptr, gain_ptr, out_ptr, led_ptr, parts_ptr, arrivals_ptr, parts,
    slots_ptr, state_ptr, state_width, kept_ptr, kept_width, tail,
    total, count, stream_width, width, outputs, channels, tap_step, row_step, taps, dilation,
    scaled, added, wanted, snake, gelu,  # 0 or 1, of a call and not of the program: compiling takes seconds
    EVEN: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile, part): COLUMNS outputs of ROWS of the B T rows; SHARED: one of `parts` of their sums, and the last to come adds them."""
    tile, part, across = tl.program_id(0), tl.program_id(1), tl.cdiv(outputs, COLUMNS)
    row, column = tile // across * ROWS + tl.arange(0, ROWS), tile % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < total)[:, None] & (column < outputs)[None, :]
    stream, time, depth = row // count, row % count, tl.arange(0, DEPTH)
    # Where no row or column is, the last is read, so that nothing needs a mask.
    real, last = tl.minimum(row, total - 1), tl.minimum(column, outputs - 1)
    x_row = x_ptr + ((real // count).to(tl.int64) * stream_width + real % count * width)[:, None] + depth[None, :]
    w_column = weight_ptr + (last.to(tl.int64) * row_step)[None, :] + depth[:, None]
    blocks = tl.cdiv(width, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(part * taps * blocks // parts, (part + 1) * taps * blocks // parts):
        tap, begin = block // blocks, block % blocks * DEPTH
        if EVEN:
            x = tl.load(x_row + (tap * dilation * width + begin))
            w = tl.load(w_column + (tap * tap_step + begin))
        else:
            x = tl.load(x_row + (tap * dilation * width + begin), mask=(begin + depth < width)[None, :], other=0.0)
            w = tl.load(w_column + (tap * tap_step + begin), mask=(begin + depth < width)[:, None], other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if SHARED:
        SIZE: tl.constexpr = ROWS * COLUMNS
        place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mine = parts_ptr + tile * parts * SIZE + place
        tl.store(mine + part * SIZE, sums)
        tl.debug_barrier()  # all of the part is stored before it counts
        if tl.atomic_add(arrivals_ptr + tile, 1) < parts - 1:
            return
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for other in range(parts):  # in the same order, whoever came last
            sums += tl.load(mine + other * SIZE, cache_modifier=".cg")
    kind: tl.constexpr = x_ptr.dtype.element_ty
    at, there, channel = (row * outputs)[:, None] + column[None, :], column < outputs, column % channels
    y = sums + tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    y *= tl.load(gamma_ptr + column, mask=there & (scaled > 0), other=1.0).to(tl.float32)[None, :]
    y += tl.load(more_ptr + at, mask=inside & (added > 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(kind), mask=inside & (wanted > 0))
    rate = tl.load(rate_ptr + channel, mask=there & (snake > 0), other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=there & (snake > 0), other=0.0).to(tl.float32)
    y += _sine_squared(y * rate[None, :]) * gain[None, :]
    if gelu > 0:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    _lead(
        led_ptr, y.to(kind), at, stream[:, None], inside, count * outputs, slots_ptr, state_ptr, state_width,
        kept_ptr, kept_width, tail, tl.min(time) * outputs < tail,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1


PROGRAMS = 132  # multiprocessors of an H200: fewer programs leave some idle
LEAST_STEPS = 6  # of a program that shares a tile: with fewer, adding parts up takes longer than making them
# The largest that still makes enough programs is taken; their loops are as fast as cuBLAS's where there are many rows.
EVEN_TILES = (
    Tile(128, 128, 64, warps=8, stages=3),
    Tile(128, 64, 64, warps=4, stages=4),
    Tile(64, 64, 64, warps=4, stages=4),
)
NARROW_TILES = (Tile(128, 32, 32, warps=4, stages=5),)  # of 96 channels


def tile_of(rows: int, taps: Taps, itemsize: int) -> Tile:
    """What one program computes of a layer of so many rows."""
    if itemsize > 2:
        return Tile(64, 64, 32, warps=8, stages=2)

    def programs(tile: Tile) -> int:
        return triton.cdiv(rows, tile.rows) * triton.cdiv(taps.outputs, tile.columns)

    even = taps.width % 64 == 0
    for tile in EVEN_TILES if even else NARROW_TILES:
        wasteful = even and tile.columns == 128 and taps.outputs % 128
        if programs(tile) >= PROGRAMS and not wasteful:
            return tile
    depth = 64 if even else 32
    tile = Tile(64 if rows > 32 else 32 if rows > 16 else 16, 64, depth, warps=4, stages=4)
    parts = min(2 * PROGRAMS // programs(tile), taps.count * taps.width // depth // LEAST_STEPS, 8)
    return replace(tile, parts=max(1, parts))


def conv(
    x: Led,
    taps: Taps,
    *,
    memory: StepMemory,
    scratch: Scratch,
    tail: Tail | None = None,
    rate: int = 1,
    more: Tensor | None = None,
    gamma: Tensor | None = None,
    snake: tuple[Tensor, Tensor] | None = None,
    gelu: bool = False,
    out: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor | None, Led]:
    """y = more + gamma * (convolution of x + bias), each row of it `rate` rows of outputs / rate channels.

    Returns y, if `out` says that it is wanted, and y with its activation (gelu, or snake: rates and gains of the channels) as inputs
    of the next layer, whose streams remember `tail`.
    """
    batch, count, kind = x.x.shape[0], x.count, x.x
    total, channels = batch * count, taps.outputs // rate
    y = kind.new_empty(batch, count * rate, channels) if out else None
    led = Led.empty(kind, batch, count * rate, channels, tail)
    tile = tile or tile_of(total, taps, kind.element_size())
    rates, gains = snake or (kind, kind)
    tiles, partial, arrivals = triton.cdiv(total, tile.rows) * triton.cdiv(taps.outputs, tile.columns), kind, kind
    if tile.parts > 1:
        partial = kind.new_empty(tiles * tile.parts * tile.rows * tile.columns, dtype=torch.float32)
        arrivals = scratch.arrivals(tiles)
    _conv_kernel[(tiles, tile.parts)](
        kind, taps.weight, taps.bias, kind if gamma is None else gamma, kind if more is None else more, rates, gains,
        kind if y is None else y, led.x, partial, arrivals, tile.parts, *_places(tail, memory, scratch),
        total, count, x.x.shape[1] * taps.width, taps.width, taps.outputs, channels, taps.tap_step, taps.row_step,
        taps.count, taps.dilation,
        int(gamma is not None), int(more is not None), int(out), int(snake is not None), int(gelu),
        EVEN=taps.width % tile.depth == 0, SHARED=tile.parts > 1,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, led


def _places(tail: Tail | None, memory: StepMemory, scratch: Scratch) -> tuple[object, ...]:
    """slots_ptr, state_ptr, state_width, kept_ptr, kept_width, tail of `_lead`."""
    rows = memory.state.rows
    start, size = (scratch.first, 0) if tail is None else (tail.start, tail.size)
    return (
        memory.slots,
        rows[0, start:],
        rows.stride(0),
        scratch.rows[0, start - scratch.first :],
        scratch.rows.stride(0),
        size,
    )


@triton.jit(do_not_specialize=["total", "count"])
def _last_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, total, count, stream_width, width,
    TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, channel = row < total, tl.arange(0, WIDTH)
    real = (channel < width)[None, :] & there[:, None]
    x_row = (
        x_ptr + (row // count).to(tl.int64)[:, None] * stream_width + (row % count)[:, None] * width + channel[None, :]
    )
    sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        w = tl.load(weight_ptr + tap * width + channel, mask=channel < width, other=0.0).to(tl.float32)
        sums += tl.load(x_row + tap * width, mask=real, other=0.0).to(tl.float32) * w[None, :]
    y = tl.sum(sums, 1) + tl.load(bias_ptr).to(tl.float32)
    tl.store(out_ptr + row, tl.minimum(tl.maximum(y, -1.0), 1.0), mask=there)


def last_conv(x: Led, taps: Taps) -> Tensor:
    """The convolution to one channel, undilated: -> float32 [B, T] in [-1, 1]."""
    batch, total = x.x.shape[0], x.x.shape[0] * x.count
    out = x.x.new_empty(batch, x.count, dtype=torch.float32)
    _last_conv_kernel[(triton.cdiv(total, 32),)](
        x.x, taps.weight, taps.bias, out, total, x.count, x.x.shape[1] * taps.width, taps.width,
        TAPS=taps.count, ROWS=32, WIDTH=triton.next_power_of_2(taps.width),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _depthwise_norm_kernel(
    x_ptr, taps_ptr, bias_ptr, norm_ptr, shift_ptr, out_ptr, count, stream_width, width, eps,
    TAPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0), tl.arange(0, WIDTH)
    inside = channel < width
    x_row = x_ptr + (row // count).to(tl.int64) * stream_width + (row % count) * width + channel
    y = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        w = tl.load(taps_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(x_row + tap * width, mask=inside, other=0.0).to(tl.float32) * w
    kind: tl.constexpr = x_ptr.dtype.element_ty
    y = y.to(kind).to(tl.float32)
    y = tl.where(inside, y - tl.sum(y, 0) / width, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / width + eps)
    norm = tl.load(norm_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * width + channel, (y * norm + shift).to(kind), mask=inside)


def depthwise_norm(x: Led, taps: Tensor, bias: Tensor, norm: torch.nn.LayerNorm) -> Led:
    """Convolution of each channel with itself, taps [C, 1, kernel], bias [C]; then the norm over channels."""
    batch, _, width = x.x.shape
    out = x.x.new_empty(batch, x.count, width)
    _depthwise_norm_kernel[(batch * x.count,)](
        x.x, taps, bias, norm.weight, norm.bias, out, x.count, x.x.shape[1] * width, width, norm.eps,
        TAPS=taps.shape[2], WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return Led(out, 0)


# ---------------------------------------------------------------- codes, attention, state


@triton.jit(do_not_specialize=["count"])
def _quantize_kernel(
    codes_ptr, codes_width, table_ptr, led_ptr, slots_ptr, state_ptr, state_width, kept_ptr, kept_width, tail,
    count, size, width, BOOKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    stream, time = row // count, row % count
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (channel < width)[None, :] & (row >= 0)[:, None]
    y = tl.zeros((1, WIDTH), dtype=tl.float32)
    for book in range(BOOKS):
        code = tl.load(codes_ptr + stream * codes_width + time * BOOKS + book) + book * size
        y += tl.load(table_ptr + code[:, None] * width + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (row * width)[:, None] + channel[None, :]
    _lead(
        led_ptr, y.to(table_ptr.dtype.element_ty), at, stream[:, None], inside, count * width, slots_ptr, state_ptr,
        state_width, kept_ptr, kept_width, tail, tl.min(time) * width < tail,
    )  # fmt: skip


def quantize(codes: Tensor, table: Tensor, size: int, *, tail: Tail, memory: StepMemory, scratch: Scratch) -> Led:
    """codes int64 [B, T, Q], frames of a stream contiguous -> sums of the table's rows, [B, T, C]; a book has `size`."""
    batch, count, books = codes.shape
    width = table.shape[1]
    led = Led.empty(table, batch, count, width, tail)
    block = min(512, triton.next_power_of_2(width))
    _quantize_kernel[(batch * count, triton.cdiv(width, block))](
        codes, codes.stride(0), table, led.x, *_places(tail, memory, scratch), count, size, width,
        BOOKS=books, WIDTH=block,
    )  # fmt: skip
    return led


@triton.jit
def _turned(x_ptr, at, dims, there, cos, sin, D: tl.constexpr):
    """Vectors [R, D] at `at` [R, 1], turned; zeros where not there."""
    half: tl.constexpr = D // 2
    x = tl.load(x_ptr + at + dims, mask=there, other=0.0)
    mirrored = tl.load(x_ptr + at + tl.where(dims < half, dims + half, dims - half), mask=there, other=0.0)
    mirrored = tl.where(dims < half, -mirrored, mirrored)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    return ((x * cos).to(kind).to(tl.float32) + (mirrored * sin).to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["count"])
def _attend_kernel(
    qkv_ptr, rates_ptr, frames_ptr, slots_ptr, keys_ptr, values_ptr, state_width, out_ptr, count, heads, scale,
    PAST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (stream, head): `count` queries over its PAST remembered keys and the new ones; then remembers the last PAST."""
    stream, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    half: tl.constexpr = D // 2
    slot = tl.load(slots_ptr + stream)
    first = tl.load(frames_ptr + slot)
    dims, key, row = tl.arange(0, BLOCK)[None, :], tl.arange(0, KEYS), tl.arange(0, ROWS)
    width = heads * D
    inside = dims < D
    held = slot * state_width + head * D + key[:, None] * width + dims
    old, new = (key < PAST)[:, None] & inside, (row < count)[:, None] & inside
    k_old, v_old = tl.load(keys_ptr + held, mask=old, other=0.0), tl.load(values_ptr + held, mask=old, other=0.0)
    rate = tl.load(rates_ptr + tl.where(dims < half, dims, dims - half), mask=inside, other=0.0)
    angle = (first + row)[:, None].to(tl.float32) * rate
    cos, sin = tl.cos(angle).to(kind), tl.sin(angle).to(kind)
    at = (stream * count + row)[:, None] * 3 * width + head * D
    q = _turned(qkv_ptr, at, dims, new, cos, sin, D)
    k = _turned(qkv_ptr, at + width, dims, new, cos, sin, D)
    v = tl.load(qkv_ptr + at + 2 * width + dims, mask=new, other=0.0)
    tl.debug_barrier()  # all that is remembered is read before any of it is overwritten
    stays, place = old & (key >= count)[:, None], (PAST - count + row)[:, None]
    tl.store(keys_ptr + held - count * width, k_old, mask=stays)
    tl.store(values_ptr + held - count * width, v_old, mask=stays)
    held = slot * state_width + head * D + place * width + dims
    tl.store(keys_ptr + held, k, mask=new & (place >= 0))
    tl.store(values_ptr + held, v, mask=new & (place >= 0))
    before = tl.dot(q, tl.trans(k_old), input_precision="ieee") * scale
    seen = (key < PAST) & (first + key >= PAST)
    before = tl.where((key[None, :] >= row[:, None]) & seen[None, :], before, float("-inf"))
    now = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    now = tl.where(row[None, :] <= row[:, None], now, float("-inf"))
    most = tl.maximum(tl.max(before, 1), tl.max(now, 1))[:, None]
    before, now = tl.exp(before - most), tl.exp(now - most)
    out = tl.dot(before.to(kind), v_old, input_precision="ieee") + tl.dot(now.to(kind), v, input_precision="ieee")
    out /= (tl.sum(before, 1) + tl.sum(now, 1))[:, None]
    tl.store(out_ptr + (stream * count + row)[:, None] * width + head * D + dims, out.to(kind), mask=new)


def attend(qkv: Tensor, rates: Tensor, *, heads: int, keys: Tail, values: Tail, memory: StepMemory) -> Tensor:
    """qkv [B, T, 3 heads D], T up to MOST_FRAMES; rates float32 [D / 2] of the rotation -> [B, T, heads D].

    Turns queries and keys by their frame's number, attends to what the streams remember and causally to the new, and remembers.
    """
    batch, count, width = qkv.shape
    dim = width // (3 * heads)
    rows = memory.state.rows
    out = qkv.new_empty(batch, count, heads * dim)
    _attend_kernel[(batch, heads)](
        qkv, rates, memory.state.frames, memory.slots, rows[0, keys.start :], rows[0, values.start :], rows.stride(0), out,
        count, heads, dim**-0.5, PAST=keys.rows, KEYS=max(16, triton.next_power_of_2(keys.rows)),
        ROWS=max(16, triton.next_power_of_2(count)), D=dim, BLOCK=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["frames"])
def _remember_kernel(
    kept_ptr, kept_width, slots_ptr, state_ptr, state_width, frames_ptr, frames, BLOCK: tl.constexpr
):  # fmt: skip
    stream, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, inside = tl.load(slots_ptr + stream), place < kept_width
    kept = tl.load(kept_ptr + stream * kept_width + place, mask=inside, other=0.0)
    tl.store(state_ptr + slot * state_width + place, kept, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(frames_ptr + slot, tl.load(frames_ptr + slot) + frames)


def remember(memory: StepMemory, scratch: Scratch, frames: int) -> None:
    """The end of a step of so many frames: what was set aside becomes the state."""
    state, (batch, width) = memory.state, scratch.rows.shape
    _remember_kernel[(batch, triton.cdiv(width, 2048))](
        scratch.rows, width, memory.slots, state.rows[0, scratch.first :], state.rows.stride(0), state.frames, frames,
        BLOCK=2048,
    )  # fmt: skip
