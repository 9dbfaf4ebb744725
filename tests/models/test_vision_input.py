"""Sizes, resizing and patches of frames."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from aura_omni.models.vision_input import Framing, PixelRules, axis_filter, resize, resize_in_integers
from tests.aura_tiny import IMAGE_PIXELS, VIDEO_PIXELS

VIDEO = PixelRules.from_json(VIDEO_PIXELS)
IMAGE = PixelRules.from_json(IMAGE_PIXELS)
CPU = torch.device("cpu")
BENCHMARK = PixelRules.from_json({**VIDEO_PIXELS, "size": {"shortest_edge": 4096, "longest_edge": 602112}})


@pytest.mark.parametrize(
    ("rules", "frames", "width", "height", "tokens"),
    [
        (VIDEO, 2, 640, 360, 220),
        (VIDEO, 2, 640, 480, 300),
        (VIDEO, 2, 1280, 720, 880),
        (VIDEO, 2, 1920, 1080, 2040),
        (VIDEO, 2, 320, 240, 80),
        (VIDEO, 2, 320, 180, 60),
        (VIDEO, 4, 640, 360, 440),
        (VIDEO, 16, 640, 360, 1760),
        (BENCHMARK, 2, 640, 480, 266),
        (BENCHMARK, 2, 1280, 720, 264),
        (BENCHMARK, 4, 640, 360, 288),
        (BENCHMARK, 16, 640, 360, 256),
    ],
)
def test_a_video_costs_the_published_number_of_tokens(
    rules: PixelRules, frames: int, width: int, height: int, tokens: int
) -> None:
    tall, wide = rules.size(frames, height, width, still=False)
    assert tall * wide // 32**2 * frames // 2 == tokens


@pytest.mark.reference
def test_sizes_equal_the_references_for_any_shape() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_image
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_video

    pick = random.Random(0)
    for _ in range(2000):
        frames, height, width = pick.randint(2, 40), pick.randint(1, 2500), pick.randint(1, 2500)
        if max(height, width) / min(height, width) > 60:
            continue
        for rules in (VIDEO, BENCHMARK):
            expected = of_video(frames, height, width, 2, 32, rules.min_pixels, rules.max_pixels)
            assert rules.size(frames, height, width, still=False) == expected
        expected = of_image(height, width, 32, IMAGE.min_pixels, IMAGE.max_pixels)
        assert IMAGE.size(1, height, width, still=True) == expected


@pytest.mark.parametrize("still", [False, True])
@pytest.mark.parametrize(("width", "height"), [(2, 2), (1, 1), (16, 9), (4000, 40), (40, 4000), (641, 361)])
def test_odd_shapes_get_whole_tokens(width: int, height: int, still: bool) -> None:
    rules = IMAGE if still else VIDEO
    tall, wide = rules.size(1, height, width, still=still)
    assert tall >= 32
    assert wide >= 32
    assert tall % 32 == wide % 32 == 0
    frames = torch.zeros(1, height, width, 3, dtype=torch.uint8)
    assert rules.patches(frames, (tall, wide)).shape == (1, tall * wide // 256, 3 * 2 * 256)


def test_an_extreme_shape_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"4000x10 pixels is an aspect ratio of 400; at most 200"):
        VIDEO.size(2, 10, 4000, still=False)


def test_the_resize_in_integers_gives_the_bytes_of_pytorchs_uint8_kernel() -> None:
    pick, noise = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(25):
        height, width = pick.randint(1, 300), pick.randint(1, 300)
        size = (32 * pick.randint(1, 9), 32 * pick.randint(1, 9))
        frames = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=noise)
        if pick.random() < 0.3:
            frames = (frames > 127).byte() * 255  # overshoots at every edge
        expected = F.interpolate(frames, size, mode="bicubic", antialias=True, align_corners=False)
        filters = [axis_filter(*sides, CPU) for sides in zip((height, width), size, strict=True)]
        assert torch.equal(resize_in_integers(frames, *filters), expected)


def test_patches_of_a_token_are_neighbours_and_values_are_normalised() -> None:
    frames = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
    frames[1, 40, 20, 2] = 255  # second frame, third token, its first row of patches, second column
    patches = VIDEO.patches(frames, (64, 64))
    lit = (patches[0] == 1).nonzero()
    assert lit.tolist() == [[9, 2 * 512 + 256 + 8 * 16 + 4]]
    assert patches.min() == -1


def test_a_frame_left_over_is_repeated() -> None:
    frames = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    full = torch.cat((frames, frames[2:]))
    assert torch.equal(VIDEO.patches(frames, (32, 32)), VIDEO.patches(full, (32, 32)))


@pytest.mark.gpu
def test_the_device_resizes_to_the_same_bytes() -> None:
    frames = torch.randint(0, 256, (2, 360, 640, 3), dtype=torch.uint8)
    framing, device = Framing(VIDEO, (360, 640), (352, 640)), torch.device("cuda")
    pixels = frames.permute(0, 3, 1, 2)
    ours = resize(pixels.to(device), framing.size, framing.tables(device))
    assert torch.equal(ours.cpu(), resize(pixels, framing.size, framing.tables(CPU)))
