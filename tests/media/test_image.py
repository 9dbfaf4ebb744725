import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from aura_omni.errors import BadMedia
from aura_omni.media.image import decode_image

PARAM = "messages[0].content[0].image_url"
LIMIT = 1_000_000


def seen(data: bytes) -> np.ndarray:
    video = decode_image(data, max_pixels=LIMIT, param=PARAM)
    assert video.still
    assert video.times_s == (0.0,)
    (frame,) = video.frames
    assert frame.dtype == np.uint8
    assert video.frames.flags.c_contiguous
    return frame


def refused(data: bytes, max_pixels: int = LIMIT) -> str:
    with pytest.raises(BadMedia) as caught:
        decode_image(data, max_pixels=max_pixels, param=PARAM)
    assert caught.value.param == PARAM
    return caught.value.message


def assert_upright(frame: np.ndarray, *, colour: bool = True) -> None:
    assert frame.shape == (80, 100, 3)
    top, bottom = frame[10, 50].astype(int), frame[70, 50].astype(int)
    assert frame[25, 50].min() > 240
    assert frame[40, 10].max() < 30
    if colour:
        assert top[0] > 200
        assert top[1:].max() < 60
        assert bottom[2] > 200
        assert bottom[:2].max() < 60


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("BMP", {}),
        ("AVIF", {}),
    ],
)
def test_i01_i06_common_formats_are_seen(picture_file, picture, kind, options):
    assert_upright(seen(picture_file(picture, kind, **options)))


@pytest.mark.parametrize("mode", ["L", "1", "LA", "P", "RGBA"])
def test_i02_every_png_mode_becomes_rgb(picture_file, picture, mode):
    assert_upright(seen(picture_file(picture.convert(mode), "PNG")), colour=mode in ("P", "RGBA"))


def test_i02_sixteen_bit_grey_keeps_its_tones(picture_file):
    ramp = np.linspace(0, 65_535, 256, dtype=np.uint16).reshape(16, 16)
    frame = seen(picture_file(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(frame, np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2))


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_i02_transparent_pixels_are_white(picture_file, mode):
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.putpixel((0, 0), (0, 0, 0, 255))
    frame = seen(picture_file(image.convert(mode), "PNG"))
    assert frame[0, 0].tolist() == [0, 0, 0]
    assert frame[1, 3].tolist() == [255, 255, 255]


def test_i03_cmyk_red_stays_red(picture_file, picture):
    assert_upright(seen(picture_file(picture.convert("CMYK"), "JPEG", quality=95)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_i04_all_eight_orientations_come_out_upright(picture_file, picture, kind, orientation):
    # What a camera stores is the picture turned so that the tag turns it back.
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = picture if undo is None else picture.transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert_upright(seen(picture_file(stored, kind, exif=exif, quality=95)))


def test_i04_broken_exif_does_not_lose_the_picture(picture_file, picture):
    assert_upright(seen(picture_file(picture, "JPEG", exif=b"Exif\0\0MM\0*" + b"\xff" * 20)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "AVIF"])
def test_i05_truncated_picture_is_refused(picture_file, picture, kind):
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 100, 3), np.uint8))
    data = picture_file(noisy, kind)
    message = refused(data[: len(data) // 2])
    assert "cut off" in message
    assert "damaged" in message


def test_i06_heic_is_refused_by_name():
    assert "HEIC" in refused(struct.pack(">I", 24) + b"ftypheic" + bytes(12) + b"mif1heic")


def test_v09_of_an_animation_the_first_frame_is_seen(picture_file, picture):
    data = picture_file(picture, "GIF", save_all=True, append_images=[ImageOps.invert(picture)] * 3, duration=100)
    assert_upright(seen(data))


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"hello", bytes(1_000), b"%PDF-1.7", b"GIF89a"])
def test_m22_what_is_no_picture_is_refused(data):
    refused(data)


def test_too_many_pixels_are_refused_before_decoding(picture_file):
    message = refused(picture_file(Image.new("L", (1_001, 1_000)), "PNG"))
    assert "1001 x 1000 = 1,001,000 pixels" in message
    assert f"{LIMIT:,}" in message
    # A header alone that claims 60,000 x 60,000: far beyond what Pillow itself opens.
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    assert "far more pixels" in refused(bomb + bytes(4) + b"IDAT" + bytes(4))


def test_key_depends_on_pixels_alone(picture_file, picture):
    png, bmp = (decode_image(picture_file(picture, kind), max_pixels=LIMIT) for kind in ("PNG", "BMP"))
    wide = decode_image(picture_file(Image.new("RGB", (8, 2)), "PNG"), max_pixels=LIMIT)
    tall = decode_image(picture_file(Image.new("RGB", (2, 8)), "PNG"), max_pixels=LIMIT)
    assert png.key == bmp.key
    assert len({png.key, wide.key, tall.key}) == 3


@pytest.fixture(scope="module")
def good_pictures(picture_file, picture) -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [picture_file(picture, kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP")]
    return files + [picture_file(picture, kind) for kind in ("BMP", "GIF", "AVIF")]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_pictures_are_decoded_or_refused_and_nothing_else(good_pictures, data):
    file = bytearray(data.draw(st.sampled_from(good_pictures)))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(file) - 1), st.integers(0, 255)), max_size=8)):
        file[place] = value
    try:
        video = decode_image(bytes(file), max_pixels=LIMIT)
    except BadMedia:
        return
    assert video.frames.ndim == 4
