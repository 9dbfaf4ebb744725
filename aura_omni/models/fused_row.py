"""What attention of single rows without tensor cores is made of: for `fused_dense` and `engine.paged_row`.

Where two query heads share a key head, tensor cores would multiply two rows and fourteen of nothing, and keys would have to be put in
order for them first: of a step of few rows against a few hundred keys that is most of the time. Here each thread multiplies what
it has loaded, and lanes exchange sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x log2 e), and exp2 is what the hardware has
MOST_GROUP = 2  # query heads that share a key head; each is multiplied by itself


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
