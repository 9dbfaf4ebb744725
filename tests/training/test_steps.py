"""What is captured as a CUDA graph reads nothing that is gone when it is replayed: shown on a CPU, for every training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.lasting import Reads
from training.asr import train as asr_train
from training.asr.clips import FORMS, Clips
from training.asr.shape import Recogniser
from training.asr.toy import toy_clips
from training.tts import graph


def test_a_gradient_that_the_next_step_adds_to_is_found():
    network = torch.nn.Linear(2, 2)

    def step() -> None:
        network(torch.ones(1, 2)).sum().backward()
        network.zero_grad(set_to_none=True)

    assert not Reads.of(step).gone
    network(torch.ones(1, 2)).sum().backward()
    assert len(Reads.of(step).gone) == 2


class Watched(graph.Step):
    """Looked at twice: what the first run leaves behind, the second one may read."""

    seen: list[Reads]

    def __init__(self, step: Callable[[], dict[str, Tensor]], *, captured: bool, pool: object = None) -> None:
        super().__init__(step, captured=False)
        self.seen.extend(Reads.of(step) for _ in range(2))


@pytest.mark.parametrize(("script", "steps"), [("train_wave", 5), ("train_talker", 5), ("train_encoder", 1)])
def test_the_speakers_steps_read_only_what_stays(made, monkeypatch, tmp_path, script, steps):
    run, home = made.run, made.home
    monkeypatch.setattr("training.tts.train_talker.MOST_FRAMES", 4)
    monkeypatch.setattr(f"training.tts.{script}.Step", type("Here", (Watched,), {"seen": (seen := [])}))
    more = (
        ("--tokenizer", home / "tokenizer.json") if script == "train_talker" else ("--sound", home / "clips/sound.s16")
    )
    run(script, "--corpus", home / "corpus.npz", "--out", tmp_path, "--smoke", *more)
    assert len(seen) == 2 * steps
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert first.gone == second.gone == ()
        assert first.places <= second.places  # the first made the optimizer's moments


def test_the_recognisers_steps_read_only_what_stays_through_an_evaluation(smoked: Path, tmp_path: Path):
    run = asr_train.Training(
        tmp_path, Recogniser.copied(smoked, tmp_path), torch.device("cpu"), asr_train.Plan(batch_s=10.0), 0
    )
    clips = Clips(run.device, run.writer, capacity_s=300.0)
    made = toy_clips(40)
    clips.take(made[:20])
    forms = (FORMS[0], FORMS[4])
    learn = {
        form: partial(
            run.learn, clips.samples, form, clips.deal(np.random.default_rng(0), batch_s=20.0, form=form).table
        )
        for form in forms
    }
    found: list[list[Reads]] = []
    for _ in range(2):
        for step in learn.values():
            step()
        found.append([Reads.of(step) for step in learn.values()])
        model = run.averaged()
        run.save(model)
        run.report(model, clips, {"toy": made[:2]}, 0.0)
        run.after_step()
        clips.take(made[20:])
    for before, after in zip(*found, strict=True):
        assert before.gone == after.gone == ()
        assert before.places == after.places


@pytest.mark.parametrize("script", ["train_wave", "train_talker", "train_encoder"])
def test_a_script_of_the_speaker_that_was_cut_off_goes_on_from_its_state(made, monkeypatch, tmp_path, capsys, script):
    monkeypatch.setattr("training.tts.train_talker.MOST_FRAMES", 4)
    monkeypatch.setattr("training.tts.state.EVERY_S", -1.0)
    monkeypatch.setattr("training.tts.state.State.forget", lambda self: None)  # as if it had not come to its end
    home = made.home
    more = (
        ("--tokenizer", home / "tokenizer.json") if script == "train_talker" else ("--sound", home / "clips/sound.s16")
    )
    for _ in range(2):
        made.run(
            script, "--corpus", home / "corpus.npz", "--out", tmp_path, "--smoke", "--state", tmp_path / "x", *more
        )
    assert ("goes on from step 3" if script == "train_wave" else "goes on from step 2") in capsys.readouterr().out
