"""A16, A25 and A26 of the reports: speech that ends, of the words and not of their marks, whole numbers and names in it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from aura_omni.config import SpeechConfig
from aura_omni.flow import FRAME_S, VOICE_RATE
from aura_omni.media.audio import decode_audio
from aura_omni.stages.aura import AuraStage
from aura_omni.stages.talker import TalkerStage
from tests.cases.conftest import Served, both, read_by, served_with
from tests.family import Script, config

# ---------------------------------------------------------------- A16

SHORT = ["1.", "OK", "2次", "嗯", "a", "Привет!"]


@pytest.fixture(scope="module")
def endless() -> Iterator[Served]:
    """A Talker that never says that it is done, and a frame budget of over a minute."""
    never = {"default_sampling_params": {"ignore_eos": True, "max_tokens": 900, "min_tokens": 0}}
    with served_with(config(talker=never)) as served:
        yield served


def longest_s(text: str) -> float:
    """Of what a text may become, if each of its bytes is a token, as it is to the tiny family."""
    limits = SpeechConfig()
    return (limits.spare_frames + limits.frames_per_token * (len(text.encode()) + 3)) * FRAME_S


@pytest.mark.parametrize("text", SHORT)
def test_a16_speech_of_a_short_text_ends_soon_and_says_that_it_was_stopped(endless: Served, text: str) -> None:
    body = {"voice": "vivian", "input": text}
    answer = httpx.post(f"{endless.url}/v1/audio/speech", json=body, timeout=60)
    assert answer.status_code == 200
    assert decode_audio(answer.content, max_s=90).duration_s <= longest_s(text)
    assert answer.headers["x-audio-finish-reason"] in ("length", "loop", "silence")


def test_a16_in_a_chat_the_reason_stands_beside_the_text(endless: Served) -> None:
    (choice,) = endless.client.chat.completions.create(
        model=endless.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    ).choices
    sound = decode_audio(base64.b64decode(choice.message.audio.data), max_s=90)
    assert sound.duration_s <= longest_s(choice.message.content)
    assert choice.model_extra["audio_finish_reason"] in ("length", "loop", "silence")


def test_a16_a_trained_voice_that_may_not_end_is_stopped_and_says_so(nano: Served) -> None:
    talker = {"ignore_eos": True, "max_tokens": 900, "min_tokens": 0}
    (choice,) = nano.client.chat.completions.create(
        model=nano.model,
        messages=[{"role": "user", "content": "Hello."}],
        modalities=["text", "audio"],
        extra_body={"sampling_params_list": [{}, {"max_tokens": 2}, talker, {}]},
    ).choices
    sound = decode_audio(base64.b64decode(choice.message.audio.data), max_s=90)
    assert sound.duration_s <= longest_s(choice.message.content)
    assert choice.model_extra["audio_finish_reason"] in ("length", "loop", "silence")


def test_a16_a_long_text_has_a_long_budget(endless: Served) -> None:
    """Tight caps clip slow speech: there is room for four times as much as a text needs."""
    words = "Every word of this sentence has its time. " * 3
    body = {"voice": "vivian", "input": words}
    answer = httpx.post(f"{endless.url}/v1/audio/speech", json=body, timeout=60)
    assert decode_audio(answer.content, max_s=90).duration_s >= 0.4 * len(words.split())


LONGEST_S = 5.0


def test_a16_fifty_runs_of_short_texts_by_a_voice_that_ends_stay_short(nano: Served) -> None:
    """And the guard has to stop none of them."""

    def run(number: int) -> tuple[str, float, str]:
        text, voice = SHORT[number % len(SHORT)], ("ryan", "vivian", "uncle_fu")[number % 3]
        body = {"voice": voice, "input": text, "seed": number, "response_format": "wav"}
        answer = httpx.post(f"{nano.url}/v1/audio/speech", json=body, timeout=60)
        assert answer.status_code == 200
        seconds = decode_audio(answer.content, max_s=90).duration_s
        return text, seconds, answer.headers["x-audio-finish-reason"]

    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(run, range(50)))
    for text, seconds, reason in runs:
        assert reason == "stop", text
        assert 2 * FRAME_S <= seconds <= LONGEST_S, text


# ---------------------------------------------------------------- to the last word

ANSWER = (
    "A red circle and a blue square meet in the middle of a big picture, and a pink heart looks on from the left. "
    "The circle is small and the square is big, but the heart is black. "
    "They all move to the right, and a green star comes from the top."
)
WORD_S = (0.18, 0.35)  # of an unhurried voice


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_long_answer_is_spoken_to_its_last_word_by_one_prompt(
    nano: Served, given: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It comes a character at a time while the Talker speaks, and the Talker ends by itself."""
    prompts = []
    prompt = TalkerStage.prompt
    monkeypatch.setattr(TalkerStage, "prompt", lambda *asked: prompts.append(asked) or prompt(*asked))
    monkeypatch.setattr(AuraStage, "reader", lambda *_: Script(ANSWER))
    written = {"max_tokens": len(ANSWER), "min_tokens": len(ANSWER)}
    answer = nano.client.chat.completions.create(
        model=nano.model,
        messages=[{"role": "user", "content": "What do you see?"}],
        modalities=["text", "audio"],
        audio={"voice": "ryan", "format": "pcm16"},
        extra_body={
            "sampling_params_list": [{}, written, {}, {}],
            "additional_information": {"tts_non_streaming_mode": False},
        },
        stream=stream,
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    parts = [(choice.delta if stream else choice.message).to_dict() for choice in choices]
    sound = b"".join(base64.b64decode((part.get("audio") or {}).get("data") or "") for part in parts)
    assert "".join(part.get("content") or "" for part in parts) == ANSWER
    assert choices[-1].model_extra["audio_finish_reason"] == "stop"
    assert read_by(nano).decode(given["talker"]).strip() == ANSWER.lower()
    assert len(prompts) == 1
    assert WORD_S[0] < len(sound) / 2 / VOICE_RATE / len(ANSWER.split()) < WORD_S[1]


# ---------------------------------------------------------------- A25 and A26: what the Talker reads


Spoken = Callable[..., tuple[str, str]]


@pytest.fixture
def spoken(served: Served, given: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> Spoken:
    """spoken(text) has AURA write text, a character at a time: what the user sees of it, and what the Talker reads."""
    tokenizer = read_by(served)

    def say(text: str, **fields: Any) -> tuple[str, str]:
        given["talker"].clear()
        monkeypatch.setattr(AuraStage, "reader", lambda *_: Script(text))
        length = len(text)
        frames = length + 40  # the Talker still speaks when the last of the text comes
        body = {
            "messages": [{"role": "user", "content": "What is the plan?"}],
            "sampling_params_list": [
                {},
                {"max_tokens": length, "min_tokens": length},
                {"max_tokens": frames, "min_tokens": frames},
            ],
            "modalities": ["text", "audio"],
            **fields,
        }
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"], tokenizer.decode(given["talker"]).strip()

    return say


MARKED_UP = (
    "# The plan\n\nIt is *very* **bold**:\n\n- first\n- second\n\n| Name | Age |\n|---|---|\n| Ann | seven |\n\n"
    "See [the shop](https://shop.test/x?y=1), then a_b_c, `snake_case`, 2*3*4 and C#. 😀👩‍👩‍👧\n\n```py\nsecret = 1\n```\nThat is all."
)


@both
@pytest.mark.parametrize("at_once", [False, True], ids=["as it is written", "all at once"])
def test_a25_the_voice_reads_words_and_the_screen_shows_what_was_written(
    served: Served, spoken: Spoken, at_once: bool
) -> None:
    fold = str.lower if served.trained else str  # its vocabulary has small letters alone
    shown, read = spoken(MARKED_UP, additional_information={"tts_non_streaming_mode": at_once})
    assert shown == MARKED_UP
    for mark in ("# ", "**", "*very*", "|", "---", "`", "](", "https", "😀", "👩", "secret"):
        assert mark not in read
    for word in ("The plan", "very bold", "first", "second", "Name", "Age", "Ann", "the shop", "That is all."):
        assert fold(word) in read
    for kept in ("a_b_c", "snake_case", "2*3*4", "C#"):
        assert fold(kept) in read


@pytest.mark.parametrize("written", ["```py\nx = 1\n```", "😀 👍🏽", "***"])
def test_a25_where_there_is_no_word_nothing_is_spoken(spoken: Spoken, written: str) -> None:
    assert spoken(written) == (written, "")


@both
def test_a26_numbers_names_and_addresses_stay_whole(served: Served, spoken: Spoken) -> None:
    fold = str.lower if served.trained else str
    written = "Dr. Weiss sold 2.5 kg for $7.20 at 8:45 p.m. to A. B. Cole, see shop.test v3.1. Done! 好的。他说:“走。”然后离开。"
    shown, read = spoken(written)
    assert shown == written
    for whole in (
        "Doctor Weiss sold two point five kilograms for seven dollars and twenty cents at eight forty-five PM to A B Cole, see",
        "shop dot test",
        "three point one",
    ):
        assert fold(whole) in read
    # The sentence has one end, whatever stands in its words; closing quotes stay with theirs.
    assert read.index(fold("Done!")) > read.index("three point one")
    assert "“走。”" in read


# What is one to the ear comes in two words, and with a stop or a comma inside: each alone would be read another way.
JOINED = {
    "2.5 kg": "two point five kilograms",
    "1 kg": "one kilogram",
    "$7.20": "seven dollars and twenty cents",
    "$3 million": "three million dollars",
    "20 EUR": "twenty euros",
    "8:45 p.m.": "eight forty-five PM",
    "9 a.m.": "nine AM",
    "21 °C": "twenty-one degrees Celsius",
    "90 km/h": "ninety kilometers per hour",
    "1,200 m": "one thousand two hundred meters",
    "50 %": "fifty percent",
    "May 3rd": "May third",
    "3 May": "the third of May",
    "No. 5": "number five",
    "v3.1": "version three point one",
}


@pytest.mark.parametrize("written", JOINED)
def test_a26_a_number_is_read_as_one_with_its_unit(spoken: Spoken, written: str) -> None:
    sentence = f"You said that it was {written} when we last spoke."
    shown, read = spoken(sentence)
    assert shown == sentence
    assert read == f"You said that it was {JOINED[written]} when we last spoke."


def test_a26_a_number_without_a_unit_takes_none_of_the_next_word(spoken: Spoken) -> None:
    assert spoken("I saw 2 men, 3 ms and 5.")[1] == "I saw two men, three milliseconds and five."


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a26_however_the_text_comes_the_voice_reads_the_same(
    spoken: Spoken, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "Dr. Weiss paid $7.20 at 8:45 p.m. for 2.5 kg. Done!"
    _, by_character = spoken(written)
    pieces = [written[start : start + cut] for start in range(0, len(written), cut)]
    monkeypatch.setattr(Script, "__init__", lambda script, _: setattr(script, "_rest", iter(pieces)))
    assert spoken(written)[1] == by_character
