"""Triton kernels of the audio encoder's mel: three launches and an FFT, where PyTorch needs thirty.

Powers, their sums and logarithms differ from those of `qwen3_asr` in the last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FRAMES, BINS, LINES = 16, 64, 64  # of a program, and of frequencies at once
VALUES = 1_024  # of a program of the last step


@triton.jit(do_not_specialize=["count", "stride"], do_not_specialize_on_alignment=["waves_ptr", "lengths_ptr"])
def _frames_kernel(
    waves_ptr,
    lengths_ptr,
    window_ptr,
    out_ptr,
    count,
    stride,
    HOP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (frame, clip): its samples, mirrored at both ends of the clip, times the window."""
    frame, clip = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length, place = tl.load(lengths_ptr + clip), tl.arange(0, BLOCK)
    at = tl.abs(frame * HOP + place - SIZE // 2)
    at = tl.where(at < length, at, 2 * length - 2 - at)  # in a frame behind the end negative, where anything will do
    wave = tl.load(waves_ptr + clip * stride + at, mask=(place < SIZE) & (at >= 0), other=0.0)
    window = tl.load(window_ptr + place, mask=place < SIZE, other=0.0)
    tl.store(out_ptr + (clip * count + frame) * SIZE + place, wave * window, mask=place < SIZE)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["lengths_ptr"])
def _mel_kernel(
    spectrum_ptr, filters_ptr, lengths_ptr, out_ptr, top_ptr, count, bins,
    HOP: tl.constexpr, SIZE: tl.constexpr, FRAMES: tl.constexpr, BINS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Program (FRAMES, BINS, clip): the logarithms of their power, and the highest of the clip's own."""
    clip = tl.program_id(2).to(tl.int64)
    frame, mel = tl.program_id(0) * FRAMES + tl.arange(0, FRAMES), tl.program_id(1) * BINS + tl.arange(0, BINS)
    power = tl.zeros([BINS, FRAMES], tl.float32)
    for first in range(0, SIZE, LINES):
        line = first + tl.arange(0, LINES)
        at = (clip * count + frame[None, :]) * SIZE + line[:, None]
        there = (line < SIZE)[:, None] & (frame < count)[None, :]
        real = tl.load(spectrum_ptr + 2 * at, mask=there, other=0.0)
        imaginary = tl.load(spectrum_ptr + 2 * at + 1, mask=there, other=0.0)
        filters = tl.load(
            filters_ptr + mel[:, None] * SIZE + line[None, :],
            mask=(mel < bins)[:, None] & (line < SIZE)[None, :],
            other=0.0,
        )
        power += tl.dot(filters, real * real + imaginary * imaginary, input_precision="ieee")
    log = tl.log2(tl.maximum(power, 1e-10)) * 0.3010299956639812  # log10
    real = (mel < bins)[:, None] & (frame < count)[None, :]
    tl.store(out_ptr + (clip * bins + mel[:, None]) * count + frame[None, :], log, mask=real)
    own = real & (frame < tl.load(lengths_ptr + clip) // HOP)[None, :]
    tl.atomic_max(top_ptr + clip, tl.max(tl.max(tl.where(own, log, float("-inf")), 1), 0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["lengths_ptr"])
def _scaled_kernel(log_ptr, top_ptr, lengths_ptr, count, bins, HOP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (BLOCK values, clip), in place: no lower than 8 below the clip's highest, in quarters; zeros behind its end."""
    clip, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < bins * count
    log = tl.load(log_ptr + clip * bins * count + at, mask=inside, other=0.0)
    mel = (tl.maximum(log, tl.load(top_ptr + clip) - 8.0) + 4.0) * 0.25
    mel = tl.where(at % count < tl.load(lengths_ptr + clip) // HOP, mel, 0.0)
    tl.store(log_ptr + clip * bins * count + at, mel, mask=inside)


def log_mels(waves: Tensor, lengths: Tensor, window: Tensor, filters: Tensor, hop: int) -> Tensor:
    """As `qwen3_asr.AudioEncoder.log_mels`: waves float32 [N, L], rows of any stride; lengths int64 [N]; window float32 [400]; filters
    float32 [mel_bins, 201] -> float32 [N, mel_bins, L // hop]."""
    clips, count = len(waves), waves.shape[1] // hop
    size, (bins, lines) = len(window), filters.shape
    frames = waves.new_empty(clips, count, size)
    _frames_kernel[(count, clips)](
        waves, lengths, window, frames, count, waves.stride(0), HOP=hop, SIZE=size, BLOCK=triton.next_power_of_2(size)
    )
    spectrum = torch.view_as_real(torch.fft.rfft(frames))
    log, top = waves.new_empty(clips, bins, count), waves.new_full((clips,), -torch.inf)
    _mel_kernel[(triton.cdiv(count, FRAMES), triton.cdiv(bins, BINS), clips)](
        spectrum, filters, lengths, log, top, count, bins,
        HOP=hop, SIZE=lines, FRAMES=FRAMES, BINS=BINS, LINES=LINES, num_stages=1,  # more do not fit the registers
    )  # fmt: skip
    _scaled_kernel[(triton.cdiv(bins * count, VALUES), clips)](log, top, lengths, count, bins, HOP=hop, BLOCK=VALUES)
    return log
