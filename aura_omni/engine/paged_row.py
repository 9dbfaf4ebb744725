"""Attention over pages without tensor cores: `paged_attention.decode` for steps where two query heads at most share a key head.

Tensor cores would multiply those two and fourteen rows of nothing, and keys would have to be put in order for them first: against a
few hundred keys that is most of the time. Here each thread multiplies what it has loaded, and the lanes of the one warp that a
program has exchange sums, so that no thread ever waits for another warp's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.engine.paged_parts import combine, part_of, places, varying
from aura_omni.models.fused import _exchanged
from aura_omni.models.fused_tiles import nothing

# What was measured on an H200; with four heads to a key head, or more rows, tensor cores are ahead.
MOST_ROWS, MOST_GROUP = 32, 2
KEYS, SPLITS = 16, 16  # of a block, and into how many parts a context is cut, those of one block first


@triton.jit
def turned(x, mirrored, weight, other_weight, cos, sin, dims, eps, D: tl.constexpr):
    """One head's vector [D], normalised and turned; the arguments are those of `fused._turned`."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * scale).to(x.dtype) * weight
    mirrored = (mirrored.to(tl.float32) * scale).to(x.dtype) * other_weight
    mirrored = tl.where(dims < D // 2, -mirrored, mirrored)
    return (normed * cos).to(x.dtype) + (mirrored * sin).to(x.dtype)


@triton.jit
def see(q, k, v, high, total, acc, inside):
    """q float32 [D], scaled so that scores are exponents of 2, against keys and values [K, D], those inside [K]: the running maximum,
    sum and output [D] with them."""
    scores = tl.where(inside, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
    higher = tl.maximum(high, tl.max(scores, 0))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - safe)
    decay = tl.exp2(high - safe)
    total = total * decay + tl.sum(weights, 0)
    acc = acc * decay + tl.sum(weights[:, None] * v.to(tl.float32), 0)
    return higher, total, acc


@varying
def paged_row_kernel(
    q_ptr, k_ptr, v_ptr, q_width, k_width, v_width, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, eps,
    slots_ptr, keys, values, table, table_width, lengths, acc_ptr, m_ptr, total_ptr, arrived_ptr, out_ptr, scale, kv_heads,
    RAW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, key head, split), as `paged_attention._decode_kernel`, which says what each of them does. EARLY: as
    `paged_head.paged_head_kernel`."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
    dims = tl.arange(0, D)
    heads = kv_heads * GROUP
    before = tl.load(lengths + row) - 1
    part, used = part_of(before, BLOCK, 1, SPLITS)
    start = split * part
    stop = tl.minimum(start + part, before)
    if (split > 0) & (start >= before):
        return
    pages_ptr, offsets = table + row * table_width, start + tl.arange(0, BLOCK)
    inside = offsets < stop
    first = places(pages_ptr, offsets, inside, head, kv_heads, dims, D, PAGE)
    k_first = tl.load(keys + first, mask=inside[:, None], other=0.0)
    v_first = tl.load(values + first, mask=inside[:, None], other=0.0)
    other = _exchanged(dims, D)
    if RAW:
        turn = row * turn_width + dims
        cos, sin = tl.load(cos_ptr + turn), tl.load(sin_ptr + turn)
        q_norm, q_other = tl.load(q_weight + dims), tl.load(q_weight + other)
        k_norm, k_other = tl.load(k_weight + dims), tl.load(k_weight + other)
    if EARLY:
        gdc_wait()
    queries, mirrored = nothing(), nothing()
    for member in tl.static_range(GROUP):
        q_at = q_ptr + row * q_width + (head * GROUP + member) * D
        queries += (tl.load(q_at + dims),)
        mirrored += (tl.load(q_at + other) if RAW else 0.0,)
    k_at = k_ptr + row * k_width + head * D
    k = tl.load(k_at + dims)
    v = tl.load(v_ptr + row * v_width + head * D + dims)
    if RAW:
        k = turned(k, tl.load(k_at + other), k_norm, k_other, cos, sin, dims, eps, D)
    if split == 0:
        slot = (tl.load(slots_ptr + row) * kv_heads + head) * D + dims
        tl.store(keys + slot, k)
        tl.store(values + slot, v)
    # Its own key and value are those of the first split alone.
    own_total = tl.where(split == 0, 1.0, 0.0)
    own_acc = tl.where(split == 0, v.to(tl.float32), 0.0)
    q, m, total, acc = nothing(), nothing(), nothing(), nothing()
    for member in tl.static_range(GROUP):
        query = queries[member]
        if RAW:
            query = turned(query, mirrored[member], q_norm, q_other, cos, sin, dims, eps, D)
        query = query.to(tl.float32) * scale
        own = tl.where(split == 0, tl.sum(query * k.to(tl.float32), 0), float("-inf"))
        high, weight, out = see(query, k_first, v_first, own, own_total, own_acc, inside)
        q += (query,)
        m += (high,)
        total += (weight,)
        acc += (out,)
    for at_block in range(start + BLOCK, stop, BLOCK):
        offsets = at_block + tl.arange(0, BLOCK)
        inside = offsets < stop
        at = places(pages_ptr, offsets, inside, head, kv_heads, dims, D, PAGE)
        k_more = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v_more = tl.load(values + at, mask=inside[:, None], other=0.0)
        m_new, total_new, acc_new = nothing(), nothing(), nothing()
        for member in tl.static_range(GROUP):
            high, weight, out = see(q[member], k_more, v_more, m[member], total[member], acc[member], inside)
            m_new += (high,)
            total_new += (weight,)
            acc_new += (out,)
        m, total, acc = m_new, total_new, acc_new
    first_head = row * heads + head * GROUP
    if used == 1:
        for member in tl.static_range(GROUP):
            whole = (acc[member] / total[member]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (first_head + member) * D + dims, whole)
        return
    for member in tl.static_range(GROUP):
        held = (first_head + member) * SPLITS + split
        tl.store(m_ptr + held, m[member])
        tl.store(total_ptr + held, total[member])
        tl.store(acc_ptr + held * D + dims, acc[member])
    tl.debug_barrier()  # all threads have stored before one of them says so
    ended = tl.atomic_add(arrived_ptr + row * kv_heads + head, 1, sem="acq_rel", scope="gpu")
    if ended == used - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + row * kv_heads + head, 0)  # as the next step expects it
        splits = tl.arange(0, SPLITS)
        for member in tl.static_range(GROUP):
            combine(acc_ptr, m_ptr, total_ptr, out_ptr, first_head + member, splits, splits < used, dims, D, SPLITS)
