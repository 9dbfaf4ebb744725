"""A01-A05, A07 of the reports: what people send to such servers and what had become of it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from aura_omni.flow import SPEECH_RATE
from aura_omni.media.audio import resample
from tests.cases import sounds
from tests.cases.ask import chat, engine_got, refused, transcribe, url_part
from tests.cases.conftest import Served, both
from tests.cases.pictures import BLUE, RED, picture
from tests.cases.sounds import SECONDS, one_of, voice
from tests.media_files import likeness, make_picture

INPUT_AUDIO = "messages[0].content[0].input_audio"


def input_audio(data: str, audio_format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": audio_format}}


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a01_a_browser_recording_is_heard_whole_however_it_is_labelled(served: Served) -> None:
    recording = sounds.browser()
    transcribe(served, recording)
    heard = [engine_got(served)]
    for part in (
        url_part("audio", recording, "audio/webm;codecs=opus"),
        input_audio(base64_of(recording), "wav"),  # which is a lie
    ):
        heard += chat(served, part).media
    assert len({sound.key for sound in heard}) == 1
    assert heard[0].duration_s == pytest.approx(SECONDS, abs=0.02)
    assert likeness(*(resample(samples, 48_000, SPEECH_RATE) for samples in (heard[0].samples, voice()))) > 0.96


@pytest.mark.parametrize("channels", range(1, 9))
def test_a02_the_channels_are_mixed_whichever_of_them_speaks(served: Served, channels: int) -> None:
    text = transcribe(served, one_of(channels)).text
    np.testing.assert_allclose(engine_got(served).samples, voice() / channels, atol=1e-7)
    assert text == transcribe(served, sounds.wav(voice() / channels)).text


@pytest.mark.parametrize("channel", range(sounds.SURROUND))
def test_a02_every_channel_of_surround_sound_is_heard(served: Served, channel: int) -> None:
    text = transcribe(served, sounds.surround(channel)).text
    np.testing.assert_allclose(engine_got(served).samples, voice() / sounds.SURROUND, atol=1e-7)
    assert text == transcribe(served, sounds.wav(voice() / sounds.SURROUND)).text


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a03_a_photo_reaches_the_model_upright(served: Served, kind: str, orientation: int) -> None:
    undo = dict(
        enumerate(
            (
                None,
                Image.Transpose.FLIP_LEFT_RIGHT,
                Image.Transpose.ROTATE_180,
                Image.Transpose.FLIP_TOP_BOTTOM,
                Image.Transpose.TRANSPOSE,
                Image.Transpose.ROTATE_90,
                Image.Transpose.TRANSVERSE,
                Image.Transpose.ROTATE_270,
            ),
            start=1,
        )
    )[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture() if undo is None else picture().transpose(undo)
    (seen,) = chat(served, url_part("image", make_picture(stored, kind, exif=exif))).media
    (frame,) = seen.frames.astype(int)
    assert frame.shape == (300, 400, 3)
    assert np.abs(frame[:50] - RED).mean() < 8
    assert np.abs(frame[250:] - BLUE).mean() < 8


@both
@pytest.mark.parametrize("response_format", ["json", "verbose_json", "text"])
def test_a04_broken_or_empty_sound_is_never_heard(served: Served, response_format: Any) -> None:
    for data, words in ((sounds.no_samples(), "no samples"), (sounds.with_one(np.nan), "NaN")):
        message = refused(served, lambda data=data: transcribe(served, data, response_format=response_format), "file")
        assert words in message
    for data in (sounds.ten_ms(), sounds.silence()):
        heard = transcribe(served, data, response_format=response_format)
        assert getattr(heard, "text", heard) == ""


@both
def test_a04_a_short_clip_has_its_true_duration_and_no_language(served: Served) -> None:
    heard = transcribe(served, sounds.ten_ms(), response_format="verbose_json")
    assert (heard.duration, heard.language) == (0.01, "")


@both
def test_a05_every_spelling_of_one_sound_is_one_sound(served: Served) -> None:
    data = sounds.base()
    bare = base64_of(data)
    spellings = [
        input_audio(bare),
        input_audio(f"data:audio/wav;base64,{bare}"),
        url_part("audio", data, "audio/wav"),
        input_audio(base64.encodebytes(data).decode()),  # with line breaks
        input_audio(base64.urlsafe_b64encode(data).decode()),
    ]
    answers = [chat(served, part) for part in spellings]
    assert len({answer.media[0].key for answer in answers}) == 1
    assert len({(answer.text, *answer.transcripts) for answer in answers}) == 1


@both
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (base64_of(sounds.no_samples())[:-1], "cut off"),
        ("", "empty"),
        ("!" * 8, "nor base64"),
        ("data:audio/wav,x", "form"),
    ],
)
def test_a05_broken_base64_is_refused_and_names_the_part(served: Served, data: str, words: str) -> None:
    assert words in refused(served, lambda: chat(served, input_audio(data)), INPUT_AUDIO)


@both
def test_a05_base64_that_ends_early_is_heard_up_to_there_or_refused(served: Served) -> None:
    """Cut at a multiple of four it is whole base64 of a file that is cut off."""
    bare = base64_of(sounds.base())
    (got,) = chat(served, input_audio(bare[: len(bare) // 8 * 4])).media
    assert got.duration_s == pytest.approx(SECONDS / 2, abs=0.01)


@pytest.mark.parametrize("language", ["en", "EN", "en-US", "English", "ENGLISH"])
def test_a07_a_language_is_understood_in_every_spelling(served: Served, language: str) -> None:
    def asked(**fields: str) -> tuple[str, int]:
        heard = transcribe(served, sounds.base(), **fields)
        return heard.text, heard.usage.input_tokens

    found_out, told = asked(), asked(language=language)
    assert told == asked(language="english")
    assert told[1] > found_out[1], "the hint is in the prompt"


@pytest.mark.parametrize("language", ["zh_CN", "zh-Hans", "Chinese", "de-DE", "pt-BR", "", "auto"])
def test_a07_other_languages_and_none_are_taken(served: Served, language: str) -> None:
    assert transcribe(served, sounds.base(), language=language).usage.input_tokens


def test_a07_an_unknown_language_is_refused_with_the_known_ones(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"klingon.*English") as refusal:
        transcribe(served, sounds.base(), language="klingon")
    assert (refusal.value.param, refusal.value.status_code) == ("language", 400)
