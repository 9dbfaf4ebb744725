"""The training of the small recogniser: what it computes is what the server computes, and its way works from end to end."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.stages.asr import AsrStage
from training.asr import train
from training.asr.augment import augment
from training.asr.clips import Clip, Clips, fragments, withheld
from training.asr.evaluate import Ear
from training.asr.network import Prompt, Trainee, letters
from training.asr.shape import Recogniser
from training.asr.sounds import sound
from training.asr.toy import toy_clips
from training.asr.wer import wer
from training.text.grammar import RULES, sentence

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smoked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asr")
    train.smoke(folder, steps=6)
    return folder


@pytest.fixture(scope="module")
def trainee(smoked: Path) -> Trainee:
    """What the stage reads from the file, in the form that trains."""
    stage = AsrStage.load(Checkpoint(smoked, "smoke"), device=CPU, dtype=torch.float32)
    model = Trainee(stage.network.config, Prompt.of(stage.tokenizer)).eval()
    model.net.load_state_dict(stage.network.state_dict())
    model.prepare()
    return model


def waves(lengths: list[int]) -> torch.Tensor:
    random_ = np.random.default_rng(3)
    rows = np.zeros((len(lengths), max(lengths)), np.float32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = random_.standard_normal(length) * np.linspace(0.3, 0.01, length)
    return torch.from_numpy(rows)


def test_in_a_batch_every_clip_is_encoded_as_the_product_encodes_it_alone(trainee):
    lengths = [8_000, 12_345, 16_000, 40_001, 128_000, 128_161, 300_000]
    batch = waves(lengths)
    with torch.no_grad():
        mel, frames = trainee.log_mel(batch, torch.tensor(lengths))
        hidden, rows = trainee.hear(mel, frames)
        sound_rows = trainee.project(hidden)
        for wave, length, ours, count in zip(batch, lengths, sound_rows, rows.tolist(), strict=True):
            (alone,) = trainee.net.encode([wave[:length]])
            assert len(alone) == count
            torch.testing.assert_close(ours[:count], alone, atol=2e-5, rtol=1e-4)


def test_the_stage_writes_the_ids_that_training_evaluates(smoked, trainee):
    clips = [clip.samples.astype(np.float32) / 32768 for clip in toy_clips(3, seed=9)]
    lengths = [len(clip) for clip in clips]
    batch = torch.zeros(len(clips), max(lengths))
    for row, clip in zip(batch, clips, strict=True):
        row[: len(clip)] = torch.from_numpy(clip)
    ids = trainee.write(batch, torch.tensor(lengths))
    ear = Ear(smoked)
    heard = [ear.ids(clip, limit=len(row)) for clip, row in zip(clips, ids, strict=True)]
    assert heard == ids
    assert any(ids)


def test_augmented_clips_stay_in_range_and_silence_follows_the_end():
    clips = Clips(CPU, capacity_s=120.0)
    clips.take(toy_clips(12))
    batch = clips.batch(random.Random(1), batch_s=40.0)
    background = clips.background(random.Random(2), *batch.waves.shape)
    out = augment(batch.waves, batch.samples, background, torch.Generator().manual_seed(0))
    assert torch.isfinite(out).all()
    assert 0 < out.abs().max() <= 1
    for row, length in zip(out, batch.lengths, strict=True):
        assert not row[length:].any()


def test_at_its_own_pace_a_clip_comes_back_as_it_was():
    made = toy_clips(1)
    clips = Clips(CPU, capacity_s=20.0)
    clips.take(made)
    batch = clips.batch(random.Random(0), batch_s=1.0, vary=False)
    if len(batch.texts[0]) > len(made[0].text):
        pytest.fail("a joined batch was drawn; choose another seed")
    expected = made[0].samples[:-1].astype(np.float32) / 32768
    torch.testing.assert_close(batch.waves[0, 1_600 : 1_600 + len(expected)], torch.from_numpy(expected))


def test_the_grammar_names_no_rule_that_is_missing_and_every_sentence_can_be_spelled():
    for choices, _ in RULES.values():
        for choice in choices:
            assert all(name in RULES for name in re.findall(r"<(\w+)>", choice)), choice
    rng = random.Random(0)
    for _ in range(2_000):
        text = sentence(rng)
        assert re.fullmatch(r"[A-Z][A-Za-z', -]*[.?!]", text), text
        assert letters(text)


def test_a_resumed_run_goes_on_with_weights_vocabulary_and_optimizer(smoked, tmp_path):
    def training(recogniser: Recogniser) -> train.Training:
        return train.Training(tmp_path, recogniser, Clips(CPU, capacity_s=1.0), CPU, train.Plan(), 0)

    before = training(Recogniser.copied(smoked, tmp_path))
    before.resume(smoked)
    assert before.step == 6
    clips = Clips(CPU, capacity_s=120.0)
    clips.take(toy_clips(8))
    before.train(clips.batch(random.Random(0), batch_s=10.0), done=0.0)
    model = before.averaged()
    before.log.append({"step": before.step})
    before.save(model)
    after = training(Recogniser.copied(tmp_path, tmp_path / "next"))
    after.resume(tmp_path)
    assert after.step == 7
    for (name, ours), theirs in zip(after.model.named_parameters(), before.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3, msg=name)
        ours_state, theirs_state = after.optimizer.state[ours], before.optimizer.state[theirs]
        for part in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours_state[part], theirs_state[part], atol=1e-6, rtol=2e-2, msg=name)


def test_what_the_evaluation_says_is_withheld_but_for_stock_phrases():
    def clip(text: str) -> Clip:
        return Clip(np.zeros(1, np.int16), text, "rms")

    long, short = "Where is the red ball?", "Stop talking."
    assert withheld([clip(long), clip(short), clip("")]) == {long}


def test_fragments_are_words_that_can_be_spelled():
    rng = random.Random(0)
    for _ in range(300):
        text = fragments(rng, ["I see an old man's hat, well-worn.", "Full of anxiety."])
        assert re.fullmatch(r"[A-Z][A-Za-z' -]*\.", text), text


def test_word_error_rate_counts_words_alone():
    assert wer([("What colour is it?", "what colour is it")]) == 0
    assert wer([("one two three four", "one three five four six")]) == 3 / 4
    assert wer([("hello", "")]) == 1


def test_sounds_are_finite_and_bounded():
    rng = random.Random(0)
    for _ in range(20):
        wave = sound(rng)
        assert math.isclose(float(np.abs(wave).max()), 0.5, abs_tol=1e-3)
