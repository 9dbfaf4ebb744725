"""Pictures from bytes: upright RGB, whatever the colour mode of the file.

Knows Pillow. Does not know clips; a picture is a Video of one frame with still=True.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps

from aura_omni.errors import BadMedia
from aura_omni.flow import Video
from aura_omni.media.budget import Budget
from aura_omni.media.video import CHUNK_FPS, video_of

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "AVIF")
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

# What Pillow's readers raise on damaged files; it promises OSError but its parsers let these through.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    SyntaxError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
)


def decode_image(data: bytes, *, max_pixels: int, budget: Budget | None = None, param: str | None = None) -> Video:
    """The picture in `data`; of an animation the first frame.

    EXIF orientation (all eight values) is applied and dropped. Transparent pixels are laid on white. 16-bit grey keeps
    its upper 8 bits. max_pixels and the budget are checked before the pixels are decoded.
    Raises BadMedia: empty, unknown or unsupported format (named), damaged or cut off, too large.
    """
    if not data:
        raise BadMedia("the picture is empty (0 bytes)", param=param)
    if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS:
        raise BadMedia("the picture is HEIC/HEIF, which this server does not read; send JPEG or PNG", param=param)
    formats = _readable()
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadMedia(
            f"the picture has far more pixels than the limit of {max_pixels:,}; send a smaller one", param=param
        ) from None
    except _UNREADABLE:
        raise BadMedia(
            f"not a picture: cut off, damaged, or in none of the formats {', '.join(formats)}", param=param
        ) from None
    with image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadMedia(
                f"the picture has {width} x {height} = {width * height:,} pixels, more than the limit of {max_pixels:,}; "
                "send a smaller one, or raise media.max_pixels in the deploy file",
                param=param,
            )
        if budget is not None:
            budget.take("pixels", width * height, param=param)
        try:
            image.load()
        except _UNREADABLE:
            raise BadMedia(f"the {image.format} picture is damaged or cut off", param=param) from None
        _turn_upright(image)
        pixels = np.asarray(_rgb(image))
    return video_of(np.ascontiguousarray(pixels)[None], (0.0,), fps=CHUNK_FPS, still=True)


def _readable() -> tuple[str, ...]:
    """AVIF depends on how Pillow was built."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _turn_upright(image: Image.Image) -> None:
    with suppress(*_UNREADABLE):  # a broken EXIF block says nothing about orientation; the pixels are good
        ImageOps.exif_transpose(image, in_place=True)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip it at 255
        values = np.asarray(image)
        return Image.fromarray((np.clip(values, 0, 65_535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies in any case
