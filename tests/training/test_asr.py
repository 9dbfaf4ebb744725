"""The training of the small recogniser: what it computes is what the server computes, and its way works from end to end."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.stages.asr import AsrStage
from training.asr import asked, train
from training.asr.augment import augment, masked, revoiced, warped
from training.asr.clips import FORMS, PACE_ONE, Clip, Clips, Columns, Form, behind, fragments, said, sounded, withheld
from training.asr.ctc import native, scanned
from training.asr.evaluate import Ear
from training.asr.network import CHARACTERS, IGNORED, Prompt, Trainee, letters
from training.asr.shape import Recogniser
from training.asr.sounds import sound
from training.asr.toy import toy_clips
from training.asr.wer import wer
from training.text.grammar import RULES, sentence

CPU = torch.device("cpu")


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


def writer(text: str) -> tuple[list[int], list[int]]:
    """Pieces are words, numbered by their lengths."""
    return [len(word) for word in text.split()], letters(text)


def store(clips: list[Clip]) -> Clips:
    found = Clips(CPU, writer, capacity_s=400.0)
    found.take(clips)
    return found


def dealt(clips: Clips, form: Form, *, batch_s: float = 40.0, seed: int = 1) -> Columns:
    return Columns.of(form, clips.deal(np.random.default_rng(seed), batch_s=batch_s, form=form).table)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.room_s} s")
def test_augmented_clips_stay_in_range_and_silence_follows_the_end(form):
    clips, noise = store(toy_clips(30)), torch.Generator().manual_seed(0)
    columns = dealt(clips, form)
    out = augment(sounded(clips.samples, form, columns), columns.samples, behind(clips.samples, form, columns), noise)
    assert torch.isfinite(out).all()
    assert 0 < out.abs().max() <= 1
    for row, length in zip(out, columns.samples.tolist(), strict=True):
        assert not row[length:].any()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.room_s} s")
def test_a_deal_of_every_form_writes_what_its_clips_say_and_fits(form):
    made = toy_clips(30)
    clips = store(made)
    columns = dealt(clips, form, seed=3)
    assert len(columns.samples) == form.rows(40.0)
    texts = {clip.text for clip in made}
    starts = dict(zip(clips._starts.tolist(), clips._texts, strict=False))
    spoken = 0
    for row in range(len(columns.samples)):
        heard = [starts[start] for start in columns.start[row, columns.count[row] > 0].tolist()]
        assert texts.issuperset(heard)
        pieces, spelled = writer(" ".join(heard))
        assert [piece for piece in columns.pieces[row].tolist() if piece != IGNORED] == pieces
        assert columns.spelled[row, : columns.spelled_count[row]].tolist() == spelled
        ends = columns.offset[row] + columns.count[row]
        assert int(ends[columns.count[row] > 0].max() if heard else 0) <= columns.samples[row] <= form.room_s * 16_000
        spoken += bool(heard)
    assert spoken


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.room_s} s")
def test_whatever_a_deal_points_at_is_there(form):
    clips = store([*toy_clips(30), Clip(np.ones(30_000, np.int16), "", "sounds")])
    end, pieces = clips._end, max(max(writer(text)[0], default=0) for text in clips._texts)
    for seed in range(20):
        columns = dealt(clips, form, seed=seed)
        last = columns.start + (columns.count * columns.pace // PACE_ONE)
        assert columns.start.min() >= 0
        assert last.max() < end - 2  # a cubic reads two samples more
        assert (columns.behind_start + columns.behind_length).max() <= end
        assert columns.samples.max() <= form.room_s * 16_000
        assert columns.pieces.max() <= pieces
        assert 0 <= columns.spelled.min() <= columns.spelled.max() <= len(CHARACTERS)
        assert columns.spelled_count.max() <= form.letters


def test_at_its_own_pace_a_clip_comes_back_as_it_was():
    made = toy_clips(30)
    clips, form = store(made), FORMS[2]
    columns = dealt(clips, form)
    columns.pace.fill_(1 << 20)
    row = int(columns.count[:, 0].argmax())
    start, count, offset = (int(part[row, 0]) for part in (columns.start, columns.count, columns.offset))
    expected = clips.samples[start : start + count].float() / 32768
    torch.testing.assert_close(sounded(clips.samples, form, columns)[row, offset : offset + count], expected)
    assert expected.any()


def test_warps_masks_and_new_voices_keep_shape_level_and_silence():
    noise = torch.Generator().manual_seed(0)
    mel, frames = torch.rand(5, 128, 300), torch.tensor([300, 200, 300, 50, 300])
    mel = mel * (torch.arange(300) < frames[:, None])[:, None]
    out = masked(warped(mel, noise), frames, noise)
    assert out.shape == mel.shape
    assert torch.isfinite(out).all()
    assert not out[3, :, 50:].any()
    sound = waves([16_000, 32_000, 48_000])
    sound[0] = 0
    other = revoiced(sound, torch.tensor([16_000, 32_000, 48_000]), noise)
    torch.testing.assert_close(other[1:].pow(2).mean(1).sqrt(), sound[1:].pow(2).mean(1).sqrt(), rtol=0.2, atol=0)
    assert not other[0].any()
    assert not other[1, 32_000:].any()
    assert abs(torch.corrcoef(torch.stack((other[2], sound[2])))[0, 1]) < 0.3


@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_ctc_by_a_scan_has_the_losses_and_gradients_of_torch(sharpness):
    torch.manual_seed(0)
    raw = (torch.randn(7, 30, 29) * sharpness).requires_grad_()
    lengths = torch.tensor([9, 5, 9, 0, 1, 9, 9])
    targets = torch.randint(1, 29, (7, 9))
    targets[2, 3], targets[5] = targets[2, 2], 4
    targets = torch.where(torch.arange(9) < lengths[:, None], targets, 0)
    frames = torch.tensor([30, 22, 30, 10, 3, 12, 5])  # too few in the last two rows
    weight = torch.rand(7)
    found = []
    for ctc in (native, scanned):
        raw.grad = None
        losses = ctc(raw.log_softmax(-1), frames, targets, lengths)
        (losses * weight).sum().backward()
        assert raw.grad is not None
        found.append((losses.detach(), raw.grad.clone()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


def test_more_rows_of_padding_change_neither_the_loss_of_the_text_nor_that_of_the_letters(trainee):
    lengths, words = [20_000, 30_000], ["Hello there.", "Is it blue?"]
    spelled = [letters(text) for text in words]
    found = []
    for room, width in ((32_000, 12), (64_000, 40)):
        batch = torch.zeros(2, room)
        batch[:, :32_000] = torch.nn.functional.pad(waves(lengths), (0, 2_000))
        pieces, names = torch.full((2, width), IGNORED), torch.zeros(2, width, dtype=torch.long)
        for row, text in enumerate(spelled):
            pieces[row, :5] = torch.tensor([7, 8, 9, 10, 11])
            names[row, : len(text)] = torch.tensor(text)
        with torch.no_grad():
            mel, frames = trainee.log_mel(batch, torch.tensor(lengths))
            hidden, rows = trainee.hear(mel, frames)
            spell = trainee.spelling_loss(hidden, rows, names, torch.tensor([len(text) for text in spelled]))
            text = trainee.text_loss(trainee.project(hidden), rows, pieces, pieces.clamp_min(0))
        found.append(torch.stack((spell, text)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_grammar_names_no_rule_that_is_missing_and_every_sentence_can_be_spelled():
    for choices, _ in RULES.values():
        for choice in choices:
            assert all(name in RULES for name in re.findall(r"<(\w+)>", choice)), choice
    rng = random.Random(0)
    for _ in range(2_000):
        text = sentence(rng)
        assert re.fullmatch(r"[A-Z][A-Za-z', -]*[.?!]", text), text
        assert letters(text)


def test_what_aura_is_asked_is_spelt_as_the_grammar_spells_it():
    assert asked.written("WHAT COLOR IS IT") == "What colour is it?"
    assert asked.written("um am i holding a gray card") == "Um am I holding a grey card?"
    assert asked.written("Tell me when the star appears.") == "Tell me when the star appears."
    assert asked.written("how many things do i see??") == "How many things do I see?"
    assert asked.written("what is 2 plus 2") is None
    assert asked.written(" ?") is None
    for line in (said := asked.lines(2_000)):
        assert re.fullmatch(r"[A-Z][A-Za-z' ,-]*[.?]", line), line
        assert asked.written(line) == line
        assert "color" not in line.lower()
    assert len(set(said)) == 2_000


def test_what_aura_is_asked_is_the_same_in_every_process(tmp_path):
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "training.asr.asked", str(tmp_path / seed), "--lines", "300"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    first, second = ((tmp_path / seed).read_text(encoding="utf-8").splitlines() for seed in ("1", "2"))
    assert first == second == asked.lines(300)


def test_half_of_what_is_said_is_said_to_the_assistant_and_two_fifths_of_that_as_aura_is_asked():
    rng = random.Random(5)
    said_ = [said(rng, ["General."], ["Asked?"]) for _ in range(2_000)]
    assert 0.17 < said_.count("Asked?") / len(said_) < 0.23
    assert "Asked?" not in [said(rng, ["General."]) for _ in range(200)]


def training(recogniser: Recogniser, folder: Path) -> train.Training:
    return train.Training(folder, recogniser, CPU, train.Plan(batch_s=10.0), 0)


def steps(run: train.Training, clips: Clips, count: int) -> None:
    for _ in range(count):
        run.before_step(0.1)
        run.learn(clips.samples, FORMS[0], clips.deal(run.rng, batch_s=6.0, form=FORMS[0]).table)
        run.after_step()


@pytest.fixture
def begun(smoked: Path, tmp_path: Path) -> tuple[train.Training, Clips]:
    run = training(Recogniser.copied(smoked, tmp_path), tmp_path)
    run.resume(smoked)
    assert run.step == 6
    clips = Clips(CPU, run.writer, capacity_s=120.0)
    clips.take(toy_clips(8))
    steps(run, clips, 1)
    run.log.append({"step": run.step})
    run.save(run.averaged())
    return run, clips


def test_a_run_resumed_from_rounded_files_goes_on_with_weights_vocabulary_and_optimizer(begun, tmp_path):
    before, _ = begun
    after = training(Recogniser.copied(tmp_path, tmp_path / "next"), tmp_path / "next")
    after.resume(tmp_path)
    assert after.step == 7
    for ours, theirs in zip(after.parameters, before.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        ours_state, theirs_state = after.optimizer.state[ours], before.optimizer.state[theirs]
        for part in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours_state[part], theirs_state[part], atol=1e-6, rtol=2e-2)


def test_a_run_resumed_from_weights_alone_hears_as_before_and_starts_its_schedule_anew(begun, tmp_path):
    before, clips = begun
    for name in ("gradients", "squares"):
        (tmp_path / f"resume/{name}.safetensors").unlink()
    (tmp_path / "merges.txt").unlink()  # a tokenizer of one file
    after = training(Recogniser.copied(tmp_path, tmp_path / "next"), tmp_path / "next")
    after.resume(tmp_path)
    assert (after.step, after.done) == (0, None)
    for ours, theirs in zip(after.parameters, before.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    steps(after, clips, 1)


def test_a_run_resumed_from_all_of_its_state_takes_the_very_same_steps(begun, tmp_path):
    before, clips = begun
    (tmp_path / "kept").mkdir()
    before.keep(tmp_path / "kept")
    after = training(Recogniser.copied(tmp_path / "kept", tmp_path / "next"), tmp_path / "next")
    after.resume(tmp_path / "kept")
    assert after.done == before.done == 0.1
    before.warm_up_steps = after.warm_up_steps
    for run in (before, after):
        run.noise.manual_seed(1)
        run.rng = np.random.default_rng(1)
        steps(run, clips, 2)
    for ours, theirs in zip([*after.parameters, *after.mean], [*before.parameters, *before.mean], strict=True):
        assert torch.equal(ours, theirs)


def test_speech_that_was_remembered_comes_back(tmp_path):
    made = toy_clips(6)
    first = Clips(CPU, writer, capacity_s=100.0, kept=tmp_path)
    first.take(made[:2])
    first.take(made[2:], remember=True)
    second = Clips(CPU, writer, capacity_s=100.0, kept=tmp_path)
    second.take(made[:2])
    second.recall()
    assert torch.equal(first.samples, second.samples)
    assert len(second) == 6
    assert torch.equal(dealt(first, FORMS[0]).start, dealt(second, FORMS[0]).start)


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
