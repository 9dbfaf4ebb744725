"""What people send, as the shipped server understands it: checkpoints that hear and see, so that an answer can be right.

The other tests of this folder look at what reaches the engine; these look at what comes out. One question, spoken by a
voice that ASR never heard, and one drawn scene go in as every kind of file, and the answers have to stay the same.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import av
import numpy as np
import openai
import pytest
from PIL import Image

from aura_omni.flow import SILENT_TEXT, SPEECH_RATE
from aura_omni.media.audio import resample
from tests.cases import pictures, sounds, test_pictures
from tests.cases.ask import url_part
from tests.cases.clips import FAST_VPX, LIVE, QUIET
from tests.media_files import make_audio, make_picture, make_video
from tests.nano.shown import Camera, colours_of
from tests.served import ROOT, Server
from training.asr.opus import clips

QUESTION = "What do you see?"
RIGHT = "The red circle is moving."  # of the clip of the examples, as the README has it


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    server = Server(log=tmp_path_factory.mktemp("nano") / "log")
    try:
        url = f"{server.wait().url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        server.stop()


@cache
def spoken() -> np.ndarray:
    """float32 [n] at 48 kHz: the question."""
    recorded = clips(ROOT / "tests/nano/spoken/rms.opus")
    samples = next(samples for samples, text in recorded if text == QUESTION)
    return resample(samples.astype(np.float32) / 32_768, SPEECH_RATE, sounds.RATE)


@pytest.fixture(autouse=True)
def question_as_the_voice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of `sounds` are made of the question."""
    monkeypatch.setattr(sounds, "voice", spoken)


def transcript(client: openai.OpenAI, data: bytes, **fields: Any) -> str:
    file = ("blob", data, "application/octet-stream")
    return client.audio.transcriptions.create(model="aura-nano", file=file, **fields).text


def answer(client: openai.OpenAI, *parts: dict[str, Any], **fields: Any) -> str | None:
    messages = [{"role": "user", "content": list(parts)}]
    fields.setdefault("modalities", ["text"])
    return client.chat.completions.create(model="aura-nano", messages=messages, **fields).choices[0].message.content


def input_audio(data: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def written(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@cache
def star() -> dict[str, Any]:
    """A picture to ask about aloud."""
    (frame,) = Camera(11, height=480, width=640, colours=colours_of("big green star")).chunk("big green star", frames=1)
    return url_part("image", make_picture(Image.fromarray(frame), "PNG"), "image/png")


SEES_STAR = "I see a green star."


# ---------------------------------------------------------------- sound


def browser() -> bytes:
    return sounds.coded("webm", "libopus", "flt", live=True, options=sounds.LIVE)()


def closed_tab() -> bytes:
    """Cut in the silence after the question."""
    samples = np.concatenate([spoken(), np.zeros(sounds.RATE, np.float32)])
    whole = make_audio(
        samples, sounds.RATE, "webm", "libopus", "flt", live=True, options={**sounds.LIVE, "cluster_time_limit": "200"}
    )
    return whole[: int(0.97 * len(whole))]


RECORDINGS: dict[str, Callable[[], bytes]] = {
    "M01 recorder of a browser, live webm": browser,
    "M02 the same cut off by a closed tab": closed_tab,
    "M06 m4a": sounds.coded("ipod", "aac", "fltp"),
    "M07 fragmented mp4": sounds.coded(
        "mp4", "aac", "fltp", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    ),
    "M08 mp3 with a cover": sounds.with_cover,
    "M11 flac of 96 kHz and 24 bits": sounds.coded("flac", "flac", "s32", rate=96_000),
    "M12 ogg opus": sounds.coded("ogg", "libopus", "flt"),
    "M12 ogg vorbis": sounds.ogg_vorbis,
    "M13 wav, mu-law": sounds.coded("wav", "pcm_mulaw", "s16", rate=8_000),
    "M13 wav, a-law": sounds.coded("wav", "pcm_alaw", "s16", rate=8_000),
    "M14 wav, 8 bits unsigned": sounds.coded("wav", "pcm_u8", "u8"),
    "M14 wav, 24 bits": sounds.coded("wav", "pcm_s24le", "s32"),
    "M14 wav, 32 bits": sounds.coded("wav", "pcm_s32le", "s32"),
    "M14 wav, float": sounds.base,
    "M14 wav, double": sounds.coded("wav", "pcm_f64le", "dbl"),
    "M15 wav with the extensible header": sounds.extensible,
    "M16, A02 the right channel alone": lambda: sounds.one_of(2),
    **{
        f"M16, A02 surround sound, channel {channel}": partial(sounds.surround, channel)
        for channel in range(sounds.SURROUND)
    },
    "M21 very quiet": lambda: sounds.louder(-45),
    "M21 with an offset": sounds.with_offset,
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_question_is_understood_in_every_kind_of_file(client: openai.OpenAI, name: str) -> None:
    assert transcript(client, RECORDINGS[name]()) == QUESTION


def test_m21_a_clipped_question_is_heard_as_some_words(client: openai.OpenAI) -> None:
    """30 dB over full scale leaves little of a voice but its zero crossings: nano hears speech in it, not these words."""
    assert transcript(client, sounds.louder(30))


def test_m21_a_slightly_clipped_question_is_understood(client: openai.OpenAI) -> None:
    assert transcript(client, sounds.louder(12)) == QUESTION


def test_a01_a_question_recorded_by_a_browser_is_answered_however_it_is_labelled(client: openai.OpenAI) -> None:
    for part in (
        url_part("audio", browser(), "audio/webm;codecs=opus"),
        input_audio(base64.b64encode(browser()).decode()),  # a wav, it says
    ):
        assert answer(client, star(), part) == SEES_STAR


def test_a05_every_spelling_of_a_question_is_answered(client: openai.OpenAI) -> None:
    data = sounds.base()
    bare = base64.b64encode(data).decode()
    for part in (
        input_audio(bare),
        input_audio(f"data:audio/wav;base64,{bare}"),
        url_part("audio", data, "audio/wav"),
        input_audio(base64.encodebytes(data).decode()),  # with line breaks
        input_audio(base64.urlsafe_b64encode(data).decode()),
    ):
        assert answer(client, star(), part) == SEES_STAR


@pytest.mark.parametrize("language", ["en", "EN", "en-US", "English", "", "auto"])
def test_a07_the_language_of_a_question_may_be_said_in_every_spelling(client: openai.OpenAI, language: str) -> None:
    assert transcript(client, sounds.base(), language=language) == QUESTION


def test_a07_an_unknown_language_is_refused_with_the_known_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"klingon.*English") as refusal:
        transcript(client, sounds.base(), language="klingon")
    assert refusal.value.param == "language"


@pytest.mark.parametrize("make", [sounds.silence, sounds.faint_noise, sounds.tone], ids=["silence", "noise", "tone"])
def test_a17_m18_where_nobody_speaks_there_is_no_text_and_no_answer(
    client: openai.OpenAI, make: Callable[[], bytes]
) -> None:
    assert transcript(client, make()) == ""
    assert answer(client, url_part("audio", make())) == SILENT_TEXT


# ---------------------------------------------------------------- A06


def test_a06_text_is_text_alone_streamed_or_not(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}], "modalities": ["text"]}
    (choice,) = client.chat.completions.create(model="aura-nano", **asked).choices
    assert choice.message.audio is None
    stream = client.chat.completions.create(model="aura-nano", stream=True, **asked)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert all(getattr(delta, "audio", None) is None for delta in deltas)


def test_a06_audio_is_the_text_spoken_streamed_or_not(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hello."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16", "voice": ""},
    }
    (choice,) = client.chat.completions.create(model="aura-nano", **asked).choices
    stream = client.chat.completions.create(model="aura-nano", stream=True, **asked)
    deltas = [
        choice.delta.to_dict() for chunk in stream for choice in chunk.choices
    ]  # whose audio newer clients have a type for
    sound = b"".join(base64.b64decode((delta.get("audio") or {}).get("data") or "") for delta in deltas)
    assert sound == base64.b64decode(choice.message.audio.data)
    assert len(sound) > 24_000


# ---------------------------------------------------------------- pictures and clips


@cache
def circle_on_top() -> Image.Image:
    scene = "red circle top left, blue square bottom right"
    (frame,) = Camera(21, height=480, width=640, colours=colours_of(scene)).chunk(scene, frames=1)
    return Image.fromarray(frame)


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a03_a_turned_photo_is_seen_as_the_upright_one(
    client: openai.OpenAI, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = written("Where is the red circle?")
    upright = answer(client, url_part("image", make_picture(circle_on_top(), "JPEG", quality=95)), where)
    assert upright == "The red circle is at the top left."
    monkeypatch.setattr(pictures, "picture", circle_on_top)
    assert answer(client, url_part("image", pictures.turned(orientation)), where) == upright


IN_COLOUR = [name for name, (_, _, mode) in test_pictures.GOOD.items() if mode in ("RGB", "P")]


@pytest.mark.parametrize("name", IN_COLOUR)
def test_a_picture_is_understood_in_every_kind_of_file(
    client: openai.OpenAI, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "picture", circle_on_top)
    make, _, _ = test_pictures.GOOD[name]
    part = url_part("image", make(), "image/jpeg")
    assert answer(client, part, written("Where is the red circle?")) == "The red circle is at the top left."


@cache
def shapes() -> tuple[list[np.ndarray], list[int]]:
    """The frames of the clip of the examples, uint8 [height, width, 3], and their times in ms."""
    path = ROOT / "examples/online_serving/aura_omni/shapes_clip.mp4"
    with av.open(str(path)) as file:
        frames = [(frame.to_ndarray(format="rgb24"), round(1_000 * frame.time)) for frame in file.decode(video=0)]
    return [picture for picture, _ in frames], [time_ms for _, time_ms in frames]


def coded_shapes(container: str, codec: str, *, sound: bool = False, **more: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        return make_video(*shapes(), container, codec, sound=spoken() if sound else None, **more)

    return make


FILMS: dict[str, Callable[[], bytes]] = {
    "V01 mp4, h264 and aac": coded_shapes("mp4", "libx264", sound=True),
    "V02 webm, vp8": coded_shapes("webm", "libvpx", options=FAST_VPX),
    "V02 webm, vp9": coded_shapes("webm", "libvpx-vp9", options=FAST_VPX),
    "V03 recorder of a browser, live webm": coded_shapes("webm", "libvpx", sound=True, options=FAST_VPX, **LIVE),
    "V04 mov of a phone, hevc": coded_shapes(
        "mov", "libx265", sound=True, options={**QUIET, "preset": "ultrafast"}, tag="hvc1"
    ),
    "V05 no sound": coded_shapes("mp4", "libx264"),
}


@pytest.mark.parametrize("name", FILMS)
def test_a_clip_is_understood_in_every_kind_of_file(client: openai.OpenAI, name: str) -> None:
    assert answer(client, url_part("video", FILMS[name]()), written("What is moving?")) == RIGHT
