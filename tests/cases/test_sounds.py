"""Every kind of recording, sent to the running server: heard as the voice it was made from, or refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from aura_omni.flow import SILENT_TEXT, SPEECH_RATE
from aura_omni.media.audio import resample
from tests.cases import sounds
from tests.cases.ask import chat, engine_got, refused, transcribe, url_part
from tests.cases.conftest import Served, both
from tests.cases.sounds import SECONDS, coded, louder, one_of, with_one
from tests.media_files import likeness

SAME = 1.0  # to the last bit
# AAC begins a third of a 16 kHz sample early or late, which costs a few hundredths
LOSSLESS, LOSSY, TELEPHONE, CLIPPED = 0.999, 0.96, 0.95, 0.6

GOOD: dict[str, tuple[Callable[[], bytes], float]] = {
    "M01 recorder of a browser, live webm": (sounds.browser, LOSSY),
    "M02 the same cut off by a closed tab": (sounds.closed_tab, LOSSY),
    "M06 m4a, index behind": (coded("ipod", "aac", "fltp"), LOSSY),
    "M06 m4a, index in front": (coded("ipod", "aac", "fltp", options={"moov_size": "8000"}), LOSSY),
    "M07 fragmented mp4": (
        coded("mp4", "aac", "fltp", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
        LOSSY,
    ),
    "M08 mp3 with a cover": (sounds.with_cover, LOSSY),
    "M11 flac of 96 kHz and 24 bits": (coded("flac", "flac", "s32", rate=96_000), LOSSLESS),
    "M12 ogg opus": (coded("ogg", "libopus", "flt"), LOSSY),
    "M12 ogg vorbis": (sounds.ogg_vorbis, LOSSY),
    "M13 wav, mu-law": (coded("wav", "pcm_mulaw", "s16", rate=8_000), TELEPHONE),
    "M13 wav, a-law": (coded("wav", "pcm_alaw", "s16", rate=8_000), TELEPHONE),
    "M14 wav, 8 bits unsigned": (coded("wav", "pcm_u8", "u8"), 0.99),
    "M14 wav, 16 bits": (coded("wav", "pcm_s16le", "s16"), SAME),
    "M14 wav, 24 bits": (coded("wav", "pcm_s24le", "s32"), SAME),
    "M14 wav, 32 bits": (coded("wav", "pcm_s32le", "s32"), SAME),
    "M14 wav, float": (sounds.base, SAME),
    "M14 wav, double": (coded("wav", "pcm_f64le", "dbl"), SAME),
    "M15 wav with the extensible header": (sounds.extensible, SAME),
    "M16 one channel of two": (lambda: one_of(2), LOSSLESS),
    "M16 one channel of eight": (lambda: one_of(8), LOSSLESS),
    **{
        f"M16 surround sound, channel {channel}": (partial(sounds.surround, channel), LOSSLESS)
        for channel in range(sounds.SURROUND)
    },
    "M21 clipped": (lambda: louder(30), CLIPPED),
    "M21 very quiet": (lambda: louder(-45), LOSSLESS),
    "M21 with an offset": (sounds.with_offset, LOSSLESS),
}

BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "M03 a slice without its header": (sounds.later_slice, "header is missing"),
    "M04 a header and nothing more": (sounds.header_alone, "nothing follows"),
    "M04 300 bytes": (lambda: sounds.browser()[:300], "no samples|nothing follows"),
    "M17 a wav of no samples": (sounds.no_samples, "no samples"),
    "M17 no bytes": (lambda: b"", "empty"),
    "M20 a sample that is no number": (lambda: with_one(np.nan), "NaN or infinite"),
    "M20 an infinite sample": (lambda: with_one(-np.inf), "NaN or infinite"),
    "M22 a text named wav": (lambda: b"hello\n", "no audio or video file"),
    "M22 a page": (lambda: b"<!doctype html><html><body>no</body></html>", "no audio or video file"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_recording_is_heard_as_the_voice_it_was_made_from(served: Served, name: str) -> None:
    make, alike = GOOD[name]
    text = transcribe(served, make()).text
    got = engine_got(served)
    answer = chat(served, url_part("audio", make(), "audio/wav"))
    (same,) = answer.media
    assert same.key == got.key, "a file is one sound, however it is sent"
    assert answer.transcripts == [text]

    cut = "cut off" in name
    assert 0.6 * SECONDS < got.duration_s < 0.8 * SECONDS if cut else abs(got.duration_s - SECONDS) < 0.06
    assert np.abs(got.samples).max() <= 1
    heard, meant = (resample(samples, rate, SPEECH_RATE) for samples, rate in (
        (got.samples, got.rate), (sounds.voice(), sounds.RATE),
    ))  # fmt: skip
    if alike < SAME:
        assert likeness(heard, meant[: len(heard)] if cut else meant) > alike
        return
    np.testing.assert_array_equal(got.samples, sounds.voice())
    assert text == transcribe(served, sounds.base()).text


@both
@pytest.mark.parametrize("name", BAD)
def test_a_bad_recording_is_refused_in_words_and_the_next_is_heard(served: Served, name: str) -> None:
    make, words = BAD[name]
    data = make()
    part = url_part("audio", data, "audio/wav")
    assert re.search(words, refused(served, lambda: transcribe(served, data), "file"))
    assert re.search(words, refused(served, lambda: chat(served, part), "messages[0].content[0].audio_url"))
    assert transcribe(served, sounds.base()).text


@both
@pytest.mark.parametrize("make", [sounds.silence, sounds.faint_noise, sounds.tone], ids=["silence", "noise", "tone"])
def test_m18_where_nobody_speaks_nothing_is_heard_and_nothing_answered(
    served: Served, make: Callable[[], bytes]
) -> None:
    heard = transcribe(served, make(), response_format="verbose_json")
    assert (heard.text, heard.language, heard.duration) == ("", "", 5.0)
    content = [url_part("audio", make())]
    answer = served.client.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": content}], modalities=["text", "audio"]
    )
    assert answer.choices[0].message.content == SILENT_TEXT
    assert answer.choices[0].message.audio is None
    assert answer.usage.completion_tokens == 0


@both
def test_m19_a_clip_of_ten_milliseconds_is_an_empty_text_of_its_true_duration(served: Served) -> None:
    heard = transcribe(served, sounds.ten_ms(), response_format="verbose_json")
    assert (heard.text, heard.language, heard.duration) == ("", "", 0.01)


@both
def test_m08_a_cover_is_no_video(served: Served) -> None:
    part = url_part("video", sounds.with_cover(), "video/mp4")
    assert "no video track" in refused(served, lambda: chat(served, part), "messages[0].content[0].video_url")
