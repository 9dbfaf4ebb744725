"""One Triton kernel for `sampler.pick` over a small vocabulary (codebooks), which draws 16 times a frame.

Same order, same random numbers, same ties as the plain code, whose some forty launches it replaces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _pick_kernel(
    logits_ptr, floats_ptr, integers_ptr, out_ptr, stream, vocabulary, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, mask=inside, other=float("-inf"))
    temperature = tl.load(floats_ptr + row * 3)
    top_k = tl.load(integers_ptr + row * 3)
    seed = tl.load(integers_ptr + row * 3 + 1)
    step = tl.load(integers_ptr + row * 3 + 2)
    scores = logits / tl.maximum(temperature, 1e-6)
    if TOP_K:
        ordered = tl.sort(scores, descending=True)
        last = tl.minimum(tl.maximum(top_k, 1), vocabulary) - 1
        threshold = tl.sum(tl.where(tokens == last, ordered, 0.0), 0)
        threshold = tl.where(top_k > 0, threshold, float("-inf"))
        scores = tl.where(scores < threshold, float("-inf"), scores)
    first = _mix((seed + 0x9E3779B9).to(tl.uint32))
    second = _mix((step * 64 + stream + 1).to(tl.uint32))
    bits = _mix(_mix(first ^ second) ^ _mix((tokens.to(tl.int64) + 0x51ED270B).to(tl.uint32))) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    noisy = scores - tl.log(-tl.log(uniform))
    noisy = tl.where(inside, noisy, float("-inf"))
    token = tl.where(temperature > 0, tl.argmax(noisy, 0), tl.argmax(logits, 0))
    tl.store(out_ptr + row, token.to(tl.int64))


def pick_small(logits: Tensor, floats: Tensor, integers: Tensor, *, top_k: bool, stream: int) -> Tensor:
    """logits float32 [B, V], V at most MOST_VOCABULARY; floats, integers [B, 3] of a `Draw` -> ids int64 [B]."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _pick_kernel[(rows,)](
        logits.contiguous(), floats.contiguous(), integers.contiguous(), out, stream, vocabulary,
        TOP_K=top_k, BLOCK=triton.next_power_of_2(vocabulary),
    )  # fmt: skip
    return out
