"""What measures the voice as it is served: on two texts, and that it would see what it looks for."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from tests.served import ROOT
from training.tts import served
from training.tts.served import level_of, median_pitch, of_all_lengths, roughness

QUESTION = ROOT / "examples/online_serving/aura_omni/shapes_question.wav"


def vowel(seconds: float = 1.0, hertz: float = 110.0) -> np.ndarray:
    time = np.arange(int(24_000 * seconds)) / 24_000
    return sum(0.1 / n * np.sin(2 * np.pi * hertz * n * time) for n in range(1, 20)).astype(np.float32)


def test_a_click_stands_out_and_a_vowel_does_not():
    sound = vowel()
    assert roughness(sound) < 10
    sound[12_000:] += 0.2  # a step, as between two chunks that do not meet
    assert roughness(sound) > 50


def test_level_and_pitch_of_a_tone():
    tone = 0.1 * np.sin(2 * np.pi * 200 * np.arange(24_000) / 24_000).astype(np.float32)
    assert level_of(tone) == pytest.approx((-23.0, -20.0), abs=0.1)
    assert median_pitch(vowel(hertz=110)) == pytest.approx(110, rel=0.02)


def test_texts_that_must_end_have_all_lengths():
    lengths = [len(text) for text in of_all_lengths(50, 1, ["domain"])]
    assert lengths[0] == 1
    assert np.abs(np.array(lengths) - np.linspace(1, 200, 50)).max() <= 2  # a space at the cut goes


@pytest.mark.parametrize(
    "arguments",
    [("words",), ("ends",), ("speed",), ("clone", "--reference", str(QUESTION), "What is moving?")],
    ids=lambda arguments: arguments[0],
)
def test_each_measure_says_what_it_found(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["served", *arguments, "--smoke", "--kinds", "domain"])
    served.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0]["what"] == arguments[0]
    if arguments[0] == "words":
        assert lines[0]["ended"] == "2 of 2"
        assert lines[0]["word_error"] < 0.5
