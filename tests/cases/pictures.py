"""The test picture, and every kind of file that it can come in."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from tests.media_files import make_picture

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture() -> Image.Image:
    """400 x 300: a red bar on top, a blue bar at the bottom, a black arrow pointing up between."""
    image = Image.new("RGB", (400, 300), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle([0, 0, 399, 59], fill=RED)
    draw.rectangle([0, 240, 399, 299], fill=BLUE)
    draw.polygon([(200, 80), (170, 140), (230, 140)], fill="black")
    draw.rectangle([190, 140, 210, 220], fill="black")
    return image


def as_mode(mode: str) -> Image.Image:
    return picture().convert(mode)


def sixteen_bit_grey() -> bytes:
    grey = np.asarray(picture().convert("L")).astype(np.uint16) * 257
    return make_picture(Image.fromarray(grey), "PNG")


def turned(orientation: int) -> bytes:
    """As a camera stores it that was held so: the tag says how to turn it back."""
    undo = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return make_picture(picture().transpose(undo), "JPEG", exif=exif, quality=95)


def truncated() -> bytes:
    data = make_picture(picture(), "JPEG")
    return data[: len(data) // 2]


def animation() -> bytes:
    """The picture first, then others."""
    others = [Image.new("RGB", (400, 300), (0, 80 * shade, 0)) for shade in range(3)]
    return make_picture(picture(), "GIF", save_all=True, append_images=others, duration=100)
