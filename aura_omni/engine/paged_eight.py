"""Keys and values in eight bits: how kernels store them.

Each vector of a key head, key or value, is rounded as `fp8.quantized` rounds a row, with a scale of its own that is known when it is
stored: nothing has to be calibrated, and nothing overflows. A row's own step attends to it as it is stored, so that how a prompt is cut
into chunks changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aura_omni.models.fp8 import LARGEST, LEAST
from aura_omni.models.fused_fp8 import scale_of

_LARGEST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(LEAST)


@triton.jit
def rounded(x, pool):
    """x [R, D] as `pool` holds it, and its scales float32 [R]."""
    wide = x.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(wide), 1), _LARGEST, _LEAST)
    return tl.math.div_rn(wide, scale[:, None]).to(pool.dtype.element_ty), scale


@triton.jit
def keep(x, pool, scales, place, which, dims, D: tl.constexpr, there):
    """Stores x [R, D], those of its rows that are there [R], as number place [R] of all vectors of the pool; which: 0 for keys, 1 for
    values. Returns what later steps will see, float32 [R, D]."""
    held, scale = rounded(x, pool)
    tl.store(scales + 2 * place + which, scale, mask=there)
    tl.store(pool + place[:, None] * D + dims[None, :], held, mask=there[:, None])
    return held.to(tl.float32) * scale[:, None]


@triton.jit
def scales_of(scales, slots, inside, head, kv_heads):
    """Of the keys and of the values of one head in slots [K] that are inside [K]: float32 [K] each."""
    # Each twice, as the compiler lets every thread fetch what it will use of a block that is smaller than there are threads: sixteen
    # times as many loads, and their addresses in registers that a prefill does not have.
    at = 2 * (slots * kv_heads + head)[:, None] + tl.arange(0, 4)[None, :] // 2
    twice = tl.load(scales + at, mask=inside[:, None], other=0.0)
    once, _ = tl.split(tl.reshape(twice, [slots.shape[0], 2, 2]))
    return tl.split(once)


@triton.jit
def _store_eight_kernel(
    k_ptr, v_ptr, slots_ptr, keys, values, scales, k_width, v_width, kv_heads, HEADS: tl.constexpr, D: tl.constexpr
):
    """Program: a row. HEADS: kv_heads, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    head, dims = tl.arange(0, HEADS), tl.arange(0, D)
    there, at = head < kv_heads, head[:, None] * D + dims[None, :]
    k = tl.load(k_ptr + row * k_width + at, mask=there[:, None], other=0.0)
    v = tl.load(v_ptr + row * v_width + at, mask=there[:, None], other=0.0)
    keep(k, keys, scales, slot * kv_heads + head, 0, dims, D, there)
    keep(v, values, scales, slot * kv_heads + head, 1, dims, D, there)


def store(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: Tensor) -> None:
    """As `paged_attention.store`, rounded; scales float32 [slots, kv_heads, 2] contiguous: of each key and of each value."""
    rows, kv_heads, dim = k.shape
    _store_eight_kernel[(rows,)](
        k, v, slots, keys, values, scales, k.stride(0), v.stride(0), kv_heads,
        HEADS=triton.next_power_of_2(kv_heads), D=dim,
    )  # fmt: skip
