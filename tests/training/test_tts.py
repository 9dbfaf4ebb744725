"""Training of the small speaker, in seconds: made-up clips through every step, and the exported folder in the product."""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from aura_omni.engine.loader import Checkpoint
from aura_omni.flow import Voice
from aura_omni.stages import vocoder
from aura_omni.stages.talker import TalkerStage
from training.tts import clock, corpus, shape
from training.tts.codec_model import MelCodec
from training.tts.ear import word_error, words
from training.tts.grad import refresh
from training.tts.listen import talker_of
from training.tts.phones import PHONES, SYMBOLS, Span, frame_codes, phones_of
from training.tts.speakers import FRAME_SAMPLES, SPEAKERS
from training.tts.talker_batch import Rows
from training.tts.talker_speak import speak

_TEXTS = ("A red ball.", "Two blue stars on the left.", "Nothing moves.", "I see it.")
_FRAMES = 24


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
        phones = random.integers(1, PHONES, 2 * _FRAMES)
        spans = [[int(phone), 0.04 * slot, 0.04 * (slot + 1)] for slot, phone in enumerate(phones)]
        lines.append(
            {"text": _TEXTS[number % 4], "held_out": number > 9, "kind": ("domain", "general")[number % 2],
             "speaker": SPEAKERS[number % 3].name, "samples": _FRAMES * FRAME_SAMPLES, "spans": spans}
        )  # fmt: skip
    (home / "clips/index.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sound = random.normal(0, 2_000, 12 * _FRAMES * FRAME_SAMPLES).astype("<i2")
    sound.tofile(home / "clips/sound.s16")
    shape.train_tokenizer(list(_TEXTS) * 10).save(str(home / "tokenizer.json"))
    clips, raw = home / "clips", home / "clips/sound.s16"
    run("corpus", "--times", clips, "--sound", clips, "--out", home / "corpus.npz")
    data = ("--corpus", home / "corpus.npz", "--out", home, "--smoke")
    run("train_codec", *data, "--sound", raw)
    run("train_wave", *data, "--sound", raw, "--codec", home / "codec.pt", "--codes", home / "codes.npz")
    run("encode", "--sound", clips, "--times", clips, "--codec", home / "codec.pt", "--out", home / "many.npz", "--codes", home / "many_codes.npz")  # fmt: skip
    talker = ("--out", home, "--smoke", "--tokenizer", home / "tokenizer.json")
    run("train_talker", *talker, "--corpus", home / "corpus.npz")
    run("train_talker", *talker, "--corpus", home / "many.npz", "--codes", home / "many_codes.npz", "--resume", home / "talker.pt")  # fmt: skip
    run("train_books", "--corpus", home / "many.npz", "--codes", home / "many_codes.npz", *talker, "--resume", home / "talker.pt")  # fmt: skip
    run("predict", "--corpus", home / "many.npz", "--codes", home / "many_codes.npz", "--tokenizer", home / "tokenizer.json", "--talker", home / "talker.pt", "--out", home / "predicted.npz")  # fmt: skip
    run("train_wave", *data, "--sound", raw, "--codec", home / "wave.pt", "--judges", home / "judges.pt", "--codes", home / "many_codes.npz", "--predicted", home / "predicted.npz")  # fmt: skip
    run("export", "--talker", home / "talker.pt", "--wave", home / "wave.pt", "--tokenizer", home / "tokenizer.json", "--out", home / "tts")  # fmt: skip
    return SimpleNamespace(home=home, checkpoint=Checkpoint.find(str(home / "tts")))


def test_codes_say_the_phones_in_order():
    spans = [Span(5, 0.0, 0.09), Span(7, 0.09, 0.11), Span(9, 0.11, 0.3)]
    assert phones_of(frame_codes(spans, 5)) == [5, 7, 9]  # the second is shorter than a slot


def test_codes_and_controls_do_not_meet():
    assert len(SYMBOLS) ** 2 <= 2_048


def test_numbers_are_heard_as_words():
    assert " ".join(words("It took 12 seconds, and 1,400!")) == "it took twelve seconds fourteen hundred"
    assert word_error([("I see it.", "i see"), ("Two", "2")]) == 0.25


def test_encoding_again_gives_the_same_codes(made):
    first, again = (np.load(made.home / name)["codes"] for name in ("codes.npz", "many_codes.npz"))
    edge = np.arange(len(first)) % _FRAMES
    inner = (edge > 1) & (edge < _FRAMES - 2)  # at the edges the neighbours of a clip are other clips
    assert (first[inner] == again[inner]).mean() > 0.9


def test_exported_codec_sounds_as_trained(made):
    decoder, _ = vocoder.load(made.checkpoint.sub("speech_tokenizer"), device=torch.device("cpu"), dtype=torch.float32)
    trained = MelCodec().eval()
    trained.load_state_dict(clock.load(made.home / "wave.pt")["model"])
    refresh(trained.decoder)
    codes = torch.randint(0, shape.BOOK_ROWS, (1, 9, 16), generator=torch.Generator().manual_seed(1))
    codes[..., 1 + shape.ACOUSTIC_BOOKS :] = torch.randint(0, shape.BOOK_ROWS, codes[..., 5:].shape)  # say nothing
    with torch.no_grad():
        acoustic = trained.rows_of(codes[..., 1 : 1 + shape.ACOUSTIC_BOOKS])
        wanted = trained.wave(trained.front(trained.embed(codes[..., 0], acoustic))).clamp(-1, 1)
    torch.testing.assert_close(decoder.whole(codes), wanted, atol=2e-3, rtol=0)


def test_training_rows_are_the_rows_that_are_served(made):
    stage = TalkerStage.load(made.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(made.home / "tokenizer.json"))
    rows = Rows(tokenizer)
    for speaker, tagged in ((0, False), (2, True)):
        voice = Voice(speaker=SPEAKERS[speaker].name, language="English" if tagged else None)
        body = stage.writer.body(_TEXTS[1])
        served = stage.prompt(stage.voices.resolve(voice), body).prefill
        text, codec = rows.prompt(speaker, tagged=tagged)
        assert list(served.text_ids[: len(text)]) == text
        controls = dict(zip(served.codec_rows, served.codec_ids, strict=True))
        assert [controls.get(row, -1) for row in range(len(codec))] == codec
        assert list(body) == rows.tokens(_TEXTS[1])


def test_exported_talker_speaks_as_trained(made):
    stage = TalkerStage.load(made.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(made.home / "tokenizer.json"))
    trained = talker_of(made.home / "talker.pt", tokenizer).talker
    said = [
        speak(talker, Rows(tokenizer), _TEXTS[:2], [0, 1], streaming=True, most=4) for talker in (trained, stage.talker)
    ]
    for before, after in zip(*said, strict=True):
        np.testing.assert_array_equal(before[:, :5], after[:, :5])


def test_corpus_keeps_its_clips(made):
    loaded = corpus.Corpus.of_arrays(dict(np.load(made.home / "many.npz")), "sound_")
    assert loaded.texts[:4] == list(_TEXTS)
    assert (loaded.held_out.sum(), len(loaded), loaded.starts[-1]) == (2, 12, 12 * _FRAMES)
