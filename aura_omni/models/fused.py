"""Triton kernels for the small operations between matrix products, where PyTorch would launch ten for one.

Each rounds exactly where the plain code of `layers` rounds, so they are interchangeable with it. Inference only: no gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels may begin before the one in front of them has ended, and wait for it inside: programmatic dependent launch,
    which GPUs have from Hopper on."""
    return device.type != "cpu" and triton.runtime.driver.active.get_current_target().arch >= 90


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program: a row. EARLY: it begins before the kernel in front of it has ended."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(out_ptr + row * size + dims, (wide * scale).to(x.dtype) * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.RMSNorm`: x [..., D] -> [..., D]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    early = starts_early(x.device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    _rms_norm_kernel[(x.numel() // size,)](
        x, weight, out, size, eps, BLOCK=triton.next_power_of_2(size), EARLY=early, **options
    )
    return out


@triton.jit
def _add_rms_norm_kernel(x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0)
    more = tl.load(more_ptr + row * size + dims, mask=inside, other=0.0)
    both = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * size + dims, both, mask=inside)
    wide = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + dims, (wide * scale).to(x.dtype) * weight, mask=inside)


def add_rms_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `layers.RMSNorm.of_sum`: x, more [..., D] -> their sum, and that normed."""
    x, more = x.contiguous(), more.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(x.numel() // size,)](x, more, weight, total, out, size, eps, BLOCK=block)
    return total, out


@triton.jit
def _add_layer_norm_kernel(x_ptr, more_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    x = tl.load(x_ptr + row * size + dims, mask=inside, other=0.0)
    more = tl.load(more_ptr + row * size + dims, mask=inside, other=0.0)
    both = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * size + dims, both, mask=inside)
    wide = both.to(tl.float32)
    wide = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + dims, (wide * scale * weight + bias).to(x.dtype), mask=inside)


def add_layer_norm(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, more [..., D] -> their sum, and its layer norm, in float32 until it is rounded once, as PyTorch's."""
    x, more = x.contiguous(), more.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _add_layer_norm_kernel[(x.numel() // size,)](x, more, weight, bias, total, out, size, eps, BLOCK=block)
    return total, out


@triton.jit
def _turned(x, mirrored, weight, other_weight, cos, sin, dims, eps, D: tl.constexpr):
    """Heads' vectors [R, D], normalised and turned: mirrored and other_weight are x and weight with their halves exchanged; weights and
    rotations [R, D] or [1, D]; dims are 0..D-1."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    normed = (wide * scale).to(x.dtype) * weight
    mirrored = (mirrored.to(tl.float32) * scale).to(x.dtype) * other_weight
    mirrored = tl.where((dims < D // 2)[None, :], -mirrored, mirrored)
    return (normed * cos).to(x.dtype) + (mirrored * sin).to(x.dtype)


@triton.jit
def _exchanged(dims, D: tl.constexpr):
    """Of each place its partner in the other half."""
    half: tl.constexpr = D // 2
    return tl.where(dims < half, dims + half, dims - half)


@triton.jit
def _turned_rows(x_ptr, at, there, weight_ptr, cos_ptr, sin_ptr, turn, dims, eps, D: tl.constexpr):
    """`_turned` of what is at x_ptr: at [R] where vectors begin, turn [R] where their rotations do; zeros where not there [R]."""
    other, real = _exchanged(dims, D), there[:, None]
    x = tl.load(x_ptr + at[:, None] + dims[None, :], mask=real, other=0.0)
    mirrored = tl.load(x_ptr + at[:, None] + other[None, :], mask=real, other=0.0)
    cos = tl.load(cos_ptr + turn[:, None] + dims[None, :], mask=real, other=0.0)
    sin = tl.load(sin_ptr + turn[:, None] + dims[None, :], mask=real, other=0.0)
    weight, other_weight = tl.load(weight_ptr + dims)[None, :], tl.load(weight_ptr + other)[None, :]
    return _turned(x, mirrored, weight, other_weight, cos, sin, dims, eps, D)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _qk_kernel(
    qkv_ptr, q_weight, k_weight, cos_ptr, sin_ptr, turn_width, q_ptr, k_ptr, v_ptr, slots_ptr, eps, heads, kv_heads, width,
    D: tl.constexpr, HEADS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Program (row, HEADS of its heads): all of them queries, or keys, or values, which are STORED with the keys where slots say."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    dims, some = tl.arange(0, D), tl.arange(0, HEADS)
    head = first + some
    at, turn = row * width + head * D, row * turn_width + some * 0
    if first < heads:
        q = _turned_rows(qkv_ptr, at, some >= 0, q_weight, cos_ptr, sin_ptr, turn, dims, eps, D)
        tl.store(q_ptr + (row * heads + head)[:, None] * D + dims[None, :], q)
    else:
        to = tl.load(slots_ptr + row) if STORED else row
        before = heads + tl.cdiv(kv_heads, HEADS) * HEADS  # programs of keys are as many as can be full
        if first < before:
            key = head - heads
            k = _turned_rows(qkv_ptr, at, key < kv_heads, k_weight, cos_ptr, sin_ptr, turn, dims, eps, D)
            tl.store(k_ptr + (to * kv_heads + key)[:, None] * D + dims[None, :], k, mask=(key < kv_heads)[:, None])
        else:
            member = head - before
            there = (member < kv_heads)[:, None]
            source = row * width + (heads + kv_heads + member) * D
            v = tl.load(qkv_ptr + source[:, None] + dims[None, :], mask=there, other=0.0)
            tl.store(v_ptr + (to * kv_heads + member)[:, None] * D + dims[None, :], v, mask=there)


MANY_ROWS, HEADS_AT_ONCE = 32, 8  # from so many rows on, programs of one head would be more than a GPU has room for


def _heads_at_once(rows: int, heads: int) -> int:
    return HEADS_AT_ONCE if rows >= MANY_ROWS and heads % HEADS_AT_ONCE == 0 else 1


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """qkv [N, (heads + 2 kv_heads) D] contiguous; cos, sin [N, D] of equal strides, also one row expanded to N -> q [N, heads, D],
    k [N, kv_heads, D], normed and turned."""
    rows, dim = cos.shape
    q = qkv.new_empty(rows, heads, dim)
    k = qkv.new_empty(rows, kv_heads, dim)
    at_once = _heads_at_once(rows, heads)
    _qk_kernel[(rows, heads // at_once + triton.cdiv(kv_heads, at_once))](
        qkv, q_weight, k_weight, cos, sin, cos.stride(0), q, k, k, k, eps, heads, kv_heads, qkv.shape[-1],
        D=dim, HEADS=at_once, STORED=False,
    )  # fmt: skip
    return q, k


def qk_norm_rope_stored(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *,
    slots: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope` whose keys, and the values as they are, go into slots int64 [N] of keys, values [slots, kv_heads, D], contiguous
    and of the type of qkv -> q [N, heads, D]."""
    rows, dim = cos.shape
    kv_heads = keys.shape[1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(rows, heads, dim)
    at_once = _heads_at_once(rows, heads)
    _qk_kernel[(rows, heads // at_once + 2 * triton.cdiv(kv_heads, at_once))](
        qkv, q_weight, k_weight, cos, sin, cos.stride(0), q, keys, values, slots, eps, heads, kv_heads, qkv.shape[-1],
        D=dim, HEADS=at_once, STORED=True,
    )  # fmt: skip
    return q


@triton.jit
def _summed_rows_kernel(
    ids_ptr, offsets_ptr, table_ptr, out_ptr, width, IDS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, BLOCK of its sums)."""
    row, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    there = place < IDS
    at = tl.load(ids_ptr + row * IDS + place, mask=there, other=0) + tl.load(offsets_ptr + place, mask=there, other=0)
    held = tl.load(
        table_ptr + at[:, None] * width + dims[None, :], mask=there[:, None] & (dims < width)[None, :], other=0.0
    )
    total = tl.sum(held.to(tl.float32), 0)
    tl.store(out_ptr + row * width + dims, total.to(held.dtype), mask=dims < width)


def summed_rows(ids: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
    """ids int64 [N, K], with offsets int64 [K] added, name rows of table [V, H] -> the sums of each K of them [N, H], in float32 until
    they are rounded once."""
    rows, count = ids.shape
    width = table.shape[1]
    out = table.new_empty(rows, width)
    _summed_rows_kernel[(rows, triton.cdiv(width, 128))](
        ids.contiguous(), offsets, table, out, width, IDS=count, PLACES=triton.next_power_of_2(count), BLOCK=128
    )
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < size
    gate = tl.load(gate_up_ptr + row * 2 * size + dims, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + dims, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * size + dims, silu * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 I] -> silu(gate) * up [..., I]."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    _silu_mul_kernel[(out.numel() // size, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024)
    return out


@triton.jit(do_not_specialize=["rows", "patches"])
def _turn_patches_kernel(
    qkv_ptr, cos_ptr, sin_ptr, out_ptr, rows, patches, heads, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (patch of a group, query or key): all heads."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (dims < D)
    half: tl.constexpr = D // 2
    source = qkv_ptr + ((row * 3 + which) * heads + head) * D
    x = tl.load(source + dims, mask=inside, other=0.0)
    mirrored = tl.load(source + tl.where(dims < half, dims + half, dims - half), mask=inside, other=0.0).to(tl.float32)
    patch = row % patches
    cos = tl.load(cos_ptr + patch * D + dims, mask=dims < D, other=0.0)
    sin = tl.load(sin_ptr + patch * D + dims, mask=dims < D, other=0.0)
    out = x.to(tl.float32) * cos + tl.where(dims < half, -mirrored, mirrored) * sin
    at = ((which * rows + row) * heads + head) * D + dims
    tl.store(out_ptr + at, out.to(x.dtype), mask=inside)


def turn_patches(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """qkv [G, P, 3 heads D]; cos, sin float32 [P, D] -> q and k [2, G, heads, P, D], turned as `qwen3_vl._turn` does.

    In memory the heads of a patch lie together, as in qkv: attention lays its output out like q, and needs no copy after it.
    """
    qkv = qkv.contiguous()
    groups, patches, width = qkv.shape
    dim, rows = width // (3 * heads), groups * patches
    out = qkv.new_empty(2, groups, patches, heads, dim)
    _turn_patches_kernel[(rows, 2)](
        qkv, cos, sin, out, rows, patches, heads,
        D=dim, HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip
    return out.transpose(2, 3)


MOST_DENSE_KEYS = 64  # one program holds all keys of a sequence and key head


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


def dense_attend(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *,
    keys: Tensor, values: Tensor, start: int,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope`, then as `layers.DenseKV.attend` in one layer, up to MOST_DENSE_KEYS keys.

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
    _dense_kernel[(batch, kv_heads)](
        qkv, q_weight, k_weight, cos, sin, cos.stride(0), keys, values, out, capacity, start, eps, dim**-0.5, kv_heads,
        STEPS=steps, GROUP=group, ROWS=max(16, triton.next_power_of_2(steps * group)),
        KEYS=max(16, triton.next_power_of_2(start + steps)), D=dim, EARLY=early, **options,
    )  # fmt: skip
    return out
