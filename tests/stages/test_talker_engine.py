"""The Talker stage inside the paged engine gives the frames that it gives alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.engine.runner import ArRunner
from aura_omni.flow import Audio, Sampling, Voice
from aura_omni.media.noise import swelling_noise
from aura_omni.stages.talker import TalkerPrompt, TalkerStage
from tests.reference_tts import reference_model, tts_config, write_checkpoint
from tests.replayed import without_cuda
from tests.slow_lane import SlowLane
from tests.stages.drive import run

SPEECH = Audio(swelling_noise(np.random.default_rng(0), 1.25, 24_000), 24_000, b"speech")
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


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("pages", "rows_per_step"), [(100, 1000), (100, 7), (19, 16)])
def test_paged_batches_give_the_frames_of_each_sequence_alone(
    stage: TalkerStage, pages: int, rows_per_step: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = without_cuda(monkeypatch)
    runner = ArRunner(
        stage,
        pages=pages,
        page_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=rows_per_step,
        max_model_len=120,
        max_waiting=8,
        prefix_caching=True,
        graphs=graphs,
        usual=(stage.bounded(SAMPLING), PREDICTOR),
    )
    captured = len(recorded)
    prompts, seeds = prompts_of(stage), [3, 4, 5, 6]
    together = speak(stage, prompts, seeds, runner)
    for prompt, seed, (reason, frames) in zip(prompts, seeds, together, strict=True):
        [(alone_reason, alone)] = speak(stage, [prompt], [seed])
        assert reason == alone_reason
        np.testing.assert_array_equal(frames, alone)
    assert runner.counters.pages_used == 0
    assert (runner.counters.preemptions > 0) == (pages < 100)
    assert len(recorded) == captured  # none while requests wait
    assert (captured > 0) == graphs


@pytest.mark.parametrize("seed", range(6))
def test_text_that_arrives_while_a_frame_is_under_way_is_read_as_if_it_had_been_there(
    stage: TalkerStage, seed: int
) -> None:
    """It may come before the launch, between launch and arrival, or after the sequence has had to wait for it."""
    dice, lane = random.Random(seed), SlowLane()
    voice = Voice(ref_audio=SPEECH, x_vector_only=True, language="english", non_streaming=False)
    speaking = stage.voices.resolve(voice)
    reference = stage.reference(speaking, SPEECH.samples, None, lambda _: torch.empty(0))
    body = stage.writer.body("Hello the world, hello the world")
    least = stage.least_body(speaking, reference)
    [whole] = speak(stage, [stage.prompt(speaking, body, reference)], [seed])
    runner = ArRunner(
        stage,
        pages=5 if seed % 2 else 100,
        page_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=72,
        max_waiting=8,
        prefix_caching=True,
        lane=lane,
    )
    frames: list[np.ndarray] = []
    ends: list[str] = []
    sequence = stage.sequence(
        stage.prompt(speaking, body[:least], reference),
        replace(SAMPLING, seed=seed),
        predictor=PREDICTOR,
        on_output=frames.append,
        on_end=lambda reason, _: ends.append(reason),
        open_ended=True,
    )
    [other] = [
        stage.sequence(
            stage.prompt(speaking, body, reference),
            replace(SAMPLING, seed=9, max_tokens=28),
            on_output=lambda _: None,
            on_end=lambda *_: None,
        )
    ]
    other.priority = -1  # takes the pages away, where they are few
    runner.add(sequence)
    runner.add(other)
    rest, waited = list(body[least:]), False
    while runner.busy or rest or not ends:
        runner.step()
        runner.check_integrity()
        waited |= sequence.blocked
        for _ in range(2):
            if rest and not ends and dice.random() < 0.3:
                stage.feed(sequence, [rest.pop(0)])
                if not rest:
                    stage.close(sequence)
            if dice.random() < 0.6:
                lane.arrive()
                break
    assert waited
    assert ends == [whole[0]]
    np.testing.assert_array_equal(np.stack(frames), whole[1])
    assert (sequence.preempted > 0) == bool(seed % 2)
