"""The Talker stage inside the paged engine gives the frames that it gives alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.runner import ArRunner
from aura_omni.flow import Audio, Sampling, Voice
from aura_omni.stages.talker import TalkerPrompt, TalkerStage
from tests.reference_tts import reference_model, tts_config, write_checkpoint
from tests.stages.drive import run

SPEECH = Audio((np.random.default_rng(0).normal(size=30_000) * 0.1).astype(np.float32), 24_000, b"speech")
SAMPLING = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=14)
PREDICTOR = Sampling(temperature=0.9, top_k=50)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> TalkerStage:
    folder, config = tmp_path_factory.mktemp("base"), tts_config("base")
    write_checkpoint(folder, config, reference_model(config, seed=6))
    return TalkerStage.load(Checkpoint.find(str(folder)), device=torch.device("cpu"), dtype=torch.float32)


def prompts_of(stage: TalkerStage) -> list[TalkerPrompt]:
    voice = Voice(ref_audio=SPEECH, ref_text="the user said")
    codes = torch.randint(2048, (17, 16), generator=torch.Generator().manual_seed(1))
    prompts = []
    for number, wanted in enumerate(
        (
            voice,
            replace(voice, non_streaming=True),
            replace(voice, x_vector_only=True, language="english"),
            replace(voice, x_vector_only=True, non_streaming=True),
        )
    ):
        speaking = stage.voices.resolve(wanted)
        reference = stage.reference(speaking, SPEECH.samples, wanted.ref_text, lambda _: codes)
        prompts.append(stage.prompt(speaking, stage.writer.body("Hello the world " * (number + 1)), reference))
    return prompts


def speak(
    stage: TalkerStage, prompts: list[TalkerPrompt], seeds: list[int], runner: ArRunner | None = None
) -> list[tuple[str, np.ndarray]]:
    """How each prompt's sequence ended, and its frames; without a runner, driven plainly."""
    frames: list[list[np.ndarray]] = [[] for _ in prompts]
    ends: dict[int, Any] = {}
    sequences = []
    for number, prompt in enumerate(prompts):
        sequence = stage.sequence(
            prompt,
            replace(SAMPLING, seed=seeds[number]),
            predictor=PREDICTOR,
            on_output=frames[number].append,
            on_end=lambda reason, error, number=number: ends.update({number: reason}),
        )
        sequence.seed = seeds[number]
        sequences.append(sequence)
    if runner is None:
        run(stage, sequences)
    else:
        for sequence in sequences:
            runner.add(sequence)
        while runner.step():
            runner.check_integrity()
    return [(ends[number], np.stack(part)) for number, part in enumerate(frames)]


@pytest.mark.parametrize(("pages", "rows_per_step"), [(100, 1000), (100, 7), (19, 16)])
def test_paged_batches_give_the_frames_of_each_sequence_alone(
    stage: TalkerStage, pages: int, rows_per_step: int
) -> None:
    runner = ArRunner(
        stage,
        pages=pages,
        page_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=rows_per_step,
        max_model_len=120,
        max_waiting=8,
        prefix_caching=True,
    )
    prompts, seeds = prompts_of(stage), [3, 4, 5, 6]
    together = speak(stage, prompts, seeds, runner)
    for prompt, seed, (reason, frames) in zip(prompts, seeds, together, strict=True):
        [(alone_reason, alone)] = speak(stage, [prompt], [seed])
        assert reason == alone_reason
        np.testing.assert_array_equal(frames, alone)
    assert runner.counters.pages_used == 0
    assert (runner.counters.preemptions > 0) == (pages < 100)
