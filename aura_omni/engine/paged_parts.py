"""What kernels of attention over pages have in common."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x log2 e), and exp2 is what the hardware has

# What differs from step to step, and whether it happens to be a multiple of 16: each would be a kernel of its own otherwise, compiled
# while requests wait.
varying = triton.jit(
    do_not_specialize=["table_width", "chunks"],
    do_not_specialize_on_alignment=["slots_ptr", "table", "lengths", "begins", "counts", "starts"],
)


@triton.jit
def part_of(before, BLOCK: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr):
    """How many of the `before` keys of a row each of its splits takes, and how many splits have something to do."""
    part = tl.maximum(tl.cdiv(tl.cdiv(before, BLOCK), SPLITS), LEAST) * BLOCK
    return part, tl.maximum(tl.cdiv(before, part), 1)


@triton.jit
def slots_of(pages_ptr, offsets, inside, PAGE: tl.constexpr):
    """The slots of a sequence's rows [K] that are inside [K]; pages_ptr: its row of the table."""
    pages = tl.load(pages_ptr + offsets // PAGE, mask=inside, other=0).to(tl.int64)
    return pages * PAGE + offsets % PAGE


@triton.jit
def places(pages_ptr, offsets, inside, head, kv_heads, dims, D: tl.constexpr, PAGE: tl.constexpr):
    """Where a sequence's keys [K] that are inside [K] lie, of one head: [K, D]; pages_ptr: its row of the table."""
    return (slots_of(pages_ptr, offsets, inside, PAGE)[:, None] * kv_heads + head) * D + dims[None, :]


@triton.jit
def combine(acc_ptr, m_ptr, total_ptr, out_ptr, head, splits, there, dims, D: tl.constexpr, SPLITS: tl.constexpr):
    """The splits of one query head become its output."""
    at = head * SPLITS + splits
    # Not from the nearest cache: other programs of the same kernel may have written them.
    m = tl.load(m_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(total_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
    acc = tl.load(acc_ptr + at[:, None] * D + dims[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
    weights = tl.exp2(m - tl.max(m, 0))
    out = tl.sum(acc * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out_ptr + head * D + dims, out.to(out_ptr.dtype.element_ty))
