"""Attention over pages with a program for each query head: `paged_attention.decode` of very few rows, as a single turn has them.

What such a step costs is the way from the product in front of it to the one behind, so there is little on that way. Keys and values of
a program's first block are in registers before the wait, and those of further blocks are near. Threads multiply what they have
loaded: each lane, half a warp if D is 128, sees keys of its own, norms and turns what it multiplies them with by itself, and meets the
others once, at the end. A context of up to WHOLE keys is one program's: to put parts together, which meet in memory, takes longer
than to read a few more blocks. Of more rows the programs of a key head's query heads, which read the same keys, are in each other's way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.engine.paged_parts import combine, varying
from aura_omni.models.fused import _exchanged, _turned
from aura_omni.models.fused_tiles import nothing

# What was fastest on an H200: with more rows `paged_row` is, with four heads to a key head tensor cores are.
MOST_ROWS, MOST_GROUP = 4, 2
WARPS, LANES, EACH = 8, 16, 8  # a block is EACH keys of every lane
WHOLE, SPLITS = 256, 8  # a longer context is cut into so many parts at most
_LOWEST = tl.constexpr(-1e30)  # a maximum of nothing; minus infinity less minus infinity would not be a number


def takes(rows: int, group: int, page_size: int) -> bool:
    """Whether this is for so many rows, query heads to a key head, and rows to a page."""
    return rows <= MOST_ROWS and group <= MOST_GROUP and page_size % LANES == 0 and LANES * EACH % page_size == 0


@triton.jit
def _fetch(pages_ptr, pool, first, stop, head, kv_heads, D: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr):
    """Has what `pool` holds of COUNT keys from `first` on, those before `stop`, brought into the nearest cache, 128 bytes at a time."""
    LINE: tl.constexpr = 1024 // pool.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    offsets = tl.minimum(first + tl.arange(0, COUNT), stop - 1)
    slots = tl.load(pages_ptr + offsets // PAGE).to(tl.int64) * PAGE + offsets % PAGE
    lines = tl.arange(0, LINES) * LINE
    at = (pool + (slots[:, None] * kv_heads + head) * D + lines[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _block(
    pages_ptr, keys, values, first, stop, lane, head, kv_heads, dims,
    D: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """EACH keys of every lane and their values, each [LANES, D], from `first` on, those before `stop`: lanes take turns."""
    k, v = nothing(), nothing()
    for page in tl.static_range(LANES * EACH // PAGE):
        begin = first + page * PAGE
        slot = tl.load(pages_ptr + begin // PAGE, mask=begin < stop, other=0).to(tl.int64) * PAGE
        for part in tl.static_range(PAGE // LANES):
            row = part * LANES + lane
            there = (begin + row < stop)[:, None]
            at = ((slot + row)[:, None] * kv_heads + head) * D + dims[None, :]
            k += (tl.load(keys + at, mask=there, other=0.0),)
            v += (tl.load(values + at, mask=there, other=0.0),)
    return k, v


@triton.jit
def _see(q, k, v, high, total, acc, offsets, stop, LANES: tl.constexpr, EACH: tl.constexpr):
    """q float32 [LANES, D], scaled so that scores are exponents of 2, against a `_block` whose first keys are at offsets [LANES]: of
    each lane the running maximum and sum [LANES] and output [LANES, D] with them."""
    scores, higher = nothing(), high
    for one in tl.static_range(EACH):
        score = tl.where(offsets + one * LANES < stop, tl.sum(k[one].to(tl.float32) * q, 1), float("-inf"))
        scores += (score,)
        higher = tl.maximum(higher, score)
    decay = tl.exp2(high - higher)
    total, acc = total * decay, acc * decay[:, None]
    for one in tl.static_range(EACH):
        weight = tl.exp2(scores[one] - higher)
        total += weight
        acc += weight[:, None] * v[one].to(tl.float32)
    return higher, total, acc


@varying
def paged_head_kernel(
    q_ptr, k_ptr, v_ptr, q_width, k_width, v_width, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, eps,
    slots_ptr, keys, values, table, table_width, lengths, acc_ptr, m_ptr, total_ptr, arrived_ptr, out_ptr, scale, kv_heads,
    RAW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
    WHOLE: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, query head, split); for the rest as `paged_attention._decode_kernel`.

    EARLY: it lets the kernel behind it begin at once, as products do, so many may have begun that still wait. What is read here before
    the wait is not theirs: keys and values of earlier steps, and numbers that a step's own first kernels have written. Those begin
    early themselves nowhere, and only when all in front of them has ended.
    """
    row, query_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
    head, heads = query_head // GROUP, kv_heads * GROUP
    dims, lane = tl.arange(0, D), tl.arange(0, LANES)
    BLOCK: tl.constexpr = LANES * EACH
    before = tl.load(lengths + row) - 1
    part = tl.where(before <= WHOLE, WHOLE, tl.cdiv(tl.cdiv(before, BLOCK), SPLITS) * BLOCK)
    used = tl.maximum(tl.cdiv(before, part), 1)
    if split >= used:
        return
    start = split * part
    stop = tl.minimum(start + part, before)
    pages_ptr = table + row * table_width
    k_block, v_block = _block(
        pages_ptr, keys, values, start, stop, lane, head, kv_heads, dims, D, PAGE, LANES, EACH
    )  # fmt: skip
    if EARLY and start + BLOCK < stop:
        _fetch(pages_ptr, keys, start + BLOCK, stop, head, kv_heads, D, PAGE, WHOLE)
        _fetch(pages_ptr, values, start + BLOCK, stop, head, kv_heads, D, PAGE, WHOLE)
    # For every lane, which would have to wait for another's otherwise.
    here, there = dims[None, :] + 0 * lane[:, None], _exchanged(dims, D)[None, :] + 0 * lane[:, None]
    if RAW:
        turn = row * turn_width
        cos, sin = tl.load(cos_ptr + turn + here), tl.load(sin_ptr + turn + here)
        q_norm, q_other = tl.load(q_weight + here), tl.load(q_weight + there)
        k_norm, k_other = tl.load(k_weight + here), tl.load(k_weight + there)
    slot = (tl.load(slots_ptr + row) * kv_heads + head) * D
    if EARLY:
        gdc_wait()
    q_at, k_at = q_ptr + row * q_width + query_head * D, k_ptr + row * k_width + head * D
    q, k = tl.load(q_at + here), tl.load(k_at + here)
    v = tl.load(v_ptr + row * v_width + head * D + here)
    if RAW:
        q = _turned(q, tl.load(q_at + there), q_norm, q_other, cos, sin, dims, eps, D)
        k = _turned(k, tl.load(k_at + there), k_norm, k_other, cos, sin, dims, eps, D)
    # The row's own key and value are those of the first split's first lane, and one of the query heads stores them.
    own = (split == 0) & (lane == 0)
    stored = (own & (query_head % GROUP == 0))[:, None]
    tl.store(keys + slot + here, k, mask=stored)
    tl.store(values + slot + here, v, mask=stored)
    query = q.to(tl.float32) * scale
    high = tl.where(own, tl.sum(query * k.to(tl.float32), 1), _LOWEST)
    total = tl.where(own, 1.0, 0.0)
    acc = tl.where(own[:, None], v.to(tl.float32), 0.0)
    high, total, acc = _see(query, k_block, v_block, high, total, acc, start + lane, stop, LANES, EACH)
    for begin in range(start + BLOCK, stop, BLOCK):
        k_block, v_block = _block(
            pages_ptr, keys, values, begin, stop, lane, head, kv_heads, dims, D, PAGE, LANES, EACH
        )  # fmt: skip
        high, total, acc = _see(query, k_block, v_block, high, total, acc, begin + lane, stop, LANES, EACH)
    highest = tl.max(high, 0)
    weights = tl.exp2(high - highest)
    whole, out = tl.sum(total * weights, 0), tl.sum(acc * weights[:, None], 0)
    if used == 1:
        tl.store(out_ptr + (row * heads + query_head) * D + dims, (out / whole).to(out_ptr.dtype.element_ty))
        return
    held = (row * heads + query_head) * SPLITS + split
    tl.store(m_ptr + held, highest)
    tl.store(total_ptr + held, whole)
    tl.store(acc_ptr + held * D + dims, out)
    tl.debug_barrier()  # all threads have stored before one of them says so
    ended = tl.atomic_add(arrived_ptr + row * kv_heads + head, 1, sem="acq_rel", scope="gpu")
    if ended == used * GROUP - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + row * kv_heads + head, 0)  # as the next step expects it
        splits, first_head = tl.arange(0, SPLITS), row * heads + head * GROUP
        for member in tl.static_range(GROUP):
            combine(acc_ptr, m_ptr, total_ptr, out_ptr, first_head + member, splits, splits < used, dims, D, SPLITS)
