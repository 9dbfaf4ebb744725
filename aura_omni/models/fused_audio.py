"""Triton kernels of the audio encoder: the ends of its convolutions, and attention within windows of up to 128 rows.

Of 5 s of sound every operation is so small that launching takes longer than computing, and PyTorch's attention brings three more
for its mask. Each rounds where the plain code of `qwen3_asr` rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_WINDOW = 128  # rows of which one program holds all keys and values
QUERIES = 64  # of a program, of which a window of 104 rows and 16 heads is 32. What was fastest on an H200, as are the next two

PIXELS, CHANNELS = 32, 128  # of the first convolution, of a program
BLOCK = 1_024  # values of a program of one operation for each


@triton.jit
def _gelu(x):
    """The exact one, in float32, as PyTorch computes it; x and the result in the same type."""
    wide = x.to(tl.float32)
    return (wide * 0.5 * (1.0 + tl.erf(wide * 0.7071067811865476))).to(x.dtype)


@triton.jit(do_not_specialize=["width"])
def _window_kernel(
    qkv_ptr, inside_ptr, out_ptr, width, heads, size, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr
):
    """Program (ROWS queries of a window, head, window): they attend to all of its places that are inside. D: size, or what is above it."""
    window, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    place, key, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    hidden, real = heads * size, (dims < size)[None, :]
    own = qkv_ptr + window * width * 3 * hidden + head * size + dims[None, :]
    there = (key < width)[:, None] & real
    q = tl.load(own + place[:, None] * 3 * hidden, mask=(place < width)[:, None] & real, other=0.0)
    k = tl.load(own + hidden + key[:, None] * 3 * hidden, mask=there, other=0.0)
    v = tl.load(own + 2 * hidden + key[:, None] * 3 * hidden, mask=there, other=0.0)
    inside = tl.load(inside_ptr + window * width + key, mask=key < width, other=0) != 0
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    # Not minus infinity: of a window that is only filled up, no place is inside, and its rows are to be numbers all the same.
    scores = tl.where(inside[None, :], scores, -1e30)
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / total[:, None]
    at = (window * width + place)[:, None] * hidden + head * size + dims[None, :]
    tl.store(out_ptr + at, out.to(v.dtype), mask=(place < width)[:, None] & real)


def window_attention(qkv: Tensor, heads: int, inside: Tensor) -> Tensor:
    """qkv [W, R, 3 heads D], R up to MOST_WINDOW; inside bool [W, 1, 1, R]: places of a window that its rows attend to -> [W, R, heads D].

    Of no meaning, but finite, where no place of a window is inside.
    """
    windows, width, hidden = *qkv.shape[:2], qkv.shape[2] // 3
    out = qkv.new_empty(windows, width, hidden)
    size = hidden // heads
    _window_kernel[(triton.cdiv(width, QUERIES), heads, windows)](
        qkv.contiguous(), inside.contiguous().view(torch.uint8), out, width, heads, size, size**-0.5,
        ROWS=QUERIES, KEYS=MOST_WINDOW, D=max(16, triton.next_power_of_2(size)),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["pixels", "chunk_step", "high_step", "wide_step", "wide"],
    do_not_specialize_on_alignment=["images_ptr"],
)
def _first_kernel(
    images_ptr, weight_ptr, bias_ptr, out_ptr, chunk_step, high_step, wide_step, pixels, high, wide, channels,
    SIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (PIXELS of the outputs, CHANNELS of each): of images high x wide; a window of SIDE x SIDE begins one before each second pixel."""
    kind: tl.constexpr = out_ptr.dtype.element_ty
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.arange(0, SIDE * SIDE)
    tall, broad = (high + 1) // 2, (wide + 1) // 2
    real, used = pixel < pixels, channel < channels
    row = (pixel // broad % tall * 2 - 1)[:, None] + (tap // SIDE)[None, :]
    column = (pixel % broad * 2 - 1)[:, None] + (tap % SIDE)[None, :]
    inside = real[:, None] & (row >= 0) & (row < high) & (column >= 0) & (column < wide)
    at = (pixel // (broad * tall) * chunk_step)[:, None] + row * high_step + column * wide_step
    windows = tl.load(images_ptr + at, mask=inside, other=0.0).to(kind)
    weight = tl.load(weight_ptr + channel[None, :] * (SIDE * SIDE) + tap[:, None], mask=used[None, :], other=0.0)
    bias = tl.load(bias_ptr + channel, mask=used, other=0.0).to(tl.float32)
    out = (tl.dot(windows, weight, input_precision="ieee") + bias[None, :]).to(kind)
    to = pixel[:, None] * channels + channel[None, :]
    tl.store(out_ptr + to, _gelu(out), mask=real[:, None] & used[None, :])


def first_convolution(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """images float32 [C, H, W] of any strides; weight [channels, 16]: of the 3x3 one of a single channel, of stride 2 and padding 1, as 4x4;
    bias [channels] -> GELU of the convolution of the images in the weights' dtype [C, channels, ceil(H / 2), ceil(W / 2)], channels last."""
    chunks, high, wide = images.shape
    channels = len(weight)
    out = weight.new_empty(chunks, (high + 1) // 2, (wide + 1) // 2, channels)
    pixels = out.numel() // channels
    _first_kernel[(triton.cdiv(pixels, PIXELS), triton.cdiv(channels, CHANNELS))](
        images,
        weight,
        bias,
        out,
        *images.stride(),
        pixels,
        high,
        wide,
        channels,
        SIDE=4,
        PIXELS=PIXELS,
        CHANNELS=CHANNELS,
    )
    return out.permute(0, 3, 1, 2)


@triton.jit(do_not_specialize=["wide"])
def _bias_gelu_kernel(x_ptr, bias_ptr, out_ptr, count, high, wide, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: BLOCK of the outputs, which lie as x does; ROWS: as [C, wide, channels, high]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, source, channel = at < count, at, at % channels
    if ROWS:
        channel, row = at // high % channels, at // (high * channels)
        source = (row // wide * high + at % high) * wide + row % wide
        source = source * channels + channel
    x = tl.load(x_ptr + source, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    tl.store(out_ptr + at, _gelu((x.to(tl.float32) + bias.to(tl.float32)).to(x.dtype)), mask=inside)


def bias_gelu(x: Tensor, bias: Tensor, *, rows: bool = False) -> Tensor:
    """x [C, channels, H, W], best channels last -> GELU of x + bias, of that shape, channels last; rows: [C, W, channels H]."""
    chunks, channels, high, wide = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    out = x.new_empty(chunks, wide, channels * high) if rows else torch.empty_like(x)
    _bias_gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, bias, out, x.numel(), high, wide, channels, ROWS=rows, BLOCK=BLOCK
    )
    return out
