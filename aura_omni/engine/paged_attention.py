"""Attention over paged keys and values on CUDA: Triton kernels for rows of decoding and for chunks of prefill.

PyTorch's own attention needs each sequence's keys gathered and padded first, which copies the whole context in every layer
of every step and depends on lengths that the host must know. These read the pages in place through a table on the device,
so that a decode step has one shape whatever the lengths are, and can be a CUDA graph.

Softmax and sums are float32. The online softmax is that of FlashAttention (Dao et al. 2022); decode rows split their context
over several programs and combine ("Flash-Decoding", 2023), which the last of them to end does here: in a step of few short rows launches
take longer than attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.engine import paged_eight, paged_head, paged_row
from aura_omni.engine.paged_eight import keep, scales_of
from aura_omni.engine.paged_parts import LOG2_E, combine, part_of, slots_of, varying
from aura_omni.models.fused import _exchanged, _turned, qk_norm_rope_stored, starts_early
from aura_omni.models.layers import RMSNorm, fusible

BLOCK_KEYS = 64


class DecodePlan(NamedTuple):
    """How rows of decoding are read: blocks of `keys`, of which a program takes at least `least`.

    programs: of a step, that keep a large GPU's memory busy; one row's context is cut into parts for that. More parts would only add
    programs, and with fewer than `least_splits` a long context among short ones would hold all of them up.
    """

    keys: int
    least: int
    warps: int
    stages: int
    programs: int
    least_splits: int


# Where contexts are short, joining parts takes longer than reading a second block. What was fastest on an H200.
SHORT_DECODE = DecodePlan(64, 2, 4, 2, programs=1_024, least_splits=8)
LONG_DECODE = DecodePlan(64, 1, 4, 3, programs=256, least_splits=4)
MOST_SPLITS = 64

# Queries of a prefill chunk that one program takes: rows, times the heads that share a key head.
CHUNK_QUERIES = 128

# Contexts of chunks are cut too while all parts fit such a GPU at once, if contexts can be so long that it matters. A question of
# a few rows after an hour of video is a few programs otherwise.
CHUNK_PROGRAMS, MOST_CHUNK_SPLITS, LONG_CONTEXT = 132, 16, 8_192
COMBINED = 4  # rows and heads that one program puts together
LEAST_CHUNKS = 16  # steps of fewer are no kernel of their own


@varying
def _store_kernel(k_ptr, v_ptr, slots_ptr, keys, values, k_width, v_width, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    part = tl.arange(0, BLOCK)
    inside = part < size
    tl.store(keys + slot * size + part, tl.load(k_ptr + row * k_width + part, mask=inside), mask=inside)
    tl.store(values + slot * size + part, tl.load(v_ptr + row * v_width + part, mask=inside), mask=inside)


def store(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """k, v [N, kv_heads, D], rows of any stride, into slots int64 [N] of keys, values [slots, kv_heads, D]."""
    rows, kv_heads, dim = k.shape
    size = kv_heads * dim
    _store_kernel[(rows,)](
        k, v, slots, keys, values, k.stride(0), v.stride(0), size, BLOCK=triton.next_power_of_2(size)
    )  # fmt: skip


@triton.jit
def _attend(q, k, v, k_scale, v_scale, m, total, acc, mask, scale, ALL: tl.constexpr, SCALED: tl.constexpr):
    """One block of keys and values [K, D]: q [M, D] against them; m, total [M] and acc [M, D] are the running maximum, sum and output.

    scale turns products into exponents of 2. ALL: every query sees every key, whatever mask [M, K] says. SCALED: keys and values are
    to be multiplied by k_scale, v_scale [K], which is done with their products and weights, as eight bits fit into q's dtype and what
    they stand for may not.
    """
    if SCALED:
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (k_scale * scale)[None, :]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if not ALL:
        scores = tl.where(mask, scores, float("-inf"))
    high = tl.maximum(m, tl.max(scores, 1))
    safe = high if ALL else tl.where(high == float("-inf"), 0.0, high)
    weights = tl.exp2(scores - safe[:, None])
    decay = tl.exp2(m - safe)
    total = total * decay + tl.sum(weights, 1)
    if SCALED:
        weights = weights * v_scale[None, :]
    acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return high, total, acc


@triton.jit
def _attend_block(
    q, m, total, acc, keys, values, scales, slots, inside, mask, scale, head, kv_heads, dims,
    D: tl.constexpr, ALL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """`_attend` to slots [K], those of them that are inside [K]."""
    k_scale, v_scale = 1.0, 1.0
    if SCALED:
        k_scale, v_scale = scales_of(scales, slots, inside, head, kv_heads)
    at = (slots[:, None] * kv_heads + head) * D + dims[None, :]
    if ALL:
        k, v = tl.load(keys + at), tl.load(values + at)
    else:
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
    return _attend(q, k, v, k_scale, v_scale, m, total, acc, mask, scale, ALL, SCALED)


@varying
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, q_width, k_width, v_width, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, eps,
    slots_ptr, keys, values, table, table_width, lengths, acc_ptr, m_ptr, total_ptr, arrived_ptr, out_ptr, scale, kv_heads, scales,
    RAW: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, key head, split): GROUP query heads of one row against a part of what came before it.

    The first split also takes the row's own key and value: it stores them, and nobody reads them from there in this step. RAW:
    heads are normed and turned first. SCALED: keys and values are in eight bits, as `paged_eight` says. The split that comes to its end
    last puts all of them together. EARLY: it begins before the kernel in front of it has ended, and reads its first keys meanwhile. Those
    were written in earlier steps, tens of launches ago, of which a GPU has room for a few at once.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dims, group = tl.arange(0, D), tl.arange(0, ROWS)
    heads = kv_heads * GROUP
    before = tl.load(lengths + row) - 1
    part, used = part_of(before, BLOCK, LEAST, SPLITS)
    start = split * part
    stop = tl.minimum(start + part, before)
    if (split > 0) & (start >= before):
        return
    pages_ptr, offsets = table + row * table_width, start + tl.arange(0, BLOCK)
    inside = offsets < stop
    slots = slots_of(pages_ptr, offsets, inside, PAGE)
    first = (slots[:, None] * kv_heads + head) * D + dims[None, :]
    k_scale, v_scale = 1.0, 1.0
    if SCALED:
        k_scale, v_scale = scales_of(scales, slots, inside, head, kv_heads)
    k_first = tl.load(keys + first, mask=inside[:, None], other=0.0)
    v_first = tl.load(values + first, mask=inside[:, None], other=0.0)
    other = _exchanged(dims, D)
    if RAW:
        turn = row * turn_width + dims
        cos, sin = tl.load(cos_ptr + turn)[None, :], tl.load(sin_ptr + turn)[None, :]
        q_norm, q_other = tl.load(q_weight + dims)[None, :], tl.load(q_weight + other)[None, :]
        k_norm, k_other = tl.load(k_weight + dims)[None, :], tl.load(k_weight + other)[None, :]
    if EARLY:
        gdc_wait()
    there = (group < GROUP)[:, None]
    q_at = row * q_width + (head * GROUP + group)[:, None] * D
    q = tl.load(q_ptr + q_at + dims[None, :], mask=there, other=0.0)
    if RAW:
        mirrored = tl.load(q_ptr + q_at + other[None, :], mask=there, other=0.0)
        q = _turned(q, mirrored, q_norm, q_other, cos, sin, dims, eps, D)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if split == 0:
        k_at, own = row * k_width + head * D, tl.arange(0, 1)[:, None]
        k = tl.load(k_ptr + k_at + own + dims[None, :])
        v = tl.load(v_ptr + row * v_width + head * D + dims)
        if RAW:
            k_mirrored = tl.load(k_ptr + k_at + own + other[None, :])
            k = _turned(k, k_mirrored, k_norm, k_other, cos, sin, dims, eps, D)
        place = tl.load(slots_ptr + row) * kv_heads + head
        if SCALED:
            one = tl.arange(0, 1)
            k_own = keep(k, keys, scales, place + one, 0, dims, D, one == 0)
            v_own = keep(v[None, :], values, scales, place + one, 1, dims, D, one == 0)
        else:
            at = place * D + dims
            tl.store(keys + at[None, :], k)
            tl.store(values + at, v)
            k_own, v_own = k.to(tl.float32), v.to(tl.float32)[None, :]
        m = tl.sum(q.to(tl.float32) * k_own, 1) * scale
        total = total + 1.0
        acc = acc + v_own
    if EARLY:
        gdc_launch_dependents()
    mask = inside[None, :] & (group[:, None] >= 0)
    m, total, acc = _attend(q, k_first, v_first, k_scale, v_scale, m, total, acc, mask, scale, False, SCALED)
    for at_block in range(start + BLOCK, stop, BLOCK):
        offsets = at_block + tl.arange(0, BLOCK)
        inside = offsets < stop
        slots = slots_of(pages_ptr, offsets, inside, PAGE)
        mask = inside[None, :] & (group[:, None] >= 0)
        m, total, acc = _attend_block(
            q, m, total, acc, keys, values, scales, slots, inside, mask, scale, head, kv_heads, dims, D, False, SCALED
        )
    kind: tl.constexpr = out_ptr.dtype.element_ty
    out_at = (row * heads + head * GROUP + group[:, None]) * D + dims[None, :]
    if used == 1:
        tl.store(out_ptr + out_at, (acc / total[:, None]).to(kind), mask=there)
        return
    held = (row * heads + head * GROUP + group) * SPLITS + split
    tl.store(m_ptr + held, m, mask=group < GROUP)
    tl.store(total_ptr + held, total, mask=group < GROUP)
    tl.store(acc_ptr + held[:, None] * D + dims[None, :], acc, mask=there)
    tl.debug_barrier()  # all threads have stored before one of them says so
    ended = tl.atomic_add(arrived_ptr + row * kv_heads + head, 1, sem="acq_rel", scope="gpu")
    if ended == used - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + row * kv_heads + head, 0)  # as the next step expects it
        splits = tl.arange(0, SPLITS)
        for member in tl.static_range(GROUP):
            combine(
                acc_ptr, m_ptr, total_ptr, out_ptr, row * heads + head * GROUP + member, splits, splits < used, dims, D, SPLITS
            )  # fmt: skip


@triton.jit(do_not_specialize=["members"])
def _combine_kernel(
    acc_ptr, m_ptr, total_ptr, out_ptr, members, D: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr
):
    """Program: EACH of a prefill's `members`, rows and heads. Split after split, so that no thread needs what another one has read."""
    member, dims = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH), tl.arange(0, D)
    there = member < members
    high = tl.full([EACH], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        high = tl.maximum(high, tl.load(m_ptr + member * SPLITS + split, mask=there, other=0.0))
    total = tl.zeros([EACH], tl.float32)
    acc = tl.zeros([EACH, D], tl.float32)
    for split in tl.static_range(SPLITS):
        at = member * SPLITS + split
        weight = tl.exp2(tl.load(m_ptr + at, mask=there, other=0.0) - high)
        total += tl.load(total_ptr + at, mask=there, other=1.0) * weight
        acc += tl.load(acc_ptr + at[:, None] * D + dims[None, :], mask=there[:, None], other=0.0) * weight[:, None]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + member[:, None] * D + dims[None, :], out, mask=there[:, None])


def splits_of(programs: int, plan: DecodePlan) -> int:
    """Into how many parts the contexts are cut when there are so many rows and key heads; a power of two."""
    wanted = max(plan.least_splits, min(MOST_SPLITS, plan.programs // programs))
    return 1 << (wanted.bit_length() - 1)


def chunk_splits(programs: int, context: int) -> int:
    """The same for chunks; context: rows that a sequence can have."""
    if context <= LONG_CONTEXT:
        return 1
    wanted = max(1, min(MOST_CHUNK_SPLITS, CHUNK_PROGRAMS // programs))
    return 1 << (wanted.bit_length() - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What heads are normed and turned with: weights [D] of queries and of keys; cos, sin [B, D] of equal strides."""

    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    eps: float


def decode(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor, *,
    table: Tensor, lengths: Tensor, arrived: Tensor, page_size: int, turn: Turn | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One row of each of B sequences: stores its key and value, and attends to all up to it.

    q [B, heads, D]; k, v [B, kv_heads, D], all with rows of any stride; turn: q and k are normed and turned first; slots int64
    [B]: where keys and values go; keys, values [slots, kv_heads, D] contiguous, slot = page * page_size + row; table int32
    [B, P]: pages of each sequence; lengths int32 [B] >= 1: rows to attend to, their own included; arrived int32 [B kv_heads or
    more]: zeros, and zeros again afterwards, for one call at a time; scales: as `paged_eight.store`, where keys and values are in eight
    bits. Scale D**-0.5. Returns [B, heads, D]. No host synchronisation.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group, long = heads // kv_heads, table.shape[1] * page_size > LONG_CONTEXT
    plan = LONG_DECODE if long else SHORT_DECODE
    short = not long and scales is None
    by_head = short and paged_head.takes(rows, group, page_size)
    by_row = short and rows <= paged_row.MOST_ROWS and group <= paged_row.MOST_GROUP
    splits = splits_of(rows * kv_heads, plan)
    if by_head or by_row:
        splits = paged_head.SPLITS if by_head else paged_row.SPLITS
    acc = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
    m = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    total = torch.empty_like(m)
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    given = turn or Turn(q, q, q, q, 0.0)
    early = starts_early(q.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    tensors = (
        q, k, v, q.stride(0), k.stride(0), v.stride(0),
        given.q_weight, given.k_weight, given.cos, given.sin, given.cos.stride(0), given.eps,
        slots, keys, values, table, table.stride(0), lengths, acc, m, total, arrived, out, dim**-0.5 * LOG2_E, kv_heads,
    )  # fmt: skip
    shape: dict[str, Any] = {
        "RAW": turn is not None,
        "GROUP": group,
        "D": dim,
        "PAGE": page_size,
        "SPLITS": splits,
        "EARLY": early,
    }
    if by_head:
        paged_head.paged_head_kernel[(rows, heads, splits)](
            *tensors, **shape, LANES=paged_head.LANES, EACH=paged_head.EACH, WHOLE=paged_head.WHOLE,
            num_warps=paged_head.WARPS, **options,
        )  # fmt: skip
    elif by_row:
        paged_row.paged_row_kernel[(rows, kv_heads, splits)](
            *tensors, **shape, BLOCK=paged_row.KEYS, num_warps=1, **options
        )
    else:
        _decode_kernel[(rows, kv_heads, splits)](
            *tensors, keys if scales is None else scales, **shape, SCALED=scales is not None,
            ROWS=max(16, triton.next_power_of_2(group)), BLOCK=plan.keys, LEAST=plan.least,
            num_warps=plan.warps, num_stages=plan.stages, **options,
        )  # fmt: skip
    return out


@triton.jit
def _attend_keys(
    q, m, total, acc, begin, stop, last, keys, values, scales, table, scale, kv_head, kv_heads, dims,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Keys [begin, stop) of one sequence, whose pages are at `table`: q [M, D] sees those up to its `last` [M]; ALL: it sees them
    all, and they are whole blocks."""
    # Pages are looked up a block ahead: a load whose address is loaded in the same round cannot be begun rounds before, and
    # every block would wait for its keys.
    offsets = begin + tl.arange(0, BLOCK)
    pages = tl.load(table + offsets // PAGE, mask=offsets < stop, other=0)
    for first in range(begin, stop, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < stop
        slots = pages.to(tl.int64) * PAGE + offsets % PAGE
        pages = tl.load(table + (offsets + BLOCK) // PAGE, mask=offsets + BLOCK < stop, other=0)
        mask = inside[None, :] & (offsets[None, :] <= last[:, None])
        m, total, acc = _attend_block(
            q, m, total, acc, keys, values, scales, slots, inside, mask, scale, kv_head, kv_heads, dims, D, ALL, SCALED
        )
    return m, total, acc


@varying
def _prefill_kernel(
    q_ptr, keys, values, scales, out_ptr, acc_ptr, m_ptr, total_ptr, table, table_width, begins, counts, starts, chunks, scale,
    heads, kv_heads,
    SCALED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, key head, split): GROUP query heads of ROWS rows of a chunk, which all need the same keys, against all
    rows up to each of them. WIDE is GROUP, rounded up to a power of two.

    Blocks are counted through all chunks, so that those of a chunk of few rows beside one of many are no empty programs; CHUNKS is at
    least how many there are. One of several splits takes its part of the keys, and `_combine_kernel` makes out of acc, m and total of
    all.
    """
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    every = tl.arange(0, CHUNKS)
    blocks = tl.cdiv(tl.load(counts + every, mask=every < chunks, other=0), ROWS)
    ends = tl.cumsum(blocks, 0)
    if block >= tl.max(ends, 0):
        return
    chunk = tl.sum((ends <= block).to(tl.int32), 0)
    block -= tl.sum(tl.where(every < chunk, blocks, 0), 0)
    count, begin, start = tl.load(counts + chunk), tl.load(begins + chunk), tl.load(starts + chunk)
    query, dims = tl.arange(0, ROWS * WIDE), tl.arange(0, D)
    rows, member = block * ROWS + query // WIDE, query % WIDE
    there = (rows < count) & (member < GROUP)
    heads_of = (begin + rows).to(tl.int64) * heads + kv_head * GROUP + member
    at = heads_of[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + at, mask=there[:, None], other=0.0)
    m = tl.full([ROWS * WIDE], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * WIDE], tl.float32)
    acc = tl.zeros([ROWS * WIDE, D], tl.float32)
    stop = start + tl.minimum(count, (block + 1) * ROWS)
    part = tl.cdiv(tl.cdiv(stop, BLOCK), SPLITS) * BLOCK
    from_ = split * part
    stop = tl.minimum(from_ + part, stop)
    # Nearly all keys after a long history are whole blocks that every row sees: those need no mask.
    seen_by_all = tl.maximum(from_, tl.minimum((start + block * ROWS + 1) // BLOCK * BLOCK, stop))
    pages, last = table + chunk * table_width, start + rows
    m, total, acc = _attend_keys(
        q, m, total, acc, from_, seen_by_all, last, keys, values, scales, pages, scale, kv_head, kv_heads, dims,
        D, PAGE, BLOCK, True, SCALED,
    )  # fmt: skip
    m, total, acc = _attend_keys(
        q, m, total, acc, seen_by_all, stop, last, keys, values, scales, pages, scale, kv_head, kv_heads, dims,
        D, PAGE, BLOCK, False, SCALED,
    )  # fmt: skip
    if SPLITS == 1:
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None])
    else:
        to = heads_of * SPLITS + split
        tl.store(m_ptr + to, m, mask=there)
        tl.store(total_ptr + to, total, mask=there)
        tl.store(acc_ptr + to[:, None] * D + dims[None, :], acc, mask=there[:, None])


@cache
def _shared_memory() -> int:
    """Bytes that one program may have of it on the current device."""
    driver = triton.runtime.driver.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"])


def _stages(q: Tensor, keys: Tensor, queries: int) -> int:
    """How many blocks of keys a program of so many queries may have under way: three where a GPU's shared memory holds them."""
    if q.is_cpu:
        return 1
    row, block = q.shape[-1] * q.element_size(), 2 * BLOCK_KEYS * q.shape[-1]
    # Products want both of their sides in one dtype there, so eight bits are there once more, as those.
    turned = block * q.element_size() if keys.dtype != q.dtype else 0
    return max(1, min(3, (_shared_memory() - queries * row - turned) // (block * keys.element_size())))


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, table: Tensor, begins: Tensor, counts: Tensor, starts: Tensor,
    most_rows: int, page_size: int, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Chunks of C sequences, whose own keys are already stored; writes their rows of `out` [N, heads, D], contiguous as q.

    Rows of no chunk are left as they are, or become anything.

    Chunk c is rows [begins[c], begins[c] + counts[c]) of q and rows [starts[c], ...) of its sequence; it attends causally.
    table int32 [C, P]; begins, counts, starts int32 [C]; most_rows: the largest of counts; scales: as `decode`.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    wide = triton.next_power_of_2(group)
    queries = max(16, min(CHUNK_QUERIES, triton.next_power_of_2(most_rows * wide)))
    each = max(1, queries // wide)
    splits = chunk_splits(triton.cdiv(most_rows, each) * kv_heads, table.shape[1] * page_size)
    acc = m = total = out  # not used by a single split
    if splits > 1:
        acc = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
        m = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
        total = torch.empty_like(m)
    chunks = len(begins)
    blocks = rows // each + min(chunks, rows)  # at most, whatever rows each chunk has
    _prefill_kernel[(blocks, kv_heads, splits)](
        q, keys, values, keys if scales is None else scales, out, acc, m, total, table, table.stride(0), begins, counts, starts,
        chunks, dim**-0.5 * LOG2_E, heads, kv_heads,
        SCALED=scales is not None, GROUP=group, D=dim, PAGE=page_size, ROWS=each, WIDE=wide, BLOCK=BLOCK_KEYS, SPLITS=splits,
        CHUNKS=max(LEAST_CHUNKS, triton.next_power_of_2(chunks)),
        num_warps=8 if each * wide >= 128 else 4, num_stages=_stages(q, keys, each * wide),
    )  # fmt: skip
    if splits > 1:
        members = rows * heads
        _combine_kernel[(triton.cdiv(members, COMBINED),)](
            acc, m, total, out, members, D=dim, SPLITS=splits, EACH=COMBINED
        )


class DecodeStep:
    """A `models.layers.RawKeyValues` of one row per sequence. Tensors only: it may be recorded in a CUDA graph."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        arrived: Tensor,
        slot: Tensor,
        length: Tensor,
        table: Tensor,
        *,
        scales: Tensor | None = None,
    ) -> None:
        """keys, values, scales: as `PagedKV` has them; arrived as `decode` has it; the rest as `PagedKV.decode_step`."""
        self._page_size = keys.shape[2]
        self._keys, self._values, self._arrived = keys.flatten(1, 2), values.flatten(1, 2), arrived
        self._scales = None if scales is None else scales.flatten(1, 2)
        self._written, self._lengths, self._table = slot, length, table

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v, None)

    def takes_raw(self, qkv: Tensor) -> bool:
        return fusible(qkv)

    def attend_raw(self, layer: int, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        kv_heads, dim = self._keys.shape[2:]
        q, k, v = qkv.unflatten(1, (-1, dim)).split((qkv.shape[1] // dim - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        turn = Turn(q_norm.weight, k_norm.weight, cos, sin, q_norm.eps)
        return self._attend(layer, q, k, v, turn).flatten(1)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn | None) -> Tensor:
        return decode(
            q, k, v, self._written, self._keys[layer], self._values[layer], table=self._table, lengths=self._lengths,
            arrived=self._arrived, page_size=self._page_size, turn=turn,
            scales=None if self._scales is None else self._scales[layer],
        )  # fmt: skip


class PagedStep:
    """A `models.layers.RawKeyValues` of chunks of several sequences. Tensors only: it may be recorded in a CUDA graph."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        slot: Tensor,
        chunks: Tensor,
        most_rows: int,
        *,
        scales: Tensor | None = None,
    ) -> None:
        """keys, values, scales: as `PagedKV` has them; the rest as `PagedKV.chunk_step` has them."""
        self._page_size = keys.shape[2]
        self._scales = None if scales is None else scales.flatten(1, 2)
        self._keys, self._values = keys.flatten(1, 2), values.flatten(1, 2)
        self._written, self._table, self._most_rows = slot, chunks[:, 3:], most_rows
        self._begins, self._counts, self._starts = chunks[:, :3].T.contiguous()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._scales is None:
            store(k, v, self._written, self._keys[layer], self._values[layer])
        else:
            paged_eight.store(k, v, self._written, self._keys[layer], self._values[layer], self._scales[layer])
        return self._attend(layer, q.contiguous())

    def takes_raw(self, qkv: Tensor) -> bool:
        return fusible(qkv) and qkv.dtype == self._keys.dtype

    def attend_raw(self, layer: int, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        q = qk_norm_rope_stored(
            qkv, q_norm.weight, k_norm.weight, cos, sin, q_norm.eps, slots=self._written, keys=self._keys[layer],
            values=self._values[layer],
        )  # fmt: skip
        return self._attend(layer, q).flatten(1)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """What rows, whose keys and values are stored, attend to."""
        out = torch.empty_like(q)
        prefill(
            q, self._keys[layer], self._values[layer], out, table=self._table, begins=self._begins, counts=self._counts,
            starts=self._starts, most_rows=self._most_rows, page_size=self._page_size,
            scales=None if self._scales is None else self._scales[layer],
        )  # fmt: skip
        return out
