"""Attention over keys and values that lie together, as the code predictor has them: Triton, with norms and turns in the same launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aura_omni.models.fused import _exchanged, _turned, starts_early
from aura_omni.models.fused_row import LOG2_E, MOST_GROUP, see, turned
from aura_omni.models.fused_tiles import nothing

MOST_KEYS = 64  # one program holds all keys of a sequence and key head


@triton.jit(do_not_specialize=["start"])
def _dense_kernel(
    qkv_ptr, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, keys_ptr, values_ptr, out_ptr, capacity, start, eps, scale,
    kv_heads,
    STEPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (sequence, key head): norms and turns, stores the new keys and values; then GROUP query heads attend causally.

    EARLY: it begins before the kernel in front of it has ended, and reads meanwhile what earlier passes have left. That was written
    tens of launches ago, of which a GPU has room for a few at once.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, place, row = tl.arange(0, D), tl.arange(0, KEYS), tl.arange(0, ROWS)
    heads = kv_heads * GROUP
    width = (heads + 2 * kv_heads) * D
    other = _exchanged(dims, D)
    held = (sequence * kv_heads + head) * capacity * D + place[:, None] * D + dims[None, :]
    old, new = (place < start)[:, None], ((place >= start) & (place < start + STEPS))[:, None]
    k_old, v_old = tl.load(keys_ptr + held, mask=old, other=0.0), tl.load(values_ptr + held, mask=old, other=0.0)
    fresh = sequence * STEPS + place - start  # row of the step
    k_turn = (fresh * turn_width)[:, None] + dims[None, :]
    k_cos, k_sin = tl.load(cos_ptr + k_turn, mask=new, other=0.0), tl.load(sin_ptr + k_turn, mask=new, other=0.0)
    k_norm, k_other = tl.load(k_weight + dims)[None, :], tl.load(k_weight + other)[None, :]
    step, real = row // GROUP, (row < STEPS * GROUP)[:, None]
    token, query_head = sequence * STEPS + step, head * GROUP + row % GROUP
    q_turn = (token * turn_width)[:, None] + dims[None, :]
    q_cos, q_sin = tl.load(cos_ptr + q_turn, mask=real, other=0.0), tl.load(sin_ptr + q_turn, mask=real, other=0.0)
    q_norm, q_other = tl.load(q_weight + dims)[None, :], tl.load(q_weight + other)[None, :]
    if EARLY:
        gdc_wait()
    k_at, v_at = fresh * width + (heads + head) * D, fresh * width + (heads + kv_heads + head) * D
    q_at = token * width + query_head * D
    q = tl.load(qkv_ptr + q_at[:, None] + dims[None, :], mask=real, other=0.0)
    q_mirrored = tl.load(qkv_ptr + q_at[:, None] + other[None, :], mask=real, other=0.0)
    k_new = tl.load(qkv_ptr + k_at[:, None] + dims[None, :], mask=new, other=0.0)
    k_mirrored = tl.load(qkv_ptr + k_at[:, None] + other[None, :], mask=new, other=0.0)
    v_new = tl.load(qkv_ptr + v_at[:, None] + dims[None, :], mask=new, other=0.0)
    if EARLY:
        gdc_launch_dependents()
    k_new = _turned(k_new, k_mirrored, k_norm, k_other, k_cos, k_sin, dims, eps, D)
    tl.store(keys_ptr + held, k_new, mask=new)
    tl.store(values_ptr + held, v_new, mask=new)
    q = _turned(q, q_mirrored, q_norm, q_other, q_cos, q_sin, dims, eps, D)
    scores = tl.dot(q, tl.trans(k_old + k_new), input_precision="ieee") * scale
    scores = tl.where(place[None, :] <= start + step[:, None], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    out = tl.dot(weights.to(v_old.dtype), v_old + v_new, input_precision="ieee") / total[:, None]
    at = (token * heads + query_head) * D
    tl.store(out_ptr + at[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["start"])
def _dense_row_kernel(
    qkv_ptr, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, keys_ptr, values_ptr, out_ptr, capacity, start, eps, scale,
    kv_heads, GROUP: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`_dense_kernel` of a step of one row. scale: so that scores are exponents of 2."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, place = tl.arange(0, D), tl.arange(0, KEYS)
    heads, other, old = kv_heads * GROUP, _exchanged(dims, D), place < start
    width = (heads + 2 * kv_heads) * D
    held = (sequence * kv_heads + head) * capacity * D
    at = held + place[:, None] * D + dims[None, :]
    k_old = tl.load(keys_ptr + at, mask=old[:, None], other=0.0)
    v_old = tl.load(values_ptr + at, mask=old[:, None], other=0.0)
    turn = sequence * turn_width + dims
    cos, sin = tl.load(cos_ptr + turn), tl.load(sin_ptr + turn)
    q_norm, q_other = tl.load(q_weight + dims), tl.load(q_weight + other)
    k_norm, k_other = tl.load(k_weight + dims), tl.load(k_weight + other)
    if EARLY:
        gdc_wait()
    q, mirrored = nothing(), nothing()
    for member in tl.static_range(GROUP):
        q_at = sequence * width + (head * GROUP + member) * D
        q += (tl.load(qkv_ptr + q_at + dims),)
        mirrored += (tl.load(qkv_ptr + q_at + other),)
    k_at = sequence * width + (heads + head) * D
    k, k_mirrored = tl.load(qkv_ptr + k_at + dims), tl.load(qkv_ptr + k_at + other)
    v = tl.load(qkv_ptr + k_at + kv_heads * D + dims)
    if EARLY:
        gdc_launch_dependents()
    k = turned(k, k_mirrored, k_norm, k_other, cos, sin, dims, eps, D)
    tl.store(keys_ptr + held + start * D + dims, k)
    tl.store(values_ptr + held + start * D + dims, v)
    for member in tl.static_range(GROUP):
        query = turned(q[member], mirrored[member], q_norm, q_other, cos, sin, dims, eps, D).to(tl.float32) * scale
        own = tl.sum(query * k.to(tl.float32), 0)
        _, total, acc = see(query, k_old, v_old, own, tl.full([], 1.0, tl.float32), v.to(tl.float32), old)
        out_at = (sequence * heads + head * GROUP + member) * D
        tl.store(out_ptr + out_at + dims, (acc / total).to(out_ptr.dtype.element_ty))


def dense_attend(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *,
    keys: Tensor, values: Tensor, start: int,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope`, then as `layers.DenseKV.attend` in one layer, up to MOST_KEYS keys.

    qkv [B T, (heads + 2 kv_heads) D] contiguous; cos, sin [B T, D] of equal strides, also one row expanded; keys, values
    [B, kv_heads, capacity, D] contiguous, in which `start` keys of each sequence are there already. Returns [B T, heads D].
    """
    rows, dim = cos.shape
    batch, kv_heads, capacity, _ = keys.shape
    steps, heads = rows // batch, qkv.shape[1] // dim - 2 * kv_heads
    group = heads // kv_heads
    out = qkv.new_empty(rows, heads * dim)
    early = starts_early(qkv.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    if steps == 1 and group <= MOST_GROUP:
        _dense_row_kernel[(batch, kv_heads)](
            qkv, q_weight, k_weight, cos, sin, cos.stride(0), keys, values, out, capacity, start, eps, dim**-0.5 * LOG2_E,
            kv_heads, GROUP=group, KEYS=max(16, triton.next_power_of_2(start)), D=dim, EARLY=early, num_warps=2, **options,
        )  # fmt: skip
        return out
    _dense_kernel[(batch, kv_heads)](
        qkv, q_weight, k_weight, cos, sin, cos.stride(0), keys, values, out, capacity, start, eps, dim**-0.5, kv_heads,
        STEPS=steps, GROUP=group, ROWS=max(16, triton.next_power_of_2(steps * group)),
        KEYS=max(16, triton.next_power_of_2(start + steps)), D=dim, EARLY=early, **options,
    )  # fmt: skip
    return out
