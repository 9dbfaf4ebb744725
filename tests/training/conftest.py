"""Made-up material, trained on for a few steps by every script of the speaker and the recogniser."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aura_omni.engine.loader import Checkpoint
from training.asr import train
from training.tts import shape
from training.tts.phones import PHONES
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS

TEXTS = ("A red ball.", "Two blue stars on the left.", "Nothing moves.", "I see it.")
FRAMES = 24


def run(script: str, *arguments: object) -> None:
    before, sys.argv = sys.argv, [script, *map(str, arguments)]
    try:
        importlib.import_module(f"training.tts.{script}").main()
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Twelve made-up clips, trained on by every script for two steps, and exported."""
    home = tmp_path_factory.mktemp("tts")
    random = np.random.default_rng(0)
    (home / "clips").mkdir()
    lines = []
    for number in range(12):
        phones = random.integers(1, PHONES, 2 * FRAMES)
        spans = [[int(phone), 0.04 * slot, 0.04 * (slot + 1)] for slot, phone in enumerate(phones)]
        lines.append(
            {"text": TEXTS[number % 4], "held_out": number > 9, "kind": ("domain", "general")[number % 2],
             "speaker": SPEAKERS[number % 3].name, "samples": FRAMES * FRAME_SAMPLES, "spans": spans}
        )  # fmt: skip
    (home / "clips/index.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sound = random.normal(0, 2_000, 12 * FRAMES * FRAME_SAMPLES).astype("<i2")
    sound.tofile(home / "clips/sound.s16")
    shape.train_tokenizer(list(TEXTS) * 10).save(str(home / "tokenizer.json"))
    clips, raw = home / "clips", home / "clips/sound.s16"
    run("corpus", "--times", clips, "--sound", clips, "--out", home / "corpus.npz", "--opus", home / "sound.ogg")
    data = ("--corpus", home / "corpus.npz", "--out", home, "--smoke")
    run("train_wave", *data, "--sound", home / "sound.ogg")
    run("train_wave", *data, "--sound", raw, "--resume", home / "wave.pt")
    run("train_encoder", *data, "--sound", raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.tts.train_talker.MOST_FRAMES", 4)
        run("train_talker", *data, "--tokenizer", home / "tokenizer.json")
        run("train_talker", *data, "--tokenizer", home / "tokenizer.json", "--resume", home / "talker.pt")
    weights = ("--talker", home / "talker.pt", "--wave", home / "wave.pt", "--tokenizer", home / "tokenizer.json")
    run("export", *weights, "--out", home / "tts")
    run("export", *weights, "--encoder", home / "encoder.pt", "--kind", "base", "--out", home / "base")
    both = ("--out", home / "family/tts", "--share", home / "family/tts-base")
    run("export", *weights, "--encoder", home / "encoder.pt", *both)
    return SimpleNamespace(
        home=home, run=run, checkpoint=Checkpoint.find(str(home / "tts")), base=Checkpoint.find(str(home / "base"))
    )


@pytest.fixture(scope="module")
def smoked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asr")
    train.smoke(folder, steps=6)
    return folder
