"""Frames to the patches that the vision tower reads: size, resize, patchify, normalise.

    size = rules.size(2, 360, 640, still=False)
    framing = Framing(rules, (360, 640), size)
    patches = framing.patches(frames, framing.tables(frames.device))

Knows uint8 frames and pixel limits. The reference resizes in uint8, so a float resize would be visibly off (up to 0.2 of
the normalised range); both resizes here give the same bytes as PyTorch's uint8 bicubic kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aura_omni.models.fields import numbers, whole

MAX_ASPECT_RATIO = 200
RESIZED_AT_ONCE = 1 << 21  # numbers, held in float64 for a while; many small frames cost no more launches than one
BICUBIC = 3  # the published code of the filter (PIL's numbering)


@dataclass(frozen=True, slots=True)
class PixelRules:
    """How a checkpoint wants its frames. Limits count the pixels of all frames of a medium together."""

    min_pixels: int
    max_pixels: int
    patch: int
    temporal_patch: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_json(cls, preprocessor: Mapping[str, Any]) -> PixelRules:
        """From preprocessor_config.json (images) or video_preprocessor_config.json (video).

        Raises KeyError for a missing field and ValueError for another resize filter.
        """
        filter_code = preprocessor.get("resample", BICUBIC)
        if filter_code != BICUBIC:
            raise ValueError(f"resample is {filter_code}; only {BICUBIC} (bicubic) is supported")
        size = preprocessor["size"]
        return cls(
            min_pixels=whole(size, "shortest_edge"),
            max_pixels=whole(size, "longest_edge"),
            patch=whole(preprocessor, "patch_size"),
            temporal_patch=whole(preprocessor, "temporal_patch_size"),
            merge=whole(preprocessor, "merge_size"),
            mean=numbers(preprocessor, "image_mean"),
            std=numbers(preprocessor, "image_std"),
        )

    @property
    def factor(self) -> int:
        """Sides are multiples of it: the pixels of one token."""
        return self.patch * self.merge

    def size(self, frames: int, height: int, width: int, *, still: bool) -> tuple[int, int]:
        """(height, width) in pixels that a medium is resized to.

        Sides shorter than one token are scaled up, in a video by both sides together (as transformers 5 does), in an image
        by the lower pixel limit. Raises ValueError, with the numbers, for an aspect ratio above 200.
        """
        factor = self.factor
        source = f"{width}x{height}"
        if still:
            frames, counted = 1, 1
        else:
            frames = max(frames, self.temporal_patch)
            counted = round(frames / self.temporal_patch) * self.temporal_patch
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        ratio = max(height, width) / min(height, width)
        if ratio > MAX_ASPECT_RATIO:
            raise ValueError(f"{source} pixels is an aspect ratio of {ratio:.0f}; at most {MAX_ASPECT_RATIO}")
        # Python's round is half-to-even, as the reference's: 720 becomes 704.
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if counted * tall * wide > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            tall = max(factor, math.floor(height / shrink / factor) * factor)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
        elif counted * tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            tall = math.ceil(height * grow / factor) * factor
            wide = math.ceil(width * grow / factor) * factor
        return max(tall, factor), max(wide, factor)

    def patches(self, frames: Tensor, size: tuple[int, int]) -> Tensor:
        """frames uint8 [n, h, w, 3] RGB on any device -> float32 [groups, P, patch values], resized to `size` in pixels.

        A last group that is not full repeats its last frame.
        """
        missing = -frames.shape[0] % self.temporal_patch
        if missing:
            frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        framing = Framing(self, (frames.shape[1], frames.shape[2]), size)
        return framing.patches(frames, framing.tables(frames.device))

    def patchify(self, pixels: Tensor) -> Tensor:
        """[n, C, h, w] -> [groups, P, C x time x patch x patch]; the merge x merge patches of one token are neighbours."""
        count, channels, height, width = pixels.shape
        patch, merge, factor = self.patch, self.merge, self.factor
        split = pixels.view(
            count // self.temporal_patch,
            self.temporal_patch,
            channels,
            height // factor,
            merge,
            patch,
            width // factor,
            merge,
            patch,
        )
        group, time, channel, block_row, row, y, block_column, column, x = range(9)
        ordered = split.permute(group, block_row, block_column, row, column, channel, time, y, x)
        return ordered.reshape(split.shape[0], (height // patch) * (width // patch), -1)


@dataclass(frozen=True, slots=True, eq=False)
class PatchTables:
    """What frames of one framing need on their device: tall, wide as `axis_filter` gives them; mean, std float32 [patch values], in
    units of a byte.

    A CUDA graph remembers where they are, so it must hold on to them.
    """

    tall: Tensor | None
    wide: Tensor | None
    mean: Tensor
    std: Tensor


@dataclass(frozen=True, slots=True)
class Framing:
    """Frames of `source` (height, width) in pixels, resized to `size`, as the rules have it."""

    rules: PixelRules
    source: tuple[int, int]
    size: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) in patches."""
        return self.size[0] // self.rules.patch, self.size[1] // self.rules.patch

    def tables(self, device: torch.device) -> PatchTables:
        return _tables(self, device)

    def patches(self, frames: Tensor, tables: PatchTables) -> Tensor:
        """frames uint8 [n, *source, 3] RGB, n whole groups -> float32 [groups, P, patch values]. Fit for a CUDA graph."""
        pixels = frames.permute(0, 3, 1, 2)
        if self.source != self.size:
            pixels = resize(pixels, self.size, tables)
        return (self.rules.patchify(pixels) - tables.mean) / tables.std


# Kept on the device: to send them each time would have the host wait for whatever is under way there.
@lru_cache(maxsize=32)
def _tables(framing: Framing, device: torch.device) -> PatchTables:
    rules = framing.rules
    tall, wide = (
        axis_filter(before, after, device) for before, after in zip(framing.source, framing.size, strict=True)
    )
    mean, std = (
        (torch.tensor(values, dtype=torch.float32, device=device) * 255).repeat_interleave(
            rules.temporal_patch * rules.patch**2
        )
        for values in (rules.mean, rules.std)
    )
    return PatchTables(tall, wide, mean, std)


def resize(frames: Tensor, size: tuple[int, int], tables: PatchTables) -> Tensor:
    """frames uint8 [n, C, h, w] -> uint8 [n, C, *size], bicubic with antialiasing; the same bytes on every device."""
    if frames.device.type == "cpu":
        return F.interpolate(frames, size, mode="bicubic", antialias=True, align_corners=False)
    return resize_in_integers(frames, tables.tall, tables.wide)


def resize_in_integers(frames: Tensor, tall: Tensor | None, wide: Tensor | None) -> Tensor:
    """PyTorch's uint8 bicubic resize, which exists for CPUs only, as two exact matrix products; None: the axis stays as it is.

    The CPU kernel filters the width, then the height, with weights rounded to 16-bit fixed point, and rounds to uint8 after
    each. All sums stay far below 2**53, so float64 products are exact whatever the order and the matmul precision setting.
    """
    rows = []
    for some in frames.split(max(1, RESIZED_AT_ONCE // frames[0].numel())):
        values = some.double()
        if wide is not None:
            values = _rounded(values @ wide.T)
        if tall is not None:
            values = _rounded(tall @ values)
        rows.append(values.to(torch.uint8))
    return torch.cat(rows)


def _rounded(sums: Tensor) -> Tensor:
    return torch.floor(sums + 0.5).clamp(0, 255)


def axis_filter(before: int, after: int, device: torch.device) -> Tensor | None:
    """float64 [after, before], multiples of a power of two; None where there is nothing to do."""
    if before == after:
        return None
    weights, shift = _fixed_point_weights(before, after)
    return weights.to(device).double() / 2**shift


@lru_cache(maxsize=32)
def _fixed_point_weights(before: int, after: int) -> tuple[Tensor, int]:
    """int16 [after, before] and the number of fraction bits in them."""
    scale = before / after
    stretch = max(scale, 1.0)
    reach = 2.0 * stretch  # the cubic filter spans two samples to each side
    weights = torch.zeros(after, before, dtype=torch.float64, device="cpu")
    for place in range(after):
        centre = scale * (place + 0.5)
        first = max(int(centre - reach + 0.5), 0)
        last = min(int(centre + reach + 0.5), before)
        taps = [_cubic((j - centre + 0.5) / stretch) for j in range(first, last)]
        total = sum(taps)
        weights[place, first:last] = torch.tensor([tap / total for tap in taps], dtype=torch.float64)
    largest = float(weights.max())
    shift = 0
    while shift < 22 and int(0.5 + largest * 2 ** (shift + 1)) < 2**15:
        shift += 1
    fixed = weights * 2**shift
    return torch.trunc(fixed + torch.where(fixed < 0, -0.5, 0.5)).short(), shift


def _cubic(x: float, a: float = -0.5) -> float:
    x = abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    if x < 2.0:
        return (((x - 5) * x + 8) * x - 4) * a
    return 0.0
