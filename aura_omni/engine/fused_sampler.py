"""Triton kernel for `sampler.pick` from a small vocabulary without top-p and min-p: a Talker frame draws from codebooks 15 times.

Same order, same random numbers, same ties as the plain code, whose tens of launches it replaces; `fused_seats` draws with what it has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models.fused import starts_early

MOST_VOCABULARY = 4_096  # one program holds a row of logits


@triton.jit
def _mix(x):
    """`sampler._mix` in unsigned 32-bit arithmetic, which wraps by itself."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed, step, stream, tokens):
    """`sampler._gumbel`."""
    first = _mix((seed + 0x9E3779B9).to(tl.uint32))
    second = _mix((step * 64 + stream + 1).to(tl.uint32))
    bits = _mix(_mix(first ^ second) ^ _mix((tokens.to(tl.int64) + 0x51ED270B).to(tl.uint32))) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _threshold(values, rank, BITS: tl.constexpr):
    """Of float32 [N], whose bits after the first BITS are zero: a number that `rank` values are not below (1: only the largest), and as
    few others as ties allow. NaN where that would be minus infinity.

    Found two bits at a time, as the largest number that so many reach: 16 times counting or fewer, where one sort takes 66 steps.
    """
    bits = values.to(tl.uint32, bitcast=True)
    # Unsigned numbers in the order of the floats.
    keys = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    found = tl.full([], 0, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    shift = tl.full([], 30, tl.int32)
    count = tl.full([], -1, tl.int64)
    while (shift >= 32 - BITS) & (count != rank):
        low, middle, high = found | (one << shift), found | (one << (shift + 1)), found | ((one + 2) << shift)
        # Three counts in one sum.
        reached = (
            (keys >= low).to(tl.int64) + ((keys >= middle).to(tl.int64) << 20) + ((keys >= high).to(tl.int64) << 40)
        )
        counts = tl.sum(reached, 0)
        lows, middles, highs = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        found = tl.where(highs >= rank, high, tl.where(middles >= rank, middle, tl.where(lows >= rank, low, found)))
        count = tl.where(highs >= rank, highs, tl.where(middles >= rank, middles, tl.where(lows >= rank, lows, count)))
        shift -= 2
    return tl.where(found >= 0x80000000, found ^ 0x80000000, found ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def picked(logits, inside, vocabulary, temperature, top_k, noise, TOP_K: tl.constexpr, BITS: tl.constexpr):
    """The id that is drawn from a whole row of logits float32, whose bits after the first BITS are zero."""
    scores = logits / tl.maximum(temperature, 1e-6)
    if TOP_K:
        rank = tl.minimum(tl.maximum(top_k, 1), vocabulary)
        if BITS == 16:
            beyond = logits < _threshold(logits, rank, 16)  # their quotients are in the same order, and as different
        else:
            beyond = scores < _threshold(scores, rank, 32)
        scores = tl.where(beyond & (top_k > 0), float("-inf"), scores)
    noisy = tl.where(temperature > 0, scores + noise, logits)
    token = tl.argmax(tl.where(inside, noisy, float("-inf")), 0)
    # Where nothing is a number the best one may be beyond the vocabulary, and an index must not be.
    return tl.minimum(token, vocabulary - 1).to(tl.int64)


@triton.jit(do_not_specialize=["stream"])
def _pick_kernel(
    logits_ptr, floats_ptr, integers_ptr, out_ptr, table_ptr, rows_ptr, stream, vocabulary, width,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: a row. EARLY: it begins before the kernel in front of it has ended, and draws its noise meanwhile."""
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    if EARLY:
        gdc_launch_dependents()
    temperature = tl.load(floats_ptr + row * 3)
    top_k = tl.load(integers_ptr + row * 3)
    seed = tl.load(integers_ptr + row * 3 + 1)
    step = tl.load(integers_ptr + row * 3 + 2)
    noise = gumbel(seed, step, stream, tokens)
    if EARLY:
        gdc_wait()
    logits = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    BITS: tl.constexpr = 16 if logits_ptr.dtype.element_ty == tl.bfloat16 else 32
    token = picked(logits, inside, vocabulary, temperature, top_k, noise, TOP_K, BITS)
    tl.store(out_ptr + row, token)
    if ROWS:
        dims = tl.arange(0, WIDE)
        held = tl.load(table_ptr + token * width + dims, mask=dims < width)
        tl.store(rows_ptr + row * width + dims, held, mask=dims < width)


def pick_small(
    logits: Tensor, floats: Tensor, integers: Tensor, *, top_k: bool, stream: int, table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits float32 or bfloat16 [B, V], V at most MOST_VOCABULARY; floats, integers [B, 3] of a `Draw` -> ids int64 [B], and their rows
    [B, W] of table [V, W] contiguous; without one the ids again."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    width = 1 if table is None else table.shape[1]
    found = out if table is None else table.new_empty(rows, width)
    early = starts_early(logits.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _pick_kernel[(rows,)](
        logits.contiguous(), floats.contiguous(), integers.contiguous(), out, out if table is None else table, found, stream,
        vocabulary, width, TOP_K=top_k, ROWS=table is not None, BLOCK=triton.next_power_of_2(vocabulary),
        WIDE=triton.next_power_of_2(width), EARLY=early, **options,
    )  # fmt: skip
    return out, found
