"""Every kind of picture, sent to the running server: seen upright in its colours, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aura_omni.flow import Video
from tests.cases import pictures
from tests.cases.ask import chat, refused, url_part
from tests.cases.conftest import Served, both
from tests.cases.pictures import as_mode, picture, turned
from tests.media_files import make_picture

FIXTURES = Path(__file__).parents[1] / "fixtures/media"
SAME, LOSSY = 0.0, 6.0  # mean difference to the test picture, of 255


def saved(kind: str, mode: str = "RGB", **options: object) -> Callable[[], bytes]:
    return lambda: make_picture(as_mode(mode), kind, **options)


GOOD: dict[str, tuple[Callable[[], bytes], float, str]] = {  # file, difference, mode that it is compared in
    "I01 jpeg": (saved("JPEG"), LOSSY, "RGB"),
    "I01 progressive jpeg": (saved("JPEG", progressive=True), LOSSY, "RGB"),
    "I01 png": (saved("PNG"), SAME, "RGB"),
    "I01 webp": (saved("WEBP"), LOSSY, "RGB"),
    "I01 lossless webp": (saved("WEBP", lossless=True), SAME, "RGB"),
    "I01 bmp": (saved("BMP"), SAME, "RGB"),
    "I02 grey": (saved("PNG", "L"), SAME, "L"),
    "I02 one bit": (saved("PNG", "1"), SAME, "1"),
    "I02 palette": (saved("PNG", "P"), SAME, "P"),
    "I02 grey with alpha": (saved("PNG", "LA"), SAME, "L"),
    "I02 grey of 16 bits": (pictures.sixteen_bit_grey, SAME, "L"),
    "I03 CMYK": (saved("JPEG", "CMYK", quality=95), LOSSY, "RGB"),
    "I04 upside down": (lambda: turned(3), LOSSY, "RGB"),
    "I04 turned right": (lambda: turned(6), LOSSY, "RGB"),
    "I04 turned left": (lambda: turned(8), LOSSY, "RGB"),
    "I06 avif": (saved("AVIF"), LOSSY, "RGB"),
    "V09 gif that moves: its first frame": (pictures.animation, SAME, "RGB"),
}

BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "I05 half a jpeg": (pictures.truncated, "damaged or cut off"),
    "I06 heic": ((FIXTURES / "a.heic").read_bytes, "HEIC"),
    "M22 a page named jpg": (lambda: b"<!doctype html><html><body>no</body></html>", "not a picture"),
}


@both
@pytest.mark.parametrize("name", GOOD)
def test_a_good_picture_is_seen_upright_in_its_colours(served: Served, name: str) -> None:
    make, most, mode = GOOD[name]
    answer = chat(served, url_part("image", make(), "image/jpeg"))
    (seen,) = answer.media
    assert isinstance(seen, Video)
    assert seen.still
    want = np.asarray(as_mode(mode).convert("RGB")).astype(int)
    assert seen.frames.shape == (1, *want.shape)
    assert np.abs(seen.frames[0].astype(int) - want).mean() <= most
    if mode == "RGB":
        assert np.abs(seen.frames[0, 20, 200].astype(int) - pictures.RED).max() < 40
        assert np.abs(seen.frames[0, 280, 200].astype(int) - pictures.BLUE).max() < 40
    if most == SAME and mode == "RGB":
        assert answer.text == chat(served, url_part("image", make_picture(picture(), "PNG"))).text


@both
@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_in_words_and_the_next_is_seen(served: Served, name: str) -> None:
    make, words = BAD[name]
    part = url_part("image", make(), "image/jpeg")
    assert words in refused(served, lambda: chat(served, part), "messages[0].content[0].image_url")
    assert chat(served, url_part("image", make_picture(picture(), "PNG"))).media
