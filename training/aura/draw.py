"""Scenes as pixels, many frames at once, on any device.

    painter = Painter(photos, device)
    frames = painter.frames(spec, seed=7)          # uint8 [F, height, width, 3]

Shapes are read from a table of signed distances, so that edges are smooth at every size and rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.aura.world import SHAPES

# Columns of a slot: what, where (pixels), how large, how turned, colour, rim, and the names for the training of the tower.
SHAPE, X, Y, RADIUS, TURN, RED, GREEN, BLUE, OUTLINE, ON, COLOUR, MOTION = range(12)
SLOT_VALUES = 12
# Columns of a ground.
PHOTO, BANK, AFFINE, FIRST, SECOND, GAIN, OFFSET, NOISE, BLUR, QUANT = 0, 1, 2, 8, 11, 14, 17, 18, 19, 20
GROUND_VALUES = 21

REACH = 1.3  # the table of a shape covers [-REACH, REACH] radii
TABLE = 96
AT_ONCE = 40_000_000  # pixels of one slice


@dataclass(frozen=True, slots=True)
class Spec:
    """slots float32 [F, K, SLOT_VALUES], drawn in order; ground float32 [F, GROUND_VALUES]."""

    height: int
    width: int
    slots: np.ndarray
    ground: np.ndarray


class Painter:
    def __init__(self, photos: np.ndarray, device: torch.device) -> None:
        """photos uint8 [N, h, w, 3]."""
        self.device = device
        self._photos = torch.from_numpy(photos).to(device).permute(0, 3, 1, 2).float().div(255).contiguous()
        self._textures = torch.from_numpy(textures()).to(device)[:, None]
        self._shapes = torch.from_numpy(shape_table()).to(device)[:, None]

    def frames(self, spec: Spec, *, seed: int) -> Tensor:
        """uint8 [F, height, width, 3]; the same seed gives the same noise."""
        count = max(1, AT_ONCE // (spec.height * spec.width))
        random = torch.Generator(self.device).manual_seed(seed)
        parts = [self._slice(spec, slice(first, first + count), random) for first in range(0, len(spec.ground), count)]
        return torch.cat(parts)

    def _slice(self, spec: Spec, which: slice, random: torch.Generator) -> Tensor:
        slots, ground = spec.slots[which], spec.ground[which]
        there_slots, there_ground = (
            self._moved(slots),
            self._moved(ground),
        )  # once: each transfer costs more than its bytes
        image = self._background(spec, ground, there_ground)
        rows, columns = self._axes(spec.height, spec.width)
        softness = 1 + 2 * there_ground[:, BLUR]
        for number in range(slots.shape[1]):
            there = np.flatnonzero(slots[:, number, ON])
            if not len(there):
                continue
            where = self._moved(there)
            some = there_slots[where, number]
            distance = self._distance(some, rows[None, :, None], columns[None, None, :])
            inside = (distance / softness[where][:, None, None] + 0.5).clamp_(0, 1)
            rim = some[:, OUTLINE, None, None] * (distance < 0.13 * some[:, RADIUS, None, None])
            colour = some[:, RED : BLUE + 1, None, None] * (1 - rim)[:, None]
            image.index_copy_(0, where, torch.lerp(image[where], colour, inside[:, None]))
        image = image * _column(there_ground, GAIN, 3) + _column(there_ground, OFFSET)
        image = image + _column(there_ground, NOISE) * torch.randn(
            image.shape, generator=random, device=self.device, dtype=image.dtype
        )
        coarse = np.flatnonzero(ground[:, QUANT])
        if len(coarse) and not (spec.height % 8 or spec.width % 8):
            where = self._moved(coarse)
            image = image.index_copy(0, where, _compressed(image[where], there_ground[where, QUANT]))
        return (image * 255).round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)

    def owners(self, spec: Spec, cells: tuple[int, int]) -> Tensor:
        """The slot that covers the middle of each cell of a grid (or has its own middle in it), -1 for none: int64 [F, h, w]."""
        high, wide = cells
        rows = (torch.arange(high, device=self.device) + 0.5) * (spec.height / high)
        columns = (torch.arange(wide, device=self.device) + 0.5) * (spec.width / wide)
        slots = self._moved(spec.slots)
        found = torch.full((len(spec.ground), high, wide), -1, dtype=torch.int64, device=self.device)
        for number in range(spec.slots.shape[1]):
            there = np.flatnonzero(spec.slots[:, number, ON])
            if not len(there):
                continue
            where = self._moved(there)
            some = slots[where, number]
            covered = self._distance(some, rows[None, :, None], columns[None, None, :]) > 0
            near_row = (rows[None, :, None] - some[:, Y, None, None]).abs() <= 0.5 * spec.height / high
            near_column = (columns[None, None, :] - some[:, X, None, None]).abs() <= 0.5 * spec.width / wide
            found[where] = torch.where(covered | (near_row & near_column), number, found[where])
        return found

    def _axes(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        return torch.arange(height, device=self.device) + 0.5, torch.arange(width, device=self.device) + 0.5

    def _distance(self, some: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Pixels [n, h, w] from the rim of each thing, positive inside."""
        radius = some[:, RADIUS, None, None]
        down, right = (rows - some[:, Y, None, None]) / radius, (columns - some[:, X, None, None]) / radius
        cos, sin = some[:, TURN].cos()[:, None, None], some[:, TURN].sin()[:, None, None]
        grid = torch.stack((cos * right + sin * down, cos * down - sin * right), dim=-1) / REACH
        table = self._shapes[some[:, SHAPE].long()]
        return F.grid_sample(table, grid, padding_mode="border", align_corners=False)[:, 0] * radius

    def _background(self, spec: Spec, ground: np.ndarray, moved_ground: Tensor) -> Tensor:
        image = torch.empty(len(ground), 3, spec.height, spec.width, device=self.device)
        for is_photo, bank in ((True, self._photos), (False, self._textures)):
            there = np.flatnonzero((ground[:, PHOTO] > 0) == is_photo)
            if not len(there):
                continue
            where = self._moved(there)
            some = moved_ground[where]
            affine = some[:, AFFINE : AFFINE + 6].view(-1, 2, 3)
            grid = F.affine_grid(affine, [len(there), 1, spec.height, spec.width], align_corners=False)
            read = F.grid_sample(bank[some[:, BANK].long()], grid, padding_mode="reflection", align_corners=False)
            if not is_photo:
                first, second = (some[:, at : at + 3, None, None] for at in (FIRST, SECOND))
                read = first + (second - first) * read
            image.index_copy_(0, where, read)
        return image

    def _moved(self, array: np.ndarray) -> Tensor:
        return moved(array, self.device)


def _column(ground: Tensor, at: int, count: int = 1) -> Tensor:
    return ground[:, at : at + count, None, None]


def moved(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is doing."""
    here = torch.from_numpy(np.ascontiguousarray(array))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _compressed(image: Tensor, step: Tensor) -> Tensor:
    """What a camera's JPEG or video coder leaves: half the colour resolution, coarse 8x8 cosine coefficients."""
    count, _, height, width = image.shape
    red, green, blue = image.unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    chroma = torch.stack(((blue - luma) * 0.564, (red - luma) * 0.713), dim=1)
    chroma = F.interpolate(F.avg_pool2d(chroma, 2), scale_factor=2, mode="bilinear", align_corners=False)
    k = torch.arange(8, device=image.device)
    basis = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) * 0.5
    basis[0] *= math.sqrt(0.5)
    blocks = luma.view(count, height // 8, 8, width // 8, 8)
    spectrum = torch.einsum("ka,nhawb,lb->nhkwl", basis, blocks, basis)
    coarse = (0.02 + 0.02 * (k[:, None] + k[None]))[:, None, :] * step[:, None, None, None, None]
    spectrum = (spectrum / coarse).round() * coarse
    luma = torch.einsum("ka,nhkwl,lb->nhawb", basis, spectrum, basis).reshape(count, height, width)
    blue, red = luma + chroma[:, 0] / 0.564, luma + chroma[:, 1] / 0.713
    return torch.stack((red, (luma - 0.299 * red - 0.114 * blue) / 0.587, blue), dim=1)


# ---------------------------------------------------------------- tables


def textures(seed: int = 5) -> np.ndarray:
    """float32 [N, 96, 160] in [0, 1]: flat, ramps, clouds, stripes, checks."""
    random = np.random.default_rng(seed)
    high, wide = 96, 160
    y, x = np.mgrid[0:high, 0:wide] / np.array([high, wide])[:, None, None]
    made = [np.zeros((high, wide)), x, y, (x + y) / 2, (x - y + 1) / 2, 2 * np.hypot(x - 0.5, y - 0.5) / 1.5]
    for cells in (3, 5, 8, 12, 20, 32) * 3:
        small = torch.from_numpy(random.random((1, 1, max(2, cells * high // wide), cells)))
        made.append(F.interpolate(small, (high, wide), mode="bicubic", align_corners=False)[0, 0].clamp(0, 1).numpy())
    for waves in (4, 7, 12):
        for slope in (0.0, 1.0, -0.6):
            made.append(0.5 + 0.5 * np.sin(2 * math.pi * waves * (x + slope * y)))
        made.append(((np.floor(x * waves) + np.floor(y * waves)) % 2) * 1.0)
    return np.stack(made).astype(np.float32)


def shape_table() -> np.ndarray:
    """float32 [SHAPES + card + hand, TABLE, TABLE]: signed distance to the rim in radii, positive inside."""
    axis = ((np.arange(TABLE) + 0.5) / TABLE * 2 - 1) * REACH
    y, x = np.meshgrid(axis, axis, indexing="ij")
    tables = {
        "circle": 0.95 - np.hypot(x, y),
        "square": _box(x, y, 0.82, 0.82),
        "triangle": _polygon(x, y, [(0, -1.0), (0.95, 0.72), (-0.95, 0.72)]),
        "star": _polygon(x, y, _star()),
        "heart": _polygon(x, y, _heart()),
        "cross": np.maximum(_box(x, y, 0.98, 0.32), _box(x, y, 0.32, 0.98)),
        "ring": 0.21 - np.abs(np.hypot(x, y) - 0.77),
        "moon": np.minimum(0.97 - np.hypot(x, y), np.hypot(x - 0.52, y) - 0.76),
    }
    card = _box(x, y, 0.88, 0.6) + 0.06
    fingers = [0.16 - _segment(x, y, (at, 0.45), (at * 0.7, 1.3)) for at in (-0.3, 0.0, 0.3)]
    return np.stack([*(tables[name] for name in SHAPES), card, np.maximum.reduce(fingers)]).astype(np.float32)


def _box(x: np.ndarray, y: np.ndarray, half_wide: float, half_high: float) -> np.ndarray:
    over_x, over_y = np.abs(x) - half_wide, np.abs(y) - half_high
    return -(np.hypot(np.maximum(over_x, 0), np.maximum(over_y, 0)) + np.minimum(np.maximum(over_x, over_y), 0))


def _segment(x: np.ndarray, y: np.ndarray, a: tuple[float, float], b: tuple[float, float]) -> np.ndarray:
    along = ((x - a[0]) * (b[0] - a[0]) + (y - a[1]) * (b[1] - a[1])) / ((b[0] - a[0]) ** 2 + (b[1] - a[1]) ** 2)
    along = np.clip(along, 0, 1)
    return np.hypot(x - a[0] - along * (b[0] - a[0]), y - a[1] - along * (b[1] - a[1]))


def _polygon(x: np.ndarray, y: np.ndarray, corners: list[tuple[float, float]]) -> np.ndarray:
    distance, inside = np.full(x.shape, np.inf), np.zeros(x.shape, bool)
    for a, b in zip(corners, corners[1:] + corners[:1], strict=True):
        distance = np.minimum(distance, _segment(x, y, a, b))
        crosses = (a[1] > y) != (b[1] > y)
        with np.errstate(divide="ignore", invalid="ignore"):
            inside ^= crosses & (x < (b[0] - a[0]) * (y - a[1]) / (b[1] - a[1]) + a[0])
    return np.where(inside, distance, -distance)


def _star() -> list[tuple[float, float]]:
    radii = [1.05, 0.45] * 5
    return [(r * math.sin(n * math.pi / 5), -r * math.cos(n * math.pi / 5)) for n, r in enumerate(radii)]


def _heart() -> list[tuple[float, float]]:
    turns = [n * 2 * math.pi / 60 for n in range(60)]
    return [
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16 - 0.08,
        )
        for t in turns
    ]
